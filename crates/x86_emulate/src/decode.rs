//! From bytes to what matters for a device access: operation, width and operands.
//!
//! The `yaxpeax-x86` crate reads the bytes. It has one decoder for each mode with types of its own; here their results
//! become one type, and all instructions that are of no use for a device drop out.

use crate::{Mode, Segment, Width};

/// A decoded instruction with exactly one operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) operation: Operation,
    /// Operand that is written, or compared with the other.
    pub(crate) to: Operand,
    pub(crate) from: Operand,
    /// Width of the operand in memory.
    pub(crate) memory_width: Width,
    /// In bytes.
    pub(crate) length: u8,
}

/// What an instruction does with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Move,
    MoveZeroExtended,
    MoveSignExtended,
    Exchange,
    Or,
    And,
    Xor,
    Add,
    Subtract,
    Compare,
    Test,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Register(Register),
    /// Sign-extended to 64 bits.
    Immediate(u64),
    Memory(Address),
}

/// A general register, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register {
    /// Place in [`CpuState::gprs`](crate::CpuState::gprs), below 16.
    pub(crate) number: u8,
    pub(crate) width: Width,
    /// Bits 15:8 instead of 7:0: AH, CH, DH, BH.
    pub(crate) high: bool,
}

/// An operand's address: segment : base + index * scale + displacement, modulo `width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) segment: Segment,
    pub(crate) base: Option<Base>,
    /// Register number and scale.
    pub(crate) index: Option<(u8, u8)>,
    /// Sign-extended.
    pub(crate) displacement: u64,
    pub(crate) width: Width,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Register(u8),
    /// RIP of the next instruction.
    NextInstruction,
}

/// Why bytes gave no [`Instruction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The bytes end before the instruction does; or it never ends, when they are as many as there can be.
    Incomplete,
    /// No instruction, or none that is known here.
    Unknown,
}

/// Decodes the instruction that `bytes` start with.
pub(crate) fn decode(mode: Mode, bytes: &[u8]) -> Result<Instruction, Refusal> {
    match mode {
        Mode::Bits16 => bits16::decode(bytes),
        Mode::Bits32 => bits32::decode(bytes),
        Mode::Bits64 if has_idle_rex(bytes) => Err(Refusal::Unknown),
        Mode::Bits64 => bits64::decode(bytes),
    }
}

/// The numbers of SP and BP, whose use as a base selects the stack segment.
const STACK_REGISTERS: core::ops::RangeInclusive<u8> = 4..=5;

/// Legacy prefixes, those of segments first.
pub(crate) const PREFIXES: [u8; 11] = [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65, 0x66, 0x67, 0xf0, 0xf2, 0xf3];

/// Whether the prefixes of an instruction outside 64-bit mode name DS as their last segment. The decoder does not tell
/// this from no segment at all, which makes a difference for addresses based on SP or BP.
fn names_ds(bytes: &[u8]) -> bool {
    let prefixes = bytes.iter().take_while(|byte| PREFIXES.contains(byte));
    prefixes.filter(|byte| PREFIXES[..6].contains(byte)).last() == Some(&0x3e)
}

/// Whether an instruction of 64-bit mode has a REX prefix with W, which comes behind all others.
fn has_rex_w(bytes: &[u8]) -> bool {
    let rex = bytes.iter().find(|byte| !PREFIXES.contains(byte));
    rex.is_some_and(|byte| byte & 0xf8 == 0x48)
}

/// Whether a REX prefix of 64-bit mode is not the last prefix. The processor ignores it then, but the decoder does not.
/// No compiler does this, so such an instruction is refused.
pub(crate) fn has_idle_rex(bytes: &[u8]) -> bool {
    let is_rex = |byte: &u8| byte & 0xf0 == 0x40;
    let prefixes = bytes.iter().take_while(|byte| PREFIXES.contains(byte) || is_rex(byte)).count();
    bytes[..prefixes.saturating_sub(1)].iter().any(is_rex)
}

/// Defines `decode` for one of the decoder's three modes.
macro_rules! decoder {
    (
        $name:ident, $arch:ident,
        address: $default_width:ident, with_prefix: $other_width:ident,
        displaced: $displaced:ident,
        immediates: [$($immediate:ident),*],
        absolute: [$($absolute:ident of $absolute_width:ident),*],
        classes: [$($class:ident of $class_width:ident),*],
        pointers: [$($pointer:ident),*]
    ) => {
        mod $name {
            use super::{Address, Base, Instruction, Operand, Operation, Refusal, Register, STACK_REGISTERS, has_rex_w, names_ds};
            use crate::{Segment, Width};
            use yaxpeax_arch::LengthedInstruction;
            use yaxpeax_x86::$arch as arch;

            pub(super) fn decode(bytes: &[u8]) -> Result<Instruction, Refusal> {
                let decoded = arch::InstDecoder::default().decode_slice(bytes).map_err(|error| match error {
                    arch::DecodeError::ExhaustedInput | arch::DecodeError::TooLong => Refusal::Incomplete,
                    _ => Refusal::Unknown,
                })?;
                convert(&decoded, bytes).ok_or(Refusal::Unknown)
            }

            fn convert(decoded: &arch::Instruction, bytes: &[u8]) -> Option<Instruction> {
                if decoded.operand_count() != 2 {
                    return None;
                }
                // Without REX.W, MOVSXD is a MOV that nobody uses; the decoder takes it for one that extends to 64 bits.
                if decoded.opcode() == arch::Opcode::MOVSXD && !has_rex_w(bytes) {
                    return None;
                }
                let (to, from) = (operand(decoded, 0, bytes)?, operand(decoded, 1, bytes)?);
                let in_memory = [to, from].into_iter().filter(|operand| matches!(operand, Operand::Memory(_))).count();
                if in_memory != 1 {
                    return None;
                }
                Some(Instruction {
                    operation: operation(decoded.opcode())?,
                    to,
                    from,
                    memory_width: Width::from_bytes(decoded.mem_size()?.bytes_size()?)?,
                    length: u8::try_from(decoded.len().to_const()).ok()?,
                })
            }

            fn operation(opcode: arch::Opcode) -> Option<Operation> {
                Some(match opcode {
                    arch::Opcode::MOV => Operation::Move,
                    arch::Opcode::MOVZX => Operation::MoveZeroExtended,
                    arch::Opcode::MOVSX | arch::Opcode::MOVSXD => Operation::MoveSignExtended,
                    arch::Opcode::XCHG => Operation::Exchange,
                    arch::Opcode::OR => Operation::Or,
                    arch::Opcode::AND => Operation::And,
                    arch::Opcode::XOR => Operation::Xor,
                    arch::Opcode::ADD => Operation::Add,
                    arch::Opcode::SUB => Operation::Subtract,
                    arch::Opcode::CMP => Operation::Compare,
                    arch::Opcode::TEST => Operation::Test,
                    _ => return None,
                })
            }

            fn operand(decoded: &arch::Instruction, place: u8, bytes: &[u8]) -> Option<Operand> {
                use arch::Operand as From;

                let full = if decoded.prefixes.address_size() { Width::$other_width } else { Width::$default_width };
                let address = |base: Option<arch::RegSpec>, index: Option<(arch::RegSpec, u8)>, displacement: u64| {
                    let base = match base {
                        Some(register) => Some(self::base(register)?),
                        None => None,
                    };
                    let index = match index {
                        Some((register, scale)) => Some((self::register(register)?.number, scale)),
                        None => None,
                    };
                    // A 16-bit address [BP + SI] is based on BP even where BP comes second.
                    let on_stack = matches!(base, Some(Base::Register(number)) if STACK_REGISTERS.contains(&number));
                    let segment = match segment(decoded.prefixes.segment()) {
                        Segment::Ds if on_stack && !names_ds(bytes) => Segment::Ss,
                        segment => segment,
                    };
                    Some(Operand::Memory(Address { segment, base, index, displacement, width: full }))
                };
                let signed = |displacement: i32| i64::from(displacement).cast_unsigned();

                match decoded.operand(place) {
                    From::Register { reg } => Some(Operand::Register(register(reg)?)),

                    From::ImmediateI8 { imm } => Some(Operand::Immediate(i64::from(imm).cast_unsigned())),
                    From::ImmediateI16 { imm } => Some(Operand::Immediate(i64::from(imm).cast_unsigned())),
                    From::ImmediateI32 { imm } => Some(Operand::Immediate(i64::from(imm).cast_unsigned())),
                    From::ImmediateU8 { imm } => Some(Operand::Immediate(u64::from(imm))),
                    From::ImmediateU16 { imm } => Some(Operand::Immediate(u64::from(imm))),
                    From::ImmediateU32 { imm } => Some(Operand::Immediate(u64::from(imm))),

                    $(From::$immediate { imm } => Some(Operand::Immediate(imm.cast_unsigned())),)*

                    From::MemDeref { base } => address(Some(base), None, 0),
                    From::$displaced { base, disp } => address(Some(base), None, signed(disp)),
                    From::MemIndexScale { index, scale } => address(None, Some((index, scale)), 0),
                    From::MemIndexScaleDisp { index, scale, disp } => {
                        address(None, Some((index, scale)), signed(disp))
                    }
                    From::MemBaseIndexScale { base, index, scale } => address(Some(base), Some((index, scale)), 0),
                    From::MemBaseIndexScaleDisp { base, index, scale, disp } => {
                        address(Some(base), Some((index, scale)), signed(disp))
                    }
                    // In 64-bit mode, an address of 32 bits is sign-extended; elsewhere the bits above are cut off.
                    $(From::$absolute { addr } => {
                        address(None, None, Width::$absolute_width.sign_extend(addr.into()))
                    })*

                    _ => None,
                }
            }

            fn base(register: arch::RegSpec) -> Option<Base> {
                if is_instruction_pointer(register.class()) {
                    return Some(Base::NextInstruction);
                }
                self::register(register).map(|register| Base::Register(register.number))
            }

            fn register(register: arch::RegSpec) -> Option<Register> {
                let class = register.class();
                let number = register.num();
                // Without REX, the byte registers 4 to 7 are the second bytes of registers 0 to 3.
                if class == arch::register_class::B && number >= 4 {
                    return (number < 8).then_some(Register { number: number - 4, width: Width::Byte, high: true });
                }
                (number < 16).then_some(Register { number, width: width(class)?, high: false })
            }

            fn width(class: arch::RegisterClass) -> Option<Width> {
                match class {
                    $(arch::register_class::$class => Some(Width::$class_width),)*
                    _ => None,
                }
            }

            fn is_instruction_pointer(class: arch::RegisterClass) -> bool {
                $(class == arch::register_class::$pointer)||*
            }

            fn segment(segment: arch::Segment) -> Segment {
                match segment {
                    arch::Segment::ES => Segment::Es,
                    arch::Segment::CS => Segment::Cs,
                    arch::Segment::SS => Segment::Ss,
                    arch::Segment::DS => Segment::Ds,
                    arch::Segment::FS => Segment::Fs,
                    arch::Segment::GS => Segment::Gs,
                }
            }
        }
    };
}

decoder!(
    bits16, real_mode,
    address: Word, with_prefix: Dword,
    displaced: MemDisp,
    immediates: [],
    absolute: [AbsoluteU16 of Word, AbsoluteU32 of Dword],
    classes: [B of Byte, W of Word, D of Dword],
    pointers: [EIP]
);
decoder!(
    bits32, protected_mode,
    address: Dword, with_prefix: Word,
    displaced: Disp,
    immediates: [],
    absolute: [AbsoluteU16 of Word, AbsoluteU32 of Dword],
    classes: [B of Byte, W of Word, D of Dword],
    pointers: [EIP]
);
decoder!(
    bits64, long_mode,
    address: Qword, with_prefix: Dword,
    displaced: Disp,
    immediates: [ImmediateI64],
    absolute: [AbsoluteU32 of Dword, AbsoluteU64 of Qword],
    classes: [B of Byte, RB of Byte, W of Word, D of Dword, Q of Qword],
    pointers: [EIP, RIP]
);

//! Decodes bytes into an [`Instruction`].
//!
//! This file reads the prefixes, like the processor: of several conflicting prefixes the last one counts, 64-bit mode
//! ignores some, and a REX that is not last is ignored. The crate `yaxpeax-x86` reads the rest of the instruction. It
//! has one decoder for each mode, with its own types. This file converts their results into one type and rejects all
//! instructions that are of no use for a device.

use crate::instruction::{Base, Form, Instruction, Operation, Register, Repeat};
use crate::{MAX_LENGTH, Mode, Segment, Width};

/// Why the bytes are not an [`Instruction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end before the instruction.
    Incomplete,
    /// The instruction has not ended after [`MAX_LENGTH`] bytes: #GP.
    TooLong,
    /// No instruction, or one that this crate does not support.
    Unknown,
}

/// Decodes the instruction at the start of `bytes`. Reads at most [`MAX_LENGTH`] of them.
///
/// # Errors
/// The bytes are not an instruction that can be emulated.
pub fn decode(mode: Mode, bytes: &[u8]) -> Result<Instruction, DecodeError> {
    let bytes = &bytes[..bytes.len().min(MAX_LENGTH)];
    let prefixes = Prefixes::read(mode, bytes);

    // The decoder does not ignore a REX that the processor ignores. It also does not know opcode 82, nor an opcode in
    // the 15th byte.
    let mut rewritten = [0; MAX_LENGTH];
    let is_82 = mode != Mode::Bits64 && bytes.get(prefixes.count) == Some(&0x82);
    let is_strange = prefixes.has_idle_rex || is_82 || prefixes.count == MAX_LENGTH - 1;
    let read = if is_strange { prefixes.rewrite(bytes, is_82, &mut rewritten) } else { bytes };
    #[expect(clippy::cast_possible_truncation, reason = "at most 15")]
    let dropped = (bytes.len() - read.len()) as u8;
    let decoded = match mode {
        Mode::Bits16 => bits16::decode(read, &prefixes),
        Mode::Bits32 => bits32::decode(read, &prefixes),
        Mode::Bits64 => bits64::decode(read, &prefixes),
    };
    match decoded {
        Ok(mut instruction) => {
            instruction.length += dropped;
            if instruction.locked && !instruction.may_be_locked() {
                return Err(DecodeError::Unknown);
            }
            Ok(instruction)
        }
        Err(DecodeError::Incomplete) if bytes.len() == MAX_LENGTH => Err(DecodeError::TooLong),
        Err(refusal) => Err(refusal),
    }
}

/// The bytes before the opcode (APM vol. 3, 1.2).
struct Prefixes {
    segment: Option<Segment>,
    address_size: bool,
    locked: bool,
    repeat: Repeat,
    rex_w: bool,
    /// Operand width of most instructions.
    operand_width: Width,
    /// Operand width of PUSH and POP.
    stack_width: Width,
    /// There is a REX that the processor ignores.
    has_idle_rex: bool,
    /// Number of prefix bytes.
    count: usize,
}

impl Prefixes {
    fn read(mode: Mode, bytes: &[u8]) -> Self {
        let mut prefixes = Self {
            segment: None,
            address_size: false,
            locked: false,
            repeat: Repeat::Never,
            rex_w: false,
            operand_width: Width::Dword,
            stack_width: Width::Dword,
            has_idle_rex: false,
            count: 0,
        };
        // A REX that counts if no prefix follows.
        let mut rex = None;
        let mut operand_size = false;
        for &byte in bytes {
            if mode == Mode::Bits64 && is_rex(byte) {
                prefixes.has_idle_rex |= rex.replace(byte).is_some();
                prefixes.count += 1;
                continue;
            }
            match byte {
                // Of these segments, only FS and GS have a meaning in 64-bit mode.
                0x26 | 0x2e | 0x36 | 0x3e if mode == Mode::Bits64 => {}
                0x26 => prefixes.segment = Some(Segment::Es),
                0x2e => prefixes.segment = Some(Segment::Cs),
                0x36 => prefixes.segment = Some(Segment::Ss),
                0x3e => prefixes.segment = Some(Segment::Ds),
                0x64 => prefixes.segment = Some(Segment::Fs),
                0x65 => prefixes.segment = Some(Segment::Gs),
                0x66 => operand_size = true,
                0x67 => prefixes.address_size = true,
                0xf0 => prefixes.locked = true,
                0xf2 => prefixes.repeat = Repeat::WhileDifferent,
                0xf3 => prefixes.repeat = Repeat::WhileEqual,
                _ => break,
            }
            prefixes.has_idle_rex |= rex.take().is_some();
            prefixes.count += 1;
        }
        prefixes.rex_w = rex.is_some_and(|rex| rex & 8 != 0);
        prefixes.operand_width = if prefixes.rex_w {
            Width::Qword
        } else if operand_size == (mode == Mode::Bits16) {
            Width::Dword
        } else {
            Width::Word
        };
        prefixes.stack_width = match prefixes.operand_width {
            Width::Dword if mode == Mode::Bits64 => Width::Qword,
            width => width,
        };
        prefixes
    }

    /// The same instruction in fewer bytes: without ignored REX prefixes and repeated prefixes. Opcode 80 replaces 82,
    /// which does the same (APM vol. 3, A.1).
    fn rewrite<'a>(&self, bytes: &[u8], is_82: bool, into: &'a mut [u8; MAX_LENGTH]) -> &'a [u8] {
        let mut length = 0;
        for (place, &byte) in bytes.iter().enumerate() {
            let later = bytes.get(place + 1..self.count).unwrap_or_default();
            let is_idle = later.contains(&byte) || !later.is_empty() && is_rex(byte);
            if !is_idle {
                into[length] = if is_82 && place == self.count { 0x80 } else { byte };
                length += 1;
            }
        }
        &into[..length]
    }
}

fn is_rex(byte: u8) -> bool {
    byte & 0xf0 == 0x40
}

/// The numbers of SP and BP, whose use as a base selects the stack segment.
const STACK_REGISTERS: core::ops::RangeInclusive<u8> = 4..=5;

impl Instruction {
    /// Whether LOCK is allowed (APM vol. 3, 1.2.5).
    fn may_be_locked(&self) -> bool {
        use Operation::{
            Add, AddWithCarry, And, BitComplement, BitReset, BitSet, CompareExchange, CompareExchangePair, Decrement,
            Exchange, ExchangeAdd, Increment, Negate, Not, Or, Subtract, SubtractWithBorrow, Xor,
        };
        self.form != Form::FromMemory
            && matches!(
                self.operation,
                Add | AddWithCarry
                    | And
                    | BitComplement
                    | BitReset
                    | BitSet
                    | CompareExchange
                    | CompareExchangePair
                    | Decrement
                    | Exchange
                    | ExchangeAdd
                    | Increment
                    | Negate
                    | Not
                    | Or
                    | Subtract
                    | SubtractWithBorrow
                    | Xor
            )
    }
}

/// An operand of the decoder, in one type for all modes.
enum Operand {
    Register(Register),
    /// Sign-extended to 64 bits.
    Immediate(u64),
    Memory {
        base: Option<Base>,
        index: Option<(u8, u8)>,
        displacement: u64,
    },
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
            use super::{DecodeError, Operand, Prefixes, STACK_REGISTERS};
            use crate::instruction::{Address, Base, Form, Index, Instruction, Operation, Register};
            use crate::{Segment, Width};
            use yaxpeax_arch::LengthedInstruction;
            use yaxpeax_x86::$arch as arch;

            pub(super) fn decode(bytes: &[u8], prefixes: &Prefixes) -> Result<Instruction, DecodeError> {
                let decoded = arch::InstDecoder::default().decode_slice(bytes).map_err(|error| match error {
                    arch::DecodeError::ExhaustedInput => DecodeError::Incomplete,
                    arch::DecodeError::TooLong => DecodeError::TooLong,
                    _ => DecodeError::Unknown,
                })?;
                convert(&decoded, prefixes).ok_or(DecodeError::Unknown)
            }

            fn convert(decoded: &arch::Instruction, prefixes: &Prefixes) -> Option<Instruction> {
                let operation = operation(decoded.opcode(), prefixes)?;
                let address_width = if prefixes.address_size { Width::$other_width } else { Width::$default_width };
                let accumulator = Register { number: 0, width: Width::Byte, high: false };
                let mut instruction = Instruction {
                    operation,
                    form: Form::Memory,
                    width: memory_width(decoded, operation, prefixes)?,
                    register: accumulator,
                    address: Address {
                        segment: prefixes.segment.unwrap_or(Segment::Ds),
                        base: None,
                        index: None,
                        width: address_width,
                    },
                    displacement: 0,
                    immediate: 0,
                    repeat: prefixes.repeat,
                    locked: prefixes.locked,
                    length: u8::try_from(decoded.len().to_const()).ok()?,
                };
                if operation.is_string() {
                    return Some(instruction);
                }

                let to = operand(decoded, 0)?;
                let from = if decoded.operand_count() == 2 { Some(operand(decoded, 1)?) } else { None };
                let memory = match (to, from) {
                    (memory @ Operand::Memory { .. }, None) => memory,
                    (Operand::Register(register), Some(memory @ Operand::Memory { .. })) => {
                        instruction.form =
                            if operation == Operation::Exchange { Form::ToMemory } else { Form::FromMemory };
                        instruction.register = register;
                        memory
                    }
                    (memory @ Operand::Memory { .. }, Some(Operand::Register(register))) => {
                        instruction.form = Form::ToMemory;
                        instruction.register = register;
                        memory
                    }
                    (memory @ Operand::Memory { .. }, Some(Operand::Immediate(value))) => {
                        instruction.form = Form::ToMemoryImmediate;
                        instruction.immediate = value;
                        memory
                    }
                    _ => return None,
                };
                let extends = matches!(operation, Operation::MoveZeroExtended | Operation::MoveSignExtended);
                let has_register = matches!(instruction.form, Form::FromMemory | Form::ToMemory);
                if has_register && !extends && instruction.register.width != instruction.width {
                    return None;
                }
                if decoded.operand_count() > 2 {
                    return None;
                }

                let Operand::Memory { base, index, displacement } = memory else { return None };
                // A 16-bit address [BP + SI] is based on BP even if BP comes second.
                let on_stack = matches!(base, Some(Base::Register(number)) if STACK_REGISTERS.contains(&number));
                if on_stack && prefixes.segment.is_none() {
                    instruction.address.segment = Segment::Ss;
                }
                instruction.address.base = base;
                instruction.address.index = index.map(|(register, scale)| Index { register, scale });
                instruction.displacement = displacement;
                Some(instruction)
            }

            fn memory_width(
                decoded: &arch::Instruction,
                operation: Operation,
                prefixes: &Prefixes,
            ) -> Option<Width> {
                match operation {
                    // The decoder drops the prefixes of some of these, but all have one width.
                    Operation::BitTest | Operation::BitSet | Operation::BitReset | Operation::BitComplement => {
                        return Some(prefixes.operand_width);
                    }
                    Operation::Push | Operation::Pop => return Some(prefixes.stack_width),
                    _ => {}
                }
                let bytes = decoded.mem_size()?.bytes_size()?;
                match operation {
                    // Half of the pair.
                    Operation::CompareExchangePair => Width::from_bytes(bytes / 2),
                    // Port accesses have 32 bits at most, whatever a REX says.
                    Operation::InString | Operation::OutString if bytes > 1 => {
                        Some(prefixes.operand_width.min(Width::Dword))
                    }
                    _ => Width::from_bytes(bytes),
                }
            }

            fn operation(opcode: arch::Opcode, prefixes: &Prefixes) -> Option<Operation> {
                use arch::Opcode;
                Some(match opcode {
                    Opcode::MOV | Opcode::MOVNTI => Operation::Move,
                    Opcode::MOVZX => Operation::MoveZeroExtended,
                    Opcode::MOVSX => Operation::MoveSignExtended,
                    // Without REX.W, MOVSXD is a MOV that no compiler uses; the decoder treats it as one that extends
                    // to 64 bits.
                    Opcode::MOVSXD if prefixes.rex_w => Operation::MoveSignExtended,
                    Opcode::XCHG => Operation::Exchange,
                    Opcode::ADD => Operation::Add,
                    Opcode::OR => Operation::Or,
                    Opcode::ADC => Operation::AddWithCarry,
                    Opcode::SBB => Operation::SubtractWithBorrow,
                    Opcode::AND => Operation::And,
                    Opcode::SUB => Operation::Subtract,
                    Opcode::XOR => Operation::Xor,
                    Opcode::CMP => Operation::Compare,
                    Opcode::TEST => Operation::Test,
                    Opcode::INC => Operation::Increment,
                    Opcode::DEC => Operation::Decrement,
                    Opcode::NOT => Operation::Not,
                    Opcode::NEG => Operation::Negate,
                    Opcode::BT => Operation::BitTest,
                    Opcode::BTS => Operation::BitSet,
                    Opcode::BTR => Operation::BitReset,
                    Opcode::BTC => Operation::BitComplement,
                    Opcode::CMPXCHG => Operation::CompareExchange,
                    Opcode::CMPXCHG8B | Opcode::CMPXCHG16B => Operation::CompareExchangePair,
                    Opcode::XADD => Operation::ExchangeAdd,
                    Opcode::PUSH => Operation::Push,
                    Opcode::POP => Operation::Pop,
                    Opcode::STOS => Operation::StoreString,
                    Opcode::MOVS => Operation::MoveString,
                    Opcode::LODS => Operation::LoadString,
                    Opcode::CMPS => Operation::CompareString,
                    Opcode::SCAS => Operation::ScanString,
                    Opcode::INS => Operation::InString,
                    Opcode::OUTS => Operation::OutString,
                    _ => return None,
                })
            }

            fn operand(decoded: &arch::Instruction, place: u8) -> Option<Operand> {
                use arch::Operand as From;

                let memory = |base: Option<arch::RegSpec>, index: Option<(arch::RegSpec, u8)>, displacement: u64| {
                    let base = match base {
                        Some(register) => Some(self::base(register)?),
                        None => None,
                    };
                    let index = match index {
                        Some((register, scale)) => Some((self::register(register)?.number, scale)),
                        None => None,
                    };
                    Some(Operand::Memory { base, index, displacement })
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

                    From::MemDeref { base } => memory(Some(base), None, 0),
                    From::$displaced { base, disp } => memory(Some(base), None, signed(disp)),
                    From::MemIndexScale { index, scale } => memory(None, Some((index, scale)), 0),
                    From::MemIndexScaleDisp { index, scale, disp } => {
                        memory(None, Some((index, scale)), signed(disp))
                    }
                    From::MemBaseIndexScale { base, index, scale } => memory(Some(base), Some((index, scale)), 0),
                    From::MemBaseIndexScaleDisp { base, index, scale, disp } => {
                        memory(Some(base), Some((index, scale)), signed(disp))
                    }
                    // In 64-bit mode a 32-bit address is sign-extended; elsewhere the upper bits are cut off.
                    $(From::$absolute { addr } => {
                        memory(None, None, Width::$absolute_width.sign_extend(addr.into()))
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

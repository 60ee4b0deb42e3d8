//! Finds an instruction's operands with `iced-x86`, and decides whether the processor may execute it.

use crate::machine::{CODE, CODE_BYTES, Case, RCX, RDI, RESERVED, RSI, RSP};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use x86_emulate::{Mode, Segment};

/// An operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operand {
    /// Linear address of its first byte.
    pub(crate) linear: u64,
    pub(crate) bytes: u64,
}

/// A case whose instruction changes only flags, general registers and reserved memory.
#[derive(Clone, Debug)]
pub(crate) struct Confined(Case);

impl Confined {
    /// `None` if the case may change anything else.
    pub(crate) fn new(case: Case) -> Option<Self> {
        let instruction = decode(&case)?;
        if !is_harmless(&instruction) || case.length == 0 {
            return None;
        }
        let end = usize::from(case.place) + usize::from(case.length);
        if end >= CODE_BYTES || !case.bases.iter().all(|&base| is_canonical(base)) {
            return None;
        }

        let confined =
            |gprs| operands(&case, &instruction, gprs).into_iter().flatten().all(|operand| is_confined(&operand));
        let Some(last) = last_element(&case, &instruction) else { return confined(&case.gprs).then_some(Self(case)) };
        (last.count <= MOST_ELEMENTS && confined(&case.gprs) && confined(&last.gprs)).then_some(Self(case))
    }

    pub(crate) fn case(&self) -> &Case {
        &self.0
    }
}

/// Maximum number of elements of a repeated instruction.
pub(crate) const MOST_ELEMENTS: u64 = 256;

/// A repeated instruction's registers at its last element.
struct Last {
    count: u64,
    gprs: [u64; 16],
}

fn last_element(case: &Case, instruction: &Instruction) -> Option<Last> {
    let width = string_address_bytes(instruction)?;
    if !(instruction.has_rep_prefix() || instruction.has_repne_prefix()) {
        return None;
    }
    let count = truncate(case.gprs[RCX], width);
    let mut gprs = case.gprs;
    let way = count.saturating_sub(1).wrapping_mul(instruction.memory_size().size() as u64);
    for register in [RSI, RDI] {
        let moved =
            if case.flags & 0x400 == 0 { gprs[register].wrapping_add(way) } else { gprs[register].wrapping_sub(way) };
        gprs[register] = truncate(moved, width);
    }
    Some(Last { count, gprs })
}

/// Decodes with `iced-x86`; `None` if it does not know the instruction, or finds another length.
pub(crate) fn decode(case: &Case) -> Option<Instruction> {
    let instruction = decoder(case).decode();
    let is_all = instruction.len() == case.instruction().len();
    (instruction.code() != Code::INVALID && is_all).then_some(instruction)
}

/// Position and size of the displacement in the instruction.
pub(crate) fn displacement_place(case: &Case) -> Option<(usize, usize)> {
    let mut decoder = decoder(case);
    let instruction = decoder.decode();
    let offsets = decoder.get_constant_offsets(&instruction);
    offsets.has_displacement().then(|| (offsets.displacement_offset(), offsets.displacement_size()))
}

fn decoder(case: &Case) -> Decoder<'_> {
    Decoder::with_ip(bitness(case.mode), case.instruction(), case.rip(), DecoderOptions::AMD)
}

fn bitness(mode: Mode) -> u32 {
    match mode {
        Mode::Bits16 => 16,
        Mode::Bits32 => 32,
        Mode::Bits64 => 64,
    }
}

/// Whether the bytes begin with an instruction that the emulator should know.
pub(crate) fn is_known(mode: Mode, bytes: &[u8]) -> bool {
    let instruction = Decoder::new(bitness(mode), bytes, DecoderOptions::AMD).decode();
    // Without REX.W, MOVSXD is a MOV that no compiler uses; the emulator rejects it on purpose.
    let is_strange = matches!(instruction.code(), Code::Movsxd_r32_rm32 | Code::Movsxd_r16_rm16);
    instruction.code() != Code::INVALID && is_harmless(&instruction) && !is_strange
}

/// Whether it changes only data, for any registers.
fn is_harmless(instruction: &Instruction) -> bool {
    use Mnemonic::{
        Adc, Add, And, Bt, Btc, Btr, Bts, Cmp, Cmpsb, Cmpsd, Cmpsq, Cmpsw, Cmpxchg, Cmpxchg8b, Cmpxchg16b, Dec, Inc,
        Lodsb, Lodsd, Lodsq, Lodsw, Mov, Movnti, Movsb, Movsd, Movsq, Movsw, Movsx, Movsxd, Movzx, Neg, Not, Or, Pop,
        Push, Sbb, Scasb, Scasd, Scasq, Scasw, Stosb, Stosd, Stosq, Stosw, Sub, Test, Xadd, Xchg, Xor,
    };
    let is_known = matches!(
        instruction.mnemonic(),
        Adc | Add
            | And
            | Bt
            | Btc
            | Btr
            | Bts
            | Cmp
            | Cmpsb
            | Cmpsd
            | Cmpsq
            | Cmpsw
            | Cmpxchg
            | Cmpxchg8b
            | Cmpxchg16b
            | Dec
            | Inc
            | Lodsb
            | Lodsd
            | Lodsq
            | Lodsw
            | Mov
            | Movnti
            | Movsb
            | Movsd
            | Movsq
            | Movsw
            | Movsx
            | Movsxd
            | Movzx
            | Neg
            | Not
            | Or
            | Pop
            | Push
            | Sbb
            | Scasb
            | Scasd
            | Scasq
            | Scasw
            | Stosb
            | Stosd
            | Stosq
            | Stosw
            | Sub
            | Test
            | Xadd
            | Xchg
            | Xor
    );
    // No segment, control or vector registers: MOVSD is more than one instruction.
    let registers = (0..instruction.op_count()).filter(|&place| instruction.op_kind(place) == OpKind::Register);
    let is_memory = |place| instruction.op_kind(place) == OpKind::Memory;
    let has_memory = string_address_bytes(instruction).is_some() || (0..instruction.op_count()).any(is_memory);
    is_known && has_memory && registers.map(|place| instruction.op_register(place)).all(Register::is_gpr)
}

/// The instruction's operands in memory with these registers; for a repeated one, those of its next element.
pub(crate) fn operands(case: &Case, instruction: &Instruction, gprs: &[u64; 16]) -> [Option<Operand>; 2] {
    let bytes = instruction.memory_size().size() as u64;
    let operand = |segment, offset| Some(Operand { linear: linear(case, segment, offset), bytes });
    if let Some(width) = string_address_bytes(instruction) {
        let kinds = [0, 1]
            .map(|place| if place < instruction.op_count() { instruction.op_kind(place) } else { OpKind::Register });
        let at = |register: usize| truncate(gprs[register], width);
        let source =
            kinds.iter().any(|kind| matches!(kind, OpKind::MemorySegSI | OpKind::MemorySegESI | OpKind::MemorySegRSI));
        let destination =
            kinds.iter().any(|kind| matches!(kind, OpKind::MemoryESDI | OpKind::MemoryESEDI | OpKind::MemoryESRDI));
        return [
            source.then(|| operand(segment(instruction.memory_segment()), at(RSI))).flatten(),
            destination.then(|| operand(Segment::Es, at(RDI))).flatten(),
        ];
    }

    let width = address_bytes(instruction);
    let mut offset = instruction.memory_displacement64();
    let is_relative = instruction.is_ip_rel_memory_operand();
    if !is_relative && instruction.memory_base() != Register::None {
        offset = offset.wrapping_add(gprs[instruction.memory_base().number()]);
    }
    if instruction.memory_index() != Register::None {
        let scale = u64::from(instruction.memory_index_scale());
        offset = offset.wrapping_add(gprs[instruction.memory_index().number()].wrapping_mul(scale));
    }

    let pointer = case.stack_pointer_bytes();
    let stack = match instruction.mnemonic() {
        Mnemonic::Push => Some(gprs[RSP].wrapping_sub(bytes)),
        Mnemonic::Pop => {
            if matches!(instruction.memory_base(), Register::RSP | Register::ESP) {
                offset = offset.wrapping_add(bytes);
            }
            Some(gprs[RSP])
        }
        Mnemonic::Bt | Mnemonic::Btc | Mnemonic::Btr | Mnemonic::Bts if instruction.op1_kind() == OpKind::Register => {
            let number = sign_extend(gprs[instruction.op1_register().number()], bytes);
            let operands = number >> (bytes * 8).trailing_zeros();
            offset = offset.wrapping_add_signed(operands.wrapping_mul(bytes.cast_signed()));
            None
        }
        _ => None,
    };
    [
        operand(segment(instruction.memory_segment()), truncate(offset, width)),
        stack.and_then(|offset| operand(Segment::Ss, truncate(offset, pointer))),
    ]
}

/// Address size of a string instruction in bytes; `None` for others.
pub(crate) fn string_address_bytes(instruction: &Instruction) -> Option<usize> {
    (0..instruction.op_count()).find_map(|place| match instruction.op_kind(place) {
        OpKind::MemorySegSI | OpKind::MemoryESDI => Some(2),
        OpKind::MemorySegESI | OpKind::MemoryESEDI => Some(4),
        OpKind::MemorySegRSI | OpKind::MemoryESRDI => Some(8),
        _ => None,
    })
}

/// Address size of an operand in bytes; with only a displacement, the displacement's size.
pub(crate) fn address_bytes(instruction: &Instruction) -> usize {
    let registers = [instruction.memory_base(), instruction.memory_index()];
    let widest =
        registers.into_iter().filter(|&register| register != Register::None).map(|register| register.size()).max();
    widest.unwrap_or_else(|| usize::try_from(instruction.memory_displ_size()).expect("small"))
}

pub(crate) fn segment(register: Register) -> Segment {
    match register {
        Register::ES => Segment::Es,
        Register::CS => Segment::Cs,
        Register::SS => Segment::Ss,
        Register::FS => Segment::Fs,
        Register::GS => Segment::Gs,
        _ => Segment::Ds,
    }
}

fn linear(case: &Case, segment: Segment, offset: u64) -> u64 {
    let linear = case.base(segment).wrapping_add(offset);
    if case.mode == Mode::Bits64 { linear } else { truncate(linear, 4) }
}

fn is_confined(operand: &Operand) -> bool {
    let Some(last) = operand.linear.checked_add(operand.bytes - 1) else { return false };
    // The code is not data: there are other rights to it.
    let code = CODE..CODE + CODE_BYTES as u64;
    let is_code = operand.linear < code.end && last >= code.start;
    RESERVED.contains(&operand.linear) && RESERVED.contains(&last) && !is_code
        || is_hole(operand.linear) && is_hole(last)
}

/// Whether no process can have anything there: not canonical, or on the last page below that, which Linux keeps empty.
fn is_hole(linear: u64) -> bool {
    (0x7fff_ffff_f000..0xffff_8000_0000_0000).contains(&linear)
}

/// With 48-bit linear addresses.
pub(crate) fn is_canonical(linear: u64) -> bool {
    !(0x8000_0000_0000..0xffff_8000_0000_0000).contains(&linear)
}

/// The lowest `bytes` of `value`.
pub(crate) fn truncate(value: u64, bytes: usize) -> u64 {
    if bytes >= 8 { value } else { value & ((1 << (bytes * 8)) - 1) }
}

fn sign_extend(value: u64, bytes: u64) -> i64 {
    let unused = 64 - bytes * 8;
    (value << unused).cast_signed() >> unused
}

//! Properties of a decoded instruction, for any bytes: above all, another decoder, `iced-x86`, agrees.
//!
//! Used with pseudorandom numbers, and with the bytes of a fuzzer (`fuzzed.rs`).

use super::random::Source;
use super::x86_emulate::{Base, DecodeError, Form, Instruction, MAX_LENGTH, Mode, Operation, Repeat, Segment, decode};
use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic, OpKind, Register as Other};

/// Decodes the instruction at the start of 20 bytes and checks the result. Panics if it is wrong.
pub(crate) fn check_decode(mode: Mode, bytes: &[u8; 20], source: &mut impl Source) -> Result<Instruction, DecodeError> {
    // The slice ends where an instruction must; a read behind it would be out of bounds.
    let window = &bytes[..MAX_LENGTH];
    let decoded = decode(mode, window);
    assert_eq!(decoded, decode(mode, bytes), "bytes behind the 15th matter: {bytes:02x?}");
    assert_ne!(decoded, Err(DecodeError::Incomplete), "15 bytes are not enough: {bytes:02x?}");
    agree(mode, window, decoded);

    if let Ok(instruction) = decoded {
        assert_eq!(Instruction::unpack(instruction.pack()), Some(instruction));
        depends_on_itself_only(mode, bytes, &instruction, source);
    }
    decoded
}

/// Only the instruction's own bytes decide, and all of them: so a comparison of them can find a cached instruction.
fn depends_on_itself_only(mode: Mode, bytes: &[u8; 20], instruction: &Instruction, source: &mut impl Source) {
    let length = usize::from(instruction.length);
    assert!((1..=MAX_LENGTH).contains(&length));
    let is_same = |bytes: &[u8]| {
        assert_eq!(decode(mode, bytes).as_ref(), Ok(instruction), "another tail, another instruction: {bytes:02x?}");
    };
    is_same(&bytes[..length]);

    let cut = source.below(length);
    assert_eq!(decode(mode, &bytes[..cut]), Err(DecodeError::Incomplete), "{cut} bytes are enough: {bytes:02x?}");

    let random = source.bytes();
    for tail in [[0; 20], [0xff; 20], [0x66; 20], random] {
        let mut other = *bytes;
        other[length..].copy_from_slice(&tail[length..]);
        is_same(&other);
        is_same(&other[..MAX_LENGTH]);
    }
    if length < MAX_LENGTH {
        let mut other = *bytes;
        other[length + source.below(MAX_LENGTH - length)] ^= 1 << source.below(8);
        is_same(&other);
    }
}

/// Whether both decoders give the same instruction, or both reject it.
fn agree(mode: Mode, bytes: &[u8], decoded: Result<Instruction, DecodeError>) {
    let other = other_decode(mode, bytes);
    match decoded {
        Ok(ours) => {
            assert!(is_known(&other), "{ours:?} is {:?} {bytes:02x?}", other.code());
            if let Err(what) = is_same(mode, &ours, &other) {
                panic!("{what} differs: {ours:?} is {:?} ({other:?}) {mode:?} {bytes:02x?}", other.code());
            }
        }
        Err(refusal) => {
            assert!(!is_known(&other), "{refusal:?}, but it is {:?} {mode:?} {bytes:02x?}", other.code());
        }
    }
}

pub(crate) fn other_decode(mode: Mode, bytes: &[u8]) -> iced_x86::Instruction {
    let bits = match mode {
        Mode::Bits16 => 16,
        Mode::Bits32 => 32,
        Mode::Bits64 => 64,
    };
    Decoder::with_ip(bits, bytes, 0, DecoderOptions::AMD).decode()
}

/// Whether the other decoder sees an instruction that this crate supports.
pub(crate) fn is_known(other: &iced_x86::Instruction) -> bool {
    if other.is_invalid() || is_left_out(other.code()) || operation(other).is_none() {
        return false;
    }
    if other.is_string_instruction() {
        return true;
    }
    let count = other.op_count();
    let memory = (0..count).filter(|&place| other.op_kind(place) == OpKind::Memory).count();
    let mut registers = (0..count).filter(|&place| other.op_kind(place) == OpKind::Register);
    count <= 2 && memory == 1 && registers.all(|place| other.op_register(place).is_gpr())
}

/// Rejected on purpose: MOVSXD without extension, which no compiler emits.
fn is_left_out(code: Code) -> bool {
    matches!(code, Code::Movsxd_r16_rm16 | Code::Movsxd_r32_rm32)
}

fn operation(other: &iced_x86::Instruction) -> Option<Operation> {
    Some(match other.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movnti => Operation::Move,
        Mnemonic::Movzx => Operation::MoveZeroExtended,
        Mnemonic::Movsx | Mnemonic::Movsxd => Operation::MoveSignExtended,
        Mnemonic::Xchg => Operation::Exchange,
        Mnemonic::Add => Operation::Add,
        Mnemonic::Or => Operation::Or,
        Mnemonic::Adc => Operation::AddWithCarry,
        Mnemonic::Sbb => Operation::SubtractWithBorrow,
        Mnemonic::And => Operation::And,
        Mnemonic::Sub => Operation::Subtract,
        Mnemonic::Xor => Operation::Xor,
        Mnemonic::Cmp => Operation::Compare,
        Mnemonic::Test => Operation::Test,
        Mnemonic::Inc => Operation::Increment,
        Mnemonic::Dec => Operation::Decrement,
        Mnemonic::Not => Operation::Not,
        Mnemonic::Neg => Operation::Negate,
        Mnemonic::Bt => Operation::BitTest,
        Mnemonic::Bts => Operation::BitSet,
        Mnemonic::Btr => Operation::BitReset,
        Mnemonic::Btc => Operation::BitComplement,
        Mnemonic::Cmpxchg => Operation::CompareExchange,
        Mnemonic::Cmpxchg8b | Mnemonic::Cmpxchg16b => Operation::CompareExchangePair,
        Mnemonic::Xadd => Operation::ExchangeAdd,
        Mnemonic::Push => Operation::Push,
        Mnemonic::Pop => Operation::Pop,
        // Some of these names are also those of vector instructions.
        _ if !other.is_string_instruction() => return None,
        Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => Operation::StoreString,
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq => Operation::MoveString,
        Mnemonic::Lodsb | Mnemonic::Lodsw | Mnemonic::Lodsd | Mnemonic::Lodsq => Operation::LoadString,
        Mnemonic::Cmpsb | Mnemonic::Cmpsw | Mnemonic::Cmpsd | Mnemonic::Cmpsq => Operation::CompareString,
        Mnemonic::Scasb | Mnemonic::Scasw | Mnemonic::Scasd | Mnemonic::Scasq => Operation::ScanString,
        Mnemonic::Insb | Mnemonic::Insw | Mnemonic::Insd => Operation::InString,
        Mnemonic::Outsb | Mnemonic::Outsw | Mnemonic::Outsd => Operation::OutString,
        _ => return None,
    })
}

/// Compares one thing; the error is its name.
macro_rules! same {
    ($what:literal, $ours:expr, $other:expr) => {
        if $ours != $other {
            return Err($what);
        }
    };
}

fn is_same(mode: Mode, ours: &Instruction, other: &iced_x86::Instruction) -> Result<(), &'static str> {
    same!("length", usize::from(ours.length), other.len());
    same!("operation", Some(ours.operation), operation(other));
    same!("lock", ours.locked, other.has_lock_prefix());
    let halves = if ours.operation == Operation::CompareExchangePair { 2 } else { 1 };
    same!("width", ours.width.bytes() * halves, other.memory_size().size() as u64);
    if ours.operation.is_string() {
        return is_same_string(mode, ours, other);
    }

    let is_memory = |place| other.op_kind(place) == OpKind::Memory;
    let register = |place| {
        let theirs = other.op_register(place);
        same!("register", usize::from(ours.register.number), theirs.full_register().number());
        same!("register width", ours.register.width.bytes(), theirs.size() as u64);
        same!("register half", ours.register.high, [Other::AH, Other::BH, Other::CH, Other::DH].contains(&theirs));
        Ok(())
    };
    match ours.form {
        Form::FromMemory => {
            same!("form", true, other.op_count() == 2 && is_memory(1));
            register(0)?;
        }
        // The order of the operands of XCHG and TEST is arbitrary.
        Form::ToMemory => {
            same!("form", true, other.op_count() == 2);
            let symmetric = matches!(ours.operation, Operation::Exchange | Operation::Test);
            same!("order", true, symmetric || is_memory(0));
            register(u32::from(is_memory(0)))?;
        }
        Form::ToMemoryImmediate => {
            same!("form", true, other.op_count() == 2 && is_memory(0));
            let is_bit = matches!(other.mnemonic(), Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc);
            let cut = |value| if is_bit { value & 0xff } else { ours.width.truncate(value) };
            same!("immediate", cut(ours.immediate), cut(other.try_immediate(1).map_err(|_| "immediate")?));
        }
        Form::Memory => same!("form", 1, other.op_count()),
    }
    is_same_address(mode, ours, other)
}

fn is_same_string(mode: Mode, ours: &Instruction, other: &iced_x86::Instruction) -> Result<(), &'static str> {
    let repeat = match (other.has_repe_prefix(), other.has_repne_prefix()) {
        (false, false) => Repeat::Never,
        (true, false) => Repeat::WhileEqual,
        (false, true) => Repeat::WhileDifferent,
        (true, true) => return Err("both repetitions"),
    };
    same!("repetition", ours.repeat, repeat);
    same!("form", ours.form, Form::Memory);
    for place in 0..other.op_count() {
        let bytes = match other.op_kind(place) {
            OpKind::MemorySegSI | OpKind::MemoryESDI => 2,
            OpKind::MemorySegESI | OpKind::MemoryESEDI => 4,
            OpKind::MemorySegRSI | OpKind::MemoryESRDI => 8,
            _ => continue,
        };
        same!("address width", ours.address.width.bytes(), bytes);
        if matches!(other.op_kind(place), OpKind::MemorySegSI | OpKind::MemorySegESI | OpKind::MemorySegRSI) {
            is_same_segment(mode, ours, other)?;
        }
    }
    Ok(())
}

fn is_same_segment(mode: Mode, ours: &Instruction, other: &iced_x86::Instruction) -> Result<(), &'static str> {
    let named = other.memory_segment().number();
    // In 64-bit mode a prefix for one of the first four segments means nothing. The base register selects the segment,
    // which only matters for the exception (APM vol. 3, 1.2.4).
    let expected = if mode != Mode::Bits64 || named >= Segment::Fs as usize {
        named
    } else if matches!(other.memory_base(), Other::RSP | Other::ESP | Other::RBP | Other::EBP) {
        Segment::Ss as usize
    } else {
        Segment::Ds as usize
    };
    same!("segment", ours.address.segment as usize, expected);
    Ok(())
}

fn is_same_address(mode: Mode, ours: &Instruction, other: &iced_x86::Instruction) -> Result<(), &'static str> {
    let address = ours.address;
    is_same_segment(mode, ours, other)?;

    let (base, index) = (other.memory_base(), other.memory_index());
    let mut displacement = ours.displacement;
    match address.base {
        Some(Base::NextInstruction) => {
            same!("base", true, base.is_ip());
            displacement = displacement.wrapping_add(u64::from(ours.length));
        }
        Some(Base::Register(register)) => {
            same!("base", (usize::from(register), true), (base.number(), base.is_gpr()));
        }
        None => same!("base", base, Other::None),
    }
    match address.index {
        Some(ours) => {
            same!("index", (usize::from(ours.register), true), (index.number(), index.is_gpr()));
            same!("scale", u32::from(ours.scale), other.memory_index_scale());
        }
        None => same!("index", index, Other::None),
    }
    let cut = |value| address.width.truncate(value);
    same!("displacement", cut(displacement), cut(other.memory_displacement64()));

    // The registers show the address size, or else the displacement, which then exists.
    let bytes = match (base, index) {
        (Other::None, Other::None) => other.memory_displ_size() as usize,
        (Other::None, register) | (register, _) => register.size(),
    };
    same!("address width", address.width.bytes(), bytes as u64);
    Ok(())
}

//! The decoder against another one, `iced-x86`.

use super::Vec;
use crate::decode::{Address, Base, Instruction, Operand, Operation, PREFIXES, Refusal, decode, has_idle_rex};
use crate::{Mode, Segment};
use iced_x86::{Decoder, DecoderOptions, Mnemonic, OpKind};
use proptest::prelude::{ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;

/// Bytes that often are an instruction of the known kinds.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let prefixes = prop::collection::vec(prop::sample::select(&PREFIXES[..]), 0..3);
    let rex = prop::option::of(0x40..0x50_u8);
    let opcode = prop_oneof![
        4 => prop::sample::select(&[0x88, 0x89, 0x8a, 0x8b, 0xc6, 0xc7, 0x63, 0x86, 0x87, 0x84, 0x85][..])
            .prop_map(|opcode| Vec::from([opcode])),
        2 => prop::sample::select(&[0xb6, 0xb7, 0xbe, 0xbf][..]).prop_map(|opcode| Vec::from([0x0f, opcode])),
        2 => (0..0x40_u8).prop_map(|opcode| Vec::from([opcode])),
        2 => prop::sample::select(&[0x80, 0x81, 0x83, 0xf6, 0xf7, 0xa0, 0xa1, 0xa2, 0xa3, 0x8c, 0x8e][..])
            .prop_map(|opcode| Vec::from([opcode])),
        1 => any::<u8>().prop_map(|opcode| Vec::from([opcode])),
    ];
    let rest = prop::array::uniform12(any::<u8>());
    (prefixes, rex, opcode, rest).prop_map(|(prefixes, rex, opcode, rest)| {
        let mut bytes = prefixes;
        bytes.extend(rex);
        bytes.extend(opcode);
        bytes.extend(rest);
        bytes.truncate(crate::MAX_LENGTH);
        bytes
    })
}

fn any_mode() -> impl Strategy<Value = Mode> {
    prop::sample::select(&[Mode::Bits16, Mode::Bits32, Mode::Bits64][..])
}

fn operation(mnemonic: Mnemonic) -> Option<Operation> {
    Some(match mnemonic {
        Mnemonic::Mov => Operation::Move,
        Mnemonic::Movzx => Operation::MoveZeroExtended,
        Mnemonic::Movsx | Mnemonic::Movsxd => Operation::MoveSignExtended,
        Mnemonic::Xchg => Operation::Exchange,
        Mnemonic::Or => Operation::Or,
        Mnemonic::And => Operation::And,
        Mnemonic::Xor => Operation::Xor,
        Mnemonic::Add => Operation::Add,
        Mnemonic::Sub => Operation::Subtract,
        Mnemonic::Cmp => Operation::Compare,
        Mnemonic::Test => Operation::Test,
        _ => return None,
    })
}

fn other_decode(mode: Mode, bytes: &[u8]) -> iced_x86::Instruction {
    let bits = match mode {
        Mode::Bits16 => 16,
        Mode::Bits32 => 32,
        Mode::Bits64 => 64,
    };
    Decoder::with_ip(bits, bytes, 0, DecoderOptions::AMD).decode()
}

/// Whether the other decoder sees an instruction that we claim to know. Two that no compiler emits are none of ours:
/// MOVSXD that does not extend, and opcode 82, a second spelling of 80.
fn is_known(other: &iced_x86::Instruction) -> bool {
    use iced_x86::Code;
    let is_odd = matches!(other.code(), Code::Movsxd_r16_rm16 | Code::Movsxd_r32_rm32)
        || (Code::Add_rm8_imm8_82 as usize..=Code::Cmp_rm8_imm8_82 as usize).contains(&(other.code() as usize));
    let kinds = [other.op0_kind(), other.op1_kind()];
    let is_general = |place| {
        let register = other.op_register(place);
        register == iced_x86::Register::None || register.is_gpr()
    };
    !other.is_invalid()
        && !is_odd
        && operation(other.mnemonic()).is_some()
        && other.op_count() == 2
        && kinds.iter().filter(|kind| **kind == OpKind::Memory).count() == 1
        && is_general(0)
        && is_general(1)
}

fn agree(mode: Mode, bytes: &[u8]) -> Result<(), TestCaseError> {
    let other = other_decode(mode, bytes);
    let ours = match decode(mode, bytes) {
        Ok(ours) => ours,
        Err(refusal) => {
            let excused = !is_known(&other) || mode == Mode::Bits64 && has_idle_rex(bytes);
            prop_assert!(excused, "{refusal:?}, but it is {:?} {:02x?}", other.code(), bytes);
            return Ok(());
        }
    };
    prop_assert!(is_known(&other), "{:?} is {:?}", ours, other.code());
    prop_assert_eq!(usize::from(ours.length), other.len());
    prop_assert_eq!(Some(ours.operation), operation(other.mnemonic()));
    prop_assert_eq!(ours.memory_width.bytes(), other.memory_size().size() as u64);
    same_operand(mode, &ours, ours.to, &other, 0)?;
    same_operand(mode, &ours, ours.from, &other, 1)
}

fn same_operand(
    mode: Mode,
    ours: &Instruction,
    operand: Operand,
    other: &iced_x86::Instruction,
    place: u32,
) -> Result<(), TestCaseError> {
    match operand {
        Operand::Register(register) => {
            use iced_x86::Register::{AH, BH, CH, DH};
            let theirs = other.op_register(place);
            prop_assert_eq!(usize::from(register.number), theirs.full_register().number());
            prop_assert_eq!(register.width.bytes(), theirs.size() as u64);
            prop_assert_eq!(register.high, [AH, BH, CH, DH].contains(&theirs));
        }
        Operand::Immediate(value) => {
            let cut = |value| ours.memory_width.truncate(value);
            prop_assert_eq!(cut(value), cut(other.immediate(place)));
        }
        Operand::Memory(address) => same_address(mode, ours, address, other)?,
    }
    Ok(())
}

fn same_address(
    mode: Mode,
    ours: &Instruction,
    address: Address,
    other: &iced_x86::Instruction,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(other.op_kind(u32::from(!matches!(ours.to, Operand::Memory(_)))), OpKind::Memory);

    // In 64-bit mode the other four segments are all the same.
    let segment = other.memory_segment().number();
    if mode != Mode::Bits64 || segment >= Segment::Fs as usize || address.segment as usize >= Segment::Fs as usize {
        prop_assert_eq!(address.segment as usize, segment);
    }

    let number = |register: iced_x86::Register| u8::try_from(register.number()).expect("small");
    let none = iced_x86::Register::None;
    let mut displacement = address.displacement;
    let (base, index) = (other.memory_base(), other.memory_index());
    match address.base {
        Some(Base::NextInstruction) => {
            prop_assert!(base.is_ip());
            displacement = displacement.wrapping_add(u64::from(ours.length));
        }
        Some(Base::Register(register)) => prop_assert_eq!(register, number(base)),
        None => prop_assert_eq!(base, none),
    }
    match address.index {
        Some((register, scale)) => {
            prop_assert_eq!(register, number(index));
            prop_assert_eq!(u32::from(scale), other.memory_index_scale());
        }
        None => prop_assert_eq!(index, none),
    }
    let cut = |value| address.width.truncate(value);
    prop_assert_eq!(cut(displacement), cut(other.memory_displacement64()));
    for register in [base, index] {
        prop_assert!(register == none || register.size() as u64 == address.width.bytes());
    }
    Ok(())
}

#[test]
fn every_prefix_of_an_instruction_asks_for_more() {
    // mov qword ptr gs:[rax + rcx*4 + 0x12345678], 0x11223344
    let code = [0x65, 0x48, 0xc7, 0x84, 0x88, 0x78, 0x56, 0x34, 0x12, 0x44, 0x33, 0x22, 0x11];
    for length in 0..code.len() {
        assert_eq!(decode(Mode::Bits64, &code[..length]), Err(Refusal::Incomplete), "{length} bytes");
    }
    assert_eq!(decode(Mode::Bits64, &code).map(|instruction| instruction.length), Ok(13));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn likely_bytes_mean_the_same_to_both_decoders(mode in any_mode(), bytes in likely()) {
        agree(mode, &bytes)?;
    }

    #[test]
    fn random_bytes_mean_the_same_to_both_decoders(mode in any_mode(), bytes in prop::array::uniform15(any::<u8>())) {
        agree(mode, &bytes)?;
    }
}

//! Single instructions through the decoder, and packed instructions.

use fastrand::Rng;

use super::random::Source;
use crate::{
    Address, Base, DecodeError, Form, Index, Instruction, Mode, Operation, Register, Repeat, Segment, Width, decode,
};

const BYTE_ACCUMULATOR: Register = Register { number: 0, width: Width::Byte, high: false };

#[test]
fn every_prefix_of_an_instruction_asks_for_more() {
    // mov qword ptr gs:[rax + rcx*4 + 0x12345678], 0x11223344
    let code = [0x65, 0x48, 0xc7, 0x84, 0x88, 0x78, 0x56, 0x34, 0x12, 0x44, 0x33, 0x22, 0x11];
    for length in 0..code.len() {
        assert_eq!(decode(Mode::Bits64, &code[..length]), Err(DecodeError::Incomplete), "{length} bytes");
    }
    let expected = Instruction {
        operation: Operation::Move,
        form: Form::ToMemoryImmediate,
        width: Width::Qword,
        register: BYTE_ACCUMULATOR,
        address: Address {
            segment: Segment::Gs,
            base: Some(Base::Register(0)),
            index: Some(Index { register: 1, scale: 4 }),
            width: Width::Qword,
        },
        displacement: 0x1234_5678,
        immediate: 0x1122_3344,
        repeat: Repeat::Never,
        locked: false,
        length: 13,
    };
    assert_eq!(decode(Mode::Bits64, &code), Ok(expected));
}

#[test]
fn longest_instruction_has_15_bytes_and_one_more_is_too_many() {
    // lock add dword ptr fs:[rax*2 + 0x12345678], 0x11223344 with meaningless DS prefixes
    let code = [0x3e, 0x3e, 0xf0, 0x64, 0x81, 0x04, 0x45, 0x78, 0x56, 0x34, 0x12, 0x44, 0x33, 0x22, 0x11];
    let decoded = decode(Mode::Bits64, &code).expect("15 bytes");
    assert_eq!((decoded.length, decoded.locked, decoded.address.segment), (15, true, Segment::Fs));

    let mut longer = [0x3e; 16];
    longer[1..].copy_from_slice(&code);
    assert_eq!(decode(Mode::Bits64, &longer), Err(DecodeError::TooLong));
    assert_eq!(decode(Mode::Bits64, &longer[..15]), Err(DecodeError::TooLong));
    assert_eq!(decode(Mode::Bits64, &longer[..14]), Err(DecodeError::Incomplete));
    assert_eq!(decode(Mode::Bits32, &[0x66; 15]), Err(DecodeError::TooLong));
    assert_eq!(decode(Mode::Bits64, &[0x48; 15]), Err(DecodeError::TooLong));
}

#[test]
fn rex_that_is_not_last_counts_for_the_length_only() {
    let width = |code: &[u8]| decode(Mode::Bits64, code).map(|instruction| (instruction.width, instruction.length));
    assert_eq!(width(&[0x48, 0x89, 0x03]), Ok((Width::Qword, 3)), "REX.W");
    assert_eq!(width(&[0x48, 0x66, 0x89, 0x03]), Ok((Width::Word, 4)), "REX.W, then 66");
    assert_eq!(width(&[0x48, 0x40, 0x89, 0x03]), Ok((Width::Dword, 4)), "REX.W, then REX");
    assert_eq!(width(&[0x40, 0x3e, 0x48, 0x89, 0x03]), Ok((Width::Qword, 5)), "REX, then DS, then REX.W");
    assert_eq!(width(&[0x4f; 14]), Err(DecodeError::Incomplete), "nothing but REX");
}

#[test]
fn lock_is_refused_where_the_processor_refuses_it() {
    for (code, allowed) in [
        (&[0xf0, 0x01, 0x03][..], true),         // lock add [rbx], eax
        (&[0xf0, 0x03, 0x03], false),            // lock add eax, [rbx]
        (&[0xf0, 0x39, 0x03], false),            // lock cmp [rbx], eax
        (&[0xf0, 0x85, 0x03], false),            // lock test [rbx], eax
        (&[0xf0, 0x89, 0x03], false),            // lock mov [rbx], eax
        (&[0xf0, 0x87, 0x03], true),             // lock xchg [rbx], eax
        (&[0xf0, 0x0f, 0xa3, 0x03], false),      // lock bt [rbx], eax
        (&[0xf0, 0x0f, 0xba, 0x23, 1], false),   // lock bt dword [rbx], 1
        (&[0xf0, 0x0f, 0xba, 0x2b, 1], true),    // lock bts dword [rbx], 1
        (&[0xf0, 0x0f, 0xb1, 0x0b], true),       // lock cmpxchg [rbx], ecx
        (&[0xf0, 0x48, 0x0f, 0xc7, 0x0b], true), // lock cmpxchg16b [rbx]
        (&[0xf0, 0x0f, 0xc1, 0x0b], true),       // lock xadd [rbx], ecx
        (&[0xf0, 0xff, 0x03], true),             // lock inc dword [rbx]
        (&[0xf0, 0xff, 0x33], false),            // lock push [rbx]
        (&[0xf0, 0xa5], false),                  // lock movsd
        (&[0xf0, 0x0f, 0xb6, 0x03], false),      // lock movzx eax, byte [rbx]
    ] {
        let decoded = decode(Mode::Bits64, code);
        assert_eq!(
            decoded.map(|instruction| instruction.locked),
            if allowed { Ok(true) } else { Err(DecodeError::Unknown) }
        );
    }
}

#[test]
fn last_of_two_repeat_prefixes_counts_and_the_last_segment() {
    let repeat = |code: &[u8]| decode(Mode::Bits32, code).map(|instruction| instruction.repeat);
    assert_eq!(repeat(&[0xa6]), Ok(Repeat::Never));
    assert_eq!(repeat(&[0xf2, 0xf3, 0xa6]), Ok(Repeat::WhileEqual));
    assert_eq!(repeat(&[0xf3, 0xf2, 0xa6]), Ok(Repeat::WhileDifferent));
    let segment = |mode, code: &[u8]| decode(mode, code).map(|instruction| instruction.address.segment);
    assert_eq!(segment(Mode::Bits32, &[0x64, 0x26, 0xac]), Ok(Segment::Es));
    assert_eq!(segment(Mode::Bits64, &[0x64, 0x26, 0xac]), Ok(Segment::Fs), "ES means nothing in 64-bit mode");
    assert_eq!(segment(Mode::Bits16, &[0x2e, 0x8a, 0x46, 0]), Ok(Segment::Cs));
    assert_eq!(segment(Mode::Bits16, &[0x8a, 0x02]), Ok(Segment::Ss), "mov al, [bp + si]");
}

#[test]
fn widths_of_stack_and_port_instructions_follow_their_own_rules() {
    let width = |mode, code: &[u8]| decode(mode, code).map(|instruction| instruction.width);
    for (code, bits16, bits32, bits64) in [
        (&[0xff, 0x33][..], Width::Word, Width::Dword, Width::Qword), // push [..]
        (&[0x66, 0xff, 0x33], Width::Dword, Width::Word, Width::Word),
        (&[0x8f, 0x03], Width::Word, Width::Dword, Width::Qword), // pop [..]
        (&[0x66, 0x8f, 0x03], Width::Dword, Width::Word, Width::Word),
        (&[0x6d], Width::Word, Width::Dword, Width::Dword),      // ins
        (&[0x66, 0x6f], Width::Dword, Width::Word, Width::Word), // outs
        (&[0xa5], Width::Word, Width::Dword, Width::Dword),      // movs
        (&[0x66, 0xa5], Width::Dword, Width::Word, Width::Word),
    ] {
        let widths = [Mode::Bits16, Mode::Bits32, Mode::Bits64].map(|mode| width(mode, code));
        assert_eq!(widths, [bits16, bits32, bits64].map(Ok), "{code:02x?}");
    }
    assert_eq!(width(Mode::Bits64, &[0x48, 0x6d]), Ok(Width::Dword), "ports have no 64 bits");
    assert_eq!(width(Mode::Bits64, &[0x48, 0xa5]), Ok(Width::Qword));
    assert_eq!(width(Mode::Bits64, &[0x66, 0x48, 0xff, 0x33]), Ok(Width::Qword), "REX.W is stronger than 66");
}

#[test]
fn movsxd_that_does_not_extend_is_refused() {
    assert_eq!(decode(Mode::Bits64, &[0x63, 0x03]), Err(DecodeError::Unknown));
    assert!(decode(Mode::Bits64, &[0x48, 0x63, 0x03]).is_ok());
}

#[test]
fn words_that_are_no_instruction_are_not_taken_for_one() {
    let instruction = decode(Mode::Bits64, &[0x89, 0x44, 0x8b, 0x10]).expect("mov [rbx + rcx*4 + 0x10], eax");
    let words = instruction.pack();
    assert_eq!(Instruction::unpack(words), Some(instruction));
    // For each field the first number without a meaning: operation, form, width, register, its width; segment, base.
    for (word, byte, bad) in [
        (0, 0, Operation::ALL.len() as u64),
        (0, 1, Form::ALL.len() as u64),
        (0, 2, 4),
        (0, 3, 16),
        (0, 4, 4),
        (0, 6, 6),
        (0, 7, 16),
        (1, 0, 16),
        (1, 2, 4),
        (1, 3, Repeat::ALL.len() as u64),
        (1, 6, 1),
        (1, 7, 1),
    ] {
        let mut spoilt = words;
        spoilt[word] = spoilt[word] & !(0xff << (8 * byte)) | bad << (8 * byte);
        assert_eq!(Instruction::unpack(spoilt), None, "byte {byte} of word {word}");
    }
}

#[test]
fn random_words_unpack_to_nothing_or_to_what_packs_again() {
    let mut source = Rng::with_seed(3);
    let mut some = 0;
    for _ in 0..100_000 {
        // Small bytes are valid more often than others.
        let words = core::array::from_fn(|_| source.word() & source.word() & source.word() & 0x0f0f_0f0f_0f0f_0f0f);
        if let Some(instruction) = Instruction::unpack(words) {
            some += 1;
            assert_eq!(Instruction::unpack(instruction.pack()), Some(instruction));
        }
    }
    assert!(some > 100, "{some} were instructions");
}

#[test]
fn only_a_move_to_memory_does_nothing_but_write() {
    let mut gprs = [0; 16];
    (gprs[0], gprs[3], gprs[9]) = (0x1122_3344_5566_7788, 0xaaaa_bbbb_cccc_eedd, !0);
    let stored = |code: &[u8]| {
        let instruction = decode(Mode::Bits64, code).expect("it is an instruction");
        instruction.stored(&gprs).map(|value| (instruction.width, value))
    };
    assert_eq!(stored(&[0x66, 0x89, 0x01]), Some((Width::Word, 0x7788)), "mov [rcx], ax");
    assert_eq!(stored(&[0x88, 0x39]), Some((Width::Byte, 0xee)), "mov [rcx], bh");
    assert_eq!(stored(&[0x4c, 0x89, 0x09]), Some((Width::Qword, !0)), "mov [rcx], r9");
    assert_eq!(stored(&[0xc7, 0x01, 0xfe, 0xff, 0xff, 0xff]), Some((Width::Dword, 0xffff_fffe)), "mov dword [rcx], -2");
    assert_eq!(stored(&[0x0f, 0xc3, 0x01]), Some((Width::Dword, 0x5566_7788)), "movnti [rcx], eax");
    for code in [&[0x8b, 0x01][..], &[0x01, 0x01], &[0x87, 0x01], &[0xaa], &[0xff, 0x31]] {
        assert_eq!(stored(code), None, "{code:02x?}");
    }
}

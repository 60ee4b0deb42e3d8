//! Whole instructions: the device's accesses and the vCPU's registers.

use super::{CODE, DEVICE, Guest, RBX, RCX, Seen, Vec, run_long};
use crate::{CpuState, Exception, Mode, Outcome, Segment, Width};

const ONES: u64 = u64::MAX;
const VALUE: u64 = 0x8899_aabb_ccdd_eeff;

#[test]
fn loads_keep_extend_or_clear_the_rest_of_the_register() {
    for (code, expected, width) in [
        (&[0x8a, 0x43, 0x20][..], 0xffff_ffff_ffff_ffff, Width::Byte), // mov al, [rbx + 0x20]
        (&[0x8a, 0x63, 0x20], 0xffff_ffff_ffff_ffff, Width::Byte),     // mov ah, [rbx + 0x20]
        (&[0x66, 0x8b, 0x43, 0x20], 0xffff_ffff_ffff_eeff, Width::Word), // mov ax, [rbx + 0x20]
        (&[0x8b, 0x43, 0x20], 0xccdd_eeff, Width::Dword),              // mov eax, [rbx + 0x20]
        (&[0x48, 0x8b, 0x43, 0x20], VALUE, Width::Qword),              // mov rax, [rbx + 0x20]
        (&[0x0f, 0xb6, 0x43, 0x20], 0xff, Width::Byte),                // movzx eax, byte [rbx + 0x20]
        (&[0x48, 0x0f, 0xb7, 0x43, 0x20], 0xeeff, Width::Word),        // movzx rax, word [rbx + 0x20]
        (&[0x0f, 0xbe, 0x43, 0x20], 0xffff_ffff, Width::Byte),         // movsx eax, byte [rbx + 0x20]
        (&[0x48, 0x0f, 0xbf, 0x43, 0x20], 0xffff_ffff_ffff_eeff, Width::Word), // movsx rax, word [rbx + 0x20]
        (&[0x66, 0x0f, 0xbe, 0x43, 0x20], 0xffff_ffff_ffff_ffff, Width::Byte), // movsx ax, byte [rbx + 0x20]
        (&[0x48, 0x63, 0x43, 0x20], 0xffff_ffff_ccdd_eeff, Width::Dword), // movsxd rax, dword [rbx + 0x20]
    ] {
        let (state, seen, outcome) = run_long(code, |state| state.gprs[0] = ONES, VALUE);
        let length = u8::try_from(code.len()).expect("short");
        assert_eq!(outcome, Outcome::Done { length }, "{code:02x?}");
        assert_eq!(seen, [Seen::Read(DEVICE + 0x20, width)], "{code:02x?}");
        assert_eq!((state.gprs[0], state.rip), (expected, CODE + u64::from(length)), "{code:02x?}");
        assert_eq!(state.gprs[1..3], [0, 0]);
    }
}

#[test]
fn byte_registers_with_and_without_rex_are_different_ones() {
    let prepare = |state: &mut CpuState| {
        state.gprs[0] = 0x1234;
        state.gprs[4] = 0x5678;
    };
    let (_, seen, _) = run_long(&[0x88, 0x23], prepare, 0); // mov [rbx], ah
    assert_eq!(seen, [Seen::Write(DEVICE, Width::Byte, 0x12)]);
    let (_, seen, _) = run_long(&[0x40, 0x88, 0x23], prepare, 0); // mov [rbx], spl
    assert_eq!(seen, [Seen::Write(DEVICE, Width::Byte, 0x78)]);

    let (state, ..) = run_long(&[0x8a, 0x23], prepare, 0xab); // mov ah, [rbx]
    assert_eq!(state.gprs[0], 0xab34);
    let (state, ..) = run_long(&[0x40, 0x8a, 0x23], prepare, 0xab); // mov spl, [rbx]
    assert_eq!((state.gprs[0], state.gprs[4]), (0x1234, 0x56ab));
}

#[test]
fn stores_move_exactly_their_width() {
    for (code, width, expected) in [
        (&[0x88, 0x83, 0xb0, 0, 0, 0][..], Width::Byte, 0xff), // mov [rbx + 0xb0], al
        (&[0x66, 0x89, 0x83, 0xb0, 0, 0, 0], Width::Word, 0xeeff), // mov [rbx + 0xb0], ax
        (&[0x89, 0x83, 0xb0, 0, 0, 0], Width::Dword, 0xccdd_eeff), // mov [rbx + 0xb0], eax
        (&[0x48, 0x89, 0x83, 0xb0, 0, 0, 0], Width::Qword, VALUE), // mov [rbx + 0xb0], rax
        (&[0xc6, 0x83, 0xb0, 0, 0, 0, 0x81], Width::Byte, 0x81), // mov byte [rbx + 0xb0], 0x81
        (&[0x66, 0xc7, 0x83, 0xb0, 0, 0, 0, 2, 0x80], Width::Word, 0x8002), // mov word [rbx + 0xb0], 0x8002
        (&[0xc7, 0x83, 0xb0, 0, 0, 0, 3, 0, 0, 0x80], Width::Dword, 0x8000_0003), // mov dword [rbx + 0xb0], ...
        (&[0x48, 0xc7, 0x83, 0xb0, 0, 0, 0, 4, 0, 0, 0x80], Width::Qword, 0xffff_ffff_8000_0004),
    ] {
        let (state, seen, outcome) = run_long(code, |state| state.gprs[0] = VALUE, 0);
        assert_eq!(outcome, Outcome::Done { length: u8::try_from(code.len()).expect("short") });
        assert_eq!(seen, [Seen::Write(DEVICE + 0xb0, width, expected)], "{code:02x?}");
        assert_eq!(state.gprs[0], VALUE);
    }
}

#[test]
fn addresses_are_formed_in_every_way() {
    // mov eax, [r13 + r12*4 + 0x10]
    let sib = run_long(&[0x43, 0x8b, 0x44, 0xa5, 0x10], |state| (state.gprs[13], state.gprs[12]) = (DEVICE, 4), 1);
    assert_eq!(sib.1, [Seen::Read(DEVICE + 0x20, Width::Dword)]);

    // mov eax, [rip + (DEVICE + 0x30 - CODE - 6)], sign-extended downwards
    let distance = u32::try_from(DEVICE + 0x30 - CODE - 6).expect("within 4 GiB");
    let mut code = Vec::from([0x8b, 0x05]);
    code.extend(distance.to_le_bytes());
    let (_, seen, outcome) = run_long(&code, |_| {}, 1);
    assert_eq!(seen, [], "0xfedf... is negative, so the address is not DEVICE: {outcome:?}");
    code.insert(0, 0x67); // mov eax, [eip + ...]: modulo 2^32 it is, one byte further on
    assert_eq!(run_long(&code, |_| {}, 1).1, [Seen::Read(DEVICE + 0x31, Width::Dword)]);

    // mov eax, gs:[rcx], mov eax, ds:[rcx] with bases set: only GS counts
    let bases = |state: &mut CpuState| set_bases(state, [0x111, 0x222, 0x333, 0x444, 0x555, DEVICE]);
    assert_eq!(run_long(&[0x65, 0x8b, 0x01], bases, 1).1, [Seen::Read(DEVICE, Width::Dword)]);
    let ds = |state: &mut CpuState| {
        bases(state);
        state.gprs[RCX] = DEVICE;
    };
    assert_eq!(run_long(&[0x3e, 0x8b, 0x01], ds, 1).1, [Seen::Read(DEVICE, Width::Dword)]);

    // movabs eax, [DEVICE + 0x20]; movabs [DEVICE + 0x20], rax
    let mut code = Vec::from([0xa1]);
    code.extend((DEVICE + 0x20).to_le_bytes());
    assert_eq!(run_long(&code, |_| {}, 1).1, [Seen::Read(DEVICE + 0x20, Width::Dword)]);
    code[0] = 0xa3;
    code.insert(0, 0x48);
    let store = run_long(&code, |state| state.gprs[0] = VALUE, 1);
    assert_eq!(store.1, [Seen::Write(DEVICE + 0x20, Width::Qword, VALUE)]);
}

/// Runs one instruction outside 64-bit mode, without paging.
fn run_flat(code: &[u8], prepare: impl FnOnce(&mut CpuState)) -> (CpuState, Vec<Seen>, Outcome) {
    let mut guest = Guest::flat(Mode::Bits32, code);
    prepare(&mut guest.state);
    guest.device.value = VALUE;
    let outcome = guest.run();
    (guest.state, guest.device.seen, outcome)
}

fn set_bases(state: &mut CpuState, bases: [u64; 6]) {
    for (segment, base) in state.segments.iter_mut().zip(bases) {
        segment.base = base;
    }
}

#[test]
fn code_of_16_and_32_bits_uses_segments_and_wraps() {
    // mov eax, [ebx + 0x20] with DS based so that the sum wraps past 4 GiB
    let (state, seen, _) = run_flat(&[0x8b, 0x43, 0x20], |state| {
        state.segments[Segment::Ds as usize].base = DEVICE + 0x1000;
        state.gprs[3] = 0xffff_f000;
    });
    assert_eq!(seen, [Seen::Read(DEVICE + 0x20, Width::Dword)]);
    assert_eq!(state.gprs[0], 0xccdd_eeff);

    // mov eax, [0xfee00020]; mov [0xfee00020], al
    assert_eq!(run_flat(&[0xa1, 0x20, 0, 0xe0, 0xfe], |_| {}).1, [Seen::Read(DEVICE + 0x20, Width::Dword)]);
    assert_eq!(run_flat(&[0xa2, 0x20, 0, 0xe0, 0xfe], |_| {}).1, [Seen::Write(DEVICE + 0x20, Width::Byte, 0)]);

    // mov eax, [ebp] uses SS, mov eax, ds:[ebp] uses DS
    let bases = |state: &mut CpuState| {
        set_bases(state, [1, 0, DEVICE, DEVICE + 4, 5, 6]);
        state.gprs[RBX] = 0;
    };
    assert_eq!(run_flat(&[0x8b, 0x45, 0], bases).1, [Seen::Read(DEVICE, Width::Dword)]);
    assert_eq!(run_flat(&[0x3e, 0x8b, 0x45, 0], bases).1, [Seen::Read(DEVICE + 4, Width::Dword)]);

    // 16-bit code with CS based: mov ax, [bx + si]: the offset wraps at 64 KiB
    let real = |state: &mut CpuState| {
        *state = CpuState::flat(Mode::Bits16, 0);
        set_bases(state, [0, 0x1_0000, 0, DEVICE, 0, 0]);
        (state.rip, state.gprs[3], state.gprs[6]) = (0xff0, 0xfff0, 0x20);
    };
    let (state, seen, outcome) = run_flat(&[0x8b, 0], real);
    assert_eq!((outcome, state.rip), (Outcome::Done { length: 2 }, 0xff2));
    assert_eq!(seen, [Seen::Read(DEVICE + 0x10, Width::Word)]);
    assert_eq!(state.gprs[0], 0xeeff);
}

#[test]
fn read_modify_write_is_one_read_and_one_write() {
    // or dword [rbx], 0x10000
    let (state, seen, _) = run_long(&[0x81, 0x0b, 0, 0, 1, 0], |_| {}, 0x8000_0000);
    assert_eq!(seen, [Seen::Read(DEVICE, Width::Dword), Seen::Write(DEVICE, Width::Dword, 0x8001_0000)]);
    assert_eq!(state.rflags, 2 | 1 << 7 | 1 << 2, "sign and parity");

    // and dword [rbx], -2, immediate of one byte
    let (_, seen, _) = run_long(&[0x83, 0x23, 0xfe], |_| {}, 0xffff);
    assert_eq!(seen[1], Seen::Write(DEVICE, Width::Dword, 0xfffe));

    // xchg [rbx], ecx, as Linux writes to some local APICs
    let (state, seen, _) = run_long(&[0x87, 0x0b], |state| state.gprs[1] = ONES, 5);
    assert_eq!(seen, [Seen::Read(DEVICE, Width::Dword), Seen::Write(DEVICE, Width::Dword, 0xffff_ffff)]);
    assert_eq!(state.gprs[1], 5);
}

#[test]
fn compare_and_test_read_only() {
    // cmp [rbx], ecx; cmp ecx, [rbx]; test dword [rbx], 0x1000
    let carry = |code: &[u8]| {
        let (state, seen, _) = run_long(code, |state| state.gprs[1] = 3, 0x1002);
        assert_eq!(seen, [Seen::Read(DEVICE, Width::Dword)]);
        (state.rflags & 1, state.rflags & 0x40)
    };
    assert_eq!(carry(&[0x39, 0x0b]), (0, 0));
    assert_eq!(carry(&[0x3b, 0x0b]), (1, 0));
    assert_eq!(carry(&[0xf7, 0x03, 0, 0x10, 0, 0]), (0, 0));
    assert_eq!(carry(&[0xf7, 0x03, 0, 0x20, 0, 0]), (0, 0x40));
}

#[test]
fn address_that_is_not_canonical_is_a_fault_of_its_segment() {
    let bad = 1 << 47;
    let (_, _, outcome) = run_long(&[0x8b, 0x03], |state| state.gprs[3] = bad, 0); // mov eax, [rbx]
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 13, error_code: 0, cr2: None }));
    let (_, _, outcome) = run_long(&[0x8b, 0x45, 0], |state| state.gprs[5] = bad, 0); // mov eax, [rbp]
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 12, error_code: 0, cr2: None }));
}

#[test]
fn operand_in_another_page_than_reported_is_retried() {
    let (state, seen, outcome) = run_long(&[0x8b, 0x03], |state| state.gprs[3] = DEVICE + 0x1000, 0);
    assert_eq!((outcome, state.rip, seen.len()), (Outcome::Retry, CODE, 0));
}

#[test]
fn what_is_not_known_is_handed_back_with_its_bytes() {
    for code in [
        &[0x0f, 0xae, 0x03][..],      // fxsave [rbx]
        &[0x8c, 0x1b],                // mov [rbx], ds
        &[0x0f, 0x11, 0x03],          // movups [rbx], xmm0
        &[0x0f, 0xff],                // no instruction
        &[0x89, 0xc8],                // mov eax, ecx: no memory
        &[0xf0, 0x89, 0x03],          // lock mov [rbx], eax
        &[0xf7, 0x23],                // mul dword [rbx]
        &[0xc1, 0x23, 1],             // shl dword [rbx], 1
        &[0x6b, 0x03, 1],             // imul eax, [rbx], 1
        &[0xff, 0x13],                // call [rbx]
        &[0xc4, 0xe2, 0x78, 0xf2, 3], // andn eax, eax, [rbx]
    ] {
        let (state, seen, outcome) = run_long(code, |_| {}, 0);
        let Outcome::Unsupported { bytes, length } = outcome else { panic!("{code:02x?}: {outcome:?}") };
        assert!(usize::from(length) >= code.len() && bytes.starts_with(code));
        assert_eq!((state.rip, seen.len()), (CODE, 0));
    }
}

#[test]
fn more_of_the_arithmetic_reaches_memory() {
    for (code, before, after) in [
        (&[0xff, 0x03][..], 0xffff_ffff, 0),       // inc dword [rbx]
        (&[0xff, 0x0b], 0, 0xffff_ffff),           // dec dword [rbx]
        (&[0xf7, 0x13], 0x1234_5678, 0xedcb_a987), // not dword [rbx]
        (&[0xf7, 0x1b], 1, 0xffff_ffff),           // neg dword [rbx]
        (&[0x83, 0x13, 1], 5, 7),                  // adc dword [rbx], 1, with carry
        (&[0x83, 0x1b, 1], 5, 3),                  // sbb dword [rbx], 1, with carry
        (&[0x29, 0x0b], 5, 2),                     // sub [rbx], ecx
        (&[0x31, 0x0b], 5, 6),                     // xor [rbx], ecx
    ] {
        let prepare = |state: &mut CpuState| {
            state.gprs[RCX] = 3;
            state.rflags |= 1;
        };
        let (_, seen, _) = run_long(code, prepare, before);
        let expected = [Seen::Read(DEVICE, Width::Dword), Seen::Write(DEVICE, Width::Dword, after)];
        assert_eq!(seen, expected, "{code:02x?}");
    }
    // sbb ecx, [rbx], with carry: into the register, and only a read
    let prepare = |state: &mut CpuState| {
        state.gprs[RCX] = ONES;
        state.rflags |= 1;
    };
    let (state, seen, _) = run_long(&[0x1b, 0x0b], prepare, 0xffff_ffff);
    assert_eq!((state.gprs[RCX], state.rflags & 1), (0xffff_ffff, 1));
    assert_eq!(seen, [Seen::Read(DEVICE, Width::Dword)]);
}

#[test]
fn resume_flag_ends_with_the_instruction() {
    let (state, ..) = run_long(&[0x89, 0x03], |state| state.rflags |= 1 << 16, 0);
    assert_eq!(state.rflags, 2);
    let (state, ..) = run_long(&[0x89, 0x03], |state| (state.gprs[RBX], state.rflags) = (0, 2 | 1 << 16), 0);
    assert_eq!(state.rflags, 2 | 1 << 16, "but not with an attempt");
}

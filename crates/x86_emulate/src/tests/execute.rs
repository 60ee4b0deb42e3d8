//! Whole instructions: what the device sees and what the vCPU keeps.

use super::{CODE, DEVICE, Ram, Register, Seen, flat, long, run_long};
use crate::execute::Arithmetic;
use crate::{CpuState, Exception, Outcome, Width, emulate, emulate_fetched};
use addr::Gpa;
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::Vec;

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
    let bases = |state: &mut CpuState| state.segment_bases = [0x111, 0x222, 0x333, 0x444, 0x555, DEVICE];
    assert_eq!(run_long(&[0x65, 0x8b, 0x01], bases, 1).1, [Seen::Read(DEVICE, Width::Dword)]);
    let ds = |state: &mut CpuState| {
        bases(state);
        state.segment_bases[1] = 0;
        state.gprs[1] = DEVICE;
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
    let ram = Ram::with_code(code);
    let mut state = flat();
    prepare(&mut state);
    let mut device = Register { value: VALUE, ..Register::default() };
    let outcome = emulate(&mut state, &ram, &mut device, Gpa(DEVICE));
    (state, device.seen, outcome)
}

#[test]
fn code_of_16_and_32_bits_uses_segments_and_wraps() {
    // mov eax, [ebx + 0x20] with DS based so that the sum wraps past 4 GiB
    let (state, seen, _) = run_flat(&[0x8b, 0x43, 0x20], |state| {
        state.segment_bases[3] = DEVICE + 0x1000;
        state.gprs[3] = 0xffff_f000;
    });
    assert_eq!(seen, [Seen::Read(DEVICE + 0x20, Width::Dword)]);
    assert_eq!(state.gprs[0], 0xccdd_eeff);

    // mov eax, [0xfee00020]; mov [0xfee00020], al
    assert_eq!(run_flat(&[0xa1, 0x20, 0, 0xe0, 0xfe], |_| {}).1, [Seen::Read(DEVICE + 0x20, Width::Dword)]);
    assert_eq!(run_flat(&[0xa2, 0x20, 0, 0xe0, 0xfe], |_| {}).1, [Seen::Write(DEVICE + 0x20, Width::Byte, 0)]);

    // mov eax, [ebp] goes by SS, mov eax, ds:[ebp] by DS
    let bases = |state: &mut CpuState| state.segment_bases = [1, 0, DEVICE, DEVICE + 4, 5, 6];
    assert_eq!(run_flat(&[0x8b, 0x45, 0], bases).1, [Seen::Read(DEVICE, Width::Dword)]);
    assert_eq!(run_flat(&[0x3e, 0x8b, 0x45, 0], bases).1, [Seen::Read(DEVICE + 4, Width::Dword)]);

    // 16-bit code with CS based: mov ax, [bx + si]: the offset wraps at 64 KiB
    let real = |state: &mut CpuState| {
        state.cs_default_32 = false;
        state.segment_bases = [0, 0x1_0000, 0, DEVICE, 0, 0];
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
fn instruction_across_a_page_end_is_fetched_from_both_pages() {
    let code = [0xc7, 0x83, 0xb0, 0, 0, 0, 0x44, 0x33, 0x22, 0x11]; // mov dword [rbx + 0xb0], 0x11223344
    for in_first in 1..code.len() {
        let ram = Ram::default();
        let mut state = long(&ram);
        state.gprs[3] = DEVICE;
        state.rip = 0x1_1000 - in_first as u64;
        ram.put(state.rip, &code[..in_first]);

        // The second page does not exist yet: no memory, then no translation.
        let mut device = Register::default();
        let before = state.clone();
        assert_eq!(emulate(&mut state, &ram, &mut device, Gpa(DEVICE)), Outcome::Unbacked(Gpa(0x1_1000)));
        ram.put(0x1_1000, &code[in_first..]);
        ram.put(0x1_1000 + (code.len() - in_first) as u64, &[0x90; 15]);
        assert_eq!((&state, device.seen.len()), (&before, 0));

        assert_eq!(emulate(&mut state, &ram, &mut device, Gpa(DEVICE)), Outcome::Done { length: 10 });
        assert_eq!(device.seen, [Seen::Write(DEVICE + 0xb0, Width::Dword, 0x1122_3344)]);
    }
}

#[test]
fn second_page_is_touched_only_when_it_is_needed_and_faults_with_its_own_address() {
    let ram = Ram::default();
    let mut state = long(&ram);
    // The last page of the first 2 MiB; the next is not present.
    ram.put(0x1f_fff0, &[0x90; 16]);
    state.gprs[3] = DEVICE;
    state.rip = 0x1f_fffe;

    ram.put(0x1f_fffe, &[0x89, 0x03]); // mov [rbx], eax: ends with the page
    assert_eq!(emulate(&mut state, &ram, &mut Register::default(), Gpa(DEVICE)), Outcome::Done { length: 2 });

    state.rip = 0x1f_fffe;
    ram.put(0x1f_fffe, &[0x89, 0x43]); // mov [rbx + ?], eax
    let outcome = emulate(&mut state, &ram, &mut Register::default(), Gpa(DEVICE));
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 14, error_code: 0x10, cr2: Some(0x20_0000) }));
}

#[test]
fn fault_of_the_operand_comes_before_the_device() {
    // or dword [rbx], 1 where the page may only be read
    let ram = Ram::with_code(&[0x83, 0x0b, 1]);
    let mut state = long(&ram);
    ram.put(0x4000 + 8 * (DEVICE >> 21 & 0x1ff), &(DEVICE | 0x85).to_le_bytes());
    state.gprs[3] = DEVICE + 8;
    let before = state.clone();
    let mut device = Register::default();
    let outcome = emulate(&mut state, &ram, &mut device, Gpa(DEVICE));
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 14, error_code: 3, cr2: Some(DEVICE + 8) }));
    assert_eq!((state, device.seen.len()), (before, 0));
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
        &[0x0f, 0xb1, 0x0b][..], // cmpxchg [rbx], ecx
        &[0xff, 0x33],           // push [rbx]
        &[0x8c, 0x1b],           // mov [rbx], ds
        &[0x0f, 0x11, 0x03],     // movups [rbx], xmm0
        &[0xa5],                 // movsd
        &[0x0f, 0xff],           // no instruction
        &[0x89, 0xc8],           // mov eax, ecx: no memory
    ] {
        let (state, seen, outcome) = run_long(code, |_| {}, 0);
        let Outcome::Unsupported { bytes, length } = outcome else { panic!("{code:02x?}: {outcome:?}") };
        assert!(usize::from(length) >= code.len() && bytes.starts_with(code));
        assert_eq!((state.rip, seen.len()), (CODE, 0));
    }

    // An operand that reaches over the end of the page.
    let (_, seen, outcome) = run_long(&[0x8b, 0x03], |state| state.gprs[3] = DEVICE + 0xffd, 0);
    assert!(matches!(outcome, Outcome::Unsupported { length: 2, .. }) && seen.is_empty());
}

#[test]
fn more_than_15_bytes_are_a_protection_fault() {
    let code = [0x66; 15];
    let (_, _, outcome) = run_long(&code, |_| {}, 0);
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 13, error_code: 0, cr2: None }));
}

#[test]
fn bytes_from_the_hardware_are_used_and_too_few_are_fetched() {
    let ram = Ram::with_code(&[0x8b, 0x43, 0x20]);
    let mut state = long(&ram);
    state.gprs[3] = DEVICE;
    let mut device = Register::default();
    // mov ecx, [rbx + 0x30] instead of what is in memory
    let outcome = emulate_fetched(&mut state, &[0x8b, 0x4b, 0x30, 0x90], &ram, &mut device, Gpa(DEVICE));
    assert_eq!(
        (outcome, &device.seen[..]),
        (Outcome::Done { length: 3 }, &[Seen::Read(DEVICE + 0x30, Width::Dword)][..])
    );

    state.rip = CODE;
    for bytes in [&[][..], &[0x8b], &[0x8b, 0x43]] {
        state.rip = CODE;
        assert_eq!(emulate_fetched(&mut state, bytes, &ram, &mut device, Gpa(DEVICE)), Outcome::Done { length: 3 });
        assert_eq!(device.seen.last(), Some(&Seen::Read(DEVICE + 0x20, Width::Dword)));
    }
}

proptest! {
    #[test]
    fn flags_agree_with_arithmetic_in_more_bits(left in any::<u64>(), right in any::<u64>(), bytes in 0..4_u32) {
        let width = Width::from_bytes(1 << bytes).expect("a width");
        let (left, right) = (width.truncate(left), width.truncate(right));
        let signed = |value| i128::from(width.sign_extend(value).cast_signed());
        // The low bits of a wide result, as they would be stored.
        let low = |value: i128| width.truncate(u64::try_from(value & i128::from(u64::MAX)).expect("masked"));
        let fits = |value: i128| signed(low(value)) == value;
        let flag = |flags: u64, bit: u32| flags >> bit & 1 != 0;

        let (sum, flags) = Arithmetic::Add.compute(width, left, right);
        let wide = i128::from(left) + i128::from(right);
        prop_assert_eq!(sum, low(wide));
        prop_assert_eq!(flag(flags, 0), wide >> width.bits() != 0);
        prop_assert_eq!(flag(flags, 4), left % 16 + right % 16 > 15);
        prop_assert_eq!(flag(flags, 11), !fits(signed(left) + signed(right)));

        let (difference, flags) = Arithmetic::Subtract.compute(width, left, right);
        prop_assert_eq!(difference, low(signed(left) - signed(right)));
        prop_assert_eq!(flag(flags, 0), left < right);
        prop_assert_eq!(flag(flags, 4), left % 16 < right % 16);
        prop_assert_eq!(flag(flags, 6), left == right);
        prop_assert_eq!(flag(flags, 7) != flag(flags, 11), signed(left) < signed(right));

        let (_, flags) = Arithmetic::Test.compute(width, left, right);
        prop_assert_eq!(flag(flags, 2), (left & right & 0xff).count_ones() % 2 == 0);
        prop_assert!(!flag(flags, 0) && !flag(flags, 11));
    }

    #[test]
    fn hostile_bytes_never_panic_and_touch_the_device_only_when_done(
        code in prop::array::uniform15(any::<u8>()), gprs in prop::array::uniform16(0..0x2000_u64),
        long_mode in any::<bool>(), cs_default_32 in any::<bool>(),
    ) {
        let ram = Ram::with_code(&code);
        let base = if long_mode { long(&ram) } else { CpuState { cs_default_32, ..flat() } };
        let mut state = CpuState { gprs: gprs.map(|offset| DEVICE + offset), ..base };
        let before = state.clone();
        let mut device = Register { value: VALUE, ..Register::default() };
        let outcome = emulate(&mut state, &ram, &mut device, Gpa(DEVICE));
        match outcome {
            Outcome::Done { .. } => prop_assert!((1..=2).contains(&device.seen.len())),
            _ => prop_assert!(device.seen.is_empty() && state == before),
        }
    }
}

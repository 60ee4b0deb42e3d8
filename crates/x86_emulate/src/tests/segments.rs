//! Segment checks outside 64-bit mode, and canonical checks in 64-bit mode.

use super::{DEVICE, GENERAL_PROTECTION, Guest, RAX, RBP, RBX, RCX, RSI, STACK_FAULT, Seen};
use crate::{Exception, Mode, Outcome, Segment, SegmentRegister, Vendor, Width};

const WRITABLE: u16 = 0x93;
const READ_ONLY: u16 = 0x91;
const DOWN: u16 = 0x97;
const CODE_ONLY: u16 = 0x99;
const CODE_READ: u16 = 0x9b;
/// Not present.
const UNUSABLE: u16 = 0x13;
const BIG: u16 = SegmentRegister::BIG;

/// The result of an access through DS, whose base is the device, in 32-bit code.
fn access(code: &[u8], offset: u64, limit: u32, attributes: u16) -> Result<Seen, Exception> {
    let mut guest = Guest::flat(Mode::Bits32, code).set(RBX, offset);
    guest.state.segments[Segment::Ds as usize] = SegmentRegister { base: DEVICE, limit, attributes };
    match guest.run() {
        Outcome::Done { .. } => Ok(guest.device.seen[0]),
        Outcome::Fault(exception) => {
            assert!(guest.device.seen.is_empty());
            Err(exception)
        }
        outcome => panic!("{outcome:?}"),
    }
}

/// mov eax, [ebx]; mov [ebx], eax
const LOAD: &[u8] = &[0x8b, 0x03];
const STORE: &[u8] = &[0x89, 0x03];
const ADD: &[u8] = &[0x01, 0x03];
const COMPARE: &[u8] = &[0x39, 0x03];

fn load_at(offset: u64) -> Result<Seen, Exception> {
    Ok(Seen::Read(DEVICE + offset, Width::Dword))
}

fn store_at(offset: u64) -> Result<Seen, Exception> {
    Ok(Seen::Write(DEVICE + offset, Width::Dword, 0))
}

const REFUSED: Result<Seen, Exception> = Err(GENERAL_PROTECTION);

#[test]
fn limit_is_the_last_byte_of_the_operand() {
    assert_eq!(access(LOAD, 0x100, 0x103, WRITABLE), load_at(0x100));
    assert_eq!(access(LOAD, 0x101, 0x103, WRITABLE), REFUSED);
    assert_eq!(access(STORE, 0x100, 0x103, WRITABLE), store_at(0x100));
    assert_eq!(access(STORE, 0x100, 0x102, WRITABLE), REFUSED);
    assert_eq!(access(LOAD, 0xffff_fffe, u32::MAX, WRITABLE), REFUSED, "over the end of all offsets");
    assert_eq!(access(LOAD, 0, 2, WRITABLE), REFUSED);
}

#[test]
fn segment_that_expands_down_begins_behind_its_limit() {
    assert_eq!(access(LOAD, 0x104, 0x103, DOWN | BIG), load_at(0x104));
    assert_eq!(access(LOAD, 0x103, 0x103, DOWN | BIG), REFUSED);
    assert_eq!(access(LOAD, 0, 0x103, DOWN | BIG), REFUSED);
    assert_eq!(access(STORE, 0xffc, 0xff, DOWN), store_at(0xffc));
    // Without the big bit it ends at 64 KiB.
    for (attributes, fits) in [(DOWN, false), (DOWN | BIG, true)] {
        let mut guest = Guest::flat(Mode::Bits32, LOAD).set(RBX, 0xfffe);
        let base = DEVICE - 0xf000;
        guest.state.segments[Segment::Ds as usize] = SegmentRegister { base, limit: 0xff, attributes };
        let outcome = guest.run();
        assert_eq!(outcome, if fits { Outcome::Done { length: 2 } } else { Outcome::Fault(GENERAL_PROTECTION) });
    }
    assert_eq!(access(LOAD, 0xffff_fffe, 0, DOWN | BIG), REFUSED, "over the end of all offsets");
}

#[test]
fn rights_of_a_segment_depend_on_its_type() {
    for (attributes, loads, stores) in [
        (WRITABLE, true, true),
        (READ_ONLY, true, false),
        (CODE_READ, true, false),
        (CODE_ONLY, false, false),
        (UNUSABLE, false, false),
    ] {
        let expected = |allowed, seen| if allowed { seen } else { REFUSED };
        let of = |code| access(code, 0x20, u32::MAX, attributes);
        assert_eq!(of(LOAD), expected(loads, load_at(0x20)), "{attributes:x}");
        assert_eq!(of(COMPARE), expected(loads, load_at(0x20)), "{attributes:x}");
        assert_eq!(of(STORE), expected(stores, store_at(0x20)), "{attributes:x}");
        assert_eq!(of(ADD), expected(stores, load_at(0x20)), "{attributes:x}: writes, therefore may not even read");
    }
}

#[test]
fn stack_segment_has_a_fault_of_its_own() {
    for (code, expected) in [
        (&[0x8b, 0x45, 0][..], STACK_FAULT),          // mov eax, [ebp]
        (&[0x36, 0x8b, 0x03], STACK_FAULT),           // mov eax, ss:[ebx]
        (&[0x3e, 0x8b, 0x45, 0], GENERAL_PROTECTION), // mov eax, ds:[ebp]
        (&[0x8b, 0x03], GENERAL_PROTECTION),          // mov eax, [ebx]
    ] {
        let mut guest = Guest::flat(Mode::Bits32, code).set(RBP, 0x100).set(RBX, 0x100);
        for segment in [Segment::Ss, Segment::Ds] {
            guest.state.segments[segment as usize] =
                SegmentRegister { base: DEVICE, limit: 0xff, attributes: WRITABLE };
        }
        assert_eq!(guest.refused(), Outcome::Fault(expected), "{code:02x?}");
    }
}

#[test]
fn real_mode_and_virtual_8086_mode_know_limits_only() {
    for virtual_8086 in [false, true] {
        for (offset, fits) in [(0x20, true), (0xfffc, true), (0xfffd, false)] {
            let mut guest = Guest::flat(Mode::Bits16, &[0x66, 0x89, 0x07]).set(RBX, offset); // mov [bx], eax
            if virtual_8086 {
                guest.state.rflags |= 1 << 17;
                guest.state.cpl = 3;
            } else {
                guest.state.cr0 = 0;
            }
            // Even a code segment is writable there.
            let register = SegmentRegister { base: DEVICE - (offset & 0xf000), limit: 0xffff, attributes: CODE_ONLY };
            guest.state.segments[Segment::Ds as usize] = register;
            let outcome = guest.run();
            assert_eq!(outcome, if fits { Outcome::Done { length: 3 } } else { Outcome::Fault(GENERAL_PROTECTION) });
        }
    }
}

#[test]
fn linear_addresses_wrap_at_4_gib_outside_64_bit_mode() {
    // In compatibility mode there is mapped memory above 4 GiB. The access must not reach it.
    let ram = super::Ram::with_code(&[0x89, 0x03]);
    let mut state = super::long(&ram);
    state.segments[Segment::Cs as usize].attributes = CODE_READ | BIG;
    // The last page below 4 GiB is the device's; the first page maps to 0x9000; the one at 4 GiB must not be used.
    ram.put_u64(0x2000 + 8 * 3, 0x4007);
    ram.put_u64(0x4000 + 8 * 0x1ff, 0x5007);
    ram.put_u64(0x5000 + 8 * 0x1ff, DEVICE | 7);
    ram.put_u64(0x2000 + 8 * 4, 0x6007);
    ram.put_u64(0x6000, 0x40_0087);
    ram.put(0, &[0; 8]);
    let mut guest = Guest::of(ram, state).set(RBX, 0xe).set(RAX, 0x4433_2211);
    guest.state.segments[Segment::Ds as usize].base = 0xffff_fff0;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 0xffe, Width::Word, 0x2211)]);
    assert_eq!(guest.ram.get(0), [0x33, 0x44, 0, 0]);
}

#[test]
fn segments_are_nothing_in_64_bit_mode_but_for_two_bases() {
    let mut guest = Guest::long(&[0x89, 0x03]);
    for segment in [Segment::Es, Segment::Ss, Segment::Ds] {
        guest.state.segments[segment as usize] = SegmentRegister { base: 0x1234, limit: 0, attributes: 0 };
    }
    guest.done();
    let mut guest = Guest::long(&[0x64, 0x89, 0x03]).set(RBX, u64::MAX - 7); // mov fs:[rbx], eax
    guest.state.segments[Segment::Fs as usize] = SegmentRegister { base: DEVICE + 0x10, limit: 0, attributes: 0 };
    assert_eq!(guest.done().device.seen, [Seen::Write(DEVICE + 8, Width::Dword, 0)]);
}

#[test]
fn every_byte_of_an_operand_must_be_canonical() {
    for (levels_5, edge) in [(false, 1_u64 << 47), (true, 1 << 56)] {
        let run = |code: &[u8], address: u64| {
            let mut guest = Guest::long(code).set(RBX, address).set(RBP, address).set(RSI, address);
            if levels_5 {
                guest.state.cr4 |= 1 << 12;
                guest.state.cr3 = 0x6000;
                guest.ram.put_u64(0x6000, 0x1007);
            }
            guest.refused()
        };
        let not_present = |address| Outcome::Fault(Exception { vector: 14, error_code: 0, cr2: Some(address) });
        assert_eq!(run(&[0x8b, 0x03], edge), Outcome::Fault(GENERAL_PROTECTION));
        assert_eq!(run(&[0x8b, 0x03], edge.wrapping_neg() - 1), Outcome::Fault(GENERAL_PROTECTION));
        assert_eq!(run(&[0x8b, 0x03], edge - 3), Outcome::Fault(GENERAL_PROTECTION), "its last byte");
        assert_eq!(run(&[0x8b, 0x03], edge.wrapping_neg() - 2), Outcome::Fault(GENERAL_PROTECTION), "its first bytes");
        assert_eq!(run(&[0x8b, 0x45, 0], edge), Outcome::Fault(STACK_FAULT), "by RBP");
        assert_eq!(run(&[0x64, 0x8b, 0x45, 0], edge), Outcome::Fault(GENERAL_PROTECTION), "by RBP in FS");
        assert_eq!(run(&[0x3e, 0x8b, 0x45, 0], edge), Outcome::Fault(STACK_FAULT), "DS means nothing");
        assert_eq!(run(&[0xac], edge), Outcome::Fault(GENERAL_PROTECTION), "lodsb");
        assert_eq!(run(&[0x8b, 0x03], edge - 4), not_present(edge - 4));
        assert_eq!(run(&[0x8b, 0x03], edge.wrapping_neg()), not_present(edge.wrapping_neg()));
    }
}

/// The outcome of an access through GS, in 64-bit mode with 4 or 5 levels of tables: `code` uses RBX and RBP.
fn through_gs(vendor: Vendor, levels_5: bool, code: &[u8], base: u64, address: u64) -> Outcome {
    let mut guest = Guest::long(code).set(RBX, address).set(RBP, address);
    guest.state.vendor = vendor;
    guest.state.segments[Segment::Gs as usize].base = base;
    if levels_5 {
        guest.state.cr4 |= 1 << 12;
        guest.state.cr3 = 0x6000;
        guest.ram.put_u64(0x6000, 0x1007);
    }
    guest.run()
}

/// mov eax, gs:[rbx]; mov gs:[rbx], eax; mov eax, gs:[rbp]
const THROUGH_GS: [&[u8]; 3] = [&[0x65, 0x8b, 0x03], &[0x65, 0x89, 0x03], &[0x65, 0x8b, 0x45, 0]];

#[test]
fn amd_wants_effective_addresses_through_gs_canonical_and_intel_does_not() {
    for (levels_5, edge) in [(false, 1_u64 << 47), (true, 1 << 56)] {
        // The linear addresses are the device's, which are canonical. The effective addresses are around the end of the
        // lower half and the start of the upper one.
        for (address, is_canonical) in [
            (edge - 5, true),
            (edge - 4, true),
            (edge - 3, false), // its last byte is not
            (edge - 1, false),
            (edge, false),
            (edge + 0xfff, false),
            (1 << 62, false),
            (edge.wrapping_neg() - 5, false),
            (edge.wrapping_neg() - 1, false),
            (edge.wrapping_neg(), true),
            (u64::MAX - 1, true),
        ] {
            for code in THROUGH_GS {
                let base = DEVICE.wrapping_sub(address);
                let done = Outcome::Done { length: u8::try_from(code.len()).expect("short") };
                let on_amd = if is_canonical { done } else { Outcome::Fault(GENERAL_PROTECTION) };
                let run = |vendor| through_gs(vendor, levels_5, code, base, address);
                assert_eq!(run(Vendor::Amd), on_amd, "{code:02x?} at {base:#x} + {address:#x}");
                assert_eq!(run(Vendor::Intel), done, "{code:02x?} at {base:#x} + {address:#x}");
            }
        }
    }
}

#[test]
fn what_was_seen_on_zen_3_and_zen_4_through_gs() {
    let at = |vendor, base: u64, address| through_gs(vendor, false, THROUGH_GS[0], base, address);
    let not_present = |address| Outcome::Fault(Exception { vector: 14, error_code: 0, cr2: Some(address) });
    let refused = Outcome::Fault(GENERAL_PROTECTION);
    for (base, address, linear) in [
        (0_u64.wrapping_sub(4), 0x8000_0000_0000, 0x7fff_ffff_fffc),
        (0_u64.wrapping_sub(0x1000), 0x8000_0000_0ffc, 0x7fff_ffff_fffc),
    ] {
        assert_eq!(at(Vendor::Amd, base, address), refused);
        assert_eq!(at(Vendor::Intel, base, address), not_present(linear));
    }
    // A canonical address may wrap around, but not to a non-canonical one.
    for vendor in [Vendor::Amd, Vendor::Intel] {
        assert_eq!(at(vendor, 0x7fff_ffff_e000, 0xffff_ffff_ffff_0000), not_present(0x7fff_fffe_e000));
        assert_eq!(at(vendor, 0x7fff_ffff_0000, 0x1_0001), refused);
        assert_eq!(at(vendor, 0x7fff_ffff_0000, 0xfffd), refused, "its last byte");
        assert_eq!(at(vendor, 0x7fff_ffff_0000, 0xfffc), not_present(0x7fff_ffff_fffc));
    }
}

#[test]
fn a_repeated_instruction_ends_where_the_effective_address_is_no_longer_canonical() {
    // rep lodsb through FS
    let mut guest = Guest::long(&[0x64, 0xf3, 0xac]).set(RCX, 5).set(RSI, (1 << 47) - 2);
    guest.state.segments[Segment::Fs as usize].base = DEVICE.wrapping_sub((1 << 47) - 2);
    assert_eq!(guest.run(), Outcome::Again);
    assert_eq!(guest.device.seen.len(), 2);
    assert_eq!((guest.state.gprs[RCX], guest.state.gprs[RSI]), (3, 1 << 47));
    guest.device.seen.clear();
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
}

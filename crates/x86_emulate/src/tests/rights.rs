//! Rights of pages and of protection keys, and the error code of a refused access.

use super::{DEVICE, Ram, flat, long, page_fault, translate};
use crate::{Access, CpuState, Stop};
use addr::Gpa;

#[test]
fn refused_access_leaves_no_trace_and_says_why() {
    let ram = Ram::default();
    let mut state = long(&ram);
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
    let attempt = |bits: u64, cpl, change: fn(&mut CpuState), access| {
        ram.put_u64(leaf, DEVICE | bits);
        let before = ram.pages.borrow().clone();
        let mut state = CpuState { cpl, ..state.clone() };
        change(&mut state);
        let result = translate(&state, &ram, DEVICE, access);
        if result.is_err() {
            assert_eq!(before, *ram.pages.borrow());
        }
        result
    };
    let same: fn(&mut CpuState) = |_| {};
    let nx = 1 << 63;

    assert_eq!(attempt(0x83, 3, same, Access::Read), page_fault(5, DEVICE), "user in a supervisor page");
    assert_eq!(attempt(0x85, 3, same, Access::Write), page_fault(7, DEVICE), "user writes to a read-only page");
    assert_eq!(attempt(0x85, 0, same, Access::Write), page_fault(3, DEVICE), "supervisor too, by CR0.WP");
    assert_eq!(attempt(0x85, 0, |state| state.cr0 &= !0x1_0000, Access::Write), Ok(Gpa(DEVICE)));
    assert_eq!(attempt(0x86, 0, same, Access::Write), page_fault(2, DEVICE), "not present");
    assert_eq!(attempt(0x87 | nx, 0, same, Access::Execute), page_fault(0x11, DEVICE), "no execute");
    assert_eq!(attempt(0x87 | nx, 0, same, Access::Read), Ok(Gpa(DEVICE)));
    assert_eq!(attempt(0x87 | nx, 0, |state| state.efer &= !0x800, Access::Read), page_fault(9, DEVICE), "reserved");
    assert_eq!(attempt(0x87 | 1 << 45, 0, same, Access::Read), page_fault(9, DEVICE), "beyond the physical width");
    assert_eq!(attempt(0x87 | 1 << 40, 0, |state| state.physical_bits = 41, Access::Read), Ok(Gpa(DEVICE | 1 << 40)));
    assert_eq!(attempt(0x87 | 1 << 20, 0, same, Access::Read), page_fault(9, DEVICE), "address within the page");
    assert_eq!(attempt(0x87, 0, |state| state.cr4 |= 1 << 20, Access::Execute), page_fault(0x11, DEVICE), "SMEP");
    assert_eq!(attempt(0x87, 0, |state| state.cr4 |= 1 << 21, Access::Read), page_fault(1, DEVICE), "SMAP");
    let override_smap: fn(&mut CpuState) = |state| {
        state.cr4 |= 1 << 21;
        state.rflags |= 1 << 18;
    };
    assert_eq!(attempt(0x87, 0, override_smap, Access::Read), Ok(Gpa(DEVICE)), "SMAP with RFLAGS.AC");

    state.cr3 = 0x7000;
    assert_eq!(translate(&state, &ram, DEVICE, Access::Read), Err(Stop::Unbacked(Gpa(0x7000))));
}

#[test]
fn rights_of_all_levels_count() {
    // One level forbids what the other levels allow.
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
    for at in [0x1000, 0x2018, leaf] {
        for (clear, set, access, error) in [
            (2, 0, Access::Write, 7),
            (4, 0, Access::Read, 5),
            (0, 1 << 63, Access::Execute, 0x15),
            (1, 0, Access::Read, 4),
        ] {
            let ram = Ram::default();
            let state = CpuState { cpl: 3, ..long(&ram) };
            assert_eq!(translate(&state, &ram, DEVICE, access), Ok(Gpa(DEVICE)));
            ram.put_u64(at, ram.get_u64(at) & !clear | set);
            assert_eq!(translate(&state, &ram, DEVICE, access), page_fault(error, DEVICE), "entry at {at:x}");
        }
    }
}

#[test]
fn user_page_is_kept_from_the_supervisor_as_features_say() {
    const SMEP: u64 = 1 << 20;
    const SMAP: u64 = 1 << 21;
    const AC: u64 = 1 << 18;
    let refused = |cpl, cr4, rflags, user_page: bool, access| {
        let ram = Ram::default();
        let mut state = CpuState { cpl, rflags, ..long(&ram) };
        state.cr4 |= cr4;
        if !user_page {
            ram.put_u64(0x1000, 0x2003);
        }
        translate(&state, &ram, DEVICE, access).is_err()
    };
    for cpl in 0..3 {
        for access in [Access::Read, Access::Write] {
            assert!(refused(cpl, SMAP, 2, true, access));
            assert!(!refused(cpl, SMAP, AC, true, access));
            assert!(!refused(cpl, SMEP, 2, true, access));
            assert!(!refused(cpl, SMAP | SMEP, 2, false, access));
        }
        assert!(refused(cpl, SMEP, 2, true, Access::Execute));
        assert!(refused(cpl, SMEP, AC, true, Access::Execute), "AC does not lift SMEP");
        assert!(!refused(cpl, SMAP, 2, true, Access::Execute));
        assert!(!refused(cpl, SMEP, 2, false, Access::Execute));
    }
    for access in [Access::Read, Access::Write, Access::Execute] {
        assert!(!refused(3, SMAP | SMEP, 2, true, access), "the user itself is free");
    }
}

#[test]
fn protection_keys_bind_data_accesses_to_user_pages() {
    const PKE: u64 = 1 << 22;
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
    // Key 5: no access is bit 10, no write is bit 11.
    let attempt = |pkru: u32, access, change: fn(&mut CpuState)| {
        let ram = Ram::default();
        let mut state = CpuState { pkru, cpl: 3, ..long(&ram) };
        state.cr4 |= PKE;
        ram.put_u64(leaf, DEVICE | 0x87 | 5 << 59);
        change(&mut state);
        translate(&state, &ram, DEVICE, access)
    };
    let user: fn(&mut CpuState) = |_| {};
    let supervisor: fn(&mut CpuState) = |state| state.cpl = 0;
    let (fine, others) = (Ok(Gpa(DEVICE)), !(3 << 10));
    assert_eq!(attempt(others, Access::Write, user), fine, "other keys");
    assert_eq!(attempt(1 << 10, Access::Read, user), page_fault(0x25, DEVICE));
    assert_eq!(attempt(1 << 10, Access::Write, user), page_fault(0x27, DEVICE));
    assert_eq!(attempt(1 << 10, Access::Execute, user), fine, "code is not data");
    assert_eq!(attempt(1 << 11, Access::Read, user), fine);
    assert_eq!(attempt(1 << 11, Access::Write, user), page_fault(0x27, DEVICE));
    assert_eq!(attempt(1 << 10, Access::Read, supervisor), page_fault(0x21, DEVICE));
    assert_eq!(attempt(1 << 11, Access::Write, supervisor), page_fault(0x23, DEVICE));
    assert_eq!(
        attempt(1 << 11, Access::Write, |state| (state.cpl, state.cr0) = (0, 0x8000_0001)),
        fine,
        "CR0.WP clear"
    );
    assert_eq!(attempt(u32::MAX, Access::Read, |state| state.cr4 &= !PKE), fine, "the feature is off");
    // A supervisor page has no key.
    let ram = Ram::default();
    let mut state = CpuState { pkru: u32::MAX, ..long(&ram) };
    state.cr4 |= PKE;
    ram.put_u64(leaf, DEVICE | 0x83 | 5 << 59);
    assert_eq!(translate(&state, &ram, DEVICE, Access::Write), fine);
}

#[test]
fn fetches_are_named_in_error_codes_where_they_can_be_forbidden() {
    let ram = Ram::default();
    ram.put_u64(0x1000, 0);
    let legacy = |cr4, efer| CpuState { cr0: 0x8001_0001, cr3: 0x1000, cr4, efer, ..flat() };
    for (cr4, efer, error) in [(0, 0, 0), (0, 0x800, 0), (0x20, 0, 0), (0x20, 0x800, 0x10), (1 << 20, 0, 0x10)] {
        let result = translate(&legacy(cr4, efer), &ram, 0x1000, Access::Execute);
        assert_eq!(result, page_fault(error, 0x1000), "CR4 {cr4:x} EFER {efer:x}");
    }
}

#[test]
fn reserved_bits_of_three_levels_are_those_without_long_mode() {
    let attempt = |pointer: u64, entry: u64, efer| {
        let ram = Ram::default();
        ram.put_u64(0x1000, 0x2001 | pointer);
        ram.put_u64(0x2000, 0x3007 | entry);
        ram.put_u64(0x3000, 0x4007);
        let state = CpuState { cr0: 0x8001_0001, cr3: 0x1000, cr4: 0x20, efer, ..flat() };
        translate(&state, &ram, 0, Access::Read)
    };
    let reserved = page_fault(9, 0);
    assert_eq!(attempt(0, 0, 0), Ok(Gpa(0x4000)));
    for bit in [1, 2, 5, 6, 7, 8, 40, 52, 62, 63] {
        assert_eq!(attempt(1 << bit, 0, 0x800), reserved, "bit {bit} of the pointer");
    }
    for bit in [3, 4, 9, 10, 11] {
        assert_eq!(attempt(1 << bit, 0, 0x800), Ok(Gpa(0x4000)), "bit {bit} of the pointer");
    }
    for bit in [40, 52, 58, 59, 62] {
        assert_eq!(attempt(0, 1 << bit, 0x800), reserved, "bit {bit} of the directory");
    }
    assert_eq!(attempt(0, 1 << 63, 0), reserved);
    assert_eq!(attempt(0, 1 << 63, 0x800), Ok(Gpa(0x4000)));
}

#[test]
fn reserved_bits_of_four_levels_follow_the_level() {
    let attempt = |at: u64, bits: u64| {
        let ram = Ram::default();
        let state = long(&ram);
        ram.put_u64(at, ram.get_u64(at) | bits);
        translate(&state, &ram, DEVICE, Access::Read)
    };
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
    let reserved = page_fault(9, DEVICE);
    assert_eq!(attempt(0x1000, 0x80), reserved, "no leaf at the top");
    assert_eq!(attempt(0x1000, 1 << 40), reserved);
    assert_eq!(attempt(0x2018, 1 << 51), reserved);
    // Bits for software, or without a meaning.
    for (at, bits) in [(0x1000, 1 << 52 | 1 << 62 | 0xe00), (0x2018, 1 << 58 | 1 << 8), (leaf, 1 << 62 | 1 << 12)] {
        assert_eq!(attempt(at, bits), Ok(Gpa(DEVICE)), "{bits:x} at {at:x}");
    }
    for bit in 13..21 {
        assert_eq!(attempt(leaf, 1 << bit), reserved, "bit {bit} is within the page");
    }
}

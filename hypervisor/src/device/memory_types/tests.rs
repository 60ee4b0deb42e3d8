//! Each register with valid and invalid values.

use super::{MemoryTypes, is_valid_pat};

const CAP: u32 = 0xfe;
const BASE_0: u32 = 0x200;
const MASK_0: u32 = 0x201;
const MASK_7: u32 = 0x20f;
const FIXED: [u32; 11] = [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];
const DEFAULT: u32 = 0x2ff;

/// Width of a physical address.
const BITS: u8 = 40;

/// Writes, and returns whether the value was accepted. A rejected write changes nothing.
fn takes(types: &mut MemoryTypes, number: u32, value: u64) -> bool {
    let before = types.read(number);
    let accepted = types.write(number, value, BITS).is_some();
    assert_eq!(types.read(number), if accepted { Some(value) } else { before }, "{number:#x} = {value:#x}");
    accepted
}

#[test]
fn each_single_bit_of_a_variable_range_is_taken_or_refused_as_the_manual_says() {
    let mut types = MemoryTypes::new();
    for bit in 0..64 {
        let value = 1_u64 << bit;
        let is_address = (12..40).contains(&bit);
        assert_eq!(takes(&mut types, BASE_0, value), is_address || matches!(bit, 0 | 2), "base, bit {bit}");
        assert_eq!(takes(&mut types, MASK_0, value), is_address || bit == 11, "mask, bit {bit}");
        assert_eq!(takes(&mut types, MASK_7, value), is_address || bit == 11, "mask, bit {bit}");
    }
}

#[test]
fn types_that_do_not_exist_are_refused_everywhere() {
    for kind in 0..=255_u64 {
        let exists = matches!(kind, 0 | 1 | 4 | 5 | 6);
        let mut types = MemoryTypes::new();
        assert_eq!(takes(&mut types, DEFAULT, kind), exists, "{kind}");
        assert_eq!(takes(&mut types, BASE_0, kind), exists, "{kind}");
        for number in FIXED {
            for byte in 0..8 {
                assert_eq!(takes(&mut types, number, kind << (byte * 8)), exists, "{number:#x}, byte {byte}: {kind}");
            }
        }
        for byte in 0..8 {
            assert_eq!(is_valid_pat(kind << (byte * 8)), exists || kind == 7, "byte {byte}: {kind}");
        }
    }
}

#[test]
fn default_type_has_two_switches_and_no_other_bit() {
    let mut types = MemoryTypes::new();
    assert_eq!(types.read(DEFAULT), Some(0xc06 & !0x400));
    for bit in 8..64 {
        assert_eq!(takes(&mut types, DEFAULT, 6 | 1 << bit), matches!(bit, 10 | 11), "bit {bit}");
    }
}

#[test]
fn addresses_may_be_as_wide_as_a_register() {
    for (bits, value, accepted) in [
        (64, !0xfff_u64, true),
        (52, !0xfff, false),
        (52, 0xf_ffff_ffff_f000, true),
        (255, !0xfff, true),
        (0, 0x1000, false),
        (0, 0, true),
    ] {
        let mut types = MemoryTypes::new();
        assert_eq!(types.write(BASE_0, value, bits).is_some(), accepted, "{value:#x} with {bits} bits");
    }
}

#[test]
fn capabilities_cannot_be_written_and_neighbours_do_not_exist() {
    let mut types = MemoryTypes::new();
    assert_eq!(types.read(CAP), Some(0x508));
    assert!(types.write(CAP, 0x508, BITS).is_none());
    for number in [0, 0x1ff, 0x210, 0x251, 0x257, 0x25a, 0x267, 0x270, 0x2fe, 0x300, u32::MAX] {
        assert_eq!(types.read(number), None, "{number:#x}");
        assert!(types.write(number, 0, BITS).is_none(), "{number:#x}");
    }
}

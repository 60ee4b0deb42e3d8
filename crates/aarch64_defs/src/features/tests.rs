//! The allow-list alone, and on processors whose registers are known.

extern crate std;

use std::string::ToString as _;

use super::{COUNT, IdRegisters, REGISTERS, Rule, nibble, place, signed};

/// Registers of QEMU 7.2's `max,pauth-impdef=on`, read at EL2, by CRm and op2.
fn max(crm: u8, op2: u8) -> u64 {
    match (crm, op2) {
        (1, 0) => 0x1102_0131,
        (1, 1) => 0x1001_1001,
        (1, 2) => 0x0601_0009,
        (1, 4) => 0x1010_1105,
        (1, 5) => 0x4000_0000,
        (1, 6) => 0x0126_0000,
        (1, 7) => 0x0212_2211,
        (2, 0) => 0x0210_1110,
        (2, 1) => 0x1311_2111,
        (2, 2) => 0x2123_2042,
        (2, 3) => 0x0111_2131,
        (2, 4) => 0x0001_1142,
        (2, 5) => 0x1101_1121,
        (2, 6) => 0x0001_1110,
        (2, 7) => 0x0111_1111,
        (3, 0) => 0x1011_0222,
        (3, 1) => 0x1321_1111,
        (3, 2) => 0x0000_0043,
        (3, 4) => 0x0000_0011,
        (3, 6) => 0x0000_0001,
        (4, 0) => 0x1201_0011_2111_0222,
        (4, 1) => 0x0000_0000_0100_0021,
        (4, 4) => 0x0110_1101_0011_0021,
        (4, 5) => 0x80f1_00fd_0000_0000,
        (5, 0) => 0x0000_0000_1030_5609,
        (6, 0) => 0x1221_1111_1021_2120,
        (6, 1) => 0x0011_1111_0121_1012,
        (7, 0) => 0x0000_0323_1020_1126,
        (7, 1) => 0x0000_0110_1021_1122,
        (7, 2) => 0x1021_0110_1001_1011,
        _ => 0,
    }
}

/// The same of its Neoverse N1.
fn neoverse_n1(crm: u8, op2: u8) -> u64 {
    match (crm, op2) {
        (1, 0) => 0x1001_0131,
        (1, 1) => 0x1001_0000,
        (1, 2) => 0x0401_0008,
        (1, 4) => 0x1020_1105,
        (1, 5) => 0x4000_0000,
        (1, 6) => 0x0126_0000,
        (1, 7) => 0x0212_2211,
        (2, 0) => 0x0210_1110,
        (2, 1) => 0x1311_2111,
        (2, 2) => 0x2123_2042,
        (2, 3) => 0x0111_2131,
        (2, 4) => 0x0001_0142,
        (2, 5) => 0x0101_1121,
        (2, 6) => 0x0002_1110,
        (2, 7) => 0x0000_0010,
        (3, 0) => 0x1011_0222,
        (3, 1) => 0x1321_1111,
        (3, 2) => 0x0000_0043,
        (3, 4) => 0x0000_0011,
        (4, 0) => 0x1100_0000_1111_0112,
        (4, 1) => 0x0000_0000_0000_0020,
        (5, 0) => 0x0000_0000_1030_5408,
        (6, 0) => 0x0000_1000_1021_1120,
        (6, 1) => 0x0000_0000_0010_0001,
        (7, 0) => 0x0000_0000_0010_1125,
        (7, 1) => 0x0000_0000_1021_2122,
        (7, 2) => 0x0000_0000_0000_1011,
        _ => 0,
    }
}

fn field(registers: &IdRegisters, (crm, op2, shift): (u8, u8, u32)) -> u8 {
    nibble(registers.get(crm, op2), shift)
}

/// Hidden fields: register and lowest bit.
const HIDDEN: [(&str, (u8, u8, u32)); 32] = [
    ("EL2", (4, 0, 8)),
    ("EL3", (4, 0, 12)),
    ("RAS", (4, 0, 28)),
    ("SVE", (4, 0, 32)),
    ("SEL2", (4, 0, 36)),
    ("MPAM", (4, 0, 40)),
    ("AMU", (4, 0, 44)),
    ("RME", (4, 0, 52)),
    ("MTE", (4, 1, 8)),
    ("RAS_frac", (4, 1, 12)),
    ("MPAM_frac", (4, 1, 16)),
    ("SME", (4, 1, 24)),
    ("CSV2_frac", (4, 1, 32)),
    ("NMI", (4, 1, 36)),
    ("GCS", (4, 1, 44)),
    ("THE", (4, 1, 48)),
    ("SVEver", (4, 4, 0)),
    ("TraceVer", (5, 0, 4)),
    ("PMUVer", (5, 0, 8)),
    ("PMSVer", (5, 0, 32)),
    ("BRBE", (5, 0, 52)),
    ("TME", (6, 0, 24)),
    ("LS64", (6, 1, 60)),
    ("MOPS", (6, 2, 16)),
    ("FGT", (7, 0, 56)),
    ("VMIDBits", (7, 1, 4)),
    ("VH", (7, 1, 8)),
    ("LO", (7, 1, 16)),
    ("HCX", (7, 1, 40)),
    ("NV", (7, 2, 24)),
    ("FWB", (7, 2, 40)),
    ("S1PIE", (7, 3, 8)),
];

#[test]
fn every_field_of_the_list_is_there_once_in_order_and_within_its_register() {
    let mut before = None;
    for register in REGISTERS {
        let at = place(register.crm, register.op2).expect("an ID register");
        assert!(at < COUNT && before.is_none_or(|before| before < at), "{register:?}");
        before = Some(at);
        for pair in register.fields.windows(2) {
            assert!(pair[0].0 < pair[1].0, "{register:?}");
        }
        let width = if register.is_aarch32 { 32 } else { 64 };
        assert!(register.fields.iter().all(|(shift, ..)| shift % 4 == 0 && *shift < width), "{register:?}");
    }
}

#[test]
fn whatever_a_processor_has_no_field_exceeds_the_list() {
    for value in 0..16 {
        let all = IdRegisters::offered(|_, _| value * 0x1111_1111_1111_1111);
        for register in REGISTERS {
            for &(shift, _, rule) in register.fields {
                let seen = field(&all, (register.crm, register.op2, shift));
                match rule {
                    _ if register.is_aarch32 && value < 2 => assert_eq!(seen, 0),
                    Rule::UpTo(most) | Rule::Same(most) => assert_eq!(u64::from(seen), value.min(most.into())),
                    // 8 to 15 are negative: unchanged.
                    Rule::Signed(_) if value >= 8 => assert_eq!(u64::from(seen), value),
                    Rule::Signed(most) => {
                        assert_eq!(u64::from(seen), value.min(u64::try_from(most).expect("positive")))
                    }
                    Rule::Is(fixed) => assert_eq!(seen, fixed),
                }
            }
        }
    }
}

#[test]
fn what_is_not_in_the_list_reads_as_zero() {
    let all = IdRegisters::offered(|_, _| u64::MAX);
    for (name, at) in HIDDEN {
        assert_eq!(field(&all, at), 0, "{name}");
    }
    for (crm, op2) in [(1, 2), (1, 3), (4, 2), (4, 4), (4, 5), (4, 7), (5, 1), (5, 4), (6, 3), (7, 3), (7, 4), (8, 0)] {
        assert_eq!(all.get(crm, op2), 0, "{crm} {op2}");
    }
}

#[test]
fn fields_that_are_not_zero_when_something_is_missing_say_so() {
    for raw in [0, u64::MAX] {
        let offered = IdRegisters::offered(|_, _| raw);
        // ID_AA64DFR0_EL1.DoubleLock; ID_AA64MMFR0_EL1.TGran16_2, TGran64_2, TGran4_2.
        assert_eq!(field(&offered, (5, 0, 36)), 0xf);
        assert_eq!([32, 36, 40].map(|shift| field(&offered, (7, 0, shift))), [1; 3]);
    }
    // Without floating point, 0xf is less than 0 (ID_AA64PFR0_EL1.FP), and stays.
    let (with, without) = (IdRegisters::offered(|_, _| 0), IdRegisters::offered(|_, _| 0xf << 16));
    assert_eq!(field(&without, (4, 0, 16)), 0xf);
    assert_eq!(field(&with.common(&without), (4, 0, 16)), 0xf);
    assert_eq!(field(&without.common(&with), (4, 0, 16)), 0xf);
}

#[test]
fn known_processors_show_what_they_have() {
    let max = IdRegisters::offered(max);
    // Cryptography, atomics, TLB maintenance by range; FP16; BTI, SSBS; 40 of 52 bits of physical addresses;
    // FEAT_BBM 2.
    assert_eq!(max.get(6, 0), 0x1221_1111_1021_2120);
    assert_eq!(max.get(4, 0), 0x1101_0000_0111_0012);
    assert_eq!(max.get(4, 1), 0x21);
    assert_eq!(max.get(5, 0), 0x0000_00f0_1030_5009);
    assert_eq!(max.get(7, 0), 0x0000_0111_1020_0122);
    assert_eq!(max.get(7, 1), 0x0000_0010_0020_1002);
    assert_eq!(max.get(7, 2), 0x1021_0010_1001_0011);

    assert_eq!(max.get(6, 1), 0x0011_1111_0121_1012);

    let n1 = IdRegisters::offered(neoverse_n1);
    assert_eq!(n1.get(4, 0), 0x1100_0000_0111_0012);
    assert_eq!(n1.get(1, 0), 0x0001_0131);
    assert_eq!(n1.get(7, 2), 0x1011 & !0x1000);
    assert!(!n1.has_pointer_authentication() && max.has_pointer_authentication());
}

#[test]
fn guests_are_offered_what_all_processors_have() {
    let (max, n1) = (IdRegisters::offered(max), IdRegisters::offered(neoverse_n1));
    let both = max.common(&n1);
    assert_eq!(both, n1.common(&max));
    assert_eq!(both, both.common(&max));
    for register in REGISTERS {
        for &(shift, _, rule) in register.fields {
            let at = (register.crm, register.op2, shift);
            if matches!(rule, Rule::UpTo(_)) {
                assert_eq!(field(&both, at), field(&max, at).min(field(&n1, at)), "{at:?}");
            }
        }
    }
    // N1 has no pointer authentication.
    assert!(!both.has_pointer_authentication());
    // FEAT_BBM: 2 and 0.
    assert_eq!(field(&both, (7, 2, 52)), 0);
}

#[test]
fn codes_of_pointers_are_offered_only_where_they_mean_the_same() {
    // ID_AA64ISAR1_EL1.API: 1 and 3 are different functions of the pointer.
    let [old, new, future] =
        [1, 3, 6].map(|api| IdRegisters::offered(|crm, op2| if (crm, op2) == (6, 1) { api << 8 } else { 0 }));
    assert!(old.has_pointer_authentication() && new.has_pointer_authentication());
    assert!(!old.common(&new).has_pointer_authentication());
    assert_eq!(field(&new.common(&new), (6, 1, 8)), 3);
    assert_eq!(field(&future, (6, 1, 8)), 5);
}

#[test]
fn processor_without_aarch32_leaves_none_of_it() {
    let mixed = IdRegisters::offered(neoverse_n1)
        .common(&IdRegisters::offered(|crm, op2| if (crm, op2) == (4, 0) { 0x1 } else { neoverse_n1(crm, op2) }));
    assert_eq!(field(&mixed, (4, 0, 0)), 1);
    for (crm, op2) in (1..4).flat_map(|crm| (0..8).map(move |op2| (crm, op2))) {
        assert_eq!(mixed.get(crm, op2), 0);
    }
}

#[test]
fn guest_goes_on_where_nothing_is_missing_that_it_was_told_of() {
    let (max, n1) = (IdRegisters::offered(max), IdRegisters::offered(neoverse_n1));
    let both = max.common(&n1);
    for here in [max, n1, both] {
        assert_eq!(here.lacks(&here), None);
        assert_eq!(here.lacks(&both), None, "both have it");
        assert_eq!(here.lacks(&IdRegisters::with_values(*both.values())), None);
    }
    let text = |here: &IdRegisters, told: &IdRegisters| here.lacks(told).map(|lack| lack.to_string());
    // ID_AA64PFR0_EL1.DIT, the first by the encodings.
    assert_eq!(text(&n1, &max).as_deref(), Some("DIT (ID_AA64PFR0_EL1)"));
    let with = |crm, op2, value| {
        let mut values = *n1.values();
        values[place(crm, op2).expect("an ID register")] = value;
        IdRegisters::with_values(values)
    };
    // Without AES; with another kind of codes for pointers; with less than no floating point.
    let poorer = with(6, 0, n1.get(6, 0) & !0xf0);
    assert_eq!(text(&poorer, &n1).as_deref(), Some("AES (ID_AA64ISAR0_EL1)"));
    assert_eq!(n1.lacks(&poorer), None);
    let [old, new] = [1, 3].map(|api| with(6, 1, n1.get(6, 1) | api << 8));
    assert_eq!(text(&new, &old).as_deref(), Some("API (ID_AA64ISAR1_EL1)"));
    assert_eq!(text(&old, &new).as_deref(), Some("API (ID_AA64ISAR1_EL1)"));
    assert_eq!(new.lacks(&n1), None, "the guest does not know that there are codes");
    let none = with(4, 0, n1.get(4, 0) | 0xf << 16);
    assert_eq!(text(&none, &n1).as_deref(), Some("FP (ID_AA64PFR0_EL1)"));
    assert_eq!(n1.lacks(&none), None);
    // EL0 in AArch64 alone: named before what follows from it.
    let narrow = IdRegisters::offered(|crm, op2| match (crm, op2) {
        (4, 0) => neoverse_n1(4, 0) & !0xf | 1,
        _ => neoverse_n1(crm, op2),
    });
    assert_eq!(text(&narrow, &n1).as_deref(), Some("EL0 (ID_AA64PFR0_EL1)"));
}

#[test]
fn values_that_no_guest_was_told_are_refused() {
    let max = IdRegisters::offered(max);
    for at in 0..COUNT {
        for bit in 0..64 {
            let mut values = *max.values();
            values[at] ^= 1 << bit;
            let told = IdRegisters::with_values(values);
            if max.lacks(&told).is_none() {
                // A field that says less than here, within the list.
                let register = REGISTERS.iter().find(|register| place(register.crm, register.op2) == Some(at));
                let register = register.expect("a register of the list");
                let (shift, name, rule) =
                    register.fields.iter().find(|(shift, ..)| bit / 4 * 4 == *shift).expect("a field of the list");
                let [before, after] = [max.0[at], values[at]].map(|value| nibble(value, *shift));
                let is_less = match rule {
                    Rule::Signed(_) => signed(after) < signed(before),
                    Rule::UpTo(_) => after < before,
                    Rule::Same(_) => after == 0,
                    Rule::Is(_) => false,
                };
                assert!(is_less, "{name}: {before} -> {after}");
            }
        }
    }
    assert!(max.lacks(&IdRegisters::with_values([u64::MAX; COUNT])).is_some());
}

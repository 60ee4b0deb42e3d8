//! What follows from ACPI's table of interrupt controllers (MADT, ACPI 6.5, 5.2.12).
//!
//! [`is_well_formed`] checks whether the entries can be walked. Each has a length; a walk that trusts a length of 0
//! never ends, and another may leave the table.

use alloc::vec::Vec;

use addr::{Hpa, HpaRange, PAGE_BYTES};

use crate::io::pins::MOST_PINS;

/// An I/O APIC (ACPI 6.5, 5.2.12.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoApic {
    /// The page of its registers.
    pub registers: Hpa,
    /// The number of its first pin among all interrupts (GSI).
    pub first: u32,
    /// How many it has.
    pub pins: usize,
}

/// The most pins that are used: each interrupt of a level-triggered pin looks at all of them.
const MOST_OF_ALL: usize = 512;

/// Of the I/O APICs that firmware `named`, by their first interrupts and registers, those that can be, in the order of
/// their interrupts. `ram` is what the machine has; `version` reads the version register at an address where there is
/// none. Calls `left_out` for each other one, with the reason.
pub fn io_apics(
    named: &[(u32, Hpa)],
    ram: &[HpaRange],
    mut version: impl FnMut(Hpa) -> u32,
    mut left_out: impl FnMut(Hpa, &'static str),
) -> Vec<IoApic> {
    let mut named = Vec::from(named);
    named.sort_unstable();
    let mut found: Vec<IoApic> = Vec::new();
    for (first, registers) in named {
        match io_apic(first, registers, &found, ram, &mut version) {
            Ok(io_apic) => found.push(io_apic),
            Err(why) => left_out(registers, why),
        }
    }
    found
}

fn io_apic(
    first: u32,
    registers: Hpa,
    others: &[IoApic],
    ram: &[HpaRange],
    version: &mut impl FnMut(Hpa) -> u32,
) -> Result<IoApic, &'static str> {
    let page = HpaRange::new(registers, PAGE_BYTES).filter(|page| page.start.0.is_multiple_of(PAGE_BYTES));
    let page = page.ok_or("its registers do not begin with a page")?;
    if others.iter().any(|other| other.registers == registers) {
        return Err("another one has its registers");
    }
    if ram.iter().any(|range| range.start < page.end() && page.start < range.end()) {
        return Err("there is RAM");
    }
    let version = version(registers);
    let pins = usize::from(version.to_le_bytes()[2]) + 1;
    if matches!(version, 0 | u32::MAX) || pins > MOST_PINS {
        return Err("nothing answers there as one");
    }
    if others.last().is_some_and(|last| u64::from(last.first) + last.pins as u64 > first.into()) {
        return Err("another one has its interrupts");
    }
    if others.iter().map(|other| other.pins).sum::<usize>() + pins > MOST_OF_ALL {
        return Err("the machine has too many pins");
    }
    Ok(IoApic { registers, first, pins })
}

/// Bytes of entries that are read: processors with a local APIC, and with a local x2APIC.
const LEAST_BYTES: [(u8, usize); 2] = [(0, 8), (9, 16)];

/// Whether entries fill `bytes`, each of them at least as long as required.
pub fn is_well_formed(mut bytes: &[u8]) -> bool {
    while let &[kind, length, ..] = bytes {
        let least = LEAST_BYTES.iter().find(|(known, _)| *known == kind).map_or(2, |(_, least)| *least);
        let length = usize::from(length);
        if length < least || length > bytes.len() {
            return false;
        }
        bytes = &bytes[length..];
    }
    bytes.is_empty()
}

/// The number of vCPUs of a VM that has so many CPUs of a machine with these APIC ids, which are in ascending order,
/// if each vCPU has its number as its APIC id: the VM has the CPUs with the lowest ids. If the machine has fewer CPUs,
/// the number is too large by as many.
pub fn vcpus_of(ids: &[u32], cpus: u32) -> u32 {
    let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    let last = cpus.min(count).checked_sub(1).and_then(|last| ids.get(last as usize));
    last.map_or(0, |id| id.saturating_add(1)).saturating_add(cpus.saturating_sub(count))
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use addr::{Hpa, HpaRange};

    use super::{IoApic, io_apics, is_well_formed, vcpus_of};

    /// Those that are used, and why others are not. Each has the number of pins that its address says.
    fn chosen(named: &[(u32, u64)]) -> (Vec<IoApic>, Vec<(u64, &'static str)>) {
        let ram = [HpaRange::new(Hpa(0), 1 << 30).expect("fits")];
        let named: Vec<(u32, Hpa)> = named.iter().map(|(first, registers)| (*first, Hpa(*registers))).collect();
        let version = |at: Hpa| match at.0 >> 12 & 0xff {
            0 => u32::MAX,
            1 => 0,
            pins => 0x20 | (u32::try_from(pins).expect("a byte") - 1) << 16,
        };
        let mut left_out = vec![];
        let found = io_apics(&named, &ram, version, |at, why| left_out.push((at.0, why)));
        (found, left_out)
    }

    const A: u64 = 0xfec1_8000;
    const B: u64 = 0xfed7_8000;

    #[test]
    fn all_io_apics_of_a_machine_are_used_in_the_order_of_their_interrupts() {
        let of = |first, registers, pins| IoApic { registers: Hpa(registers), first, pins };
        assert_eq!(chosen(&[(24, B), (0, A)]), (vec![of(0, A, 24), of(24, B, 120)], vec![]));
        assert_eq!(chosen(&[(0, A), (56, B)]).0, [of(0, A, 24), of(56, B, 120)], "a gap is none's");
        assert_eq!(chosen(&[]), (vec![], vec![]));
    }

    #[test]
    fn io_apic_that_cannot_be_is_left_out_and_the_others_are_used() {
        for (first, registers, why) in [
            (24, 0x1000_8000, "there is RAM"),
            (24, B + 0x400, "its registers do not begin with a page"),
            (24, A, "another one has its registers"),
            (23, B, "another one has its interrupts"),
            (0, B, "another one has its interrupts"),
            (24, 0xfec0_0000, "nothing answers there as one"),
            (24, 0xfec0_1000, "nothing answers there as one"),
            (24, 0xfec7_9000, "nothing answers there as one"),
            (24, 0xfecf_1000, "nothing answers there as one"),
            (24, !0xfff, "its registers do not begin with a page"),
        ] {
            let (found, left_out) = chosen(&[(first, registers), (0, A), (300, 0xffc1_8000)]);
            assert_eq!(left_out, [(registers, why)]);
            assert_eq!(found.len(), 2, "{why}");
        }
        let many: Vec<(u32, u64)> = (0..6).map(|n| (n * 200, 0xf_0007_8000 + u64::from(n) * 0x100_0000)).collect();
        let (found, left_out) = chosen(&many);
        assert_eq!((found.len(), left_out[0].1), (4, "the machine has too many pins"));
    }

    #[test]
    fn vm_has_the_cpus_with_the_lowest_ids_and_vcpus_for_the_gaps_below() {
        let ids = [0, 1, 2, 4, 5, 6];
        assert_eq!([0, 1, 3, 4, 6].map(|cpus| vcpus_of(&ids, cpus)), [0, 1, 3, 5, 7]);
        assert_eq!([7, 9].map(|cpus| vcpus_of(&ids, cpus)), [8, 10], "too many");
        assert_eq!(vcpus_of(&[], 2), 2);
        assert_eq!(vcpus_of(&[u32::MAX], 2), u32::MAX);
    }

    #[test]
    fn entries_of_all_kinds_may_follow_each_other() {
        let processor = [0u8, 8, 0, 0, 1, 0, 0, 0];
        let unknown = [0x80u8, 3, 0];
        assert!(is_well_formed(&[]));
        assert!(is_well_formed(&[&processor[..], &unknown, &[5, 2], &processor].concat()));
    }

    #[test]
    fn entries_without_length_too_short_or_beyond_the_table_are_found_out() {
        for entry in [
            &[0u8, 0][..],
            &[0],
            &[7, 1],
            &[0, 7, 0, 0, 1, 0, 0],
            &[9, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[1, 3, 0, 1],
        ] {
            assert!(!is_well_formed(entry), "{entry:?}");
        }
    }
}

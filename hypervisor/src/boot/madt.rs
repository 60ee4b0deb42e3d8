//! What follows from ACPI's table of interrupt controllers (MADT, ACPI 6.5, 5.2.12).
//!
//! [`is_well_formed`] checks whether the entries can be walked. Each has a length; a walk that trusts a length of 0
//! never ends, and another may leave the table.

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
    use super::{is_well_formed, vcpus_of};

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

//! Checks whether the entries of ACPI's table of interrupt controllers (MADT, ACPI 6.5, 5.2.12) can be walked. Each has
//! a length; a walk that trusts a length of 0 never ends, and another may leave the table.

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

#[cfg(test)]
mod tests {
    use super::is_well_formed;

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

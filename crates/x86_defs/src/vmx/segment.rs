//! Access rights of a segment (SDM vol. 3C, table 25-2).

/// There is no segment: a null selector was loaded.
const UNUSABLE: u32 = 1 << 16;
const PRESENT: u16 = 1 << 7;
/// Bits 7:0 are the same in both encodings, and what is at 11:8 in the packed one is at 15:12.
const LOW: u16 = 0xff;
const HIGH: u16 = 0xf00;

/// Access rights from packed attributes (see [`crate::registers::Segment`]).
#[must_use]
pub const fn rights(attributes: u16) -> u32 {
    let unusable = if attributes & PRESENT == 0 { UNUSABLE } else { 0 };
    (attributes & LOW) as u32 | ((attributes & HIGH) as u32) << 4 | unusable
}

/// Packed attributes from access rights. A segment that is unusable is not present.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "twelve bits are left")]
pub const fn attributes(rights: u32) -> u16 {
    let packed = (rights & 0xff | rights >> 4 & 0xf00) as u16;
    if rights & UNUSABLE != 0 { packed & !PRESENT } else { packed }
}

#[cfg(test)]
mod tests {
    use super::{PRESENT, UNUSABLE, attributes, rights};

    #[test]
    fn attributes_survive_the_way_there_and_back() {
        for packed in 0..0x1000 {
            assert_eq!(attributes(rights(packed)), packed, "{packed:#x}");
        }
    }

    #[test]
    fn rights_are_spelled_as_the_manual_says() {
        // 64-bit code: G, L, P, S, execute, read, accessed. Flat data: G, D/B. A busy task.
        assert_eq!(rights(0xa9b), 0xa09b);
        assert_eq!(rights(0xc93), 0xc093);
        assert_eq!(rights(0x08b), 0x008b);
        assert_eq!(rights(0), UNUSABLE);
    }

    #[test]
    fn unusable_segment_keeps_its_privilege_and_is_not_present() {
        let stack = rights(0xc93 | 3 << 5) | UNUSABLE;
        assert_eq!(attributes(stack) & PRESENT, 0);
        assert_eq!(attributes(stack) >> 5 & 3, 3, "SS has the privilege level");
    }
}

//! Root and context entries: what a device may do (9.1, 9.3).
//!
//! An entry that is not present blocks all of a device's accesses to memory, so a table full of zeroes is the safe one.
//! Messages that raise interrupts are not accesses to memory: they pass unless interrupt remapping is on.
//!
//! The IOMMU may read an entry while the driver changes it. The first word alone decides: it is stored last when a
//! device gets rights, and first when it loses them.

use addr::Hpa;

/// Bit of both kinds of entries.
const PRESENT: u64 = 1 << 0;
/// Bits 63:12 of both.
const ADDRESS: u64 = !0xfff;
/// TT, bits 3:2 of a context entry: 0 translates requests, 2 lets them pass.
const PASS_THROUGH: u64 = 2 << 2;
/// AW, bits 2:0 of the second word: 2 for tables of four levels.
const FOUR_LEVELS: u64 = 2;
/// DID, from bit 8 of the second word on.
const DOMAIN_SHIFT: u32 = 8;

/// The first word of a bus's entry in the root table: its context table. The second word is 0.
#[must_use]
pub const fn root_entry(contexts: Hpa) -> u64 {
    contexts.0 & ADDRESS | PRESENT
}

/// A function's entry in its bus's context table: two words of 64 bits, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextEntry(pub [u64; 2]);

impl ContextEntry {
    /// Bytes of an entry.
    pub const BYTES: u64 = 16;
    /// Bytes of the context tables of all 256 buses, one after the other: an entry for each function of a segment.
    pub const TABLES_BYTES: u64 = Self::BYTES << 16;

    /// No access to memory passes.
    pub const BLOCKED: Self = Self([0, 0]);

    /// All accesses go through the tables of four levels at `root`, and allow what those allow. The IOMMU keeps
    /// translations under `domain`: all entries with this number must have the same root.
    #[must_use]
    pub const fn translated(root: Hpa, domain: u16) -> Self {
        Self([root.0 & ADDRESS | PRESENT, (domain as u64) << DOMAIN_SHIFT | FOUR_LEVELS])
    }

    /// Addresses are not translated, and every access passes. For a device that the hypervisor itself drives, and
    /// trusts. Only if [`Extended::passes_through`](crate::registers::Extended::passes_through).
    #[must_use]
    pub const fn untranslated(domain: u16) -> Self {
        Self([PASS_THROUGH | PRESENT, (domain as u64) << DOMAIN_SHIFT | FOUR_LEVELS])
    }

    /// Whether some access to memory may pass.
    #[must_use]
    pub const fn allows_access(self) -> bool {
        self.0[0] & PRESENT != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_bits_of_the_manual() {
        assert_eq!(root_entry(Hpa(0x1234_5000)), 0x1234_5001);
        assert_eq!(ContextEntry::translated(Hpa(0x1234_5000), 7).0, [0x1234_5001, 0x702]);
        assert_eq!(ContextEntry::untranslated(1).0, [9, 0x102]);
    }

    #[test]
    fn only_the_first_word_gives_rights() {
        assert!(!ContextEntry::BLOCKED.allows_access());
        for entry in [ContextEntry::translated(Hpa(!0xfff), u16::MAX), ContextEntry::untranslated(u16::MAX)] {
            assert!(entry.allows_access());
            assert!(!ContextEntry([0, entry.0[1]]).allows_access());
        }
    }
}

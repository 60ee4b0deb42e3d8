//! A device's way through a VM's nested tables: the IOMMUs' rules, implemented a second time. Those of AMD's for host
//! page tables (48882, 2.2.3), and those of VT-d for second-stage tables (D51397, 9.8).

use super::Pool;
use crate::{Access, Cell, ENTRIES, Pages};
use addr::{Gpa, Hpa};

/// Bits that are reserved where an entry points to a table, and in leaves.
const RESERVED_IN_TABLES: u64 = 0x1ff << 52;
const RESERVED_IN_LEAVES: u64 = 0x7f << 52;

/// Where a device's access to `gpa` ends up, and whether it may write there; `None` if it is refused.
///
/// # Panics
/// When an entry on the way is not as the manual requires.
pub(super) fn walk(pool: &Pool, root: Hpa, levels: u32, gpa: Gpa) -> Option<(Hpa, bool)> {
    let (mut level, mut table) = (levels, root);
    let (mut reads, mut writes) = (true, true);
    loop {
        let index = usize::try_from(gpa.0 >> (3 + 9 * level)).expect("small") % ENTRIES;
        let entry = pool.load(Cell::new(table, index));
        if entry & 1 == 0 {
            return None;
        }
        reads &= entry >> 61 & 1 != 0;
        writes &= entry >> 62 & 1 != 0;
        let address = Hpa(entry & 0x000f_ffff_ffff_f000);
        let next = u32::try_from(entry >> 9 & 7).expect("three bits");
        if next == 0 {
            assert_eq!(entry & RESERVED_IN_LEAVES, 0, "reserved bits of the leaf {entry:#x}");
            let inside = gpa.0 & ((1 << (3 + 9 * level)) - 1);
            assert_eq!(address.0 & ((1 << (3 + 9 * level)) - 1), 0, "the leaf {entry:#x} of level {level} is aligned");
            return reads.then_some((Hpa(address.0 + inside), writes));
        }
        assert_eq!(entry & RESERVED_IN_TABLES, 0, "reserved bits of the entry {entry:#x}");
        assert_eq!(next, level - 1, "no level is left out");
        (level, table) = (next, address);
    }
}

/// Bits that VT-d reserves: snoop and transient mapping, and those beyond an address.
const RESERVED_BY_VT_D: u64 = 1 << 11 | 1 << 62;

/// The same as [`walk`] by VT-d, through four levels.
///
/// # Panics
/// When an entry on the way is not as the manual requires.
pub(super) fn walk_by_vt_d(pool: &Pool, root: Hpa, gpa: Gpa) -> Option<(Hpa, bool)> {
    let (mut table, mut writes) = (root, true);
    for level in (0..4).rev() {
        let shift = 12 + 9 * level;
        let entry = pool.load(Cell::new(table, usize::try_from(gpa.0 >> shift).expect("small") % ENTRIES));
        // One right is enough to be present.
        if entry & 0b11 == 0 {
            return None;
        }
        assert_eq!(entry & RESERVED_BY_VT_D, 0, "reserved bits of the entry {entry:#x}");
        assert_eq!(entry & 1, 1, "no entry is only writable: {entry:#x}");
        writes &= entry & 2 != 0;
        let address = Hpa(entry & 0x000f_ffff_ffff_f000);
        if level == 0 || entry & 1 << 7 != 0 {
            let inside = (1 << shift) - 1;
            assert_eq!(address.0 & inside, 0, "the leaf {entry:#x} of level {level} is aligned");
            return Some((Hpa(address.0 + (gpa.0 & inside)), writes));
        }
        table = address;
    }
    None
}

/// Where an access of an Intel processor to `gpa` ends up, with its rights (SDM vol. 3C, 29.3.2); `None` if it is an
/// EPT violation.
///
/// # Panics
/// When an entry on the way is a misconfiguration (29.3.3.1).
pub(super) fn walk_ept(pool: &Pool, root: Hpa, gpa: Gpa) -> Option<(Hpa, Access)> {
    let (mut table, mut rights) = (root, 7);
    for level in (0..4).rev() {
        let shift = 12 + 9 * level;
        let entry = pool.load(Cell::new(table, usize::try_from(gpa.0 >> shift).expect("small") % ENTRIES));
        rights &= entry & 7;
        if entry & 7 == 0 {
            return None;
        }
        assert!(entry & 1 != 0, "{entry:#x} can be written or executed, and not read");
        let is_leaf = level == 0 || entry & 1 << 7 != 0;
        assert!(!is_leaf || level < 3, "a leaf {entry:#x} in the root");
        if is_leaf {
            assert!(matches!(entry >> 3 & 7, 0 | 1 | 4 | 5 | 6), "reserved memory type: {entry:#x}");
        } else {
            assert_eq!(entry >> 3 & 0x1f, 0, "reserved bits of the entry {entry:#x}");
        }
        let address = Hpa(entry & 0x000f_ffff_ffff_f000);
        if is_leaf {
            let inside = (1 << shift) - 1;
            assert_eq!(address.0 & inside, 0, "reserved bits of the leaf {entry:#x} of level {level}");
            let access = Access { read: true, write: rights & 2 != 0, execute: rights & 4 != 0 };
            return Some((Hpa(address.0 + (gpa.0 & inside)), access));
        }
        table = address;
    }
    None
}

//! Encodings of entries, and trees of special shapes.

use super::{EPT, GIB, Guest, NPT, Pool, leaf_at, range};
use crate::{Access, Ept, Format, MapError, Memory, PageTableEntry, Vmsa};
use addr::{Gpa, Hpa};
use core::sync::atomic::Ordering;

const DIRTY: u64 = 1 << 6;
/// Devices may read and write.
const DEVICE: u64 = 0b11 << 61;

#[test]
fn npt_entries_are_spelled_as_the_manual_says() {
    let (hpa, level) = (Hpa(0x12_3450_0000), 0);
    assert_eq!(NPT.table(hpa, 1), 0x6000_0012_3450_0207);
    assert_eq!(NPT.table(hpa, 3), 0x6000_0012_3450_0607);
    assert_eq!(NPT.leaf(hpa, level, Access::ALL, Memory::Normal), 0x6000_0012_3450_0047);
    assert_eq!(NPT.leaf(hpa, level, Access::READ, Memory::Normal), 0xa000_0012_3450_0005);
    let gigabyte = NPT.leaf(Hpa(0x4000_0000), 2, Access::READ_WRITE, Memory::Normal);
    assert_eq!(gigabyte, 0xe000_0000_4000_00c7);
    assert_eq!(NPT.leaf(hpa, level, Access::READ_WRITE, Memory::Device), 0xe000_0012_3450_005f);
    assert_eq!(NPT.part(DEVICE | 0x4000_0087 | DIRTY, 1, 3), DEVICE | 0x4060_0087 | DIRTY);
    assert_eq!(NPT.part(DEVICE | 0x4060_0087 | DIRTY, 0, 511), DEVICE | 0x407f_f007 | DIRTY);
}

#[test]
fn ept_entries_are_spelled_as_the_manual_says() {
    let hpa = Hpa(0x12_3440_0000);
    assert_eq!(EPT.table(hpa, 1), 0x12_3440_0007);
    // Write-back is 6, at bit 3. A new page that can be written counts as dirty, bit 9.
    assert_eq!(EPT.leaf(hpa, 0, Access::ALL, Memory::Normal), 0x12_3440_0237);
    assert_eq!(EPT.leaf(hpa, 0, Access::READ, Memory::Normal), 0x12_3440_0031);
    assert_eq!(EPT.leaf(hpa, 1, Access::ALL, Memory::Normal), 0x12_3440_02b7);
    assert_eq!(EPT.leaf(Hpa(0x4000_0000), 2, Access::READ_WRITE, Memory::Device), 0x4000_0283);
    assert_eq!(EPT.part(0x4000_02b7, 1, 3), 0x4060_02b7);
    assert_eq!(EPT.part(0x4060_02b7, 0, 511), 0x407f_f237);
}

#[test]
fn large_ept_entry_is_not_executable_where_code_is_small() {
    let small = Ept { small_code: true, ..EPT };
    let hpa = Hpa(0x12_3440_0000);
    assert_eq!(small.leaf(hpa, 0, Access::ALL, Memory::Normal), 0x12_3440_0237);
    assert_eq!(small.leaf(hpa, 1, Access::READ_WRITE, Memory::Normal), 0x12_3440_02b3);
    let large = small.leaf(hpa, 1, Access::ALL, Memory::Normal);
    assert_eq!(large, 0x0100_0012_3440_02b3);
    assert_eq!(small.decode(1, large), PageTableEntry::Leaf { hpa, access: Access::ALL });
    assert_eq!(small.part(large, 0, 2), 0x12_3440_2237);
    assert_eq!(small.whole(0x12_3440_0237, 1), large);
    assert_eq!(small.with_access(large, Access::READ_WRITE), 0x12_3440_02b3);
    assert_eq!(small.with_access(0x12_3440_02b3, Access::ALL), large);
    let broken = small.broken(large);
    assert_eq!((broken & 7, small.unbroken(broken)), (0, large));
}

#[test]
fn broken_ept_entry_is_not_present_and_keeps_what_it_said() {
    for access in [Access::ALL, Access::READ, Access::READ_WRITE] {
        for bits in [EPT.leaf(Hpa(GIB), 1, access, Memory::Normal), EPT.table(Hpa(GIB), 1)] {
            let broken = EPT.broken(bits);
            assert_eq!(broken & 7, 0, "not present");
            assert_eq!(EPT.decode(1, broken), PageTableEntry::Busy);
            assert_eq!(EPT.unbroken(broken), bits);
        }
    }
}

/// Descriptors from the manual, without our own code: attributes of a leaf of normal memory with all rights.
const NORMAL_ALL: u64 = 0b1111 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10;

#[test]
fn arm_descriptors_are_spelled_as_the_manual_says() {
    let vmsa = Vmsa::new(40, 40, false).expect("possible");
    let hpa = Hpa(0x12_4000_0000);
    assert_eq!(vmsa.table(hpa, 1), hpa.0 | 0b11);
    assert_eq!(vmsa.leaf(hpa, 0, Access::ALL, Memory::Normal), hpa.0 | 0b11 | NORMAL_ALL);
    assert_eq!(vmsa.leaf(hpa, 2, Access::ALL, Memory::Normal), hpa.0 | 0b01 | NORMAL_ALL);

    // XN is bit 54, S2AP[1] bit 7, Device-nGnRE 0b0001.
    let read = vmsa.leaf(hpa, 1, Access::READ, Memory::Normal);
    assert_eq!(read, hpa.0 | 0b01 | (NORMAL_ALL & !(1 << 7)) | 1 << 54);
    let device = vmsa.leaf(hpa, 0, Access::READ_WRITE, Memory::Device);
    assert_eq!(device, hpa.0 | 0b11 | 0b0001 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10 | 1 << 54);

    let forced = Vmsa::new(40, 40, true).expect("possible");
    let normal = forced.leaf(hpa, 0, Access::ALL, Memory::Normal);
    assert_eq!(normal >> 2 & 0b1111, 0b0110, "write-back, whatever stage 1 says");
    assert_eq!(vmsa.part(hpa.0 | 0b01 | NORMAL_ALL, 1, 3), (hpa.0 + 3 * (2 << 20)) | 0b01 | NORMAL_ALL);
    assert_eq!(vmsa.part(hpa.0 | 0b01 | NORMAL_ALL, 0, 511), (hpa.0 + 511 * 4096) | 0b11 | NORMAL_ALL);
}

#[test]
fn reserved_arm_descriptors_map_nothing() {
    let vmsa = Vmsa::new(40, 40, false).expect("possible");
    assert_eq!(vmsa.decode(0, 0x8000_0001), PageTableEntry::Empty, "a block at the last level");
    assert_eq!(vmsa.decode(1, 0x8000_0002), PageTableEntry::Empty, "not valid");
    assert!(!vmsa.expresses(Access { read: false, write: false, execute: true }), "fetches need the right to read");
}

#[test]
fn arm_block_that_must_not_be_cached_still_leads_to_its_memory() {
    let vmsa = Vmsa::new(40, 40, false).expect("possible");
    let block = vmsa.leaf(Hpa(0x4000_0000), 2, Access::ALL, Memory::Normal) | 1 << 16;
    assert_eq!(vmsa.decode(2, block), PageTableEntry::Leaf { hpa: Hpa(0x4000_0000), access: Access::ALL });
    assert_eq!(vmsa.part(block, 0, 0) >> 16 & 1, 0, "its parts may be cached");
}

#[test]
fn arm_walks_start_where_concatenated_roots_allow() {
    // IPA bits -> levels, SL0, tables at the root (Arm ARM, D8.2.2, tables for the 4 KiB granule).
    for (bits, levels, sl0, tables) in [
        (32, 2, 0, 4),
        (34, 2, 0, 16),
        (35, 3, 1, 1),
        (39, 3, 1, 1),
        (40, 3, 1, 2),
        (43, 3, 1, 16),
        (44, 4, 2, 1),
        (48, 4, 2, 1),
    ] {
        let vmsa = Vmsa::new(bits, 48, false).expect("possible");
        assert_eq!((vmsa.levels(), vmsa.sl0(), vmsa.t0sz()), (levels, sl0, 64 - u64::from(bits)), "{bits} bits");
        let pool = Pool::of(16);
        let tree = Guest::new(vmsa, &pool).expect("pool");
        assert_eq!(16 - pool.left(), tables, "{bits} bits");
        assert_eq!(tree.root().0 % (tables as u64 * 4096), 0, "the root is aligned to its size");
        tree.destroy(&pool);
        assert_eq!(pool.left(), 16);
    }
    for (ipa_bits, pa_bits) in [(31, 40), (41, 40), (49, 52)] {
        assert!(Vmsa::new(ipa_bits, pa_bits, false).is_none(), "{ipa_bits} of {pa_bits} bits");
    }
}

#[test]
fn second_of_two_root_tables_maps_the_upper_half() {
    let pool = Pool::of(8);
    let mut tree = Guest::new(Vmsa::new(40, 40, false).expect("possible"), &pool).expect("pool");
    let end = 1 << 40;
    assert!(tree.map(&pool, range(end - GIB, GIB), Hpa(GIB), Access::ALL).expect("maps").is_empty());
    let last = pool.table(Hpa(tree.root().0 + 4096))[511].load(Ordering::Relaxed);
    assert_eq!(last, GIB | 0b01 | NORMAL_ALL);
    assert_eq!(leaf_at(&tree, &pool, end - 1).map(|leaf| leaf.translate(Gpa(end - 1))), Some(Hpa(2 * GIB - 1)));
    assert_eq!(tree.map(&pool, range(end, 4096), Hpa(0), Access::ALL), Err(MapError::Beyond(Gpa(end))));
    let beyond = tree.map(&pool, range(0, 4096), Hpa(end), Access::ALL);
    assert_eq!(beyond, Err(MapError::BeyondHost(Hpa(end))));
}

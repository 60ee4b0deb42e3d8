//! The ranges of RAM, and the part of them in the memory map.

use alloc::vec;
use alloc::vec::Vec;

use abi::payload::Role;
use addr::Gpa;

use super::MIB;
use crate::layout::{MapKind, memory_map, ram_layout, synic_ram};

const GIB: u64 = 1 << 30;

fn ranges(memory_bytes: u64) -> Vec<(u64, u64)> {
    ram_layout(memory_bytes).map(|range| (range.start.0, range.bytes())).collect()
}

#[test]
fn ram_up_to_3_gib_is_one_range() {
    assert_eq!(ranges(0), []);
    assert_eq!(ranges(64 * MIB), [(0, 64 * MIB)]);
    assert_eq!(ranges(3 * GIB), [(0, 3 * GIB)]);
}

#[test]
fn ram_beyond_3_gib_goes_on_at_4_gib() {
    assert_eq!(ranges(3 * GIB + 4096), [(0, 3 * GIB), (4 * GIB, 4096)]);
    assert_eq!(ranges(100 * GIB), [(0, 3 * GIB), (4 * GIB, 97 * GIB)]);
}

#[test]
fn absurd_memory_sizes_end_with_the_address_space() {
    assert_eq!(ranges(u64::MAX), [(0, 3 * GIB), (4 * GIB, u64::MAX - 4 * GIB)]);
    assert_eq!(memory_map(u64::MAX, None).count(), 5);
}

#[test]
fn memory_map_keeps_the_tables_from_the_kernel() {
    let map: Vec<_> = memory_map(4 * GIB, None).map(|e| (e.range.start.0, e.range.end().0, e.kind)).collect();
    assert_eq!(
        map,
        vec![
            (0, 0x9_fc00, MapKind::Ram),
            (0xe_0000, 0x10_0000, MapKind::Reserved),
            (0x10_0000, 3 * GIB, MapKind::Ram),
            (0xe000_0000, 0xe010_0000, MapKind::Reserved),
            (4 * GIB, 5 * GIB, MapKind::Ram),
        ]
    );
}

#[test]
fn memory_map_offers_only_ram_that_is_there() {
    for memory in [0, 4096, 640 << 10, MIB, MIB + 4096, 64 * MIB, 3 * GIB, 7 * GIB] {
        for entry in memory_map(memory, None).filter(|entry| entry.kind == MapKind::Ram) {
            let backed = ram_layout(memory).any(|ram| ram.start <= entry.range.start && entry.range.end() <= ram.end());
            assert!(backed, "{entry:?} in {memory:#x}");
        }
        assert!(!memory_map(memory, None).any(|e| e.kind == MapKind::Ram && e.range.contains(Gpa(0xf_fff0))));
    }
}

#[test]
fn parent_has_ram_for_its_synics_that_no_kernel_may_use() {
    for (memory, vcpus, end) in [(64 * MIB, 1, 64 * MIB), (GIB, 512, GIB), (8 * GIB, 3, 3 * GIB)] {
        let kept = synic_ram(memory, vcpus, Role::Parent).expect("it is a parent");
        assert_eq!((kept.bytes(), kept.end()), (u64::from(vcpus) * 8192, Gpa(end)));
        assert!(ram_layout(memory).any(|ram| ram.start <= kept.start && kept.end() <= ram.end()));
        let map: Vec<_> = memory_map(memory, Some(kept)).collect();
        let holders: Vec<_> = map.iter().filter(|entry| entry.range.overlaps(&kept)).collect();
        assert!(matches!(holders[..], [entry] if entry.kind == MapKind::Reserved && entry.range == kept), "{map:?}");
        assert!(map.is_sorted_by_key(|entry| entry.range.start));
        assert_eq!(synic_ram(memory, vcpus, Role::Guest), None);
    }
}

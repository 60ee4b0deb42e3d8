//! Single operations on a tree that no other processor uses.

use super::{GIB, Guest, MIB, NPT, Pool, leaf_at, range};
use crate::{Access, Iommu, MapError, Npt, Scope, Stale};
use addr::{Gpa, Hpa};
use core::sync::atomic::{AtomicU64, Ordering};

extern crate std;
use std::vec::Vec;

const DIRTY: u64 = 1 << 6;

/// The last entry that a processor reads for `gpa`: a second implementation of the walk, by bits.
fn hardware_walk(pool: &Pool, root: Hpa, gpa: u64) -> &AtomicU64 {
    let mut table = root;
    for shift in [39, 30, 21, 12] {
        let entry = &pool.table(table)[(gpa >> shift & 0x1ff) as usize];
        let bits = entry.load(Ordering::Relaxed);
        if shift == 12 || bits & 1 == 0 || bits & 0x80 != 0 {
            return entry;
        }
        table = Hpa(bits & 0xf_ffff_ffff_f000);
    }
    unreachable!("the walk ends at the last level")
}

#[test]
fn largest_leaves_that_both_alignments_allow_are_used() {
    let pool = Pool::of(16);
    let mut tree = Guest::new(NPT, &pool).expect("pool");

    // From 1 GiB - 2 MiB - 4 KiB: a small page, a 2 MiB page, a 1 GiB page, a small one again.
    let start = GIB - 2 * MIB - 4096;
    let stale = tree.map(&pool, range(start, GIB + 2 * MIB + 8192), Hpa(4 * GIB + start), Access::ALL).expect("maps");
    assert!(stale.is_empty());

    for (gpa, level) in [(start, 0), (GIB - 2 * MIB, 1), (GIB + 12345, 2), (2 * GIB, 0)] {
        let leaf = leaf_at(&tree, &pool, gpa).expect("mapped");
        assert_eq!((leaf.level, leaf.translate(Gpa(gpa))), (level, Hpa(4 * GIB + gpa)));
    }
    assert_eq!(leaf_at(&tree, &pool, start - 1), None);
    assert_eq!(leaf_at(&tree, &pool, 2 * GIB + 4096), None);
    tree.destroy(&pool);
    assert_eq!(pool.left(), 16);
}

#[test]
fn tree_that_is_emptied_in_parts_gives_back_one_table_after_the_other() {
    let pool = Pool::of(1200);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    for mapped in [range(3 * GIB - 4096, GIB + 8192), range(513 * GIB, 4 * MIB)] {
        assert!(tree.map(&pool, mapped, Hpa(0x1000), Access::ALL).expect("maps").is_empty());
    }
    let mut left = pool.left();
    while !tree.tree.empty(&pool, || false) {
        assert_eq!(pool.left(), left + 1);
        left += 1;
        assert_eq!(leaf_at(&tree, &pool, 3 * GIB - 4096), None, "the first ones have gone first");
    }
    assert_eq!(pool.left(), 1199, "the root is left");
    tree.destroy(&pool);
    assert_eq!(pool.left(), 1200);
}

#[test]
fn host_memory_that_is_aligned_differently_gets_smaller_leaves() {
    let pool = Pool::of(600);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(GIB + 2 * MIB), Access::ALL).expect("maps");
    let _ = tree.map(&pool, range(GIB, GIB), Hpa(4 * GIB + 4096), Access::ALL).expect("maps");

    assert_eq!(leaf_at(&tree, &pool, 5 * MIB).expect("mapped").level, 1);
    let small = leaf_at(&tree, &pool, GIB + 5 * MIB).expect("mapped");
    assert_eq!((small.level, small.hpa), (0, Hpa(4 * GIB + 5 * MIB + 4096)));
}

#[test]
fn processor_without_1_gib_pages_gets_none() {
    let pool = Pool::of(4);
    let mut tree = Guest::new(Npt { one_gib_pages: false, iommu: Iommu::AmdVi }, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(0), Access::ALL).expect("maps");
    assert_eq!(leaf_at(&tree, &pool, 0).expect("mapped").level, 1);
}

#[test]
fn every_entry_on_the_way_is_a_user_entry() {
    let pool = Pool::of(16);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 8 * MIB + 4096), Hpa(0), Access::READ).expect("maps");
    let _ = tree.unmap(&pool, range(4 * MIB, 4096)).expect("unmaps");
    for entry in pool.tables.iter().flatten().map(|entry| entry.load(Ordering::Relaxed)) {
        assert!(entry == 0 || entry & 5 == 5, "{entry:#x}");
    }
}

#[test]
fn unmap_in_the_middle_of_a_large_page_splits_it_and_owes_only_the_middle() {
    let pool = Pool::of(5);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(GIB), Access::ALL).expect("maps");

    let hole = range(3 * MIB, 8192);
    let stale = tree.unmap(&pool, hole).expect("splits with two tables");
    assert_eq!(stale.scope(), Scope::AllCpus);
    assert_eq!(stale.range(), hole);

    assert_eq!(leaf_at(&tree, &pool, 3 * MIB), None);
    let leaf = |gpa| leaf_at(&tree, &pool, gpa).map(|leaf| (leaf.level, leaf.translate(Gpa(gpa))));
    assert_eq!(leaf(3 * MIB - 1), Some((0, Hpa(GIB + 3 * MIB - 1))));
    assert_eq!(leaf(3 * MIB + 8192), Some((0, Hpa(GIB + 3 * MIB + 8192))));
    assert_eq!(leaf(4 * MIB), Some((1, Hpa(GIB + 4 * MIB))));
    assert_eq!(pool.left(), 1);
    tree.destroy(&pool);
    assert_eq!(pool.left(), 5);
}

#[test]
fn rights_that_grow_owe_no_flush_and_rights_that_shrink_do() {
    let pool = Pool::of(4);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let page = range(0x5000, 4096);
    let _ = tree.map(&pool, page, Hpa(0x9000), Access::READ).expect("maps");

    assert!(tree.protect(&pool, page, Access::ALL).expect("grows").is_empty());
    assert!(tree.protect(&pool, page, Access::ALL).expect("same").is_empty());
    assert_eq!(tree.protect(&pool, page, Access::READ_EXECUTE), Ok(Stale::leaf(page, 0)));
    // Exactly this: execute goes, write comes.
    assert_eq!(tree.protect(&pool, page, Access::READ_WRITE), Ok(Stale::leaf(page, 0)));
    assert_eq!(leaf_at(&tree, &pool, 0x5000).map(|leaf| leaf.access), Some(Access::READ_WRITE));
}

#[test]
fn protecting_a_part_of_a_large_page_with_what_it_has_does_not_split_it() {
    let pool = Pool::of(3);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    assert!(tree.protect(&pool, range(4096, 4096), Access::ALL).expect("no table needed").is_empty());
    assert_eq!(tree.protect(&pool, range(4096, 4096), Access::READ), Err(MapError::OutOfTables));
    assert_eq!(leaf_at(&tree, &pool, 4096).expect("mapped").level, 1);
}

#[test]
fn one_page_of_a_large_one_is_protected_and_the_others_keep_their_rights() {
    let pool = Pool::of(8);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    assert!(tree.map(&pool, range(0, 2 * MIB), Hpa(4 * GIB), Access::ALL).expect("maps").is_empty());
    let stale = tree.protect_page(&pool, Gpa(0x5_0123), Access::READ_EXECUTE).expect("one table is enough");
    assert_eq!(stale.range(), range(0x5_0000, 4096));
    for (gpa, access) in [(0x4_f000, Access::ALL), (0x5_0000, Access::READ_EXECUTE), (0x5_1000, Access::ALL)] {
        let leaf = leaf_at(&tree, &pool, gpa).expect("mapped");
        assert_eq!((leaf.hpa, leaf.access), (Hpa(4 * GIB + gpa), access), "{gpa:#x}");
    }

    let left = pool.left();
    assert!(tree.protect_page(&pool, Gpa(0x5_0000), Access::ALL).expect("grows").is_empty(), "growing owes nothing");
    assert!(tree.protect_page(&pool, Gpa(8 * GIB), Access::READ).expect("a hole").is_empty());
    assert_eq!(pool.left(), left, "no further table");
}

#[test]
fn dirty_bit_of_the_hardware_survives_protect_and_split() {
    let pool = Pool::of(4);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    hardware_walk(&pool, tree.root(), 0).fetch_or(DIRTY, Ordering::Relaxed);

    let _ = tree.protect(&pool, range(4096, 4096), Access::READ).expect("splits");
    for gpa in [0, 4096, 2 * MIB - 4096] {
        assert_ne!(hardware_walk(&pool, tree.root(), gpa).load(Ordering::Relaxed) & DIRTY, 0, "{gpa:#x}");
    }
}

#[test]
fn overlap_is_refused_and_names_the_page_in_the_way() {
    let pool = Pool::of(8);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(2 * MIB, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    let left = pool.left();
    let error = tree.map(&pool, range(0, 3 * MIB), Hpa(0), Access::ALL);
    assert_eq!(error, Err(MapError::Overlaps(range(2 * MIB, 2 * MIB))));
    assert_eq!(leaf_at(&tree, &pool, 0), None);
    assert_eq!(pool.left(), left);
}

#[test]
fn bad_ranges_are_refused() {
    let pool = Pool::of(8);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    let end = 1 << 48;
    let mut map = |range, hpa, access| tree.map(&pool, range, Hpa(hpa), access);

    assert_eq!(map(range(1, 4096), 0, Access::ALL), Err(MapError::Misaligned(range(1, 4096))));
    assert_eq!(map(range(0, 4095), 0, Access::ALL), Err(MapError::Misaligned(range(0, 4095))));
    assert_eq!(map(range(0, 4096), 7, Access::ALL), Err(MapError::MisalignedHost(Hpa(7))));
    assert_eq!(map(range(end - 4096, 8192), 0, Access::ALL), Err(MapError::Beyond(Gpa(end))));
    assert_eq!(map(range(end + 4096, 4096), 0, Access::ALL), Err(MapError::Beyond(Gpa(end + 4096))));
    assert_eq!(map(range(0, 8192), (1 << 52) - 4096, Access::ALL), Err(MapError::BeyondHost(Hpa(1 << 52))));
    assert_eq!(map(range(0, 8192), u64::MAX - 4095, Access::ALL), Err(MapError::BeyondHost(Hpa(u64::MAX - 4095))));
    let write_only = Access { read: false, write: true, execute: false };
    assert_eq!(map(range(0, 4096), 0, write_only), Err(MapError::Inexpressible(write_only)));
    assert_eq!(map(range(end - 4096, 4096), 0, Access::ALL), Ok(Stale::EMPTY));
    assert_eq!(map(range(0x5000, 0), 0, Access::ALL), Ok(Stale::EMPTY));
    assert_eq!(leaf_at(&tree, &pool, u64::MAX), None);
    assert!(leaf_at(&tree, &pool, end - 1).is_some());
}

#[test]
fn accessed_pages_are_told_in_as_few_pieces_as_there_are() {
    let pool = Pool::of(8);
    let mut tree = Guest::new(NPT, &pool).expect("pool");
    // Small pages to the end of a table and into the next one, a large one behind a gap, and a hole.
    let _ = tree.map(&pool, range(2 * MIB - 0x3000, 0x5000), Hpa(GIB - 0x3000), Access::ALL).expect("maps");
    let _ = tree.map(&pool, range(4 * MIB, 2 * MIB), Hpa(2 * GIB), Access::ALL).expect("maps");
    let mut found = Vec::new();
    let touch = |first: u64, bytes: u64| tree.walk(&pool).touch(range(first, bytes));
    let mut accessed = |asked| {
        found.clear();
        tree.walk(&pool).accessed(asked, |piece| found.push(piece));
        found.clone()
    };
    tree.walk(&pool).age(range(0, GIB), |_| ());
    assert_eq!(accessed(range(0, GIB)), []);

    // All but the second page.
    touch(2 * MIB - 0x3000, 0x1000);
    touch(2 * MIB - 0x1000, 0x3000);
    let [first, others] = [range(2 * MIB - 0x3000, 0x1000), range(2 * MIB - 0x1000, 0x3000)];
    assert_eq!(accessed(range(0, GIB)), [first, others]);
    touch(4 * MIB, 0x1000);
    assert_eq!(accessed(range(0, GIB)), [first, others, range(4 * MIB, 2 * MIB)], "a large page as a whole");
    let within = range(2 * MIB, 2 * MIB + 0x5000);
    assert_eq!(accessed(within), [range(2 * MIB, 0x2000), range(4 * MIB, 0x5000)], "no more than was asked for");
}

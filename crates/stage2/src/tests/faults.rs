//! Faults, first touches, ageing and collapse, on one processor.

use super::devices::walk_ept;
use super::{EPT, GIB, Guest, MIB, NPT, Pool, leaf_at, range};
use crate::{
    Access, Collapse, Epochs, Ept, Fault, Format, Granularity, Limbo, MapError, Quiescence, Search, Source, Spare,
    Stale, Tlb, Tree, Vmsa, Walker,
};
use addr::{Gpa, Hpa};
use core::cell::Cell as CoreCell;

extern crate std;
use std::vec::Vec;

fn arm(bbm: u32) -> Vmsa {
    Vmsa::new(40, 40, false).expect("possible").with_bbm(bbm)
}

fn walkers() -> Epochs<[Walker; 2]> {
    Epochs::new([Walker::new(), Walker::new()])
}

#[test]
fn fault_where_nothing_is_mapped_or_allowed_says_so() {
    let pool = Pool::of(8);
    let mut guest = Guest::new(NPT, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 4096), Hpa(0), Access::READ).expect("maps");
    let fault = |gpa, wanted| guest.fault(&pool, Gpa(gpa), wanted, Granularity::Whole, &mut Spare::new()).0;
    assert!(matches!(fault(4096, Access::READ), Fault::Unmapped));
    assert!(matches!(fault(1 << 48, Access::READ), Fault::Unmapped));
    assert!(matches!(fault(u64::MAX, Access::READ), Fault::Unmapped));
    assert!(matches!(fault(0, Access::READ_WRITE), Fault::Denied(leaf) if leaf.access == Access::READ));
}

#[test]
fn fault_that_finds_nothing_to_change_owes_only_its_own_processor() {
    let pool = Pool::of(8);
    let mut spare = Spare::new();
    let mut guest = Guest::new(arm(0), &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 4096), Hpa(0), Access::ALL).expect("maps");
    let (fault, later) = guest.fault(&pool, Gpa(5), Access::READ_WRITE, Granularity::Whole, &mut spare);
    let Fault::Retry(denial) = fault else { panic!("{fault:?}") };
    assert!(denial.is_cached());
    assert_eq!(later, Stale::EMPTY);

    // Nested pages are walked again before an access is denied.
    let mut guest = Guest::new(NPT, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 4096), Hpa(0), Access::ALL).expect("maps");
    let (fault, later) = guest.fault(&pool, Gpa(5), Access::READ_WRITE, Granularity::Whole, &mut spare);
    assert!(matches!(fault, Fault::Retry(denial) if !denial.is_cached()));
    assert_eq!(later, Stale::EMPTY);
}

#[test]
fn split_by_a_fault_owes_its_broadcast_later_if_at_all() {
    for (bbm, owes, flushes) in [(0, false, 1), (1, true, 1), (2, true, 0)] {
        let pool = Pool::of(8);
        let mut guest = Guest::new(arm(bbm), &pool).expect("pool");
        let _ = guest.map(&pool, range(0, 4 * MIB), Hpa(0), Access::ALL).expect("maps");
        let protected = guest.walk(&pool).clean_all(range(0, 4 * MIB), Source::WriteProtect);
        assert_eq!(protected.range(), range(0, 4 * MIB));
        let mut spare = Spare::new();
        spare.fill(&pool, 2).expect("pool");

        let mut broadcast = Stale::EMPTY;
        for gpa in [0x3000, 2 * MIB + 0x5000] {
            let (fault, later) =
                guest.fault(&pool, Gpa(gpa), Access::READ_WRITE, Granularity::WriteProtected, &mut spare);
            let Fault::Retry(denial) = fault else { panic!("{fault:?}") };
            assert!(denial.is_cached());
            assert_eq!(later.is_empty(), !owes, "level {bbm}");
            broadcast = broadcast.merge(later);
        }
        assert_eq!(broadcast.range(), range(0, if owes { 4 * MIB } else { 0 }), "one broadcast for both");
        assert_eq!(pool.flushes.get(), 2 * flushes, "level {bbm}");
    }
}

/// One processor has seen that a leaf is write-protected, and is about to split it. Another one has no table and makes
/// the whole leaf writable.
#[test]
fn leaf_that_is_opened_whole_before_it_is_split_stays_written() {
    fn written_pages<F: Format>(format: F) -> u64 {
        let pool = Pool::of(8);
        let mut guest = Guest::new(format, &pool).expect("pool");
        let large = range(0, 2 * MIB);
        let _ = guest.map(&pool, large, Hpa(0), Access::ALL).expect("maps");
        let _ = guest.walk(&pool).clean_all(large, Source::Hardware);
        let mut spare = Spare::new();
        spare.fill(&pool, 1).expect("pool");

        let fault = |granularity| guest.walk(&pool).fault(Gpa(0), Access::READ_WRITE, granularity);
        assert!(matches!(fault(Granularity::Recorded), Fault::Large));
        assert!(matches!(fault(Granularity::Whole), Fault::Retry(_)));
        let owed = guest.walk(&pool).split_at_fault(Gpa(0), Granularity::Recorded, 0, &mut spare);
        assert!(owed.is_ok() && leaf_at(&guest, &pool, 0).is_some_and(|leaf| leaf.level == 0));

        let mut bytes = 0;
        guest.walk(&pool).written(large, Source::Hardware, |page| bytes += page.bytes());
        bytes / 4096
    }
    assert_eq!(written_pages(NPT), 512);
    assert_eq!(written_pages(EPT), 512);
    assert_eq!(written_pages(arm(2).with_recorded_writes()), 512);
}

/// What the processor grants: see [`walk_ept`].
fn executes(guest: &Guest<Ept>, pool: &Pool, gpa: u64) -> bool {
    walk_ept(pool, guest.root(), Gpa(gpa)).is_some_and(|(_, access)| access.execute)
}

#[test]
fn fetch_splits_a_large_page_where_code_is_small_and_leaves_its_neighbours_whole() {
    let pool = Pool::of(8);
    let mut guest = Guest::new(Ept { small_code: true, ..EPT }, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, GIB), Hpa(4 * GIB), Access::ALL).expect("maps");
    let mut spare = Spare::new();
    let fetch = |guest: &Guest<Ept>, spare: &mut Spare, gpa| {
        guest.fault(&pool, Gpa(gpa), Access::READ_EXECUTE, Granularity::Whole, spare).0
    };
    assert!(leaf_at(&guest, &pool, 0x3000).is_some_and(|leaf| leaf.level == 2 && leaf.access == Access::ALL));
    assert!(!executes(&guest, &pool, 0x3000), "the processor must not execute a gigabyte");
    assert!(matches!(fetch(&guest, &mut spare, 0x3000), Fault::Large), "there is no table");

    spare.fill(&pool, 2).expect("pool");
    assert!(matches!(fetch(&guest, &mut spare, 0x3000), Fault::Retry(_)));
    assert_eq!(leaf_at(&guest, &pool, 0x3000).map(|leaf| (leaf.level, leaf.hpa)), Some((0, Hpa(4 * GIB + 0x3000))));
    assert!(executes(&guest, &pool, 0x3000) && executes(&guest, &pool, 2 * MIB - 1), "one split serves its 2 MiB");
    assert!(leaf_at(&guest, &pool, 2 * MIB).is_some_and(|leaf| leaf.level == 1) && !executes(&guest, &pool, 2 * MIB));

    // Data needs no split.
    let (fault, _) = guest.fault(&pool, Gpa(2 * MIB), Access::READ_WRITE, Granularity::Whole, &mut spare);
    assert!(matches!(fault, Fault::Retry(_)) && leaf_at(&guest, &pool, 2 * MIB).is_some_and(|leaf| leaf.level == 1));

    // What becomes large again is not executable any more.
    let (mut limbo, walkers) = (Limbo::<1>::new(), walkers());
    assert_eq!(guest.walk_mut(&pool).collapse(&mut limbo, &walkers, Gpa(0), 1), Collapse::Done);
    assert!(leaf_at(&guest, &pool, 0x3000).is_some_and(|leaf| leaf.level == 1 && leaf.access == Access::ALL));
    assert!(!executes(&guest, &pool, 0x3000));

    // A page without the right is denied, and not split.
    let _ = guest.protect(&pool, range(2 * MIB, 2 * MIB), Access::READ_WRITE).expect("no table is needed");
    assert!(matches!(fetch(&guest, &mut spare, 2 * MIB), Fault::Denied(leaf) if leaf.level == 1));
}

#[test]
fn fetch_from_a_page_under_a_dirty_log_counts_as_no_write() {
    for (granularity, source) in
        [(Granularity::WriteProtected, Source::WriteProtect), (Granularity::Recorded, Source::Hardware)]
    {
        let pool = Pool::of(8);
        let mut guest = Guest::new(Ept { small_code: true, ..EPT }, &pool).expect("pool");
        let large = range(0, 2 * MIB);
        let _ = guest.map(&pool, large, Hpa(0), Access::ALL).expect("maps");
        let _ = guest.walk(&pool).clean_all(large, source);
        let mut spare = Spare::new();
        spare.fill(&pool, 1).expect("pool");

        let (fault, _) = guest.fault(&pool, Gpa(0x5000), Access::READ_EXECUTE, granularity, &mut spare);
        assert!(matches!(fault, Fault::Retry(_)) && executes(&guest, &pool, 0x5000));
        let mut written = 0;
        guest.walk(&pool).written(large, source, |page| written += page.bytes());
        assert_eq!(written, 0, "{source:?}");
        let (fault, _) = guest.fault(&pool, Gpa(0x6000), Access::READ_WRITE, granularity, &mut spare);
        assert!(matches!(fault, Fault::Retry(_)));
    }
}

#[test]
fn first_touch_maps_a_page_and_who_comes_second_changes_nothing() {
    let pool = Pool::of(8);
    let guest = Guest::new(NPT, &pool).expect("pool");
    let mut spare = Spare::new();
    let populate =
        |spare: &mut Spare, gpa, hpa, level| guest.walk(&pool).populate(spare, Gpa(gpa), Hpa(hpa), level, Access::ALL);
    assert_eq!(populate(&mut spare, 0x5123, 0x8000, 0), Err(MapError::OutOfTables));
    spare.fill(&pool, 5).expect("pool");
    populate(&mut spare, 0x5123, 0x8000, 0).expect("three tables");
    populate(&mut spare, 0x5fff, 0x9000, 0).expect("another frame for the same page");
    let first = leaf_at(&guest, &pool, 0x5123).expect("mapped");
    assert_eq!((first.hpa, first.level), (Hpa(0x8000), 0));
    assert_eq!(spare.count(), 2);

    // A large page is mapped in small pages where small tables exist.
    populate(&mut spare, 0x7000, 4 * MIB, 1).expect("no table needed");
    let part = leaf_at(&guest, &pool, 0x7000).expect("mapped");
    assert_eq!((part.hpa, part.level), (Hpa(4 * MIB + 0x7000), 0));
    populate(&mut spare, 3 * MIB, 4 * MIB, 1).expect("no table needed");
    let large = leaf_at(&guest, &pool, 3 * MIB).expect("mapped");
    assert_eq!((large.hpa, large.level, large.bytes), (Hpa(4 * MIB), 1, 2 * MIB));
    assert_eq!(populate(&mut spare, GIB, 4096, 1), Err(MapError::MisalignedHost(Hpa(4096))));
    spare.give_back(&pool);
    guest.destroy(&pool);
    assert_eq!(pool.left(), 8);
}

#[test]
fn aged_page_is_touched_again_by_its_next_fault() {
    let pool = Pool::of(8);
    let mut guest = Guest::new(arm(0), &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 2 * MIB + 4096), Hpa(0), Access::ALL).expect("maps");
    let touched = |guest: &Guest<Vmsa>| {
        let mut found = Vec::new();
        guest.walk(&pool).age(range(0, GIB), |page| found.push(page));
        found
    };
    assert_eq!(touched(&guest), [range(0, 2 * MIB), range(2 * MIB, 4096)]);
    assert!(touched(&guest).is_empty());
    let mut spare = Spare::new();
    let (fault, _) = guest.fault(&pool, Gpa(2 * MIB), Access::READ, Granularity::Whole, &mut spare);
    assert!(matches!(fault, Fault::Retry(_)));
    assert_eq!(touched(&guest), [range(2 * MIB, 4096)]);
}

#[test]
fn small_pages_that_belong_together_become_one_large_page() {
    for bbm in 0..=2 {
        let pool = Pool::of(8);
        let mut guest = Guest::new(arm(bbm), &pool).expect("pool");
        let _ = guest.map(&pool, range(0, 2 * MIB), Hpa(GIB), Access::ALL).expect("maps");
        let before = pool.left();
        let _ = guest.protect_page(&pool, Gpa(0x5000), Access::READ).expect("splits");
        let (walkers, mut limbo) = (walkers(), Limbo::<1>::new());
        let collapse = |guest: &mut Guest<Vmsa>, limbo: &mut Limbo<1>| {
            guest.walk_mut(&pool).collapse(limbo, &walkers, Gpa(0x1234), 1)
        };

        assert_eq!(collapse(&mut guest, &mut limbo), Collapse::NotAlike, "one page has other rights");
        assert_eq!(leaf_at(&guest, &pool, 0x5000).map(|leaf| leaf.access), Some(Access::READ));
        let _ = guest.protect_page(&pool, Gpa(0x5000), Access::ALL).expect("grows");

        let walking = walkers.enter(1).expect("is away");
        pool.flushes.set(0);
        assert_eq!(collapse(&mut guest, &mut limbo), Collapse::Done);
        assert_eq!(pool.flushes.get(), 1);
        let leaf = leaf_at(&guest, &pool, 0x5000).expect("mapped");
        assert_eq!((leaf.level, leaf.hpa, leaf.access), (1, Hpa(GIB), Access::ALL));

        // Another processor may still read the table.
        limbo.reclaim(&pool, &walkers);
        assert_eq!((pool.left(), limbo.waiting()), (before - 1, 1));
        assert_eq!(collapse(&mut guest, &mut limbo), Collapse::Full);
        drop(walking);
        let late = walkers.enter(0).expect("is away");
        limbo.reclaim(&pool, &walkers);
        drop(late);
        assert_eq!((pool.left(), limbo.waiting()), (before, 0), "who starts later cannot be in it");
        assert_eq!(collapse(&mut guest, &mut limbo), Collapse::NotAlike, "there is no table any more");
    }
}

#[test]
fn tables_of_small_pages_are_found_one_after_the_other() {
    let pool = Pool::of(16);
    let mut guest = Guest::new(arm(0), &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 4 * MIB), Hpa(GIB), Access::ALL).expect("maps");
    for (gpa, bytes) in [(6 * MIB + 8192, 4096), (8 * MIB, 2 * MIB - 4096), (5 * GIB, 4096)] {
        let _ = guest.map(&pool, range(gpa, bytes), Hpa(2 * GIB + gpa), Access::ALL).expect("maps");
    }
    let next = |from, most| guest.walk(&pool).next_table(Gpa(from), most);
    assert_eq!(next(0, 512), Search::Found(Gpa(6 * MIB)));
    assert_eq!(next(6 * MIB + 12345, 512), Search::Found(Gpa(6 * MIB)), "it maps something behind that");
    assert_eq!(next(8 * MIB, 512), Search::Found(Gpa(8 * MIB)));
    // The rest of the first GiB, by 2 MiB, and four holes of 1 GiB.
    assert_eq!(next(10 * MIB, 512), Search::Found(Gpa(5 * GIB)));
    assert_eq!(next(10 * MIB, 100), Search::Further(Gpa(210 * MIB)));
    assert_eq!(next(5 * GIB + 2 * MIB, 5000), Search::End);
    assert_eq!(next(u64::MAX, 1), Search::End);
}

/// TLBs of which a flush lasts so long that another processor looks up all pages meanwhile.
struct Slow<'a, F> {
    tree: &'a Tree<F>,
    pool: &'a Pool,
    walkers: &'a Epochs<[Walker; 2]>,
    flushes: CoreCell<u32>,
}

impl<F: Format> Tlb for Slow<'_, F> {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {
        let walking = self.walkers.enter(1).expect("is away");
        for offset in (0..2 * MIB).step_by(4096) {
            let leaf = self.tree.walk(self.pool, self.pool, &walking).lookup(Gpa(offset + 5));
            let found = leaf.map(|leaf| leaf.translate(Gpa(offset + 5)));
            assert_eq!(found, Some(Hpa(GIB + offset + 5)), "the page at {offset:#x}");
        }
        self.flushes.set(self.flushes.get() + 1);
    }
    fn relax(&self) {
        unreachable!("nobody else changes this tree");
    }
}

/// How often a page is split and made whole with a flush in the middle.
fn flushes_of_split_and_collapse(format: impl Format) -> [u32; 2] {
    let pool = Pool::of(8);
    let mut guest = Guest::new(format, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 2 * MIB), Hpa(GIB), Access::ALL).expect("maps");
    let (walkers, mut limbo) = (walkers(), Limbo::<1>::new());
    let slow = Slow { tree: &guest.tree, pool: &pool, walkers: &walkers, flushes: CoreCell::new(0) };

    let mut walk = guest.tree.walk_mut(&pool, &slow, &mut guest.shape);
    let _ = walk.walk().protect_page(Gpa(0x5000), Access::READ).expect("splits");
    let _ = walk.walk().protect_page(Gpa(0x5000), Access::ALL).expect("grows");
    let split = slow.flushes.take();
    assert_eq!(walk.collapse(&mut limbo, &walkers, Gpa(0), 1), Collapse::Done);
    [split, slow.flushes.get()]
}

#[test]
fn page_is_found_at_any_time_while_it_is_split_or_made_whole() {
    assert_eq!(flushes_of_split_and_collapse(NPT), [0, 1]);
    assert_eq!(flushes_of_split_and_collapse(EPT), [0, 1]);
    assert_eq!([0, 1, 2].map(|bbm| flushes_of_split_and_collapse(arm(bbm))), [[1, 1], [1, 1], [0, 1]]);
}

#[test]
fn split_ahead_of_a_fault_takes_only_what_the_log_has_write_protected() {
    for bbm in [0, 2] {
        let pool = Pool::of(16);
        let mut guest = Guest::new(arm(bbm), &pool).expect("pool");
        let _ = guest.map(&pool, range(0, 12 * MIB), Hpa(GIB), Access::ALL).expect("maps");
        let logged = range(2 * MIB, 6 * MIB);
        let _ = guest.walk(&pool).clean_all(logged, Source::WriteProtect);
        let mut spare = Spare::new();
        spare.fill(&pool, 9).expect("pool");
        pool.flushes.set(0);
        let split = guest.walk(&pool).split_at_fault(Gpa(4 * MIB + 5), Granularity::WriteProtected, 7, &mut spare);
        let (owed, end) = split.expect("there are tables");
        // With break-before-make there is one broadcast for all of them, and no later flush.
        assert_eq!((pool.flushes.get(), owed.is_empty()), if bbm == 0 { (1, true) } else { (0, false) });
        let levels = [0, 2, 4, 6, 8, 10].map(|at| leaf_at(&guest, &pool, at * MIB).map(|leaf| leaf.level));
        assert_eq!(levels, [Some(1), Some(1), Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!((end, spare.count()), (Gpa(20 * MIB), 7));
    }
}

#[test]
fn several_large_pages_come_back_with_one_flush_and_no_more_than_can_wait() {
    let pool = Pool::of(12);
    let mut guest = Guest::new(NPT, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 8 * MIB), Hpa(GIB), Access::ALL).expect("maps");
    for at in [0, 2, 6] {
        let _ = guest.protect_page(&pool, Gpa(at * MIB), Access::READ).expect("splits");
        let _ = guest.protect_page(&pool, Gpa(at * MIB), Access::ALL).expect("grows");
    }
    let (walkers, mut limbo) = (walkers(), Limbo::<2>::new());
    let mut collapse = |limbo: &mut Limbo<2>| {
        let places = [0, 2, 4, 6].map(|at| Gpa(at * MIB));
        pool.flushes.set(0);
        (guest.walk_mut(&pool).collapse_together(limbo, &walkers, places, 1), pool.flushes.get())
    };

    // The third is large already, and the limbo has no room for the fourth.
    let (outcomes, flushes) = collapse(&mut limbo);
    assert_eq!(outcomes, [Collapse::Done, Collapse::Done, Collapse::Full, Collapse::Full]);
    assert_eq!((flushes, limbo.waiting()), (1, 2));
    limbo.reclaim(&pool, &walkers);
    let (outcomes, flushes) = collapse(&mut limbo);
    assert_eq!(outcomes, [Collapse::NotAlike, Collapse::NotAlike, Collapse::NotAlike, Collapse::Done]);
    assert_eq!(flushes, 1);
    assert!([0, 2, 4, 6].iter().all(|at| leaf_at(&guest, &pool, at * MIB).is_some_and(|leaf| leaf.level == 1)));
}

#[test]
fn pages_that_lie_apart_in_host_memory_stay_small() {
    let pool = Pool::of(8);
    let mut guest = Guest::new(NPT, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, 2 * MIB - 4096), Hpa(GIB), Access::ALL).expect("maps");
    let _ = guest.map(&pool, range(2 * MIB - 4096, 4096), Hpa(2 * GIB), Access::ALL).expect("maps");
    let (walkers, mut limbo) = (walkers(), Limbo::<1>::new());
    let result = guest.walk_mut(&pool).collapse(&mut limbo, &walkers, Gpa(0), 1);
    assert_eq!(result, Collapse::NotAlike);
    let _ = guest.unmap(&pool, range(2 * MIB - 4096, 4096)).expect("unmaps");
    let result = guest.walk_mut(&pool).collapse(&mut limbo, &walkers, Gpa(0), 1);
    assert_eq!(result, Collapse::NotAlike, "a hole");
    assert_eq!((limbo.waiting(), pool.flushes.get()), (0, 0));
}

#[test]
fn walker_announces_itself_once() {
    let walkers = walkers();
    let first = walkers.enter(0).expect("is away");
    assert!(walkers.enter(0).is_none(), "it is walking already");
    assert!(walkers.enter(2).is_none(), "there are two");
    let epoch = walkers.end_epoch();
    assert!(!walkers.have_left(epoch));
    drop(first);
    assert!(walkers.have_left(epoch));
}

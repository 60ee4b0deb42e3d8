//! The small races, in every interleaving with few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-stage2 --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use addr::{Gpa, GpaRange, Hpa};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use stage2::{
    Access, Cell, DirtyLog, Epochs, Fault, Granularity, Iommu, MarkWord, NptOf, Pages, Policy, Quiescence, Rounds,
    Source, Spare, Stale, Start, Tlb, Tree, Walk, Walker, Walking,
};

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

const PAGE: u64 = 1;
const OLD: u64 = 1;
const NEW: u64 = 2;

/// A device writes to a page and marks it. Meanwhile a sender takes the mark and copies, and then does so again.
fn device_and_sender(write: impl Fn(&MarkWord, &AtomicU64) + Copy + Sync + Send + 'static) {
    explore(move || {
        let shared = Arc::new((MarkWord::new(), AtomicU64::new(OLD)));
        // Marked before, so that the device finds a mark that is being taken.
        shared.0.write(PAGE, || {});
        let device = {
            let shared = shared.clone();
            thread::spawn(move || write(&shared.0, &shared.1))
        };
        let send = || (shared.0.take(PAGE) != 0).then(|| shared.1.load(Ordering::Relaxed));
        let first = send();
        device.join().expect("no panic");
        let copy = send().or(first).expect("marked from before");
        assert_eq!(copy, NEW, "the write is lost");
    });
}

#[test]
fn write_that_is_marked_is_in_this_copy_or_the_next() {
    device_and_sender(|marks, page| marks.write(PAGE, || page.store(NEW, Ordering::Relaxed)));
}

#[test]
fn mark_before_the_write_loses_it() {
    let marked_first = |marks: &MarkWord, page: &AtomicU64| {
        marks.write(PAGE, || {});
        page.store(NEW, Ordering::Relaxed);
    };
    assert!(catch_unwind(|| device_and_sender(marked_first)).is_err());
}

/// The number of the sender among the walkers, after two that write.
const SENDER: usize = 2;

/// Walkers write to a page and only test its mark. A sender waits for `waited` walkers before it copies. The first
/// walker writes `NEW` in the last of its `sections` announcements.
fn walkers_and_sender(
    writers: usize,
    sections: usize,
    wait: impl Fn(&Epochs<[Walker; 3]>, Walking<'_>) + Copy + Sync + Send + 'static,
) {
    explore(move || {
        let shared = Arc::new((
            MarkWord::new(),
            [AtomicU64::new(OLD), AtomicU64::new(OLD)],
            Epochs::new([Walker::new(), Walker::new(), Walker::new()]),
        ));
        shared.0.write(PAGE, || {});
        let mut me = shared.2.enter(SENDER);
        let walkers: Vec<_> = (0..writers)
            .map(|number| {
                let shared = shared.clone();
                thread::spawn(move || {
                    for section in 0..sections {
                        let walking = shared.2.enter(number).expect("is away");
                        if section == 0 {
                            shared.0.write_as_walker(&walking, PAGE, || shared.1[number].store(NEW, Ordering::Relaxed));
                        }
                        drop(walking);
                    }
                })
            })
            .collect();
        // Each walker has its own part of the page.
        let mut send = || {
            (shared.0.take(PAGE) != 0).then(|| {
                wait(&shared.2, me.take().or_else(|| shared.2.enter(SENDER)).expect("is away"));
                [0, 1].map(|part: usize| shared.1[part].load(Ordering::Relaxed))
            })
        };
        let first = send();
        walkers.into_iter().for_each(|walker| walker.join().expect("no panic"));
        let copy = send().or(first).expect("marked from before");
        assert!(copy[..writers].iter().all(|part| *part == NEW), "the write is lost");
    });
}

fn wait(walkers: &Epochs<[Walker; 3]>, me: Walking<'_>) {
    walkers.wait(me, thread::yield_now);
}

#[test]
fn write_by_a_walker_is_in_this_copy_or_the_next() {
    walkers_and_sender(1, 1, wait);
}

#[test]
fn writes_by_two_walkers_are_in_this_copy_or_the_next() {
    walkers_and_sender(2, 1, wait);
}

#[test]
fn write_by_a_walker_who_came_again_is_in_this_copy_or_the_next() {
    walkers_and_sender(1, 2, wait);
}

#[test]
fn sender_that_does_not_wait_loses_a_walkers_write() {
    assert!(catch_unwind(|| walkers_and_sender(1, 1, |_, _| {})).is_err());
}

#[test]
fn sender_that_waits_for_an_earlier_epoch_loses_a_walkers_write() {
    let too_early = |walkers: &Epochs<[Walker; 3]>, me: Walking<'_>| {
        drop(me);
        while !walkers.have_left(0) {}
    };
    assert!(catch_unwind(move || walkers_and_sender(1, 1, too_early)).is_err());
}

#[test]
fn sender_that_waits_for_others_loses_a_walkers_write() {
    let others = |_: &Epochs<[Walker; 3]>, me: Walking<'_>| {
        drop(me);
        let others = Epochs::new([Walker::new()]);
        others.wait(others.enter(0).expect("is away"), thread::yield_now);
    };
    assert!(catch_unwind(move || walkers_and_sender(1, 1, others)).is_err());
}

/// A pointer to a table, and whether the table was freed.
struct Tables {
    pointer: AtomicU64,
    freed: AtomicU64,
    epochs: Epochs<[Walker; 1]>,
}

/// One thread walks. Another one cuts the table off, ends the epoch, and frees the table when `may_free` says so.
fn walker_and_freer(may_free: impl Fn(&Tables, u64) -> bool + Copy + Sync + Send + 'static) {
    explore(move || {
        let tables = Arc::new(Tables {
            pointer: AtomicU64::new(1),
            freed: AtomicU64::new(0),
            epochs: Epochs::new([Walker::new()]),
        });
        let walker = {
            let tables = tables.clone();
            thread::spawn(move || {
                let walking = tables.epochs.enter(0).expect("is away");
                if tables.pointer.load(Ordering::Relaxed) == 1 {
                    assert_eq!(tables.freed.load(Ordering::Relaxed), 0, "the table is used after it was freed");
                }
                drop(walking);
            })
        };
        tables.pointer.store(0, Ordering::Relaxed);
        let epoch = tables.epochs.end_epoch();
        if may_free(&tables, epoch) {
            tables.freed.store(1, Ordering::Relaxed);
        }
        walker.join().expect("no panic");
        fence(Ordering::SeqCst);
        assert!(tables.epochs.have_left(epoch), "nobody walks any more");
    });
}

#[test]
fn table_is_not_freed_while_somebody_may_be_in_it() {
    walker_and_freer(|tables, epoch| tables.epochs.have_left(epoch));
}

#[test]
fn table_that_is_freed_without_asking_is_used_afterwards() {
    assert!(catch_unwind(|| walker_and_freer(|_, _| true)).is_err());
}

/// Tables of two entries. loom treats sequentially consistent accesses as weaker ones, so `ordered` adds fences.
struct Pool {
    tables: Vec<[AtomicU64; 2]>,
    next: core::sync::atomic::AtomicUsize,
    ordered: bool,
}

const TABLES: u64 = 1 << 20;

impl Pool {
    fn new(ordered: bool) -> Self {
        let tables = (0..5).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect();
        Self { tables, next: Default::default(), ordered }
    }

    fn entry(&self, cell: Cell) -> &AtomicU64 {
        &self.tables[usize::try_from((cell.table().0 - TABLES) >> 12).expect("a table of ours")][cell.index()]
    }

    fn fence(&self) {
        if self.ordered {
            fence(Ordering::SeqCst);
        }
    }
}

impl Pages for Pool {
    fn allocate(&self) -> Option<Hpa> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.tables.len()).then(|| Hpa(TABLES + ((number as u64) << 12)))
    }
    fn allocate_root(&self, _: u32) -> Option<Hpa> {
        None
    }
    fn free(&self, _: Hpa) {}
    fn load(&self, cell: Cell) -> u64 {
        self.entry(cell).load(Ordering::Acquire)
    }
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        let result = self.entry(cell).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        self.fence();
        result.map(|_| ())
    }
    fn write_private(&self, cell: Cell, bits: u64) {
        self.entry(cell).store(bits, Ordering::Relaxed);
    }
}

impl Tlb for Pool {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {}
    fn relax(&self) {
        thread::yield_now();
    }
}

/// The leaf of the second page: it maps host page zero, so no other entry is without an address.
fn leaf_of_host_page_zero(pool: &Pool) -> &AtomicU64 {
    let mut entries = pool.tables.iter().flatten();
    let is_leaf = |entry: &&AtomicU64| {
        let bits = entry.load(Ordering::Relaxed);
        bits & 1 != 0 && bits & 0xf_ffff_ffff_f000 == 0
    };
    entries.find(is_leaf).expect("mapped")
}

/// A guest's second page becomes `OPEN` while another thread makes its table quiet: such a page must be found in the
/// end.
fn opener_and_cleaner<const OPEN: u64>(
    ordered: bool,
    source: Source,
    open: impl Fn(&Pool, Walk<'_, NptOf<1>, Pool, Pool>) + Copy + Sync + Send + 'static,
) {
    explore(move || {
        let pool = Pool::new(ordered);
        let (tree, mut shape) =
            Tree::new(NptOf::<1> { one_gib_pages: true, iommu: Iommu::AmdVi }, &pool).expect("tables");
        let slot = GpaRange::new(Gpa(0), 2 << 12).expect("a range");
        // Two pages that are not adjacent in host memory form no large one.
        for page in 0..2 {
            let range = GpaRange::new(Gpa(page << 12), 1 << 12).expect("a range");
            tree.walk_mut(&pool, &pool, &mut shape).map(range, Hpa((1 - page) << 12), Access::ALL).expect("tables");
        }
        let log = DirtyLog::new(slot, source, Policy::Lazy, [MarkWord::new()]).expect("enough marks");
        let walk = tree.walk(&pool, &pool, &shape);
        log.start(walk, Start::Clean, &mut Spare::new()).expect("nothing to split").pay(&pool);

        let shared = Arc::new((pool, tree, log, shape));
        let opener = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (pool, tree, _, shape) = &*shared;
                open(pool, tree.walk(pool, pool, shape));
            })
        };
        let (pool, tree, log, shape) = &*shared;
        let walk = tree.walk(pool, pool, shape);
        let mut rounds = Rounds::new(log, [0], || {}).expect("enough bits");
        let cleared = rounds.clear(log, walk, 0, &[0b11]);
        let alone = Epochs::new([Walker::new()]);
        let _ = cleared.flush(pool, alone.enter(0).expect("is away"), &alone);
        opener.join().expect("no panic");
        fence(Ordering::SeqCst);

        let is_open = leaf_of_host_page_zero(pool).load(Ordering::Relaxed) & OPEN != 0;
        let mut dirty = [0];
        log.get(walk, 0, &mut dirty);
        assert_eq!(dirty[0], if is_open { 0b10 } else { 0 }, "a page is open, and nobody will look at it");
    });
}

const WRITABLE: u64 = 1 << 1;
const DIRTY: u64 = 1 << 6;

fn by_fault(_: &Pool, walk: Walk<'_, NptOf<1>, Pool, Pool>) {
    let fault = walk.fault(Gpa(1 << 12), Access::READ_WRITE, Granularity::WriteProtected);
    assert!(matches!(fault, Fault::Retry(_)));
}

/// The hardware records the write, and lists it.
fn by_list(pool: &Pool, walk: Walk<'_, NptOf<1>, Pool, Pool>) {
    leaf_of_host_page_zero(pool).fetch_or(DIRTY, Ordering::AcqRel);
    pool.fence();
    walk.report(Gpa(1 << 12));
}

#[test]
fn page_that_is_opened_while_its_table_becomes_quiet_is_found() {
    opener_and_cleaner::<WRITABLE>(true, Source::WriteProtect, by_fault);
}

#[test]
fn without_one_order_of_all_exchanges_an_open_page_is_missed() {
    assert!(catch_unwind(|| opener_and_cleaner::<WRITABLE>(false, Source::WriteProtect, by_fault)).is_err());
}

#[test]
fn page_that_is_listed_while_its_table_becomes_quiet_is_found() {
    opener_and_cleaner::<DIRTY>(true, Source::Listed, by_list);
}

#[test]
fn report_before_the_record_is_missed() {
    let too_early = |pool: &Pool, walk: Walk<'_, NptOf<1>, Pool, Pool>| {
        walk.report(Gpa(1 << 12));
        leaf_of_host_page_zero(pool).fetch_or(DIRTY, Ordering::AcqRel);
    };
    assert!(catch_unwind(move || opener_and_cleaner::<DIRTY>(true, Source::Listed, too_early)).is_err());
}

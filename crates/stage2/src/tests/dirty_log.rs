//! The dirty log, round by round, with and without hardware that records writes.

use super::{EPT, GIB, Guest, MIB, NPT, Pool, leaf_at, range};
use crate::{
    Access, Cleared, Copyable, DirtyLog, Epochs, Ept, Fault, Format, Granularity, MarkWord, Npt, PageTableEntry,
    Policy, Rounds, Source, Spare, Start, Vmsa, Walker,
};
use addr::{Gpa, GpaRange, Hpa};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_oneof, proptest};

extern crate std;
use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

/// What the hardware does to a leaf when the guest writes; `None` if it faults.
pub(super) trait Hardware: Format {
    fn write(&self, bits: u64) -> Option<u64>;
}

impl Hardware for Npt {
    fn write(&self, bits: u64) -> Option<u64> {
        (bits & 2 != 0).then_some(bits | 1 << 6)
    }
}

impl Hardware for Ept {
    fn write(&self, bits: u64) -> Option<u64> {
        (bits & 2 != 0).then_some(bits | u64::from(self.accessed_dirty) << 9)
    }
}

impl Hardware for Vmsa {
    fn write(&self, bits: u64) -> Option<u64> {
        (bits & (1 << 7) != 0 || (self.records_writes() && bits & (1 << 51) != 0)).then_some(bits | 1 << 7)
    }
}

pub(super) fn arm(bbm: u32) -> Vmsa {
    Vmsa::new(40, 40, false).expect("possible").with_bbm(bbm)
}

/// A guest with 8 MiB or more from 2 MiB on, in large pages, all logged unless the test says otherwise.
pub(super) struct Logged<F> {
    pub(super) guest: Guest<F>,
    pub(super) pool: Pool,
    pub(super) log: DirtyLog<Vec<MarkWord>>,
    pub(super) rounds: Rounds<Vec<u64>>,
    pub(super) spare: Spare,
    /// What the hardware has listed and nobody has reported.
    pub(super) listed: Vec<Gpa>,
}

/// Flushes what was cleared, where no other processor walks.
fn flush<'w>(cleared: Cleared<'w>, pool: &Pool) -> Copyable<'w> {
    let walkers = Epochs::new([Walker::new()]);
    let me = walkers.enter(0).expect("is away");
    cleared.flush(pool, me, &walkers)
}

pub(super) const SLOT_START: u64 = 2 * MIB;
const WORDS: usize = 32;
pub(super) const LARGE: u64 = 512;

impl<F: Hardware> Logged<F> {
    pub(super) fn new(format: F, source: Source, policy: Policy) -> Self {
        Self::of(format, source, policy, range(SLOT_START, 8 * MIB))
    }

    pub(super) fn of(format: F, source: Source, policy: Policy, slot: GpaRange) -> Self {
        let pool = Pool::of(16 + usize::try_from((slot.bytes() / MIB).max(8)).expect("small"));
        let mut guest = Guest::new(format, &pool).expect("pool");
        let memory = range(SLOT_START, slot.bytes().max(8 * MIB));
        let _ = guest.map(&pool, memory, Hpa(GIB + SLOT_START), Access::ALL).expect("maps");
        let words = usize::try_from(slot.bytes().div_ceil(64 << 12)).expect("small");
        let marks = (0..words).map(|_| MarkWord::new()).collect();
        let log = DirtyLog::new(slot, source, policy, marks).expect("enough marks");
        let rounds = Rounds::new(&log, vec![u64::MAX; words], || {}).expect("enough bits");
        let mut spare = Spare::new();
        spare.fill(&pool, 8).expect("pool");
        Self { guest, pool, log, rounds, spare, listed: Vec::new() }
    }

    pub(super) fn start(&mut self, from: Start) {
        let stale = self.log.start(self.guest.walk(&self.pool), from, &mut self.spare).expect("tables");
        assert_eq!(stale.is_empty(), from == Start::AllDirty);
    }

    /// Writes to a page of the slot like the guest, which then exits. Returns the number of faults.
    pub(super) fn write(&mut self, page: u64) -> u32 {
        let faults = self.write_and_stay(page);
        self.report();
        faults
    }

    /// The same, and the guest goes on.
    pub(super) fn write_and_stay(&mut self, page: u64) -> u32 {
        self.write_at(self.log.slot().start.0 + (page << 12) + 0x123, self.log.granularity())
    }

    /// The guest exits: what was listed is reported.
    pub(super) fn report(&mut self) {
        let Self { guest, pool, listed, .. } = self;
        listed.drain(..).for_each(|gpa| guest.walk(pool).report(gpa));
    }

    fn write_at(&mut self, gpa: u64, granularity: Granularity) -> u32 {
        let Self { guest, pool, spare, listed, .. } = self;
        for faults in 0..4 {
            let slot = guest.walk(pool).descend(Gpa(gpa));
            assert!(matches!(slot.entry, PageTableEntry::Leaf { .. }));
            if let Some(bits) = guest.tree.format.write(slot.bits) {
                assert!(slot.exchange(pool, bits));
                if bits != slot.bits {
                    listed.push(Gpa(gpa & !0xfff));
                }
                return faults;
            }
            let (fault, _) = guest.fault(pool, Gpa(gpa), Access::READ_WRITE, granularity, spare);
            assert!(matches!(fault, Fault::Retry(_)), "{fault:?}");
        }
        panic!("the guest faults for ever");
    }

    pub(super) fn dirty(&self) -> Vec<u64> {
        let mut words = vec![0; self.words()];
        self.log.get(self.guest.walk(&self.pool), 0, &mut words);
        let last = words.len() as u64 * 64;
        (0..last).filter(|page| words[(page / 64) as usize] >> (page % 64) & 1 != 0).collect()
    }

    /// Words of the log, or the number that tests of small slots set.
    fn words(&self) -> usize {
        WORDS.max(usize::try_from(self.log.slot().bytes() >> 18).expect("small"))
    }

    pub(super) fn clear(&mut self, pages: impl IntoIterator<Item = u64>) {
        let mut words = vec![0; self.words()];
        let pages: Vec<u64> = pages.into_iter().collect();
        pages.iter().for_each(|page| words[(page / 64) as usize] |= 1 << (page % 64));
        let Self { guest, pool, log, rounds, .. } = self;
        let cleared = rounds.clear(log, guest.walk(pool), 0, &words);
        assert!(flush(cleared, pool).pages().eq(pages));
    }

    pub(super) fn clear_all(&mut self) {
        let dirty = self.dirty();
        self.clear(dirty);
    }
}

/// The formats, and what records writes there.
pub(super) fn each_machine(source: Option<Source>, mut test: impl FnMut(&mut dyn FnMut(Policy) -> Case)) {
    let sources = [Source::WriteProtect, Source::Hardware, Source::Listed];
    for source in sources.into_iter().filter(|one| source.is_none_or(|wanted| wanted == *one)) {
        test(&mut |policy| Case::Nested(Logged::new(NPT, source, policy)));
        let ept = Ept { accessed_dirty: source.is_hardware(), ..EPT };
        test(&mut |policy| Case::Extended(Logged::new(ept, source, policy)));
        // No list of Arm's is known here.
        for bbm in (0..=2).filter(|_| source != Source::Listed) {
            test(&mut |policy| {
                let format = arm(bbm);
                let format = if source == Source::Hardware { format.with_recorded_writes() } else { format };
                Case::Arm(Logged::new(format, source, policy))
            });
        }
    }
}

pub(super) enum Case {
    Nested(Logged<Npt>),
    Extended(Logged<Ept>),
    Arm(Logged<Vmsa>),
}

/// Runs the same lines for either format.
macro_rules! on {
    ($case:expr, $logged:ident => $body:block) => {
        match $case {
            Case::Nested(mut $logged) => $body,
            Case::Extended(mut $logged) => $body,
            Case::Arm(mut $logged) => $body,
        }
    };
}
pub(super) use on;

#[test]
fn each_written_large_page_takes_one_fault_and_cold_ones_stay_whole() {
    each_machine(Some(Source::Hardware), |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            assert!(logged.dirty().is_empty());
            let left = logged.spare.count();
            assert_eq!(logged.write(3), 1);
            for page in [4, 3, 511, 0] {
                assert_eq!(logged.write(page), 0, "page {page} is recorded by the hardware");
            }
            assert_eq!(logged.write(2 * LARGE + 7), 1);
            assert_eq!(logged.dirty(), [0, 3, 4, 511, 2 * LARGE + 7]);
            assert_eq!(left - logged.spare.count(), 2, "one table for each written large page");
            assert_eq!(leaf_at(&logged.guest, &logged.pool, SLOT_START + 2 * MIB).map(|leaf| leaf.level), Some(1));

            // The second round costs the guest nothing.
            logged.clear_all();
            assert!(logged.dirty().is_empty());
            assert_eq!(logged.write(4), 0);
            assert_eq!(logged.dirty(), [4]);
        });
    });
}

#[test]
fn lazy_log_takes_one_fault_for_each_written_page_of_a_round() {
    each_machine(None, |make| {
        on!(make(Policy::Lazy), logged => {
            logged.start(Start::Clean);
            for page in [3, 4, LARGE] {
                assert!(logged.write(page) > 0);
                assert_eq!(logged.write(page), 0);
            }
            assert_eq!(logged.dirty(), [3, 4, LARGE]);
            assert_eq!(leaf_at(&logged.guest, &logged.pool, SLOT_START + 9 * 4096).map(|leaf| leaf.access), Some(Access::ALL));
        });
    });
}

#[test]
fn without_a_spare_table_the_whole_large_page_counts_as_written() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            core::mem::take(&mut logged.spare).give_back(&logged.pool);
            assert_eq!(logged.write(LARGE + 3), 1);
            assert_eq!(logged.write(LARGE + 4), 0);
            assert!(logged.dirty().into_iter().eq(LARGE..2 * LARGE));
        });
    });
}

#[test]
fn what_is_not_cleared_of_a_large_page_stays_dirty() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::AllDirty);
            assert_eq!(logged.dirty().len(), 4 * 512);
            logged.clear([5, 70, LARGE - 1]);
            let dirty = logged.dirty();
            assert_eq!(dirty.len(), 4 * 512 - 3);
            assert!(![5, 70, LARGE - 1].iter().any(|page| dirty.contains(page)));
            let _ = logged.write(70);
            assert!(logged.dirty().contains(&70), "it was write-protected");
        });
    });
}

#[test]
fn what_was_lost_is_dirty_again_and_what_was_received_is_not() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            let _ = logged.write(3);
            logged.clear_all();
            logged.rounds.cancel(&logged.log, || {});
            assert_eq!(logged.dirty(), [3]);
            logged.clear_all();
            logged.rounds.acknowledge(|| {});
            logged.rounds.cancel(&logged.log, || {});
            assert!(logged.dirty().is_empty());
        });
    });
}

#[test]
fn hypervisors_own_writes_are_dirty_in_the_slot_and_nowhere_else() {
    let mut logged = Logged::new(NPT, Source::Hardware, Policy::Adaptive);
    logged.start(Start::Clean);
    let here = GpaRange::new(Gpa(SLOT_START + 0x3ffe), 4).expect("a range");
    assert_eq!(logged.log.write_as_host(here, || 7), 7);
    assert_eq!(logged.dirty(), [3, 4], "it reaches over a border");
    logged.clear_all();
    let walkers = Epochs::new([Walker::new()]);
    let walking = walkers.enter(0).expect("is away");
    assert_eq!(logged.log.write_as_walker(&walking, here, || 8), 8);
    assert_eq!(logged.dirty(), [3, 4], "the same by a walker");
    logged.clear_all();
    logged.log.mark(range(0, SLOT_START + 4096));
    logged.log.mark(range(SLOT_START + 8 * MIB - 4096, GIB));
    logged.log.mark(range(64 * GIB, GIB));
    assert_eq!(logged.dirty(), [0, 4 * LARGE - 1]);
}

#[test]
fn page_that_loses_the_right_to_be_written_stays_dirty() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            let _ = logged.write(3);
            let page = Gpa(SLOT_START + 0x3000);
            assert!(!logged.guest.protect_page(&logged.pool, page, Access::READ).expect("no table needed").is_empty());
            assert_eq!(logged.dirty(), [3]);
            logged.clear_all();
            assert!(logged.dirty().is_empty());
        });
    });
}

#[test]
fn what_is_wanted_beyond_the_end_of_the_slot_is_not_there() {
    let mut logged = Logged::of(NPT, Source::Hardware, Policy::Lazy, range(SLOT_START, 3 * 4096));
    logged.start(Start::AllDirty);
    assert_eq!(logged.dirty(), [0, 1, 2]);
    let Logged { guest, pool, log, rounds, .. } = &mut logged;
    let cleared = rounds.clear(log, guest.walk(pool), 0, &[u64::MAX; WORDS]);
    assert!(flush(cleared, pool).pages().eq(0..3));
    let nowhere = rounds.clear(log, guest.walk(pool), usize::MAX, &[u64::MAX; WORDS]);
    assert_eq!(flush(nowhere, pool).pages().count(), 0);
    assert!(logged.dirty().is_empty());
    logged.rounds.cancel(&logged.log, || {});
    assert_eq!(logged.dirty(), [0, 1, 2]);
}

#[test]
fn page_that_is_mapped_while_the_log_runs_is_dirty() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            let page = range(SLOT_START + 0x7000, 4096);
            let _ = logged.guest.unmap(&logged.pool, page).expect("tables");
            logged.log.mark(page);
            assert_eq!(logged.dirty(), [7]);
            logged.clear_all();
            let _ = logged.guest.map(&logged.pool, page, Hpa(4 * GIB), Access::ALL).expect("maps");
            assert_eq!(logged.dirty(), [7]);
        });
    });
}

#[test]
fn large_page_over_the_border_of_a_slot_is_split_and_what_is_outside_is_not_logged() {
    let slot = range(SLOT_START + MIB, 4 * MIB);
    let mut logged = Logged::of(arm(0), Source::WriteProtect, Policy::Adaptive, slot);
    logged.start(Start::Clean);
    assert_eq!(logged.write_at(SLOT_START + MIB - 1, Granularity::WriteProtected), 0);
    assert_eq!(logged.write_at(SLOT_START + 5 * MIB, Granularity::WriteProtected), 0);
    assert_eq!(logged.write(0), 1);
    assert_eq!(logged.dirty(), [0]);
    assert_eq!(leaf_at(&logged.guest, &logged.pool, SLOT_START + 3 * MIB).map(|leaf| leaf.level), Some(1), "inside");
}

#[test]
fn eager_split_takes_one_flush_for_many_large_pages() {
    for (bbm, flushes) in [(0, 1), (1, 1), (2, 0)] {
        let mut logged = Logged::new(arm(bbm).with_recorded_writes(), Source::Hardware, Policy::Eager);
        logged.start(Start::Clean);
        logged.pool.flushes.set(0);
        let Logged { guest, pool, log, spare, .. } = &mut logged;
        let (owed, next) = log.split_ahead(guest.walk(pool), Gpa(0), spare);
        assert_eq!(next, log.slot().end());
        assert_eq!((pool.flushes.get(), owed.is_empty()), (flushes, bbm == 0), "level {bbm}");
        assert!((0..4).all(|large| logged.write(large * LARGE) == 0), "the hardware watches");
        assert_eq!(logged.dirty(), [0, LARGE, 2 * LARGE, 3 * LARGE]);
    }
}

#[test]
fn eager_split_stops_where_its_tables_end_and_goes_on_from_there() {
    let mut logged = Logged::new(NPT, Source::Hardware, Policy::Eager);
    logged.start(Start::Clean);
    core::mem::take(&mut logged.spare).give_back(&logged.pool);
    let mut from = Gpa(0);
    for number in 1..=4 {
        logged.spare.fill(&logged.pool, 1).expect("pool");
        let Logged { guest, pool, log, spare, .. } = &mut logged;
        let (owed, next) = log.split_ahead(guest.walk(pool), from, spare);
        assert!(owed.is_empty());
        assert_eq!(next, Gpa(SLOT_START + number * 2 * MIB));
        from = next;
    }
}

#[test]
fn after_the_log_has_ended_the_guest_writes_freely() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            let _ = logged.write(3);
            logged.clear_all();
            logged.log.stop(logged.guest.walk(&logged.pool));
            assert!([3, 4, LARGE, 2 * LARGE].into_iter().all(|page| logged.write(page) == 0));
        });
    });
}

#[derive(Clone, Debug)]
enum Step {
    GuestWrites(u64),
    HostWrites(u64),
    Protects(u64, bool),
    Clears(Vec<u64>),
    Cancels,
    Acknowledges,
    SplitsAhead,
}

fn any_step() -> impl Strategy<Value = Step> {
    let page = || prop_oneof![0..4_u64, 510..514_u64, 1023..1026_u64, 0..4 * LARGE];
    prop_oneof![
        4 => page().prop_map(Step::GuestWrites),
        1 => page().prop_map(Step::HostWrites),
        1 => (page(), any::<bool>()).prop_map(|(page, write)| Step::Protects(page, write)),
        2 => prop::collection::btree_set(page(), 0..6).prop_map(|pages| Step::Clears(pages.into_iter().collect())),
        1 => Just(Step::Cancels),
        1 => Just(Step::Acknowledges),
        1 => Just(Step::SplitsAhead),
    ]
}

/// A page that is dirty in the model is dirty in the log. The log may have more, but no page that was cleared and has
/// no write near it.
fn follow<F: Hardware>(
    mut logged: Logged<F>,
    from: Start,
    steps: &[Step],
) -> Result<(), proptest::test_runner::TestCaseError> {
    logged.start(from);
    let mut dirty: BTreeSet<u64> = if from == Start::AllDirty { (0..4 * LARGE).collect() } else { BTreeSet::new() };
    let mut sent = BTreeSet::new();
    let mut read_only = BTreeSet::new();
    for step in steps {
        match step {
            Step::GuestWrites(page) if read_only.contains(page) => {}
            Step::GuestWrites(page) => {
                let _ = logged.write(*page);
                dirty.insert(*page);
            }
            Step::HostWrites(page) => {
                logged.log.write_as_host(range(SLOT_START + (page << 12), 1), || {});
                dirty.insert(*page);
            }
            Step::Protects(page, write) => {
                let access = if *write { Access::ALL } else { Access::READ };
                let gpa = Gpa(SLOT_START + (page << 12));
                if logged.guest.protect_page(&logged.pool, gpa, access).is_ok() {
                    if *write {
                        read_only.remove(page)
                    } else {
                        read_only.insert(*page)
                    };
                }
            }
            Step::Clears(pages) => {
                logged.clear(pages.iter().copied());
                pages.iter().for_each(|page| {
                    if dirty.remove(page) {
                        sent.insert(*page);
                    }
                });
            }
            Step::Cancels => {
                logged.rounds.cancel(&logged.log, || {});
                dirty.append(&mut sent);
            }
            Step::Acknowledges => {
                logged.rounds.acknowledge(|| {});
                sent.clear();
            }
            Step::SplitsAhead => {
                let Logged { guest, pool, log, spare, .. } = &mut logged;
                let _ = log.split_ahead(guest.walk(pool), Gpa(0), spare);
            }
        }
        let found: BTreeSet<u64> = logged.dirty().into_iter().collect();
        prop_assert!(dirty.is_subset(&found), "{:?} are lost by {:?}", dirty.difference(&found), step);
    }
    logged.clear_all();
    prop_assert!(logged.dirty().is_empty(), "cleared is clean");
    logged.rounds.acknowledge(|| {});
    logged.spare.give_back(&logged.pool);
    logged.guest.destroy(&logged.pool);
    prop_assert!(logged.pool.left() == 24, "a table is lost");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn log_never_says_less_than_a_set_of_pages(
        steps in prop::collection::vec(any_step(), 1..40), all_dirty: bool, bbm in 0..=2_u32, kind in 0..3,
        source in prop_oneof![Just(Source::WriteProtect), Just(Source::Hardware), Just(Source::Listed)],
        policy in prop_oneof![Just(Policy::Lazy), Just(Policy::Eager), Just(Policy::Adaptive)],
    ) {
        let from = if all_dirty { Start::AllDirty } else { Start::Clean };
        let hardware = source.is_hardware();
        let format = if hardware { arm(bbm).with_recorded_writes() } else { arm(bbm) };
        match kind {
            0 => follow(Logged::new(NPT, source, policy), from, &steps)?,
            1 => follow(Logged::new(Ept { accessed_dirty: hardware, ..EPT }, source, policy), from, &steps)?,
            _ => follow(Logged::new(format, source, policy), from, &steps)?,
        }
    }
}

//! Corner cases, and random plans and requests against sets of pages.

extern crate std;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

use crate::requests::WORDS;
use crate::{CpuSet, CutOff, Flush, Outcome, Pages, Plan, Presence, Requests, run};

const CUT_OFF: CutOff = CutOff::new(33, 48);
const TOP_PAGE: u64 = !0xfff;
/// The first and the last address of the hole between the two halves, with 48 bits.
const HOLE: u64 = 1 << 47;
const UPPER_HALF: u64 = !0 << 47;

fn pages(first: u64, count: u64) -> Flush {
    Flush::Pages(Pages::new(first, count))
}

/// What a vCPU with these requests must flush: everything, or the runs.
fn taken(requests: &Requests) -> Result<Vec<Flush>, Whole> {
    let taken = requests.take();
    if taken.whole() { Err(Whole) } else { Ok(taken.map(Flush::Pages).collect()) }
}

#[derive(Debug, PartialEq, Eq)]
struct Whole;

fn plan(cut_off: CutOff, runs: &[(u64, u64)]) -> Vec<Flush> {
    let mut plan = Plan::new(cut_off);
    runs.iter().for_each(|&(first, count)| plan.add(Pages::new(first, count)));
    assert_eq!(plan.is_empty(), plan.flushes().count() == 0);
    assert_eq!(plan.is_whole(), plan.flushes().any(|flush| flush == Flush::Whole));
    plan.flushes().collect()
}

#[test]
fn run_of_pages_has_a_whole_first_page_and_1_to_4096_pages() {
    assert_eq!(Pages::new(0x1fff, 3), Pages::new(0x1000, 3));
    assert_eq!((Pages::new(0x1fff, 3).first(), Pages::new(0x1fff, 3).count()), (0x1000, 3));
    assert_eq!(Pages::new(0, 0).count(), 1);
    assert_eq!(Pages::new(TOP_PAGE, u64::MAX).count(), 4096);
}

#[test]
fn every_run_in_an_address_space_is_taken_as_it_was_asked() {
    for first in [0, 0x1000, HOLE - 0x1000, UPPER_HALF, TOP_PAGE - 0x1000, TOP_PAGE] {
        for count in [1, 2, 511, 512, 4094] {
            let requests = Requests::new();
            requests.ask(pages(first, count));
            assert_eq!(taken(&requests), Ok(vec![pages(first, count)]), "{count} pages from {first:#x} on");
        }
    }
}

#[test]
fn run_that_no_word_can_hold_is_everything() {
    for count in [4095, 4096] {
        let requests = Requests::new();
        requests.ask(pages(TOP_PAGE, count));
        assert_eq!(taken(&requests), Err(Whole));
    }
}

#[test]
fn take_leaves_nothing_behind() {
    let requests = Requests::new();
    assert_eq!(taken(&requests), Ok(vec![]));
    requests.ask(pages(0, 1));
    requests.ask(Flush::Whole);
    requests.ask(pages(0x5000, 1));
    assert_eq!(taken(&requests), Err(Whole));
    assert_eq!(taken(&requests), Ok(vec![]));
}

#[test]
fn one_request_more_than_there_are_words_is_everything() {
    let requests = Requests::new();
    let asked: Vec<_> = (0..WORDS as u64).map(|at| pages(at << 20, at + 1)).collect();
    asked.iter().for_each(|&flush| requests.ask(flush));
    asked.iter().for_each(|&flush| requests.ask(flush));
    assert_eq!(taken(&requests), Ok(asked.clone()), "what is there already takes no word");

    asked.iter().for_each(|&flush| requests.ask(flush));
    requests.ask(pages(0, 2));
    assert_eq!(taken(&requests), Err(Whole));
    assert_eq!(taken(&requests), Ok(vec![]));
}

#[test]
fn plan_with_nothing_that_a_guest_can_use_is_empty() {
    assert_eq!(plan(CUT_OFF, &[]), []);
    assert_eq!(plan(CUT_OFF, &[(HOLE, 4096), (HOLE + 0x7000, 1), (UPPER_HALF - 0x1000, 1)]), []);
}

#[test]
fn plan_leaves_out_what_lies_in_the_hole_or_behind_the_end() {
    let of = |first, count| plan(CUT_OFF, &[(first, count)]);
    assert_eq!(of(HOLE - 0x2000, 5), [pages(HOLE - 0x2000, 2)]);
    assert_eq!(of(UPPER_HALF - 0x2000, 5), [pages(UPPER_HALF, 3)]);
    assert_eq!(of(TOP_PAGE - 0x1000, 5), [pages(TOP_PAGE - 0x1000, 2)]);
    assert_eq!(of(TOP_PAGE, 4096), [pages(TOP_PAGE, 1)]);
    assert_eq!(of(0, 2), [pages(0, 2)]);
}

#[test]
fn plan_for_57_bits_has_a_smaller_hole() {
    let cut_off = CutOff::new(33, 57);
    assert_eq!(plan(cut_off, &[(HOLE, 1), ((1 << 56) - 0x1000, 2)]), [pages(HOLE, 1), pages((1 << 56) - 0x1000, 1)]);
    assert_eq!(plan(cut_off, &[(1 << 56, 1), (!0 << 56, 1)]), [pages(!0 << 56, 1)]);
}

#[test]
fn plan_is_everything_from_one_page_above_the_cut_off() {
    let cut_off = CutOff::new(8, 48);
    assert_eq!(plan(cut_off, &[(0x1000, 8)]), [pages(0x1000, 8)]);
    assert_eq!(plan(cut_off, &[(0x1000, 9)]), [Flush::Whole]);
    assert_eq!(plan(cut_off, &[(0x1000, 7), (0x9000, 1)]), [pages(0x1000, 7), pages(0x9000, 1)]);
    assert_eq!(plan(cut_off, &[(0x1000, 7), (0x9000, 2), (0x20_0000, 1)]), [Flush::Whole]);
    assert_eq!(plan(CutOff::new(0, 48), &[(0x1000, 1)]), [Flush::Whole]);
}

#[test]
fn plan_that_covers_a_large_page_is_everything_whatever_the_cut_off() {
    let cut_off = CutOff::new(u64::MAX, 48);
    assert_eq!(plan(cut_off, &[(0x20_0000, 511)]), [pages(0x20_0000, 511)]);
    assert_eq!(plan(cut_off, &[(0x20_0000, 512)]), [Flush::Whole]);
    assert_eq!(plan(cut_off, &[(0x20_0000, 256), (0x30_0000, 256)]), [Flush::Whole]);
}

#[test]
fn plan_merges_runs_that_follow_each_other_and_has_no_more_than_there_are_words() {
    let adjacent: Vec<_> = (0..33).map(|page| (page << 12, 1)).collect();
    assert_eq!(plan(CUT_OFF, &adjacent), [pages(0, 33)]);
    let apart: Vec<_> = (0..WORDS as u64).map(|at| (at << 13, 1)).collect();
    assert_eq!(plan(CUT_OFF, &apart).len(), WORDS);
    assert_eq!(plan(CUT_OFF, &[apart, vec![(1 << 40, 1)]].concat()), [Flush::Whole]);
    assert_eq!(plan(CUT_OFF, &[(TOP_PAGE, 1), (0, 1)]), [pages(TOP_PAGE, 1), pages(0, 1)], "0 is not behind the end");
}

#[test]
fn whole_plan_stays_whole() {
    let mut plan = Plan::whole();
    plan.add(Pages::new(0, 1));
    assert!(plan.is_whole() && !plan.is_empty());
    assert_eq!(plan.flushes().collect::<Vec<_>>(), [Flush::Whole]);
}

#[test]
fn presence_tells_stays_apart() {
    let presence = Presence::new();
    assert!(!presence.look().is_inside() && !presence.is_inside());

    presence.enter(63);
    let first = presence.look();
    assert!(presence.is_inside() && first.is_inside() && first.needs_kick());
    assert_eq!(first.cpu(), 63);
    presence.leave();
    assert!(!presence.look().is_inside());
    presence.enter(63);
    assert_ne!(presence.look(), first, "it was out meanwhile");

    presence.leave();
    presence.emulate(2);
    assert!(presence.look().is_inside() && !presence.look().needs_kick() && !presence.is_inside());
    assert_eq!(presence.look().cpu(), 2);
}

#[test]
fn cpu_set_holds_numbers_0_to_63() {
    let mut set = CpuSet::new();
    assert!(set.is_empty() && set.first().is_none());
    for cpu in [63, 0, 7, 7, 64, u32::MAX] {
        set.insert(cpu);
    }
    assert_eq!(set.iter().collect::<Vec<_>>(), [0, 7, 63]);
    assert!(set.contains(63) && !set.contains(64) && !set.contains(u32::MAX));
    set.remove(0);
    set.remove(64);
    assert_eq!((set.len(), set.first()), (2, Some(7)));
}

/// The steps of one shootdown, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Publish,
    Kick(Vec<u32>),
    Meanwhile,
    Wait,
}

/// Runs a shootdown of `targets`. At each read after the first, `relax` may change them.
fn steps_of(targets: &[Presence], relax: impl Fn()) -> (Vec<Step>, Outcome) {
    let steps = RefCell::new(vec![]);
    let log = |step| steps.borrow_mut().push(step);
    let outcome = run(
        targets.iter(),
        |target| target,
        |_| log(Step::Publish),
        |cpus| log(Step::Kick(cpus.iter().collect())),
        || log(Step::Meanwhile),
        |_| {
            log(Step::Wait);
            relax();
        },
    );
    (steps.into_inner(), outcome)
}

#[test]
fn targets_outside_are_neither_kicked_nor_waited_for() {
    let targets = [Presence::new(), Presence::new()];
    targets[1].enter(3);
    targets[1].leave();
    let (steps, outcome) = steps_of(&targets, || panic!("nobody to wait for"));
    assert_eq!(steps, [Step::Publish, Step::Publish, Step::Meanwhile]);
    assert_eq!(outcome, Outcome { targets: 2, kicked: 0, pcpus: 0 });
}

#[test]
fn without_targets_there_is_still_the_callers_own_flush() {
    let (steps, outcome) = steps_of(&[], || panic!("nobody to wait for"));
    assert_eq!(steps, [Step::Meanwhile]);
    assert_eq!(outcome, Outcome::default());
}

#[test]
fn those_inside_are_kicked_once_all_together_and_waited_for_until_they_leave() {
    let targets = [Presence::new(), Presence::new(), Presence::new()];
    targets[0].enter(5);
    targets[2].enter(63);
    let looks = Cell::new(0);
    let (steps, outcome) = steps_of(&targets, || {
        looks.set(looks.get() + 1);
        match looks.get() {
            2 => targets[0].leave(),
            // Left and entered again counts as left: it has met its request.
            4 => {
                targets[2].leave();
                targets[2].enter(63);
            }
            _ => {}
        }
    });
    let mut expected = vec![Step::Publish; 3];
    expected.extend([Step::Kick(vec![5, 63]), Step::Meanwhile]);
    expected.extend(vec![Step::Wait; 4]);
    assert_eq!(steps, expected);
    assert_eq!(outcome, Outcome { targets: 3, kicked: 2, pcpus: 2 });
}

#[test]
fn emulated_instruction_is_waited_for_and_not_kicked() {
    let targets = [Presence::new()];
    targets[0].emulate(1);
    let (steps, outcome) = steps_of(&targets, || targets[0].leave());
    assert_eq!(steps, [Step::Publish, Step::Meanwhile, Step::Wait]);
    assert_eq!(outcome, Outcome { targets: 1, kicked: 1, pcpus: 0 });
}

/// The second is first read when the first has left its place.
#[test]
fn of_two_seen_on_one_pcpu_neither_is_waited_for_any_more() {
    let targets = [Presence::new(), Presence::new()];
    targets[0].enter(4);
    let looked = Cell::new(0);
    let presence = |&at: &usize| {
        if looked.replace(1) == 1 {
            targets[0].leave();
            targets[1].enter(4);
        }
        &targets[at]
    };
    let nobody = |_| panic!("the first has left, and the second entered after the request");
    let outcome = run([0, 1].iter(), presence, |_| {}, |_| {}, || {}, nobody);
    assert_eq!(outcome, Outcome { targets: 2, kicked: 1, pcpus: 1 });
}

/// GVAs near the corners of an address space of 48 bits, and anywhere.
fn gvas() -> impl Strategy<Value = u64> {
    let corners = [0, HOLE, UPPER_HALF, TOP_PAGE, 0x20_0000];
    let corner = prop::sample::select(corners.to_vec());
    let near = (corner, -20_i64..20).prop_map(|(corner, pages)| corner.wrapping_add_signed(pages << 12));
    prop_oneof![4 => near, 1 => any::<u64>()]
}

fn runs(most: usize) -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((gvas(), prop_oneof![4 => 1..8_u64, 1 => Just(512), 1 => 1..5000_u64]), 0..most)
}

/// Numbers of the run's pages with canonical addresses.
fn usable(&(first, count): &(u64, u64)) -> impl Iterator<Item = u64> {
    let first = first >> 12;
    (first..first + count.clamp(1, 4096)).filter(|page| matches!(page >> 35, 0 | 0x1_ffff) && page >> 52 == 0)
}

proptest! {
    #[test]
    fn plan_flushes_exactly_what_was_asked_or_everything(asked in runs(10), cut_off in 0_u64..1000) {
        let mut plan = Plan::new(CutOff::new(cut_off, 48));
        asked.iter().for_each(|&(first, count)| plan.add(Pages::new(first, count)));

        let wanted: BTreeSet<_> = asked.iter().flat_map(usable).collect();
        let lengths: Vec<_> = asked.iter().map(|run| usable(run).count()).filter(|&length| length > 0).collect();
        if plan.is_whole() {
            let total: usize = lengths.iter().sum();
            let has_reason = total as u64 > cut_off || lengths.len() > WORDS || total >= 512;
            prop_assert!(has_reason, "everything goes for {total} pages in {} runs", lengths.len());
        } else {
            let mut flushed = BTreeSet::new();
            for flush in plan.flushes() {
                let Flush::Pages(run) = flush else { panic!("it is not whole") };
                prop_assert!(run.first().checked_add((run.count() - 1) << 12).is_some());
                flushed.extend((0..run.count()).map(|page| (run.first() >> 12) + page));
            }
            prop_assert_eq!(&flushed, &wanted);
            prop_assert!(flushed.len() as u64 <= cut_off && plan.flushes().count() <= WORDS);
        }
        prop_assert_eq!(plan.is_empty(), wanted.is_empty() && !plan.is_whole());
    }

    #[test]
    fn what_was_asked_is_taken_once(rounds in prop::collection::vec(runs(12), 1..5)) {
        let requests = Requests::new();
        for asked in rounds {
            asked.iter().for_each(|&(first, count)| requests.ask(pages(first, count)));
            let wanted: BTreeSet<_> = asked.iter().map(|&(first, count)| Pages::new(first, count)).map(key).collect();
            match taken(&requests) {
                Ok(found) => {
                    let found: Vec<_> = found.into_iter().map(|flush| match flush {
                        Flush::Pages(pages) => key(pages),
                        Flush::Whole => panic!("it is not whole"),
                    }).collect();
                    prop_assert!(found.len() <= wanted.len(), "something was taken twice");
                    prop_assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
                }
                Err(Whole) => {
                    let unsayable = wanted.iter().any(|&(first, count)| first == TOP_PAGE && count >= 4095);
                    prop_assert!(wanted.len() > WORDS || unsayable);
                }
            }
        }
    }
}

fn key(pages: Pages) -> (u64, u64) {
    (pages.first(), pages.count())
}

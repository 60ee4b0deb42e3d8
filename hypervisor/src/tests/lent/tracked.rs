//! The dirty log of a child, which its parent harvests while it takes pages away and gives others.

use interleave::STEPS;
use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::{Answer, Code, Control, Status};
use interleave::Schedules;
use partition::Entry;
use stage2::{Access, Fault};

use super::{
    DONE, FIXED, Family, LARGE, LENT, NO_ACCESS, OF_FIXED, OF_LENT, OUTPUT, READ_ONLY, RIGHTS, UNMAP_LARGE, all, bytes,
    writer, written_for,
};
use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::platform;
use crate::arch::fake::program::Op;
use crate::sync::relax;
use crate::tests::{RANDOM_SEED, Scenario, beside_others, explore};
use crate::vm::address_space::NoTlb;
use crate::vm::dirty::comeback;

const TRACKING: u64 = 0x5_0005;
const CLEAR_ACCESSED: u64 = 1;
const SET_ACCESSED: u64 = 2;
const CLEAR: u64 = 4;
/// As Linux sets, and as it does nothing: with "accessed".
const SET: u64 = 0xa;
const ACCESSED: u8 = 1;
const DIRTY: u8 = 2;

impl Family<'_> {
    fn track(&self, is_on: bool) -> Answer {
        self.call(Code::SetPartitionProperty, 0, &bytes(&[self.id, TRACKING, is_on.into()]))
    }

    /// The states of these pages.
    fn states(&self, first: u64, count: u16, flags: u64) -> Vec<u8> {
        let answer = self.call(Code::GetGpaPagesAccessStates, count, &bytes(&[self.id, flags, first]));
        assert_eq!(answer, all(count));
        let mut states = vec![0; count.into()];
        assert!(self.parent.memory.read(Gpa(OUTPUT * PAGE_BYTES), &mut states));
        states
    }

    /// The dirty ones among these pages.
    fn dirty(&self, first: u64, count: u16, flags: u64) -> Vec<u64> {
        let states = self.states(first, count, flags);
        (first..).zip(states).filter(|(_, state)| state & DIRTY != 0).map(|(page, _)| page).collect()
    }

    /// A write of the child to a page that is there, as the hardware does it. Returns whether it may write.
    fn write_as_guest(&self, page: u64) -> bool {
        let child = self.child();
        let memory = &child.memory;
        let gpa = Gpa(page * PAGE_BYTES);
        let walking = memory.announce(crate::cpu::this().id);
        let walk = memory.tree().walk(memory.tables(), &NoTlb, &walking);
        match walk.fault(gpa, Access::READ_WRITE, memory.granularity()) {
            Fault::Unmapped | Fault::Denied(_) => return false,
            Fault::Large => memory.split_lent(walk, gpa, Access::READ_WRITE),
            Fault::Retry(_) => {}
        }
        walk.mark_written(gpa)
    }
}

/// A page of one vCPU, which stays.
const OWN: u64 = 2;
const OF_OWN: u64 = OF_LENT + 2;
/// Pages of the child.
const COUNT: u16 = 3;

/// A word on the page that stays, by which the parent tells how often it has read the log.
const GO: u64 = 0x180;
const TURNS: u64 = 2;

/// Writes to the page that moves, and then, in turn with the parent, to the vCPU's own.
fn writes(number: u64) -> Vec<Op> {
    let mut ops = writer(number);
    let end = ops.split_off(ops.len() - 2);
    let turn = |value| [Op::Write(OWN * PAGE_BYTES, value), Op::Await(GO, value)];
    ops.into_iter().chain((1..=TURNS).flat_map(turn)).chain([Op::Write(OWN * PAGE_BYTES, !0)]).chain(end).collect()
}

/// Where the lent page is in the parent, in turn.
const HOMES: [u64; 2] = [OF_LENT, OF_LENT + 1];

type Copies = [[u8; 4096]; COUNT as usize];

/// A copy of the child's memory that follows its log is right in the end.
pub(in crate::tests) const HARVESTED: Scenario = Scenario {
    name: "a parent copies a child's memory while it moves a page",
    cpus: 2,
    count: 200,
    steps: STEPS,
    script: harvested,
};

/// The same, where pCPUs list their writes.
pub(in crate::tests) const HARVESTED_BY_LIST: Scenario = Scenario {
    name: "a parent copies a child's memory, whose writes are listed",
    script: |simulation| {
        simulation.list_writes();
        harvested(simulation);
    },
    ..HARVESTED
};

fn harvested(simulation: &Simulation) {
    let family = Family::new(simulation, vec![writes(0), written_for(1)]);
    assert_eq!(family.map(FIXED, RIGHTS, &[OF_FIXED, OF_LENT, OF_OWN]), all(COUNT));
    assert_eq!(family.track(true), all(0));
    let mut copies = [[0; 4096]; COUNT as usize];
    let copy = |copies: &mut Copies, page: u64, home: u64| {
        let from = [OF_FIXED, home, OF_OWN][usize::try_from(page).expect("one of three")];
        let into = &mut copies[usize::try_from(page).expect("one of three")];
        assert!(family.parent.memory.read(Gpa(from * PAGE_BYTES), into), "page {from:#x} is not there");
    };
    let harvest = |copies: &mut Copies, home| {
        family.dirty(FIXED, COUNT, CLEAR).into_iter().for_each(|page| copy(copies, page, home));
    };
    let mut home = HOMES[0];
    harvest(&mut copies, home);
    family.start();
    for round in 0..2 {
        // The page moves, and the log is read before, in between or after.
        assert_eq!(family.map(LENT, NO_ACCESS, &[0]), all(1));
        if round % 3 == 1 {
            harvest(&mut copies, home);
        }
        let next = HOMES[usize::from(home == HOMES[0])];
        let mut content = [0; 4096];
        assert!(family.parent.memory.read(Gpa(home * PAGE_BYTES), &mut content));
        assert!(family.parent.memory.write(Gpa(next * PAGE_BYTES), &content));
        assert_eq!(family.map(LENT, RIGHTS, &[next]), all(1));
        home = next;
        family.serve();
        (0..8).for_each(|_| relax());
        if round % 3 != 1 {
            harvest(&mut copies, home);
        }
    }
    let is_done = |number: u64| family.word(OF_FIXED, DONE + 8 * number) != 0;
    for turn in 1..=TURNS {
        simulation.wait_until("the vCPU has its turn", || {
            family.serve();
            family.word(OF_OWN, 0) == turn
        });
        harvest(&mut copies, home);
        family.write(OF_FIXED, GO, turn);
    }
    simulation.wait_until("both vCPUs have ended", || {
        family.serve();
        is_done(0) && is_done(1)
    });
    harvest(&mut copies, home);
    let mut now = copies;
    (0..COUNT.into()).for_each(|page| copy(&mut now, page, home));
    assert!(now == copies, "the copy differs from the child's memory");
    assert_eq!(family.dirty(FIXED, COUNT, 0), [], "nobody writes any more");
    family.end();
}

/// Accessed pages are told beside written ones, whatever is in their word.
fn tell_accessed(simulation: &Simulation) {
    const PAGES: u16 = 3 * 64;
    let family = Family::of_parent(simulation, vec![vec![]], vec![vec![]]);
    assert_eq!(family.deposit(128, 64), all(64));
    let pages: Vec<u64> = (512..).take(PAGES.into()).collect();
    assert_eq!(family.map(0, RIGHTS, &pages), all(PAGES));
    assert_eq!(family.track(true), all(0));
    let _before = family.states(0, PAGES, CLEAR | CLEAR_ACCESSED);
    assert!(family.states(0, PAGES, 0).iter().all(|state| *state == 0), "all were cleared");
    // A word with some, a word with all, and one with some of which some were written.
    let [some, all_of_a_word, last] = [3..7_u64, 64..128, 130..190];
    for range in [&some, &all_of_a_word, &last] {
        let count = u16::try_from(range.end - range.start).expect("few");
        let _before = family.states(range.start, count, SET_ACCESSED);
    }
    let is_written = |page: u64| last.contains(&page) && page.is_multiple_of(7);
    assert!((0..PAGES.into()).filter(|page| is_written(*page)).all(|page| family.write_as_guest(page)));
    let is_accessed = |page: u64| [&some, &all_of_a_word, &last].into_iter().any(|range| range.contains(&page));
    let expected = |page: u64| (u8::from(is_accessed(page)) * ACCESSED) | (u8::from(is_written(page)) * DIRTY);
    // From each place in a word on.
    for first in 0..64 {
        let states = family.states(first, PAGES - 64, 0);
        assert!(states.into_iter().eq((first..).take(usize::from(PAGES) - 64).map(expected)), "from {first}");
    }
    let _before = family.states(0, PAGES, CLEAR_ACCESSED);
    let left = family.states(0, PAGES, 0).into_iter();
    assert!(left.eq((0..PAGES.into()).map(|page| expected(page) & DIRTY)), "only what was written is left");
    assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
    assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
    family.turn_off();
}

#[test]
fn accessed_pages_of_a_child_are_told_beside_written_ones() {
    let _no_mistakes = beside_others();
    run(2, tell_accessed);
}

/// The states of many pages are told piece by piece, because another vCPU's time flies.
fn tell_in_pieces(simulation: &Simulation) {
    const FIRST: u64 = 100;
    let clock = vec![Op::Work(20_000), Op::Jump(0)];
    let family = Family::of_parent(simulation, vec![clock], vec![vec![]]);
    assert_eq!(family.deposit(128, 64), all(64));
    for first in [0, 384, 768, 1152] {
        let pages: Vec<u64> = (512 + first..).take(384).collect();
        assert_eq!(family.map(first, RIGHTS, &pages), all(384));
    }
    assert_eq!(family.track(true), all(0));
    let _all = family.states(0, 3 * 512, CLEAR);
    let written: Vec<u64> = (0..3 * 512).filter(|page| page % 7 == 0).collect();
    assert!(written.iter().all(|page| family.write_as_guest(*page)));
    family.parent.start();
    let count = u16::try_from(3 * 512 - FIRST).expect("few");
    let mut control = Control::new(Code::GetGpaPagesAccessStates).with_rep_count(count);
    let input = bytes(&[family.id, CLEAR, FIRST]);
    let mut pieces = 0;
    let answer = loop {
        match platform::begin_hypercall(&family.parent, control, &input, Gpa(OUTPUT * PAGE_BYTES)) {
            Ok(answer) => break answer,
            Err(next) => control = next,
        }
        pieces += 1;
        assert!((FIRST + u64::from(control.rep_start())).is_multiple_of(512), "{control:?}");
    };
    assert!(answer == all(count) && pieces > 0, "{answer:?} in one piece");
    let mut states = vec![0; count.into()];
    assert!(family.parent.memory.read(Gpa(OUTPUT * PAGE_BYTES), &mut states));
    let told = (FIRST..).zip(states).filter(|(_, state)| state & DIRTY != 0).map(|(page, _)| page);
    assert!(told.eq(written.into_iter().filter(|page| *page >= FIRST)));
    assert_eq!(family.dirty(FIRST, count, 0), [], "all were cleared");
    assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
    assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
    family.turn_off();
}

#[test]
fn states_of_many_pages_are_told_in_pieces() {
    let _no_mistakes = beside_others();
    // Thousands of pages are mapped one by one.
    let told = interleave::find(Schedules::Random, RANDOM_SEED, 40, 20 * STEPS, || run(2, tell_in_pieces));
    assert_eq!(told, Ok(40));
}

/// Pages of the child that calls are about.
const PAGES: u64 = 2_048;

/// Any changes and writes, against the set of pages that were written.
fn against_model(simulation: &Simulation, steps: u32) {
    let family = Family::new(simulation, vec![vec![]]);
    let mut random = fastrand::Rng::with_seed(0x5eed_0004);
    assert_eq!(family.deposit(128, 64), all(64));
    assert_eq!(family.map(0, RIGHTS | LARGE, &[512, 1024, 1536]), all(3));
    let refused = family.call(Code::GetGpaPagesAccessStates, 1, &bytes(&[family.id, CLEAR, 0]));
    assert_eq!(refused, Answer::new(Status::InvalidPartitionState, 0), "nothing is tracked yet");

    assert_eq!(family.track(true), all(0));
    // What was written before is unknown.
    let mut written: BTreeSet<u64> = (0..3 * 512).collect();
    for step in 0..steps {
        let page = random.u64(..PAGES);
        match random.u8(..16) {
            0..4 => {
                let is_large = random.u8(..3) == 0;
                let (first, pages, large) = if is_large { (page & !511, 512, LARGE) } else { (page, 1, 0) };
                let answer = match random.u8(..4) {
                    0 => family.unmap(first, if is_large { UNMAP_LARGE } else { 0 }, 1),
                    1 => family.map(first, NO_ACCESS | large, &[0]),
                    kind => {
                        let source = if is_large { 512 * random.u64(1..8) } else { random.u64(512..4_096) };
                        family.map(first, large | if kind == 2 { READ_ONLY } else { RIGHTS }, &[source])
                    }
                };
                assert_eq!(answer, all(1), "there are deposits enough");
                assert!((first..first + pages).all(|page| family.is_mapped_as_described(page)));
            }
            4..8 => {
                if family.write_as_guest(page) {
                    written.insert(page);
                }
            }
            8..10 => {
                if family.child().memory.write(Gpa(page * PAGE_BYTES), &[1]) {
                    written.insert(page);
                }
            }
            10 => {
                let child = family.child();
                let found = child.memory.find_word(Gpa(page * PAGE_BYTES));
                if found.is_some_and(|word| child.memory.compare_exchange(word, child.memory.load(word, 0), 1)) {
                    written.insert(page);
                } else if matches!(family.described(page), Entry::Page { access, .. } if access.write) {
                    panic!("page {page:#x} is there");
                }
            }
            kind => {
                let count = if random.bool() { random.u16(1..8) } else { random.u16(1..2_048) };
                let flags = match kind {
                    11 => 0,
                    12 => SET,
                    13 => CLEAR | CLEAR_ACCESSED,
                    _ => CLEAR,
                };
                let pages = page..page + u64::from(count);
                let expected: Vec<u64> = written.range(pages.clone()).copied().collect();
                assert_eq!(family.dirty(page, count, flags), expected, "step {step}: {pages:x?}, flags {flags:x}");
                if flags & CLEAR != 0 {
                    written.retain(|page| !pages.contains(page));
                }
                if flags == SET {
                    written.extend(pages.filter(|page| family.described(*page) != Entry::Absent));
                }
            }
        }
        if step % 500 == 499 {
            // Off and on again: what is dirty then is known after it was cleared.
            assert_eq!([family.track(false), family.track(true)], [all(0); 2]);
            let _unknown = family.dirty(0, 4095, CLEAR);
            written.clear();
        }
    }
    let states = family.states(PAGES, 4_095, 0);
    assert!(states.iter().all(|state| *state == 0), "there was never any memory");
    assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
    assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
    family.turn_off();
}

/// The level of the leaf that maps a page.
fn level_of(family: &Family<'_>, page: u64) -> Option<u32> {
    let child = family.child();
    let walking = child.memory.announce(crate::cpu::this().id);
    let walk = child.memory.tree().walk(child.memory.tables(), &NoTlb, &walking);
    walk.lookup(Gpa(page * PAGE_BYTES)).map(|leaf| leaf.level)
}

/// The script is the first pCPU: it does that one's work until this is so.
fn until_back(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..200_000 {
        if is_so() {
            return;
        }
        comeback::work();
        relax();
    }
    panic!("not in time: {what}");
}

/// Large pages are split while they are tracked, and come back afterwards.
fn split_and_come_back(simulation: &Simulation) {
    let family = Family::new(simulation, vec![vec![]]);
    assert_eq!(family.deposit(128, 64), all(64));
    assert_eq!(family.map(0, RIGHTS | LARGE, &[512, 1024, 1536]), all(3));
    // Small pages that are one large page in the parent, and others that are not.
    let adjacent: Vec<u64> = (2048..2560).collect();
    let swapped: Vec<u64> = (2560..3072).map(|page| page ^ 1).collect();
    for (first, pages) in [(2048, &adjacent), (4096, &swapped)] {
        for (number, part) in (0..).zip(pages.chunks(256)) {
            assert_eq!(family.map(first + number * 256, RIGHTS, part), all(256));
        }
    }
    let levels = |family: &Family<'_>| [0, 512, 1024, 2048, 4096].map(|page| level_of(family, page));
    assert_eq!(levels(&family), [Some(1), Some(1), Some(1), Some(0), Some(0)]);
    let in_use = family.child().memory.table_bytes();

    assert_eq!(family.track(true), all(0));
    let _all = family.dirty(0, 4095, CLEAR);
    assert!([7, 513, 1023].into_iter().all(|page| family.write_as_guest(page)));
    assert_eq!(family.dirty(0, 2048, CLEAR), [7, 513, 1023]);
    assert!(family.write_as_guest(8));
    assert_eq!(levels(&family), [Some(0), Some(0), Some(1), Some(0), Some(0)]);
    assert_eq!(family.child().memory.table_bytes(), in_use + 2 * PAGE_BYTES);

    assert_eq!(family.track(false), all(0));
    until_back("large pages are back", || levels(&family)[..4] == [Some(1); 4]);
    assert_eq!(levels(&family)[4], Some(0), "these are no large page");
    until_back("their tables are free", || family.child().memory.table_bytes() == in_use - PAGE_BYTES);
    assert!(family.write_as_guest(1024), "it was write-protected");
    assert!((0..4608).step_by(5).all(|page| family.is_mapped_as_described(page)));
    let (_, collapses) = family.child().memory.dirty_state().counts();
    assert_eq!(collapses, 3);

    // Again, and the child ends in the middle of it.
    assert_eq!(family.track(true), all(0));
    let _all = family.dirty(0, 4095, CLEAR);
    assert!([0, 512, 1024, 2048].into_iter().all(|page| family.write_as_guest(page)));
    assert_eq!(family.dirty(0, 4095, 0), [0, 512, 1024, 2048]);
    assert_eq!(family.track(false), all(0));
    until_back("one is back", || family.child().memory.dirty_state().counts().1 > collapses);
    assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
    assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
    family.turn_off();
}

#[test]
fn large_pages_of_a_child_come_back_after_it_was_tracked() {
    let _no_mistakes = beside_others();
    run(1, split_and_come_back);
}

/// The pages that a vCPU writes to become one large page while it does, and the child ends.
pub(in crate::tests) const COMES_BACK: Scenario = Scenario {
    name: "a parent follows a child's writes for a while, and the child ends",
    cpus: 2,
    count: 200,
    steps: 4 * STEPS,
    script: |simulation| {
        let family = Family::new(simulation, vec![writes_in_turn(0), writes_in_turn(1)]);
        assert_eq!(family.map(0, RIGHTS | LARGE, &[512, 1024]), all(2));
        assert_eq!(family.track(true), all(0));
        let _all = family.dirty(0, 1024, CLEAR);
        family.start();
        simulation.wait_until("one has written", || {
            family.serve();
            family.word(612, 0x400) != 0 || family.word(1124, 0x400) != 0
        });
        let written = family.dirty(0, 1024, CLEAR);
        assert!(written.contains(&100) || written.contains(&612), "{written:?}");
        assert_eq!(family.track(false), all(0));
        let child = family.child();
        until_back("one is back", || {
            family.serve();
            child.memory.dirty_state().counts().1 != 0
        });
        let is_done = |number: u64| family.word(512, DONE + 8 * number) != 0;
        simulation.wait_until("both vCPUs have ended", || {
            family.serve();
            is_done(0) && is_done(1)
        });
        drop(child);
        family.end();
    },
};

/// Writes of a vCPU to three pages of a large one, which it reads again.
fn writes_in_turn(number: u64) -> Vec<Op> {
    let step = |value: u64| {
        let at = (number * 512 + 100 * (value % 3)) * PAGE_BYTES + 0x400;
        [Op::Write(at, value), Op::Expect(at, value), Op::Yield]
    };
    let end = [Op::Write(FIXED * PAGE_BYTES + DONE + 8 * number, 1), Op::Stop];
    (1..=30).flat_map(step).chain(end).collect()
}

/// Small pages become a large one while vCPUs write to them, and the parent takes one of them back.
pub(in crate::tests) const JOINED: Scenario = Scenario {
    name: "a parent maps the small pages of a large one, and takes one back",
    cpus: 2,
    count: 40,
    steps: 20 * STEPS,
    script: |simulation| {
        let family = Family::new(simulation, vec![writes_in_turn(0), writes_in_turn(1)]);
        assert_eq!(family.map(512, RIGHTS | LARGE, &[1024]), all(1));
        let map = |pages: core::ops::Range<u64>| {
            let sources: Vec<u64> = pages.clone().map(|page| 512 + page).collect();
            assert_eq!(family.map(pages.start, RIGHTS, &sources), all(256));
        };
        map(0..256);
        family.start();
        map(256..512);
        let child = family.child();
        let until_large = |times| {
            until_back("it is large", || {
                family.serve();
                child.memory.dirty_state().counts().1 == times
            });
        };
        until_large(1);
        assert_eq!([0, 511].map(|page| level_of(&family, page)), [Some(1); 2]);

        assert_eq!(family.map(300, NO_ACCESS, &[0]), all(1));
        assert_eq!([299, 300].map(|page| level_of(&family, page)), [Some(0), None]);
        assert_eq!(family.map(300, RIGHTS, &[812]), all(1));
        until_large(2);
        let is_done = |number: u64| family.word(512, DONE + 8 * number) != 0;
        simulation.wait_until("both vCPUs have ended", || {
            family.serve();
            is_done(0) && is_done(1)
        });
        assert!((0..512).step_by(5).all(|page| family.is_mapped_as_described(page)));
        drop(child);
        family.end();
    },
};

#[test]
fn small_pages_that_are_a_large_one_are_joined_once_they_are_mapped() {
    explore(JOINED);
}

#[test]
fn child_writes_and_ends_while_its_large_pages_come_back() {
    explore(COMES_BACK);
}

#[test]
fn copy_of_a_childs_memory_follows_its_log_while_a_page_moves() {
    explore(HARVESTED);
    explore(HARVESTED_BY_LIST);
}

#[test]
fn states_of_pages_survive_every_change_of_their_memory() {
    let _no_mistakes = beside_others();
    run(1, |simulation| against_model(simulation, 2_000));
}

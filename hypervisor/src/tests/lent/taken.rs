//! Pages that a parent takes away from a child again and again, by the ten million, while four vCPUs use them.
//!
//! The parent moves pages as Linux' does: it takes one away, or only the right to write, copies it, gives the copy, and
//! uses the page for something else. So two things must hold. Nobody writes to a page after it was taken: it keeps its
//! mark until it is lent again. And each vCPU reads what it has written last, wherever the page is by now.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use std::vec;
use std::vec::Vec;

use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::Code;
use interleave::Schedules;

use super::calls::{Progress, chosen};
use super::{Family, NO_ACCESS, READ_ONLY, RIGHTS, all, bytes};
use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::program::Op;
use crate::mutants::Mutant;
use crate::sync::relax;
use crate::tests::{RANDOM_SEED, Scenario, beside_others, explore, mistakes};

const VCPUS: u64 = 4;
/// Pages of the child that move.
const SLOTS: u64 = 6;
/// Pages of the parent that they are at, and move to.
const POOL: core::ops::Range<u64> = 32..48;
/// Bytes at the beginning of a page that vCPUs use: a line for each.
const USED: usize = 256;
const _: () = assert!(USED as u64 == 64 * VCPUS);
/// Calls that take pages away, in one interleaving.
const TAKEN: u64 = 40;

type Content = [u8; USED];

/// Writes to all pages, by itself and by the hypervisor, and reads what it has written.
fn program(vcpu: u64) -> Vec<Op> {
    let at = |slot: u64| slot * PAGE_BYTES + 64 * vcpu;
    let mut ops = vec![];
    for turn in 0..4 {
        for slot in 0..SLOTS {
            let slot = (slot + vcpu * 2 + turn) % SLOTS;
            let (at, value) = (at(slot), 4 * slot + turn + 1);
            ops.push(Op::Write(at, value));
            match (slot + turn + vcpu) % 4 {
                // This writes the next word as well.
                0 => ops.extend([Op::WriteByHost(at + 16, value), Op::Expect(at + 24, value)]),
                1 => ops.extend([Op::Owe(at + 32, value), Op::Expect(at + 32, value)]),
                2 => ops.push(Op::Yield),
                _ => {}
            }
            ops.push(Op::Expect(at, value));
        }
        ops.extend((0..SLOTS).map(|slot| Op::Expect(at(slot), 4 * slot + turn + 1)));
    }
    ops.push(Op::Jump(0));
    ops
}

/// The child's memory as the parent knows it.
struct Lender<'a> {
    family: &'a Family<'a>,
    random: fastrand::Rng,
    /// The page that each slot is at.
    lent: [u64; 6],
    /// Pages that nobody has, and their marks. Those that were taken last are at the end.
    free: VecDeque<(u64, u8)>,
    taken: u64,
}

impl Lender<'_> {
    fn content(&self, page: u64) -> Content {
        let mut content = [0; USED];
        assert!(self.family.parent.memory.read(Gpa(page * PAGE_BYTES), &mut content), "page {page:#x} is there");
        content
    }

    fn fill(&self, page: u64, content: &Content) {
        assert!(self.family.parent.memory.write(Gpa(page * PAGE_BYTES), content), "page {page:#x} is there");
    }

    /// A page is the parent's alone: it gets a mark.
    fn put(&mut self, page: u64) {
        let mark = 0x80 | self.random.u8(..);
        self.fill(page, &[mark; USED]);
        self.free.push_back((page, mark));
    }

    /// The page that was free for the longest time still has its mark.
    fn take(&mut self) -> u64 {
        let (page, mark) = self.free.pop_front().expect("there are more pages than slots");
        assert_eq!(self.content(page), [mark; USED], "page {page:#x} was written to after it was taken away");
        page
    }

    /// A call that takes something away from `count` slots.
    fn call(&mut self, code: Code, first: u64, flags: u64, pages: &[u64]) {
        let count = u16::try_from(pages.len()).expect("few");
        let answer = self.family.call(code, count, &bytes(&[&[self.family.id, first, flags], pages].concat()));
        assert_eq!(answer, all(count));
        self.taken += 1;
    }

    fn give(&self, slot: u64, rights: u64) {
        assert_eq!(self.family.map(slot, rights, &[self.at(slot)]), all(1));
    }

    fn at(&self, slot: u64) -> u64 {
        self.lent[usize::try_from(slot).expect("few")]
    }

    /// Copies what is at a slot to another page, which the slot is at from now on. Returns where it was.
    fn copy(&mut self, slot: u64) -> u64 {
        let (old, new) = (self.at(slot), self.take());
        self.fill(new, &self.content(old));
        self.lent[usize::try_from(slot).expect("few")] = new;
        old
    }

    /// Takes some slots away, and gives them back at other pages.
    fn move_some(&mut self) {
        let first = self.random.u64(..SLOTS);
        let count = self.random.u64(1..=3).min(SLOTS - first);
        let slots = first..first + count;
        match self.random.u8(..4) {
            // Only the right to write, then the page.
            0 => {
                let pages: Vec<u64> = slots.clone().map(|slot| self.at(slot)).collect();
                self.call(Code::MapGpaPages, first, READ_ONLY, &pages);
                let olds: Vec<u64> = slots.clone().map(|slot| self.copy(slot)).collect();
                let pages: Vec<u64> = slots.clone().map(|slot| self.at(slot)).collect();
                for (old, new) in olds.iter().zip(&pages) {
                    assert_eq!(self.content(*old), self.content(*new), "page {old:#x} was written to");
                }
                self.call(Code::MapGpaPages, first, RIGHTS, &pages);
                olds.into_iter().for_each(|old| self.put(old));
            }
            kind => {
                let code = if kind == 1 { Code::UnmapGpaPages } else { Code::MapGpaPages };
                let flags = if kind == 1 { 0 } else { NO_ACCESS };
                let nothing = vec![0; usize::try_from(count).expect("few")];
                self.call(code, first, flags, &nothing);
                for slot in slots.clone() {
                    let old = self.copy(slot);
                    self.put(old);
                }
                for slot in slots {
                    self.give(slot, RIGHTS);
                }
            }
        }
        // Time for what comes too late, and for vCPUs to use the pages.
        (0..self.random.u8(..6)).for_each(|_| relax());
    }
}

/// Moves pages of a child until `calls` have taken some away. Returns how many have.
fn torture(simulation: &Simulation, calls: u64, seed: u64) -> u64 {
    let family = Family::new(simulation, (0..VCPUS).map(program).collect());
    let mut lender = Lender {
        family: &family,
        random: fastrand::Rng::with_seed(seed),
        lent: core::array::from_fn(|slot| POOL.start + slot as u64),
        free: VecDeque::new(),
        taken: 0,
    };
    (POOL.start + SLOTS..POOL.end).for_each(|page| lender.put(page));
    (0..SLOTS).for_each(|slot| lender.give(slot, RIGHTS));
    family.start();
    while lender.taken < calls {
        lender.move_some();
        family.serve();
    }
    assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
    while !lender.free.is_empty() {
        lender.take();
    }
    let taken = lender.taken;
    assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
    family.turn_off();
    taken
}

/// Steps of a machine that is used for so long.
const LONG: usize = 1_000_000;

/// Pages move under four vCPUs.
pub(in crate::tests) const MOVED: Scenario = Scenario {
    name: "pages of a child move while four vCPUs use them",
    cpus: 2,
    count: 200,
    steps: LONG,
    script: |simulation| {
        let _taken = torture(simulation, TAKEN, RANDOM_SEED);
    },
};

#[test]
fn pages_of_a_child_move_and_keep_their_content() {
    explore(MOVED);
}

/// What an interleaving is like. Bursts take the least time, so most are such.
fn schedules(round: u64) -> Schedules {
    let bursts = |points| NonZeroU32::new(points).map_or(Schedules::Random, Schedules::Bursts);
    match round % 16 {
        0 => Schedules::Random,
        1 => Schedules::Priorities(8),
        2..7 => bursts(4),
        _ => bursts(16),
    }
}

/// Interleavings of one kind in a row.
const ROUND: usize = 100;

/// First, mistakes must be found: otherwise the figures say nothing.
fn find_mistakes() {
    let planted =
        [Mutant::FlushNotWaitedFor, Mutant::FlushedBeforeCleared, Mutant::WordKept, Mutant::VisitorsNotWaitedFor];
    for mutant in planted {
        let since = Instant::now();
        let found = mistakes::plant(mutant, MOVED, 2_000);
        println!("planted {mutant:?}: {:?}: {}", since.elapsed(), found.expect_err("a planted mistake is found"));
    }
}

/// `FUZZ_CALLS` and `FUZZ_SEED` choose others.
#[test]
#[ignore = "takes half an hour: `cargo xtask fuzz-invalidations`"]
fn ten_million_times_pages_are_taken_from_a_child_and_none_is_written_to() {
    let (calls, seed) = (chosen("FUZZ_CALLS", 10_000_000), chosen("FUZZ_SEED", RANDOM_SEED));
    find_mistakes();
    let _no_mistakes = beside_others();
    let (taken, number) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut progress = Progress::begin();
    for round in 0.. {
        let (counted, numbered) = (taken.clone(), number.clone());
        let found = interleave::find(schedules(round), seed + round, ROUND, LONG, move || {
            let number = numbered.fetch_add(1, Ordering::Relaxed);
            run(2, |simulation| {
                counted.fetch_add(torture(simulation, TAKEN, seed + number), Ordering::Relaxed);
            });
        });
        if let Err((_, what)) = found {
            panic!("interleaving {} from seed {seed:#x}: {what}", number.load(Ordering::Relaxed) - 1);
        }
        let (taken, number) = (taken.load(Ordering::Relaxed), number.load(Ordering::Relaxed));
        progress.tell(|| format!("{taken} of {calls} invalidations, {number} interleavings"));
        if taken >= calls {
            println!(
                "{taken} invalidations in {number} interleavings from seed {seed:#x}, {} s: all pages had what was \
                 written last, and none was written to after it was taken",
                progress.seconds()
            );
            return;
        }
    }
}

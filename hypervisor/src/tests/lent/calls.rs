//! Any calls of a parent, in any order, with children that run: the host answers each, and in the end all of the
//! parent's pages are its own again.
//!
//! A seed decides about all calls. Most make sense one by one, so that children come to life, and some are random
//! words. The vCPUs of the children run on another pCPU meanwhile, in no fixed order.

use std::format;
use std::string::String;
use std::time::{Duration, Instant};
use std::vec;
use std::vec::Vec;

use ::fuzz::Decisions;
use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::partition::CreatePartitionInput;
use hyperv_defs::wire::{U32, U64};
use hyperv_defs::{Code, PartitionId};

use super::{Family, LARGE, MEMORY, NO_ACCESS, OUTPUT, READ_ONLY, RIGHTS, UNMAP_LARGE, bytes};
use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::platform;
use crate::arch::fake::program::Op;
use crate::tests::beside_others;

/// Pages to deposit, and pages for children.
const TO_DEPOSIT: core::ops::Range<u64> = 64..1_024;
const TO_LEND: core::ops::Range<u64> = 1_024..MEMORY / PAGE_BYTES;
/// Pages of a child that calls are about.
const CHILD_PAGES: u64 = 3 * 512;
/// Children at a time.
const CHILDREN: usize = 4;

/// What a vCPU of a child does: it writes, by itself and by the hypervisor, and spins.
fn program(random: &mut Decisions) -> Vec<Op> {
    let op = |random: &mut Decisions| {
        let at = random.u64(..CHILD_PAGES) * PAGE_BYTES + 8 * random.u64(..500);
        match random.u8(..6) {
            0 => Op::WriteByHost(at, random.u64(..)),
            1 => Op::Yield,
            2 => Op::Work(random.u64(..100_000)),
            _ => Op::Write(at, random.u64(..)),
        }
    };
    let ops: Vec<Op> = (0..40).map(|_| op(random)).collect();
    ops.into_iter().chain([Op::Jump(0)]).collect()
}

struct Fuzz<'a> {
    family: Family<'a>,
    ids: Vec<u64>,
    random: Decisions,
    /// Answers with success, of all calls, of those that make a child, and of those that change a child's memory.
    done: u64,
    born: u64,
    mapped: u64,
}

impl Fuzz<'_> {
    fn call(&mut self, code: Code, reps: u16, words: &[u64]) -> bool {
        let answer = self.family.call(code, reps, &bytes(words));
        assert!(answer.reps() <= reps, "{code:?}: {answer:?}");
        let is_done = answer.status() == 0;
        self.done += u64::from(is_done);
        self.mapped += u64::from(is_done && matches!(code, Code::MapGpaPages | Code::UnmapGpaPages));
        is_done
    }

    fn of_few(&mut self, count: u64) -> u64 {
        self.random.u64(..count)
    }

    /// Most often a child.
    fn id(&mut self) -> u64 {
        match self.random.u8(..64) {
            0 => !0,
            1 => self.random.u64(..),
            2 => self.ids.last().map_or(1, |last| last + 1),
            _ => self.random.choice(&self.ids).copied().unwrap_or(0x100),
        }
    }

    fn create(&mut self) {
        if self.ids.len() >= CHILDREN {
            return;
        }
        let create = CreatePartitionInput {
            compatibility_version: U32::new(0x609),
            flags: U64::new(0x48_2110),
            ..CreatePartitionInput::default()
        };
        let answer = self.family.call(Code::CreatePartition, 0, create.bytes());
        let mut id = [0; 8];
        if answer.status() == 0 && self.family.parent.memory.read(Gpa(OUTPUT * PAGE_BYTES), &mut id) {
            let id = u64::from_le_bytes(id);
            let programs: Vec<_> = (0..4).map(|_| program(&mut self.random)).collect();
            self.family.simulation.load(&format!("parent/{id:x}"), programs);
            self.ids.push(id);
            self.done += 1;
            self.born += 1;
        }
    }

    fn deposit(&mut self) {
        let (id, count) = (self.id(), self.random.u16(1..48));
        let first = self.random.u64(TO_DEPOSIT);
        let pages: Vec<u64> = (0..count).map(|index| first + u64::from(index) * 3 % 64).collect();
        self.call(Code::DepositMemory, count, &[&[id], &pages[..]].concat());
    }

    fn map(&mut self) {
        let id = self.id();
        let is_large = self.random.u8(..4) == 0;
        let count = self.random.u16(1..if is_large { 3 } else { 20 });
        let first = self.of_few(CHILD_PAGES);
        let first = if is_large { first & !511 } else { first };
        let large = if is_large { LARGE } else { 0 };
        match self.random.u8(..4) {
            0 => {
                self.call(Code::UnmapGpaPages, count, &[id, first, if is_large { UNMAP_LARGE } else { 0 }]);
            }
            1 => {
                let nothing = vec![0; count.into()];
                self.call(Code::MapGpaPages, count, &[&[id, first, NO_ACCESS | large], &nothing[..]].concat());
            }
            kind => {
                let pages: Vec<u64> =
                    (0..count).map(|_| self.random.u64(TO_LEND) & if is_large { !511 } else { !0 }).collect();
                let rights = if kind == 2 { READ_ONLY } else { RIGHTS };
                self.call(Code::MapGpaPages, count, &[&[id, first, rights | large], &pages[..]].concat());
            }
        }
    }

    /// Any call, about a child or not, with words that mean something to some call.
    fn any(&mut self) {
        let code = Code::ALL[self.random.usize(7..Code::ALL.len())];
        let count = if code.shape().rep.is_some() { self.random.u16(..12) } else { 0 };
        let mut input: Vec<u64> = vec![self.id()];
        for _ in 0..16 {
            let word = match self.random.u8(..8) {
                0 => self.random.u64(..),
                1 => !0,
                2 => self.random.u64(..64),
                3 => self.random.u64(TO_LEND),
                4 => *self.random.choice(&[0x5_0005, 0x3_0003, 0x3_0005, 0x5_0017, 0x9_0007, 0x2_0000]).unwrap_or(&0),
                5 => self.random.u64(..CHILD_PAGES) * PAGE_BYTES,
                _ => self.random.u64(..4),
            };
            input.push(word);
        }
        self.call(code, count, &input);
    }

    fn step(&mut self) {
        let (id, vp, few) = (self.id(), self.of_few(5), self.of_few(4));
        match self.random.u16(..1_000) {
            0..20 => self.create(),
            20..120 => self.deposit(),
            120..140 => {
                self.call(Code::InitializePartition, 0, &[id]);
            }
            140..170 => {
                self.call(Code::CreateVp, 0, &[id, vp, !0]);
            }
            170..420 => self.map(),
            420..560 => {
                // Both reasons that suspend it, mostly to go.
                let name = self.of_few(2);
                self.call(Code::SetVpRegisters, 1, &[id, vp, name, 0, u64::from(few == 0), 0]);
            }
            560..580 => {
                self.call(Code::SetPartitionProperty, 0, &[id, 0x5_0005, u64::from(few != 0)]);
            }
            580..680 => {
                let (first, flags) = (self.of_few(CHILD_PAGES), self.of_few(16));
                let count = self.random.u16(1..700);
                self.call(Code::GetGpaPagesAccessStates, count, &[id, flags, first]);
            }
            680..740 => {
                let page = self.random.u64(TO_LEND);
                let code = if few == 0 { Code::UnmapVpStatePage } else { Code::MapVpStatePage };
                self.call(code, 0, &[id, vp | ((few % 2) << 32), page]);
            }
            740..760 => {
                let count = self.random.u16(1..40);
                self.call(Code::WithdrawMemory, count, &[id, 0]);
            }
            760..763 => {
                self.call(Code::FinalizePartition, 0, &[id]);
            }
            763..766 => {
                if self.call(Code::DeletePartition, 0, &[id]) {
                    self.ids.retain(|other| *other != id);
                }
            }
            766..780 => {
                self.call(Code::DeleteVp, 0, &[id, vp]);
            }
            780..820 => {
                self.call(Code::AssertVirtualInterrupt, 0, &[id, 0, vp, 0x40]);
            }
            _ => self.any(),
        }
        // What random words have deleted.
        if self.random.u16(..256) == 0 {
            let parent = &self.family.parent;
            self.ids.retain(|id| platform::described(parent, PartitionId(*id), 0).is_some());
        }
    }
}

/// A line every two seconds.
pub(super) struct Progress {
    since: Instant,
    told: Duration,
}

impl Progress {
    pub(super) fn begin() -> Self {
        Self { since: Instant::now(), told: Duration::ZERO }
    }

    pub(super) fn tell(&mut self, what: impl FnOnce() -> String) {
        let now = self.since.elapsed();
        if now - self.told >= Duration::from_secs(2) {
            self.told = now;
            println!("{}, {} s", what(), now.as_secs());
        }
    }

    pub(super) fn seconds(&self) -> u64 {
        self.since.elapsed().as_secs()
    }
}

/// Makes calls while there are decisions, and ends all children. Returns what was done, in words.
fn fuzz(simulation: &Simulation, calls: u64, random: Decisions) -> String {
    let mut progress = Progress::begin();
    let family = Family::new(simulation, vec![vec![]]);
    let ids = vec![family.id];
    let mut fuzz = Fuzz { family, ids, random, done: 0, born: 0, mapped: 0 };
    for number in 0..calls {
        if fuzz.random.are_over() {
            break;
        }
        fuzz.step();
        if number % 1024 == 0 {
            progress.tell(|| format!("{number} of {calls} calls, {} with success", fuzz.done));
        }
    }
    let Fuzz { family, done, born, mapped, .. } = fuzz;

    platform::end_all(&family.parent);
    assert_eq!(platform::pages_in_use(&family.parent), [], "deposited or lent to nobody");
    for page in 0..MEMORY / PAGE_BYTES {
        let _there = family.word(page, 0);
    }
    family.turn_off();
    format!(
        "{} s: {done} with success, {born} children came, {mapped} calls changed their memory; all pages came back",
        progress.seconds()
    )
}

fn fuzz_from(seed: u64, calls: u64) {
    let _no_mistakes = beside_others();
    run(2, move |simulation| {
        let done = fuzz(simulation, calls, Decisions::of_seed(seed));
        println!("{calls} calls from seed {seed:#x}, {done}");
    });
}

const SEED: u64 = 0x5eed_0005;

#[test]
fn any_calls_of_a_parent_are_answered_and_all_pages_come_back() {
    fuzz_from(SEED, 30_000);
}

/// The fuzzer decides about the calls. Its findings need not come again, because the children run on other threads.
#[test]
fn calls_that_a_fuzzer_makes_are_answered_and_all_pages_come_back() {
    ::fuzz::slow_target("parent_calls", |bytes| {
        let _no_mistakes = beside_others();
        let decisions = Decisions::of_bytes(bytes);
        run(1, |simulation| drop(fuzz(simulation, u64::MAX, decisions)));
    });
}

/// What the environment asks for.
pub(super) fn chosen(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// `FUZZ_CALLS` and `FUZZ_SEED` choose others.
#[test]
#[ignore = "takes minutes: `cargo xtask fuzz-calls`"]
fn ten_million_calls_of_a_parent_are_answered_and_all_pages_come_back() {
    let (calls, seed) = (chosen("FUZZ_CALLS", 10_000_000), chosen("FUZZ_SEED", SEED));
    fuzz_from(seed, calls);
}

//! Random schedules of pCPUs, vCPUs and shootdowns, against TLBs that keep everything that they may keep.
//!
//! The pCPUs are threads that take turns at every step. A seed chooses the turns, so it repeats a run. Guests access
//! pages, change their table and flush it, halt, are preempted, move, and have instructions emulated. The TLBs are
//! those of `hw_model`: entries stay until they are flushed, and any of them may be used. A page's entry in the table
//! is a number that grows with every change. So each use of a translation can be compared with the flushes: a number
//! older than a finished shootdown is stale.
//!
//! The real code must show no stale use, and planted mistakes must show some.

#![cfg(not(loom))]

mod turns;

use std::collections::VecDeque;
use std::iter;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hw_model::Tag;
use shootdown::{CpuSet, CutOff, Flush, Pages, Plan, Presence, Requests};
use turns::{Turns, locked};

/// Planted mistakes; the first is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// What the fence in [`Presence::enter`] prevents: others see the entry only after the guest runs.
    PresenceIsDelayed,
    KickWithoutPublish,
    /// The bit and the words are taken, but pages are not flushed.
    PagesAreDropped,
    /// The same for a flush of everything, which a vCPU with full words needs.
    WholeIsDropped,
    /// The words are taken before the bit.
    WordsBeforeBit,
    /// The sender does not wait for an emulated instruction.
    EmulationIsIgnored,
    /// A vCPU that moves to a pCPU keeps its old translations there.
    MoveKeepsTag,
}

const PAGES: usize = 16;
/// Steps of a run.
const STEPS: u64 = 4000;

/// GVA of a page: most follow each other from 0 on, the last is at the end of the address space.
fn gva(page: usize) -> u64 {
    if page == PAGES - 1 { !0xfff } else { (page as u64) << 12 }
}

struct Machine {
    turns: Turns,
    mutant: Mutant,
    vcpus: Vec<Vcpu>,
    /// By pCPU: whether a kick is on its way there.
    kicked: Vec<AtomicBool>,
    /// Each vCPU's tag is its number.
    tlbs: Mutex<hw_model::Machine<u64>>,
    waiting: Mutex<VecDeque<usize>>,
    halted: Mutex<Vec<usize>>,
    /// The guest's page table: the number of each page's entry.
    table: [AtomicU64; PAGES],
    changes: AtomicU64,
    /// What a careless sender sees of an emulated instruction.
    nowhere: Presence,
    seen: Seen,
}

struct Vcpu {
    presence: Presence,
    has_work: AtomicBool,
    requests: Requests,
    /// Whether a flush of everything was requested.
    is_whole_asked: AtomicBool,
    ran_on: Mutex<Option<usize>>,
    /// By page: the oldest entry that may still be used.
    oldest: [AtomicU64; PAGES],
}

/// Counts of events.
#[derive(Debug, Default)]
struct Seen {
    stale: AtomicU64,
    accesses: AtomicU64,
    shootdowns: AtomicU64,
    targets: AtomicU64,
    waited_for: AtomicU64,
    emulations_met: AtomicU64,
    overflows: AtomicU64,
    moves: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Machine {
    /// Runs this many steps, on 2 to 4 pCPUs with 3 to 8 vCPUs.
    fn run(seed: u64, steps: u64, mutant: Mutant) -> Seen {
        let turns = Turns::new(seed, steps);
        let pcpus = 2 + turns.below(3);
        let vcpus = 3 + turns.below(6);
        let machine = Self {
            turns,
            mutant,
            vcpus: iter::repeat_with(Vcpu::new).take(vcpus).collect(),
            kicked: iter::repeat_with(AtomicBool::default).take(pcpus).collect(),
            tlbs: Mutex::new(hw_model::Machine::new(pcpus)),
            waiting: Mutex::new((0..vcpus).collect()),
            halted: Mutex::default(),
            table: Default::default(),
            changes: AtomicU64::new(0),
            nowhere: Presence::new(),
            seen: Seen::default(),
        };
        machine.turns.run(pcpus, |cpu| machine.run_pcpu(cpu));
        machine.seen
    }

    fn run_pcpu(&self, cpu: usize) {
        while !self.turns.is_over() {
            self.turns.step(cpu);
            if self.turns.below(2) == 0 {
                self.wake_one();
            }
            let next = locked(&self.waiting).pop_front();
            if let Some(vcpu) = next {
                self.run_vcpu(cpu, vcpu);
            }
        }
    }

    /// An interrupt for a halted vCPU.
    fn wake_one(&self) {
        let mut halted = locked(&self.halted);
        if !halted.is_empty() {
            let chosen = self.turns.below(halted.len());
            locked(&self.waiting).push_back(halted.swap_remove(chosen));
        }
    }

    /// Runs the vCPU on a pCPU: the loop of a hypervisor.
    fn run_vcpu(&self, cpu: usize, me: usize) {
        let vcpu = &self.vcpus[me];
        if locked(&vcpu.ran_on).replace(cpu).is_some_and(|before| before != cpu) {
            add(&self.seen.moves, 1);
            if self.mutant != Mutant::MoveKeepsTag {
                self.flush(cpu, me, Flush::Whole);
            }
        }

        while !self.turns.is_over() {
            if self.mutant != Mutant::PresenceIsDelayed {
                vcpu.presence.enter(number(cpu));
            }
            self.turns.step(cpu);
            if vcpu.has_work.load(Ordering::Relaxed) {
                vcpu.presence.leave();
                self.turns.step(cpu);
                self.settle(cpu, me);
                continue;
            }
            self.turns.step(cpu);
            self.run_guest(cpu, me);
            vcpu.presence.leave();

            match self.turns.below(8) {
                0..3 => self.shoot_down(cpu, me),
                3 => self.emulate(cpu, me),
                4 => return locked(&self.halted).push(me),
                5 => return locked(&self.waiting).push_back(me),
                _ => {}
            }
            self.turns.step(cpu);
        }
    }

    fn run_guest(&self, cpu: usize, me: usize) {
        let mut is_delayed = self.mutant == Mutant::PresenceIsDelayed;
        loop {
            self.access(cpu, me);
            self.turns.step(cpu);
            if is_delayed {
                self.vcpus[me].presence.enter(number(cpu));
                is_delayed = false;
            }
            // A kick arrives late.
            let is_kicked = self.turns.below(2) == 0 && self.kicked[cpu].swap(false, Ordering::Relaxed);
            if is_kicked || self.turns.is_over() || self.turns.below(6) == 0 {
                return;
            }
        }
    }

    /// The guest accesses a page: its table is walked, but the TLB answers if it can.
    fn access(&self, cpu: usize, me: usize) {
        let page = self.turns.below(PAGES);
        let mut tlbs = locked(&self.tlbs);
        tlbs.walk(cpu, tag(me), gva(page) >> 12, self.walk(page));
        let answers = tlbs.answers(cpu, tag(me), gva(page) >> 12);
        self.check_use(me, page, *answers.first().expect("it was walked"));
    }

    /// The hypervisor emulates an instruction of the guest: it walks the table, and uses the result later.
    fn emulate(&self, cpu: usize, me: usize) {
        self.vcpus[me].presence.emulate(number(cpu));
        let page = self.turns.below(PAGES);
        let entry = self.walk(page);
        self.turns.step(cpu);
        self.turns.step(cpu);
        self.check_use(me, page, entry);
        self.vcpus[me].presence.leave();
    }

    fn walk(&self, page: usize) -> u64 {
        self.table[page].load(Ordering::Relaxed)
    }

    fn check_use(&self, me: usize, page: usize, entry: u64) {
        add(&self.seen.accesses, 1);
        if entry < self.vcpus[me].oldest[page].load(Ordering::Relaxed) {
            add(&self.seen.stale, 1);
            self.turns.end();
        }
    }

    fn settle(&self, cpu: usize, me: usize) {
        let vcpu = &self.vcpus[me];
        let take_bit = || {
            vcpu.has_work.swap(false, Ordering::AcqRel);
            self.turns.step(cpu);
        };
        if self.mutant != Mutant::WordsBeforeBit {
            take_bit();
        }
        let taken = vcpu.requests.take();
        self.turns.step(cpu);
        if self.mutant == Mutant::WordsBeforeBit {
            take_bit();
        }
        let is_overflow = taken.whole() && !vcpu.is_whole_asked.swap(false, Ordering::Relaxed);
        add(&self.seen.overflows, is_overflow.into());
        if taken.whole() && self.mutant != Mutant::WholeIsDropped {
            self.flush(cpu, me, Flush::Whole);
        } else if self.mutant != Mutant::PagesAreDropped {
            taken.for_each(|pages| self.flush(cpu, me, Flush::Pages(pages)));
        }
    }

    /// The pCPU flushes entries of a vCPU.
    fn flush(&self, cpu: usize, me: usize, what: Flush) {
        let mut tlbs = locked(&self.tlbs);
        match what {
            Flush::Whole => tlbs.flush_tag(cpu, tag(me)),
            Flush::Pages(pages) => {
                let first = pages.first() >> 12;
                (first..first + pages.count()).for_each(|page| tlbs.flush_page(cpu, tag(me), page));
            }
        }
    }

    /// The guest changes some pages and flushes them on all, or on some, of its vCPUs.
    fn shoot_down(&self, cpu: usize, me: usize) {
        // A flushed run may be longer than the change. Each entry that was current before the shootdown is the oldest
        // good one after it.
        let mut plan = Plan::new(CutOff::new(8, 48));
        for _ in 0..1 + self.turns.below(3) {
            let first = self.turns.below(PAGES);
            let count = 1 + self.turns.below(4);
            plan.add(Pages::new(gva(first), count as u64));
            self.table[first].store(self.changes.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        let flushes: Vec<_> = plan.flushes().collect();
        let oldest: Vec<_> = (0..PAGES).map(|page| self.walk(page)).collect();
        let is_everybody = self.turns.below(2) == 0;
        let targets: Vec<usize> =
            (0..self.vcpus.len()).filter(|&at| at != me && (is_everybody || self.turns.below(2) == 0)).collect();

        let presence = |&at: &usize| {
            self.turns.step(cpu);
            let presence = &self.vcpus[at].presence;
            let is_emulating = presence.look().is_inside() && !presence.is_inside();
            add(&self.seen.emulations_met, is_emulating.into());
            if is_emulating && self.mutant == Mutant::EmulationIsIgnored { &self.nowhere } else { presence }
        };
        let publish = |&at: &usize| {
            if self.mutant == Mutant::KickWithoutPublish {
                return;
            }
            let vcpu = &self.vcpus[at];
            for &flush in &flushes {
                vcpu.is_whole_asked.fetch_or(flush == Flush::Whole, Ordering::Relaxed);
                vcpu.requests.ask(flush);
                self.turns.step(cpu);
            }
            vcpu.has_work.swap(true, Ordering::AcqRel);
            self.turns.step(cpu);
        };
        let kick = |cpus: CpuSet| {
            assert!(!cpus.contains(number(cpu)), "the caller's own pCPU is in no guest");
            cpus.iter().for_each(|other| self.kicked[other as usize].store(true, Ordering::Relaxed));
            self.turns.step(cpu);
        };
        let meanwhile = || {
            flushes.iter().for_each(|&flush| self.flush(cpu, me, flush));
            self.turns.step(cpu);
        };
        let mut patience = 100_000;
        let relax = |_| {
            patience -= 1;
            assert!(patience > 0, "waits for somebody who does not leave");
            self.turns.step(cpu);
        };
        let outcome = shootdown::run(targets.iter(), presence, publish, kick, meanwhile, relax);

        add(&self.seen.shootdowns, 1);
        add(&self.seen.targets, outcome.targets.into());
        add(&self.seen.waited_for, outcome.kicked.into());
        for &at in targets.iter().chain([&me]) {
            for (page, &entry) in oldest.iter().enumerate() {
                if covers(&flushes, page) {
                    self.vcpus[at].oldest[page].fetch_max(entry, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Whether a flush covers the page.
fn covers(flushes: &[Flush], page: usize) -> bool {
    flushes.iter().any(|flush| match flush {
        Flush::Whole => true,
        Flush::Pages(pages) => (0..pages.count()).any(|at| pages.first() + (at << 12) == gva(page)),
    })
}

impl Vcpu {
    fn new() -> Self {
        Self {
            presence: Presence::new(),
            has_work: AtomicBool::new(false),
            requests: Requests::new(),
            is_whole_asked: AtomicBool::new(false),
            ran_on: Mutex::new(None),
            oldest: Default::default(),
        }
    }
}

/// Number of runs of a test. `SHOOTDOWN_SEEDS` sets more, for a longer search.
fn seeds() -> u64 {
    std::env::var("SHOOTDOWN_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(200)
}

/// The first seed with a stale use.
fn first_stale(mutant: Mutant) -> Option<u64> {
    (0..seeds()).find(|&seed| Machine::run(seed, STEPS, mutant).stale.into_inner() > 0)
}

#[test]
fn no_translation_is_used_after_its_flush() {
    let mut total = Seen::default();
    for seed in 0..seeds() {
        let seen = Machine::run(seed, STEPS, Mutant::None);
        assert_eq!(seen.stale.into_inner(), 0, "seed {seed}");
        add(&total.accesses, seen.accesses.into_inner());
        add(&total.shootdowns, seen.shootdowns.into_inner());
        add(&total.targets, seen.targets.into_inner());
        add(&total.waited_for, seen.waited_for.into_inner());
        add(&total.emulations_met, seen.emulations_met.into_inner());
        add(&total.overflows, seen.overflows.into_inner());
        add(&total.moves, seen.moves.into_inner());
    }
    println!("{total:?}");

    // Every kind of event happened, and most targets cost no wait.
    for count in [&mut total.accesses, &mut total.shootdowns, &mut total.emulations_met, &mut total.overflows] {
        assert!(*count.get_mut() > 100, "{count:?}");
    }
    assert!(*total.moves.get_mut() > 1000, "{total:?}");
    assert!((1000..total.targets.into_inner() / 2).contains(&total.waited_for.into_inner()));
}

#[test]
fn planted_faults_are_found() {
    let mutants = [
        Mutant::PresenceIsDelayed,
        Mutant::KickWithoutPublish,
        Mutant::PagesAreDropped,
        Mutant::WholeIsDropped,
        Mutant::WordsBeforeBit,
        Mutant::EmulationIsIgnored,
        Mutant::MoveKeepsTag,
    ];
    for mutant in mutants {
        let began = std::time::Instant::now();
        let found = first_stale(mutant);
        println!("{mutant:?}: seed {found:?}, {:?}", began.elapsed());
        assert!(found.is_some(), "{mutant:?} was not found");
    }
}

fn tag(vcpu: usize) -> Tag {
    Tag(number(vcpu))
}

fn number(cpu: usize) -> u32 {
    u32::try_from(cpu).expect("at most 8")
}

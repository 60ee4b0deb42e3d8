//! The stale-translation detector: no CPU may read through an old translation once the flush has returned.
//!
//! Each CPU is writer and reader. As a writer it owns one page, which it moves from frame to frame; as a reader it
//! reads the pages of all. `guest_model::sequence` explains how a stale read is recognised, and why nothing else can
//! look like one. The promise of step 4 there is kept per writer and reader, so a flush of some CPUs promises nothing
//! to the others.
//!
//! Flushes cover the whole TLB, a range around the page, or the page; all CPUs or some; by all available approaches. In
//! between CPUs halt with a timer, and exit, so that their vCPUs migrate. Or they read one page for a while without an
//! exit, so that a stale translation stays long enough for a reader to see it.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::command_line::Approach;
use guest_model::cpu_set::CpuSet;
use guest_model::random::Random;
use guest_model::sequence::{FRAMES, frame_of, is_stale};

use super::{Context, NOT_OFFERED, Outcome};
use crate::arch::boot::MAX_CPUS;
use crate::arch::{control, controller, interrupts, remap, remote, tsc};
use crate::cpu;
use crate::interrupt::TIMER;
use crate::record::record;
use crate::shootdown::{self, Operation};

/// The promise of each writer to a reader: the smallest number that the reader may read. One row per reader, in cache
/// lines that it does not share with other readers.
#[repr(align(128))]
struct Promises([AtomicU64; MAX_CPUS]);
static PROMISES: [Promises; MAX_CPUS] = [const { Promises([const { AtomicU64::new(0) }; MAX_CPUS]) }; MAX_CPUS];

/// Counts of one CPU.
#[repr(align(128))]
struct Done {
    by_ipi: AtomicU64,
    by_remote: AtomicU64,
    reads: AtomicU64,
    halts: AtomicU64,
    exits: AtomicU64,
}

static DONE: [Done; MAX_CPUS] = [const {
    Done {
        by_ipi: AtomicU64::new(0),
        by_remote: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        halts: AtomicU64::new(0),
        exits: AtomicU64::new(0),
    }
}; MAX_CPUS];

/// Settings of the run: shootdowns of all CPUs together, the TSC value at which it ends, the seed, the options.
static WANTED: AtomicU64 = AtomicU64::new(0);
static END: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);
static WITH_IPI: AtomicBool = AtomicBool::new(true);
static WITH_REMOTE: AtomicBool = AtomicBool::new(false);

/// Whether pages are moved but not flushed, to see whether that is noticed.
static OMIT_FLUSH: AtomicBool = AtomicBool::new(false);

/// Shootdowns that were begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static STALE: AtomicU64 = AtomicU64::new(0);
static STOP: AtomicBool = AtomicBool::new(false);

/// Stale reads that are described one by one; the rest is only counted.
const DESCRIBED: u64 = 20;

fn total(what: impl Fn(&Done) -> &AtomicU64) -> u64 {
    DONE.iter().map(|done| what(done).load(Ordering::Relaxed)).sum()
}

fn add(counter: &AtomicU64, count: u64) {
    // Each counter has one writer.
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// Forgets the last run: every page at its first frame, every number zero.
fn prepare(context: &Context) {
    for cpu in 0..cpu::count() {
        (0..FRAMES).for_each(|frame| remap::fill(remap::frame(cpu, frame), 0));
        remap::point(cpu, remap::frame(cpu, frame_of(0)), remap::Kind::Plain);
        PROMISES[cpu].0.iter().for_each(|promise| promise.store(0, Ordering::SeqCst));
        let done = &DONE[cpu];
        for counter in [&done.by_ipi, &done.by_remote, &done.reads, &done.halts, &done.exits] {
            counter.store(0, Ordering::SeqCst);
        }
    }
    for counter in [&BEGUN, &STALE] {
        counter.store(0, Ordering::SeqCst);
    }
    STOP.store(false, Ordering::SeqCst);
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
}

pub(super) fn run(context: &Context) -> Outcome {
    let settings = context.settings;
    let asked = |approach| settings.approach.is_none_or(|wanted| wanted.iter().any(|it| it == approach));
    let by_remote = asked(remote::APPROACH) && remote::is_offered();
    let by_ipi = asked(Approach::Ipi);
    if !by_remote && !by_ipi {
        return Outcome::Unsupported(NOT_OFFERED);
    }
    prepare(context);
    WITH_IPI.store(by_ipi, Ordering::SeqCst);
    WITH_REMOTE.store(by_remote, Ordering::SeqCst);
    WANTED.store(settings.iterations.unwrap_or(20_000), Ordering::SeqCst);
    let start = tsc::now();
    END.store(settings.seconds.map_or(u64::MAX, |seconds| start + tsc::seconds(seconds)), Ordering::SeqCst);

    let stuck = let_all_work(settings.stall.unwrap_or(30));
    report("record", start);
    Outcome::Done { failures: STALE.load(Ordering::SeqCst) + u64::from(stuck.is_some()) }
}

/// Runs the workers, including this CPU's, until all have finished. If no CPU makes progress any more, returns one that
/// has not finished.
fn let_all_work(stall: u64) -> Option<usize> {
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, work) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    work(0);
    let patience = tsc::seconds(stall);
    let stuck = loop {
        // As long as one CPU still reads, the others are slow, not stuck.
        let before = total(|done| &done.reads);
        match cpu::wait_for_all(patience) {
            Some(stuck) if before == total(|done| &done.reads) => break Some(stuck),
            Some(_) => {}
            None => break None,
        }
    };
    if let Some(stuck) = stuck {
        record!("violation", experiment = "stale", of = "end", cpu = stuck, expected = "finished", seen = "stuck");
    }
    stuck
}

fn report(kind: &str, start: u64) {
    crate::record::emit(format_args!(
        "{kind} experiment=stale cpus={} milliseconds={} shootdowns={} by_ipi={} by_{}={} reads={} halts={} exits={} stale_reads={} fallbacks={}",
        cpu::count(),
        tsc::microseconds(tsc::now() - start) / 1000,
        total(|done| &done.by_ipi) + total(|done| &done.by_remote),
        total(|done| &done.by_ipi),
        remote::APPROACH.name(),
        total(|done| &done.by_remote),
        total(|done| &done.reads),
        total(|done| &done.halts),
        total(|done| &done.exits),
        STALE.load(Ordering::Relaxed),
        shootdown::fallbacks(),
    ));
}

/// The job of each CPU.
fn work(cpu: usize) {
    let mut worker = Worker { cpu, random: Random::new(SEED.load(Ordering::Relaxed), cpu as u64), number: 0 };
    let start = tsc::now();
    let mut next_report = start + tsc::seconds(3);
    interrupts::enable();
    while !STOP.load(Ordering::Relaxed) {
        worker.round();
        let now = tsc::now();
        if cpu == 0 && now >= END.load(Ordering::Relaxed) {
            STOP.store(true, Ordering::SeqCst);
        }
        if cpu == 0 && now >= next_report {
            report("progress", start);
            next_report = now + tsc::seconds(3);
        }
    }
    interrupts::disable();
    controller::disarm();
}

struct Worker {
    cpu: usize,
    random: Random,
    /// Moves of the own page so far.
    number: u64,
}

impl Worker {
    fn round(&mut self) {
        for _ in 0..self.random.below(64) {
            let writer = self.random.index(cpu::count());
            self.read(writer);
        }
        match self.random.below(16) {
            0..8 => self.shoot_down(),
            8..10 => {
                add(&DONE[self.cpu].exits, 1);
                control::leave();
            }
            10..12 => self.halt(),
            _ => {
                let writer = self.random.index(cpu::count());
                let loads = self.random.below(1024);
                (0..loads).for_each(|_| self.read(writer));
            }
        }
    }

    /// Takes the promise first, reads second.
    fn read(&mut self, writer: usize) {
        let promised = PROMISES[self.cpu].0[writer].load(Ordering::Acquire);
        let content = remap::load(remap::address(writer));
        add(&DONE[self.cpu].reads, 1);
        let is_stale = is_stale(promised, content);
        if is_stale && STALE.fetch_add(1, Ordering::Relaxed) < DESCRIBED && !OMIT_FLUSH.load(Ordering::Relaxed) {
            record!(
                "violation",
                experiment = "stale",
                of = "translation",
                reader = self.cpu,
                writer = writer,
                expected = promised,
                seen = content,
            );
        }
    }

    /// Moves the own page, flushes it on a set of CPUs, and promises them the new number.
    fn shoot_down(&mut self) {
        if BEGUN.fetch_add(1, Ordering::Relaxed) >= WANTED.load(Ordering::Relaxed) {
            STOP.store(true, Ordering::SeqCst);
            return;
        }
        let approach = self.approach();
        let set = self.set();
        let operation = self.operation();

        self.number += 1;
        if remap::BREAK_FIRST {
            remap::clear(self.cpu);
        } else {
            move_page(self.cpu, self.number);
        }
        if !OMIT_FLUSH.load(Ordering::Relaxed) {
            shootdown::shoot_down_by(approach, &set, operation);
        }
        if remap::BREAK_FIRST {
            move_page(self.cpu, self.number);
        }
        for reader in set.iter() {
            PROMISES[reader].0[self.cpu].store(self.number, Ordering::Release);
        }

        let done = &DONE[self.cpu];
        add(if approach == Approach::Ipi { &done.by_ipi } else { &done.by_remote }, 1);
    }

    fn approach(&mut self) -> Approach {
        match (WITH_IPI.load(Ordering::Relaxed), WITH_REMOTE.load(Ordering::Relaxed)) {
            // Mostly the approach under test.
            (true, true) if self.random.below(8) != 0 => remote::APPROACH,
            (false, true) => remote::APPROACH,
            _ => Approach::Ipi,
        }
    }

    /// All CPUs, about half of them, or one other; the caller is always in.
    fn set(&mut self) -> CpuSet {
        let all = cpu::up();
        match self.random.below(4) {
            0..2 => all,
            2 => all.iter().filter(|index| *index == self.cpu || self.random.below(2) == 0).collect(),
            _ => [self.cpu, self.random.index(cpu::count())].into_iter().filter(|index| all.contains(*index)).collect(),
        }
    }

    fn operation(&mut self) -> Operation {
        let at = remap::address(self.cpu);
        match self.random.below(4) {
            0 => Operation::Whole,
            1 => {
                let before = self.random.below(8).min(self.cpu as u64);
                Operation::Range { start: at - before * 4096, pages: before + 1 + self.random.below(40) }
            }
            _ => Operation::Page { at },
        }
    }

    /// Sleeps until an interrupt; a timer makes sure that there is one.
    fn halt(&mut self) {
        add(&DONE[self.cpu].halts, 1);
        interrupts::disable();
        controller::arm_once(TIMER, tsc::ticks(20 + self.random.below(400)));
        interrupts::sleep();
        controller::disarm();
        interrupts::enable();
    }
}

/// Writes `number` into its frame, and points the page of `cpu` there.
fn move_page(cpu: usize, number: u64) {
    let frame = remap::frame(cpu, frame_of(number));
    remap::fill(frame, number);
    remap::point(cpu, frame, remap::Kind::Plain);
}

/// Tests whether the detector can fire at all. It moves pages and promises the moves, but flushes nothing. First CPU 0
/// moves alone, while CPU 1 reads without an exit; then the unchanged workers of [`run`] do.
///
/// A machine may drop translations at any time. So if the detector sees nothing, the test reports it, but does not
/// fail.
pub(super) fn selftest(context: &Context) -> Outcome {
    if cpu::count() < 2 {
        return Outcome::Unsupported("needs two CPUs");
    }
    prepare(context);
    if !cpu::give(1, read_until_stopped) {
        return Outcome::Unsupported("CPU 1 is busy");
    }
    let moves = context.settings.iterations.unwrap_or(200);
    for number in 1..=moves {
        tsc::pause_until(tsc::now() + tsc::ticks(100));
        move_page(0, number);
        PROMISES[1].0[0].store(number, Ordering::Release);
    }
    tsc::pause_until(tsc::now() + tsc::ticks(1000));
    STOP.store(true, Ordering::SeqCst);
    cpu::wait_for_all(tsc::seconds(30));
    let stale = STALE.load(Ordering::SeqCst);
    report_selftest("one-reader", moves, stale);

    prepare(context);
    OMIT_FLUSH.store(true, Ordering::SeqCst);
    WANTED.store(moves, Ordering::SeqCst);
    END.store(tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(20)), Ordering::SeqCst);
    let stuck = let_all_work(context.settings.stall.unwrap_or(30));
    OMIT_FLUSH.store(false, Ordering::SeqCst);
    report_selftest("workers", moves, STALE.load(Ordering::SeqCst));
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

fn report_selftest(who: &str, moves: u64, stale: u64) {
    record!(
        "record",
        experiment = "stale-selftest",
        readers = who,
        moves_without_flush = moves,
        reads = total(|done| &done.reads),
        stale_reads = stale,
        noticed = stale > 0,
    );
}

fn read_until_stopped(cpu: usize) {
    while !STOP.load(Ordering::Relaxed) {
        let promised = PROMISES[cpu].0[0].load(Ordering::Acquire);
        let content = remap::load(remap::address(0));
        add(&DONE[cpu].reads, 1);
        if is_stale(promised, content) {
            STALE.fetch_add(1, Ordering::Relaxed);
        }
    }
}

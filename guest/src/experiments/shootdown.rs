//! Duration of a remote TLB flush from CPU 0 to all CPUs, by each approach in turn.
//!
//! Rounds of the approaches alternate, so that other load on the computer affects all of them alike. The experiment
//! measures the whole of `smp_targeted_tlb_shootdown`, by the TSC. With a run-time MSR every figure also comes net of
//! the time in which the caller's own vCPU was not running: no flush can avoid that time.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::command_line::{Approach, Extent, MOST_PAGES};
use guest_model::cpu_set::CpuSet;
use guest_model::percentiles::{Summary, nanoseconds, net_of_absence, scaled};
use spin::Mutex;

use super::{Context, NOT_OFFERED, Outcome};
use crate::arch::boot::MAX_CPUS;
use crate::arch::{cpu_local, interrupts, remap, remote, tsc};
use crate::cpu;
use crate::record::record;
use crate::shootdown::{self, Operation};

/// Values kept of one series.
const ROOM: usize = 20_000;

/// Results of one approach and one extent.
struct Series {
    seen: [u64; ROOM],
    net: [u64; ROOM],
    count: usize,
    /// Ticks spent in its rounds.
    spent: u64,
    /// What the targets did in that time.
    work: u64,
}

const EMPTY: Series = Series { seen: [0; ROOM], net: [0; ROOM], count: 0, spent: 0, work: 0 };

static SERIES: Mutex<[Series; 2]> = Mutex::new([EMPTY, EMPTY]);

/// Pages that a busy target reads over and over.
const TOUCHED: usize = 33;

static STOP: AtomicBool = AtomicBool::new(false);

/// Passes over the pages, by CPU.
#[repr(align(128))]
struct Work(AtomicU64);
static WORK: [Work; MAX_CPUS] = [const { Work(AtomicU64::new(0)) }; MAX_CPUS];

pub(super) fn run(context: &Context) -> Outcome {
    if cpu::count() < 2 {
        return Outcome::Unsupported("one CPU has nobody to flush");
    }
    let settings = context.settings;
    let asked = |approach| settings.approach.is_none_or(|wanted| wanted.iter().any(|it| it == approach));
    let approaches: [Option<Approach>; 2] = [Approach::Ipi, remote::APPROACH]
        .map(|approach| Some(approach).filter(|approach| asked(*approach) && shootdown::choose(*approach)));
    if approaches.iter().all(Option::is_none) {
        return Outcome::Unsupported(NOT_OFFERED);
    }

    map_range();
    set_targets_to_work(settings.idle_targets);
    let overhead = runtime_overhead();
    let default = [Extent::Pages(1), Extent::Pages(8), Extent::Pages(33), Extent::Whole];
    match &settings.pages {
        Some(chosen) => chosen.iter().for_each(|extent| measure(context, &approaches, extent, overhead)),
        None => default.into_iter().for_each(|extent| measure(context, &approaches, extent, overhead)),
    }

    STOP.store(true, Ordering::SeqCst);
    let stuck = cpu::wait_for_all(tsc::seconds(settings.stall.unwrap_or(30)));
    let failures = stuck.map_or(0, |cpu| {
        record!("violation", experiment = "shootdown", of = "end", cpu = cpu, expected = "finished", seen = "stuck");
        1
    });
    Outcome::Done { failures }
}

fn map_range() {
    for page in 0..usize::try_from(MOST_PAGES).unwrap_or(0) {
        remap::point(remap::RANGE + page, remap::frame(page / 8, page % 8), remap::Kind::Plain);
    }
}

fn set_targets_to_work(idle: bool) {
    STOP.store(false, Ordering::SeqCst);
    WORK.iter().for_each(|work| work.0.store(0, Ordering::SeqCst));
    for index in (1..cpu::count()).filter(|index| !idle && cpu::is_up(*index)) {
        if !cpu::give(index, keep_busy) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
}

/// A busy target: reads the pages repeatedly, with interrupts on and without an exit.
fn keep_busy(cpu: usize) {
    interrupts::enable();
    let work = &WORK[cpu].0;
    while !STOP.load(Ordering::Relaxed) {
        touch();
        work.store(work.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

fn touch() {
    for page in 0..TOUCHED {
        remap::load(remap::address(remap::RANGE + page));
    }
}

fn work_done() -> u64 {
    WORK.iter().map(|work| work.0.load(Ordering::Relaxed)).sum()
}

/// Runs the rounds of all approaches for one extent, and reports them.
fn measure(context: &Context, approaches: &[Option<Approach>; 2], extent: Extent, overhead: Option<u64>) {
    let settings = context.settings;
    let iterations = usize::try_from(settings.iterations.unwrap_or(200)).unwrap_or(ROOM).clamp(5, ROOM);
    let rounds = (iterations / 20).clamp(5, 50);
    let patience = tsc::seconds(settings.seconds.unwrap_or(20));
    let set = cpu::up();
    let operation = operation(extent);

    let mut all = SERIES.lock();
    for series in all.iter_mut() {
        (series.count, series.spent, series.work) = (0, 0, 0);
    }
    for round in 0..rounds {
        for (series, approach) in all.iter_mut().zip(approaches) {
            let Some(approach) = approach else { continue };
            let until = iterations * (round + 1) / rounds;
            run_round(series, *approach, &set, operation, until, patience, overhead);
        }
    }
    for (series, approach) in all.iter_mut().zip(approaches) {
        if let Some(approach) = approach {
            report(series, *approach, extent, settings.idle_targets, overhead.is_some());
        }
    }
}

fn operation(extent: Extent) -> Operation {
    let start = remap::address(remap::RANGE);
    match extent {
        Extent::Whole => Operation::Whole,
        Extent::Pages(1) => Operation::Page { at: start },
        Extent::Pages(pages) => Operation::Range { start, pages },
    }
}

fn run_round(
    series: &mut Series,
    approach: Approach,
    set: &CpuSet,
    operation: Operation,
    until: usize,
    patience: u64,
    overhead: Option<u64>,
) {
    shootdown::choose(approach);
    let (start, work) = (tsc::now(), work_done());
    while series.count < until && series.spent + (tsc::now() - start) <= patience {
        // The caller has used the pages too, before it flushes them.
        touch();
        let (seen, net) = time_one(set, operation, overhead);
        series.seen[series.count] = seen;
        series.net[series.count] = net;
        series.count += 1;
    }
    series.spent += tsc::now() - start;
    series.work += work_done() - work;
}

/// Ticks of one shootdown, as seen and net of the caller's absence.
fn time_one(set: &CpuSet, operation: Operation, overhead: Option<u64>) -> (u64, u64) {
    let ran_before = overhead.and_then(|_| remote::runtime());
    let start = tsc::now();
    shootdown::smp_targeted_tlb_shootdown(set, operation);
    let seen = tsc::now() - start;

    let ran = ran_before.and_then(|before| Some(remote::runtime()?.saturating_sub(before)));
    let net = ran.map_or(seen, |ran| net_of_absence(seen, runtime_ticks(ran), overhead.unwrap_or(0)));
    (seen, net)
}

/// Ticks in `units` of 100 ns.
fn runtime_ticks(units: u64) -> u64 {
    scaled(units, tsc::khz(), 10_000)
}

/// Ticks by which the run time advances between two adjacent readings: the median of many. `None` without such an MSR.
fn runtime_overhead() -> Option<u64> {
    let mut overheads = [0; 63];
    for overhead in &mut overheads {
        let before = remote::runtime()?;
        let start = tsc::now();
        let seen = tsc::now() - start;
        let ran = runtime_ticks(remote::runtime()?.saturating_sub(before));
        *overhead = ran.saturating_sub(seen);
    }
    Some(Summary::of(&mut overheads).p50)
}

fn report(series: &mut Series, approach: Approach, extent: Extent, idle: bool, has_net: bool) {
    let in_ns = |values: &mut [u64]| Summary::of(values).map(|ticks| nanoseconds(ticks, tsc::khz()));
    let seen = in_ns(&mut series.seen[..series.count]);
    let head = format_args!(
        "record experiment=shootdown approach={} pages={} targets={} cpus={} count={} mean_ns={} p50_ns={} p99_ns={} p999_ns={} max_ns={}",
        approach.name(),
        ShownExtent(extent),
        if idle { "idle" } else { "busy" },
        cpu::count(),
        seen.count,
        seen.mean,
        seen.p50,
        seen.p99,
        seen.p999,
        seen.max,
    );
    let tail = format_args!(
        "busy_work={} milliseconds={} fallbacks={}",
        series.work,
        tsc::microseconds(series.spent) / 1000,
        shootdown::fallbacks(),
    );
    if has_net {
        let net = in_ns(&mut series.net[..series.count]);
        crate::record::emit(format_args!(
            "{head} net_mean_ns={} net_p50_ns={} net_p99_ns={} net_p999_ns={} net_max_ns={} {tail}",
            net.mean, net.p50, net.p99, net.p999, net.max,
        ));
    } else {
        crate::record::emit(format_args!("{head} {tail}"));
    }
}

struct ShownExtent(Extent);

impl core::fmt::Display for ShownExtent {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            Extent::Pages(pages) => pages.fmt(f),
            Extent::Whole => f.write_str("whole"),
        }
    }
}

/// All CPUs flush whole address spaces of all, as fast as they can: a bad neighbour.
pub(super) fn storm(context: &Context) -> Outcome {
    let settings = context.settings;
    if let Some(approach) = settings.approach.and_then(|wanted| wanted.iter().next())
        && !shootdown::choose(approach)
    {
        return Outcome::Unsupported(NOT_OFFERED);
    }
    STOP.store(false, Ordering::SeqCst);
    WORK.iter().for_each(|work| work.0.store(0, Ordering::SeqCst));
    STORM_END.store(tsc::now() + tsc::seconds(settings.seconds.unwrap_or(5)), Ordering::SeqCst);
    let start = tsc::now();
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, flush_until_the_end) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    flush_until_the_end(cpu_local::index());
    let stuck = cpu::wait_for_all(tsc::seconds(settings.stall.unwrap_or(30)));
    record!(
        "record",
        experiment = "flush-storm",
        approach = shootdown::chosen().name(),
        cpus = cpu::count(),
        flushes = work_done(),
        milliseconds = tsc::microseconds(tsc::now() - start) / 1000,
        fallbacks = shootdown::fallbacks(),
    );
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

static STORM_END: AtomicU64 = AtomicU64::new(0);

fn flush_until_the_end(cpu: usize) {
    let set = cpu::up();
    interrupts::enable();
    while tsc::now() < STORM_END.load(Ordering::Relaxed) {
        shootdown::smp_targeted_tlb_shootdown(&set, Operation::Whole);
        WORK[cpu].0.fetch_add(1, Ordering::Relaxed);
    }
    interrupts::disable();
}

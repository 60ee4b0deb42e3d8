//! Every CPU writes one word to each page of its share of the memory, repeatedly, for some seconds. It counts its
//! accesses in each window of some milliseconds.
//!
//! The result is the speed of all CPUs over time. To relate it to outside events, the reader needs two clocks to agree.
//! The record `begin` has this machine's clock at the moment when it was sent, and the receiver knows that moment by
//! its own clock. Window 0 begins at that moment.
//!
//! QEMU's TLB changes its size when it is flushed: it doubles if most of it was in use, and shrinks if little was. On a
//! machine that flushes rarely, it would stay as small as a log has made it. So there each CPU flushes its TLB ten
//! times a second, before the log, while it runs, and after it.
//!
//! `memory=` is the written size, `writes=` the share of accesses that write, `regions=` the share of large pages that
//! are used.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use spin::Mutex;

use super::{NO_MEMORY, PAGE, is_to_quit, memory};
use crate::arch::boot::MAX_CPUS;
use crate::arch::ram::{LARGE_BYTES, Ram};
use crate::arch::{tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// Windows of one CPU, stored in the memory itself, before the written part. A window gets longer if there would be too
/// many.
const WINDOWS: u64 = 2048;
/// Shortest window, in microseconds.
const SHORTEST: u64 = 5_000;
const COUNTS_BYTES: u64 = (WINDOWS * 8 * MAX_CPUS as u64).next_multiple_of(LARGE_BYTES);
/// Accesses between two readings of the clock.
const BATCH: u64 = 16;
/// Sums in one record: as many as fit on a line.
const SUMS: u64 = 32;
/// Windows between two checks of the console's input.
const LOOK: u64 = 10;

/// Passes over all memory before it begins, with a flush after each: QEMU's TLB begins with 256 pages.
const PASSES_BEFORE: u32 = 14;

/// Microseconds between two flushes.
const BETWEEN_FLUSHES: u64 = 100_000;

const PAGES_PER_REGION: u64 = LARGE_BYTES / PAGE;

/// The parameters of all CPUs.
#[derive(Clone, Copy)]
struct Plan {
    counts: Ram,
    memory: Ram,
    cpus: u64,
    /// Large pages that are touched.
    regions: u64,
    /// Of 100 accesses, this many write.
    writes: u64,
    window_ticks: u64,
    windows: u64,
    windows_between_flushes: u64,
}

static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
static READY: AtomicUsize = AtomicUsize::new(0);
/// When window 0 begins, by the clock; zero until that is known.
static BEGIN: AtomicU64 = AtomicU64::new(0);
static STOP: AtomicBool = AtomicBool::new(false);
/// Windows that all CPUs but the slowest have counted in: as many as CPU 0 has completed.
static LAST: AtomicU64 = AtomicU64::new(0);

pub(in crate::experiments) fn run(context: &Context) -> Outcome {
    let settings = context.settings;
    let (Some(counts), Some(memory)) = (memory(0, Some(COUNTS_BYTES >> 20)), memory(COUNTS_BYTES, settings.memory))
    else {
        return NO_MEMORY;
    };
    let microseconds = settings.seconds.unwrap_or(5).saturating_mul(1_000_000);
    let window = SHORTEST.max(microseconds.div_ceil(WINDOWS));
    let cpus = (0..cpu::count()).filter(|cpu| *cpu == 0 || cpu::is_up(*cpu)).count() as u64;
    let all = memory.bytes() / LARGE_BYTES;
    let plan = Plan {
        counts,
        memory,
        cpus,
        regions: (all * settings.regions.unwrap_or(100) / 100).max(1),
        writes: settings.writes.unwrap_or(100),
        window_ticks: tsc::ticks(window).max(1),
        windows: (microseconds / window).clamp(1, WINDOWS),
        windows_between_flushes: (BETWEEN_FLUSHES / window).max(1),
    };
    *PLAN.lock() = Some(plan);
    READY.store(0, Ordering::SeqCst);
    BEGIN.store(0, Ordering::SeqCst);
    STOP.store(false, Ordering::SeqCst);

    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, stride) {
            record!("error", about = "cpu-is-busy", cpu = index);
            return Outcome::Done { failures: 1 };
        }
    }
    stride(0);
    let stall = settings.stall.unwrap_or(60);
    let stuck = cpu::wait_for_all(tsc::seconds(stall));

    report(&plan, window);
    Outcome::Done {
        failures: stuck.map_or(0, |cpu| {
            record!("violation", experiment = "stride", of = "end", cpu = cpu, expected = "finished", seen = "stuck");
            1
        }),
    }
}

/// What each CPU does, by its index.
fn stride(cpu: usize) {
    let Some(plan) = *PLAN.lock() else { return };
    let share = Share::of(&plan, cpu as u64);
    for window in 0..WINDOWS {
        count(&plan, cpu, window).store(0, Ordering::Relaxed);
    }
    // Nothing is touched for the first time later on, and QEMU's TLB has grown.
    for _ in 0..PASSES_BEFORE {
        for page in share.first..share.end {
            plan.memory.word(share.offset(&plan, page)).store(1, Ordering::Relaxed);
        }
        tlb::flush_all();
    }
    READY.fetch_add(1, Ordering::SeqCst);

    let begin = if cpu == 0 { begin(&plan) } else { wait_for_begin() };
    let mut page = share.first;
    let mut flushed = 0;
    let mut credit = 0;
    let mut current = 0;
    let mut looked = 0;
    while !STOP.load(Ordering::Relaxed) && share.first < share.end {
        for _ in 0..BATCH {
            let word = plan.memory.word(share.offset(&plan, page));
            credit += plan.writes;
            if credit >= 100 {
                credit -= 100;
                word.store(begin ^ page, Ordering::Relaxed);
            } else {
                word.load(Ordering::Relaxed);
            }
            page = if page + 1 == share.end { share.first } else { page + 1 };
        }
        current = (tsc::now() - begin) / plan.window_ticks;
        if current >= plan.windows {
            break;
        }
        let count = count(&plan, cpu, current);
        count.store(count.load(Ordering::Relaxed) + BATCH, Ordering::Relaxed);
        if tlb::KEPT_BY_EMULATOR && current >= flushed + plan.windows_between_flushes {
            flushed = current;
            tlb::flush_all();
        }
        if cpu == 0 && current >= looked + LOOK {
            looked = current;
            if is_to_quit() {
                STOP.store(true, Ordering::Relaxed);
            }
        }
    }
    if cpu == 0 {
        LAST.store(current.min(plan.windows), Ordering::SeqCst);
    }
}

/// Waits until all are ready, and lets them begin.
fn begin(plan: &Plan) -> u64 {
    cpu::wait_until(tsc::seconds(600), || READY.load(Ordering::SeqCst) as u64 >= plan.cpus);
    // The console's output so far is on its way by then, so the record is the first of its message.
    tsc::pause_until(tsc::now() + tsc::ticks(100_000));
    let now = tsc::now();
    record!(
        "begin",
        experiment = "stride",
        ticks = now,
        khz = tsc::khz(),
        window_us = tsc::microseconds(plan.window_ticks),
        cpus = plan.cpus,
        pages = plan.regions * PAGES_PER_REGION,
        writes = plan.writes,
    );
    BEGIN.store(now, Ordering::SeqCst);
    now
}

fn wait_for_begin() -> u64 {
    loop {
        match BEGIN.load(Ordering::SeqCst) {
            0 => core::hint::spin_loop(),
            begin => return begin,
        }
    }
}

/// The pages of one CPU, among those that are touched.
struct Share {
    first: u64,
    end: u64,
}

impl Share {
    fn of(plan: &Plan, cpu: u64) -> Self {
        let pages = plan.regions * PAGES_PER_REGION;
        Self { first: pages * cpu / plan.cpus, end: pages * (cpu + 1) / plan.cpus }
    }

    /// Offset of that page. The large pages in use are spread over all of the memory.
    #[inline]
    fn offset(&self, plan: &Plan, page: u64) -> u64 {
        let all = plan.memory.bytes() / LARGE_BYTES;
        let region =
            if plan.regions == all { page / PAGES_PER_REGION } else { page / PAGES_PER_REGION * all / plan.regions };
        region * LARGE_BYTES + page % PAGES_PER_REGION * PAGE
    }
}

fn count(plan: &Plan, cpu: usize, window: u64) -> &'static AtomicU64 {
    plan.counts.word((cpu as u64 * WINDOWS + window) * 8)
}

/// The sums of all CPUs.
struct Sums<'a> {
    plan: &'a Plan,
    from: u64,
    end: u64,
}

impl Sums<'_> {
    fn of(&self, window: u64) -> u64 {
        (0..cpu::count()).map(|cpu| count(self.plan, cpu, window).load(Ordering::Relaxed)).sum()
    }
}

impl fmt::Display for Sums<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for window in self.from..self.end {
            if window > self.from {
                f.write_str(",")?;
            }
            write!(f, "{}", self.of(window))?;
        }
        Ok(())
    }
}

fn report(plan: &Plan, window: u64) {
    let last = LAST.load(Ordering::SeqCst);
    for from in (0..last).step_by(usize::try_from(SUMS).unwrap_or(1)) {
        let sums = Sums { plan, from, end: last.min(from + SUMS) };
        record!("windows", experiment = "stride", from = from, accesses = sums);
    }
    let all = Sums { plan, from: 0, end: last };
    record!(
        "record",
        experiment = "stride",
        cpus = plan.cpus,
        pages = plan.regions * PAGES_PER_REGION,
        writes = plan.writes,
        windows = last,
        window_us = window,
        accesses = (0..last).map(|window| all.of(window)).sum::<u64>(),
    );
}

//! The cost of one exit, seen from inside: ticks of the clock per operation, without the loop around it. Also the cost
//! of the first access to memory.
//!
//! Under QEMU's `-icount shift=0` the TSC counts instructions, and the figures are exact and repeatable.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::batches::{BATCHES, Batches, per_iteration};

use super::{Context, Outcome};
use crate::arch::ram::Ram;
use crate::arch::round_trip::{self as loops, Pair};
use crate::arch::{controller, cpu_local, interrupts, tlb, tsc, window};
use crate::interrupt::{TIMER, taken};
use crate::record::record;

pub(super) const DONE: Outcome = Outcome::Done { failures: 0 };

/// How often each loop runs.
pub(super) fn iterations(context: &Context) -> u64 {
    context.settings.iterations.unwrap_or(1000)
}

/// Measures one loop with and without its instruction.
pub(super) fn measure(context: &Context, name: &str, pair: Pair) -> Outcome {
    if context.settings.endless {
        return repeat(context, name, |n| Some((pair.full)(n)));
    }
    let n = iterations(context);
    let empty = Batches::measure(|| (pair.empty)(n)).median();
    let full = Batches::measure(|| (pair.full)(n));
    report(name, n, full, empty);
    DONE
}

/// Repeats a loop as fast as it goes, for `seconds=N` (5): what a bad neighbour does.
fn repeat(context: &Context, name: &str, some: impl Fn(u64) -> Option<u64>) -> Outcome {
    const AT_A_TIME: u64 = 100;
    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(5));
    let (mut done, mut lost) = (0u64, 0);
    while tsc::now() < end {
        lost += u64::from(some(AT_A_TIME).is_none());
        done += AT_A_TIME;
    }
    record!("record", experiment = name, repeated = done);
    Outcome::Done { failures: lost }
}

pub(super) fn report(name: &str, n: u64, full: Batches, empty: u64) {
    record!(
        "record",
        experiment = name,
        iterations = n,
        ticks_per_iteration = per_iteration(full.median(), empty, n),
        min = per_iteration(full.min(), empty, n),
        max = per_iteration(full.max(), empty, n),
        empty_loop_ticks = empty,
        batches = BATCHES,
    );
}

pub(super) fn empty(context: &Context) -> Outcome {
    let n = iterations(context);
    report("empty", n, Batches::measure(|| (loops::EMPTY.full)(n)), 0);
    DONE
}

pub(super) fn page_fault(context: &Context) -> Outcome {
    let cpu = cpu_local::index();
    window::serve_demand(cpu, false);
    window::unmap(cpu, 0);
    measure(context, "page-fault", loops::PAGE_FAULT)
}

/// Measures interrupts that are sent and taken: `send` returns the ticks of a number of them, or `None` if one got
/// lost.
pub(super) fn measure_interrupts(context: &Context, name: &str, send: impl Fn(u64) -> Option<u64>) -> Outcome {
    if context.settings.endless {
        return repeat(context, name, send);
    }
    let n = iterations(context);
    let mut lost = 0;
    let empty = Batches::measure(|| (loops::EMPTY.full)(n)).median();
    let full = Batches::measure(|| {
        send(n).unwrap_or_else(|| {
            lost += 1;
            0
        })
    });
    if lost > 0 {
        record!(
            "violation",
            experiment = name,
            of = "interrupt",
            expected = "delivered",
            seen = "lost",
            batches = lost
        );
        return Outcome::Done { failures: lost };
    }
    report(name, n, full, empty);
    DONE
}

/// Time between the moment for which the timer was armed and the first instruction after the halt.
pub(super) fn wake(context: &Context, name: &str) -> Outcome {
    let n = iterations(context).min(10_000);
    let delay = tsc::ticks(50);
    let timer = &taken(cpu_local::index()).timer;

    let full = Batches::measure(|| {
        let mut beyond = 0;
        for _ in 0..n {
            let before = timer.load(Ordering::Acquire);
            let due = if controller::has_deadline() {
                let due = tsc::now() + delay;
                controller::arm_deadline(TIMER, due);
                due
            } else {
                let start = tsc::now();
                start + controller::arm_once(TIMER, delay)
            };
            while timer.load(Ordering::Acquire) == before {
                interrupts::sleep();
            }
            beyond += tsc::now().saturating_sub(due);
        }
        beyond
    });
    controller::disarm();
    report(name, n, full, 0);
    DONE
}

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Accesses pages for the first time, one store each, then again, and again after a flush of the TLB. If the machine
/// maps memory on the first access, only the first pass has faults of stage 2. A second run in the same boot uses other
/// pages.
pub(super) fn fresh_pages(context: &Context) -> Outcome {
    static USED: AtomicU64 = AtomicU64::new(0);
    let memory = Ram::all();
    let used = USED.load(Ordering::Relaxed);
    let pages = context.settings.iterations.unwrap_or(4096).min((memory.bytes() / PAGE).saturating_sub(used));
    if pages == 0 {
        return Outcome::Unsupported("there is no memory left that was not touched");
    }
    USED.store(used + pages, Ordering::Relaxed);
    let pass = || {
        let begin = tsc::now();
        for page in used..used + pages {
            memory.word(page * PAGE).store(page, Ordering::Relaxed);
        }
        tsc::now() - begin
    };
    let fresh = pass();
    let again = pass();
    tlb::flush_all();
    let missed = pass();
    record!(
        "record",
        experiment = "fresh-pages",
        pages = pages,
        ticks_per_page = fresh / pages,
        again = again / pages,
        tlb_missed = missed / pages,
        ticks_per_iteration = fresh.saturating_sub(again) / pages,
    );
    DONE
}

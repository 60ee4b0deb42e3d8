//! CPUs that take all time that they get, in the two ways that there are: they compute, or they sleep and wake.
//!
//! The hypervisor shares pCPUs among VMs. What a VM gets beside others is seen from outside, by its counters, and from
//! inside, by what its CPUs have done in each second.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::percentiles::{Summary, nanoseconds};

use super::{Context, Outcome};
use crate::arch::{controller, interrupts, tsc};
use crate::cpu;
use crate::interrupt::{TIMER, taken};
use crate::record::record;

/// Passes of the loop between two looks at the clock.
const PASSES: u64 = 10_000;

static END: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

/// All CPUs compute. The first tells each second what all have done.
pub(super) fn compute(context: &Context) -> Outcome {
    all(context, "compute", compute_once, |_| others(0, compute_once))
}

/// All CPUs sleep until a timer that has almost expired, again and again.
pub(super) fn naps(context: &Context) -> Outcome {
    all(context, "naps", nap, |cpu| others(cpu, nap))
}

/// One CPU sleeps for some milliseconds, again and again: how late it runs after its timer has expired.
pub(super) fn wake_ups(context: &Context) -> Outcome {
    let mut late = [0; WAKE_UPS];
    let mut count = 0;
    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(5));
    let timer = &taken(0).timer;
    while count < WAKE_UPS && tsc::now() < end {
        let before = timer.load(Ordering::Acquire);
        let due = tsc::now() + tsc::ticks(NAP_MICROSECONDS);
        controller::arm_once(TIMER, tsc::ticks(NAP_MICROSECONDS));
        while timer.load(Ordering::Acquire) == before {
            interrupts::sleep();
        }
        late[count] = tsc::now().saturating_sub(due);
        count += 1;
    }
    let late = Summary::of(&mut late[..count]).map(|ticks| nanoseconds(ticks, tsc::khz()));
    let Summary { count, mean, p50, p99, max, .. } = late;
    record!("record", experiment = "wake-ups", count = count, mean = mean, p50 = p50, p99 = p99, max = max);
    Outcome::Done { failures: u64::from(count == 0) }
}

/// The most that are measured: they are on the stack.
const WAKE_UPS: usize = 1024;
/// How long a nap is: shorter than a slice, so that the CPU never uses a share of any size.
const NAP_MICROSECONDS: u64 = 3_000;

/// A part of the work of a CPU. Returns how much it was.
type Part = fn(usize) -> u64;

fn compute_once(_: usize) -> u64 {
    for pass in 0..PASSES {
        core::hint::black_box(pass);
    }
    PASSES
}

fn nap(cpu: usize) -> u64 {
    let timer = &taken(cpu).timer;
    interrupts::disable();
    let before = timer.load(Ordering::Acquire);
    controller::arm_once(TIMER, 1);
    while timer.load(Ordering::Acquire) == before {
        interrupts::sleep();
    }
    interrupts::enable();
    1
}

fn all(context: &Context, experiment: &str, part: Part, job: fn(usize)) -> Outcome {
    let end = match context.settings.seconds.unwrap_or(5) {
        0 => u64::MAX,
        seconds => tsc::now() + tsc::seconds(seconds),
    };
    END.store(end, Ordering::SeqCst);
    DONE.store(0, Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, job) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }

    let (mut second, mut told) = (0u64, 0);
    let mut next = tsc::now() + tsc::seconds(1);
    interrupts::enable();
    while tsc::now() < end {
        DONE.fetch_add(part(0), Ordering::Relaxed);
        if tsc::now() >= next {
            second += 1;
            next += tsc::seconds(1);
            let done = DONE.load(Ordering::Relaxed);
            record!("record", experiment = experiment, second = second, done = done - told);
            told = done;
        }
    }
    interrupts::disable();
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    record!("record", experiment = experiment, cpus = cpu::count(), all = DONE.load(Ordering::Relaxed));
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

/// The work of the other CPUs.
fn others(cpu: usize, part: Part) {
    interrupts::enable();
    while tsc::now() < END.load(Ordering::Relaxed) {
        DONE.fetch_add(part(cpu), Ordering::Relaxed);
    }
    interrupts::disable();
}

//! All CPUs read one clock: a later reading is never less, on any CPU.
//!
//! CPUs take turns under a lock. Each reads the counter and compares it with the previous reading. In between they
//! sleep, so that a hypervisor can migrate them.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::random::Random;

use super::{Context, Outcome};
use crate::arch::boot::MAX_CPUS;
use crate::arch::{controller, interrupts, tsc};
use crate::cpu;
use crate::interrupt::TIMER;
use crate::record::record;

static LOCKED: AtomicBool = AtomicBool::new(false);
/// The last reading. Written under the lock.
static LAST: AtomicU64 = AtomicU64::new(0);
static READINGS: AtomicU64 = AtomicU64::new(0);
static BACKWARDS: AtomicU64 = AtomicU64::new(0);
/// The furthest that it went back, in ticks.
static FURTHEST: AtomicU64 = AtomicU64::new(0);
/// The end of the run, counted in turns of CPU 0, which has no better clock either.
static IS_OVER: AtomicBool = AtomicBool::new(false);
static SEED: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(context: &Context) -> Outcome {
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    for counter in [&LAST, &READINGS, &BACKWARDS, &FURTHEST] {
        counter.store(0, Ordering::SeqCst);
    }
    IS_OVER.store(false, Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, take_turns) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    // A count of naps: the clock itself may be wrong.
    let mut random = Random::new(SEED.load(Ordering::Relaxed), MAX_CPUS as u64);
    for _ in 0..context.settings.seconds.unwrap_or(3) * 1000 {
        take_turn();
        nap(&mut random);
    }
    IS_OVER.store(true, Ordering::SeqCst);
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));

    let backwards = BACKWARDS.load(Ordering::SeqCst);
    record!(
        "record",
        experiment = "one-clock",
        cpus = cpu::count(),
        readings = READINGS.load(Ordering::SeqCst),
        backwards = backwards,
        furthest_ticks = FURTHEST.load(Ordering::SeqCst),
    );
    Outcome::Done { failures: backwards + u64::from(stuck.is_some()) }
}

/// The job of the other CPUs.
fn take_turns(cpu: usize) {
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    while !IS_OVER.load(Ordering::Relaxed) {
        for _ in 0..random.below(64) {
            take_turn();
        }
        nap(&mut random);
    }
}

/// Reads the counter under the lock.
fn take_turn() {
    while LOCKED.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    let (now, last) = (tsc::now(), LAST.load(Ordering::Relaxed));
    if now < last {
        BACKWARDS.fetch_add(1, Ordering::Relaxed);
        FURTHEST.fetch_max(last - now, Ordering::Relaxed);
    }
    LAST.store(now, Ordering::Relaxed);
    LOCKED.store(false, Ordering::Release);
    READINGS.fetch_add(1, Ordering::Relaxed);
}

/// Sleeps for up to half a millisecond.
fn nap(random: &mut Random) {
    interrupts::disable();
    controller::arm_once(TIMER, tsc::ticks(20 + random.below(480)));
    interrupts::sleep();
    controller::disarm();
}

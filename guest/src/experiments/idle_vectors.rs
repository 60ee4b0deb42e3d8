//! Vector registers of a CPU that uses them rarely, while it sleeps and migrates.
//!
//! A hypervisor may leave them in the processor until another vCPU needs them, and load them only on use. So only one
//! CPU uses them: it gives them new contents, sleeps and spins some times without a check, then checks. The other CPUs
//! sleep and spin only to disturb it. The worst result is old contents: registers of a processor on which it ran some
//! time ago.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::random::Random;

use super::{Context, Outcome};
use crate::arch::registers::VectorPattern;
use crate::arch::{controller, interrupts, tsc};
use crate::cpu;
use crate::interrupt::{TIMER, taken};
use crate::record::record;

/// Failures that are described one by one; the rest is only counted.
const DESCRIBED: u64 = 5;

static END: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(context: &Context) -> Outcome {
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    END.store(tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(3)), Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, be_in_the_way) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }

    let mut random = context.random(0);
    let (mut looks, mut failures) = (0_u64, 0_u64);
    let mut before = VectorPattern::new(random.bits());
    interrupts::enable();
    while tsc::now() < END.load(Ordering::Relaxed) {
        let pattern = VectorPattern::new(random.bits());
        pattern.load();
        for _ in 0..random.below(5) {
            nap(0, &mut random);
        }

        looks += 1;
        let held = VectorPattern::held();
        if let Some(register) = held.first_difference(&pattern) {
            failures += 1;
            if failures <= DESCRIBED {
                let is_older = held.first_difference(&before).is_none();
                let seen = if is_older { "those-before" } else { "others" };
                let expected = "the-last-ones";
                record!(
                    "violation",
                    experiment = "idle-vectors",
                    register = register,
                    expected = expected,
                    seen = seen
                );
            }
        }
        before = pattern;
    }
    interrupts::disable();

    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    record!("record", experiment = "idle-vectors", cpus = cpu::count(), looks = looks, failures = failures);
    Outcome::Done { failures: failures + u64::from(stuck.is_some()) }
}

/// The job of the other CPUs.
fn be_in_the_way(cpu: usize) {
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    interrupts::enable();
    while tsc::now() < END.load(Ordering::Relaxed) {
        nap(cpu, &mut random);
        tsc::pause_until(tsc::now() + tsc::ticks(random.below(1500)));
    }
    interrupts::disable();
}

/// Sleeps until the timer fires, after a short random time. Uses no vector registers.
fn nap(cpu: usize, random: &mut Random) {
    let timer = &taken(cpu).timer;
    interrupts::disable();
    let before = timer.load(Ordering::Acquire);
    controller::arm_once(TIMER, tsc::ticks(5 + random.below(300)));
    while timer.load(Ordering::Acquire) == before {
        interrupts::sleep();
    }
    interrupts::enable();
}

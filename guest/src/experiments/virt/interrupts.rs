//! The interrupt controller and the timer, used as no kernel would.

use core::sync::atomic::Ordering;

use crate::arch::{control, controller, cpu_local, interrupts, tsc};
use crate::cpu;
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::interrupt::{COUNTED, TIMER, WAKE, taken};
use crate::record::record;

/// Writes and reads of the CPU interface's registers with random data.
pub(super) fn interface(context: &Context) -> Outcome {
    let mut random = context.random(0);
    let rounds = context.settings.iterations.unwrap_or(50_000);
    for _ in 0..rounds {
        controller::poke_interface(random.index(controller::POKES), random.bits() >> random.below(64));
    }
    // To nobody, and to everybody with all bits set.
    for value in [0, 1 << 40, u64::MAX, 0xffff, 0x00ff_00ff_0fff_ffff, 0xf << 44 | 0xffff] {
        controller::command(value);
    }
    controller::restore();
    record!("record", experiment = "icc-fuzz", rounds = rounds);
    Outcome::Done { failures: still_work(context, "icc-fuzz") }
}

/// Whether interrupts still come, here and at CPU 1, and the timer does.
pub(super) fn still_work(context: &Context, experiment: &str) -> u64 {
    let patience = tsc::seconds(context.settings.stall.unwrap_or(10));
    let own = cpu_local::index();
    let mut failures = 0;
    for cpu in 0..cpu::count().min(2) {
        let counted = &taken(cpu).counted;
        // What the random writes made pending comes first.
        cpu::wait_until(tsc::ticks(10_000), || false);
        let before = counted.load(Ordering::Acquire);
        controller::send(cpu::hardware_id(cpu), COUNTED);
        let came = cpu::wait_until(patience, || counted.load(Ordering::Acquire) != before);
        failures += context.expect(experiment, format_args!("sgi-{cpu}"), "delivered", format_args!("lost"), came);
    }
    let timer = &taken(own).timer;
    let before = timer.load(Ordering::Acquire);
    controller::arm_once(TIMER, tsc::ticks(100));
    let came = cpu::wait_until(patience, || timer.load(Ordering::Acquire) != before);
    failures += context.expect(experiment, format_args!("timer"), "delivered", format_args!("lost"), came);
    failures
}

/// WFIT and WFET (FEAT_WFxT): they end at their time, with nothing else to wake them.
pub(super) fn timed_waits(context: &Context) -> Outcome {
    if !control::has_timed_waits() {
        return Outcome::Unsupported("no WFIT (ID_AA64ISAR2_EL1.WFxT)");
    }
    let mut cases = Cases::new(context, "timed-waits");
    controller::disarm();
    for (name, delay) in [("past", 0), ("short", 50), ("long", 20_000)] {
        let start = tsc::now();
        let end = start + tsc::ticks(delay);
        interrupts::sleep_until(end);
        let now = tsc::now();
        // Without another wake-up it sleeps to the end; WFIT may end earlier, but under a hypervisor that lets it sleep it does not.
        cases.check(
            name,
            "a wait for an interrupt with a time",
            "ends at its time",
            format_args!("{} us of {delay}", tsc::microseconds(now - start)),
            now >= end,
        );
        let start = tsc::now();
        while tsc::now() < start + tsc::ticks(delay) {
            interrupts::wait_for_event_until(start + tsc::ticks(delay));
        }
        cases.check(name, "a wait for an event with a time", "ends", format_args!("ended"), true);
    }
    cases.done()
}

/// Times in the past and in the far future, and a wait for all of them.
pub(super) fn timers(context: &Context) -> Outcome {
    let mut cases = Cases::new(context, "timer-extremes");
    let timer = &taken(cpu_local::index()).timer;
    for (name, value, comes) in [
        ("past", 0, true),
        ("long-past", 1, true),
        ("now", tsc::now(), true),
        ("far", tsc::now().saturating_add(tsc::seconds(1_000_000)), false),
        ("never", u64::MAX / 2, false),
    ] {
        let before = timer.load(Ordering::Acquire);
        controller::arm_deadline(TIMER, value);
        let came = cpu::wait_until(tsc::ticks(20_000), || timer.load(Ordering::Acquire) != before);
        controller::disarm();
        cases.check(name, "a time for the timer", "comes if it is past", format_args!("came: {came}"), came == comes);
    }
    for (name, count, comes) in [("negative", 0xffff_ffff, true), ("largest", 0x7fff_ffff, false), ("one", 1, true)] {
        let before = timer.load(Ordering::Acquire);
        controller::arm_count(count);
        let came = cpu::wait_until(tsc::ticks(20_000), || timer.load(Ordering::Acquire) != before);
        controller::disarm();
        cases.check(name, "a count for the timer", "signed, 32 bits", format_args!("came: {came}"), came == comes);
    }

    // Asleep, with the timer armed for ever: only the other CPU wakes this one.
    if cpu::is_up(1) {
        let wake = &taken(cpu_local::index()).wake;
        let before = wake.load(Ordering::Acquire);
        controller::arm_deadline(TIMER, u64::MAX / 2);
        let given = cpu::give(1, |_| {
            tsc::pause_until(tsc::now() + tsc::ticks(2000));
            controller::send(cpu::hardware_id(0), WAKE);
        });
        while given && wake.load(Ordering::Acquire) == before {
            interrupts::sleep();
        }
        controller::disarm();
        cases.check("woken", "a wait with a timer that never comes", "woken", format_args!("woken"), given);
    }
    // With the condition holding and its interrupt masked in the timer, nothing may come.
    let before = timer.load(Ordering::Acquire);
    controller::arm_masked();
    let came = cpu::wait_until(tsc::ticks(5000), || timer.load(Ordering::Acquire) != before);
    controller::disarm();
    cases.check("masked", "a timer that masks its interrupt", "nothing", format_args!("came: {came}"), !came);
    cases.done()
}

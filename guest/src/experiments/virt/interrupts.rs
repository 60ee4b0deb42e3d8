//! The interrupt controller and the timer, used as no kernel does.

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
    // To no CPU, and to all CPUs with all bits set.
    for value in [0, 1 << 40, u64::MAX, 0xffff, 0x00ff_00ff_0fff_ffff, 0xf << 44 | 0xffff] {
        controller::command(value);
    }
    controller::restore();
    record!("record", experiment = "icc-fuzz", rounds = rounds);
    Outcome::Done { failures: still_work(context, "icc-fuzz") }
}

/// Whether interrupts still arrive, here and at CPU 1, and the timer fires.
pub(super) fn still_work(context: &Context, experiment: &str) -> u64 {
    let patience = tsc::seconds(context.settings.stall.unwrap_or(10));
    let own = cpu_local::index();
    let mut failures = 0;
    for cpu in 0..cpu::count().min(2) {
        let counted = &taken(cpu).counted;
        // What the random writes made pending arrives first.
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

/// The physical timer of EL1: its registers, its interrupt, its mask, its level, and that it wakes a CPU that sleeps.
pub(super) fn physical_timer(context: &Context) -> Outcome {
    const ENABLE: u64 = 1;
    const IMASK: u64 = 2;
    const ISTATUS: u64 = 4;
    /// Times under test, in microseconds.
    const SOON: u64 = 300;
    let mut cases = Cases::new(context, "physical-timer");
    let ms = controller::timer_khz();
    let control = || controller::physical_timer()[2];
    let taken = controller::physical_interrupts;
    let mut check = |name: &str, expected: &str, seen: u64, matches: bool| {
        cases.check(name, "the physical timer", expected, format_args!("{seen:#x}"), matches);
    };

    controller::set_physical_control(0, 1);
    for _ in 0..1000 {
        let (before, [count, ..], after) =
            (controller::virtual_count(), controller::physical_timer(), controller::virtual_count());
        if !(before..=after).contains(&count) {
            check("one-counter", "between two reads of the virtual counter", count, false);
        }
    }
    let [now, ..] = controller::physical_timer();
    controller::set_physical_compare(now + 1000 * ms);
    let [later, value, off, compare] = controller::physical_timer();
    check("compare", "as written", compare, compare == now + 1000 * ms);
    check(
        "value",
        "the counts from here to there",
        value,
        value <= 1000 * ms && value + 500 * ms > 1000 * ms && later >= now,
    );
    check("off", "no condition", off, off == 0);
    controller::set_physical_value(0xffff_ffff);
    let [now, _, _, compare] = controller::physical_timer();
    check("negative", "in the past", compare, compare < now && now - compare < 1000 * ms);

    // Off, and then masked: no interrupt arrives, but the condition is visible.
    cpu::wait_until(tsc::ticks(3000), || taken() != 0);
    check("off-and-past", "no interrupt", taken(), taken() == 0);
    controller::set_physical_control(ENABLE | IMASK, 1);
    cpu::wait_until(tsc::ticks(3000), || taken() != 0);
    check("masked", "no interrupt", taken(), taken() == 0);
    check("masked-status", "on, masked, holds", control(), control() == ENABLE | IMASK | ISTATUS);
    controller::set_physical_control(ENABLE, 1);
    cpu::wait_until(tsc::seconds(5), || taken() != 0);
    check("unmasked", "one interrupt", taken(), taken() == 1);

    // Later, awake: not before its time.
    controller::set_physical_control(0, 1);
    let [start, ..] = controller::physical_timer();
    controller::set_physical_compare(start + 5 * ms);
    controller::set_physical_control(ENABLE, 1);
    check("not-yet", "on", control(), control() == ENABLE || controller::physical_timer()[0] >= start + 5 * ms);
    cpu::wait_until(tsc::seconds(5), || taken() != 0);
    let [end, ..] = controller::physical_timer();
    check("fires", "after 5 ms", end - start, taken() == 1 && end >= start + 5 * ms);

    // As long as the condition holds, the interrupt arrives again.
    controller::set_physical_control(ENABLE, 3);
    cpu::wait_until(tsc::seconds(5), || taken() >= 3);
    check("level", "three interrupts", taken(), taken() == 3);

    // Asleep: nothing else wakes this CPU.
    controller::disarm();
    for delay in [1, 50] {
        let [start, ..] = controller::physical_timer();
        controller::set_physical_control(0, 1);
        controller::set_physical_value(delay * ms);
        controller::set_physical_control(ENABLE, 1);
        while taken() == 0 {
            interrupts::sleep();
        }
        let [end, ..] = controller::physical_timer();
        check("wakes", "not before its time", end - start, end >= start + delay * ms);
    }

    // Asleep, from about when it is due: a little before, or a little after.
    let mut woken = 0;
    for delay in 0..SOON {
        controller::set_physical_control(0, 1);
        controller::set_physical_value(delay * ms / 1000);
        controller::set_physical_control(ENABLE, 1);
        while taken() == 0 {
            interrupts::sleep();
        }
        woken += 1;
    }
    check("soon", "each wakes", woken, woken == SOON);

    // Masked until the condition ends: no interrupt arrives.
    controller::set_physical_control(ENABLE, 1);
    tsc::pause_until(tsc::now() + tsc::ticks(2000));
    let held = control();
    let [now, ..] = controller::physical_timer();
    controller::set_physical_compare(now + 100_000 * ms);
    cpu::wait_until(tsc::ticks(3000), || taken() != 0);
    check("taken-back", "held, and no interrupt", taken(), held == ENABLE | ISTATUS && taken() == 0);
    controller::set_physical_control(0, 1);
    cases.done()
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
        // Without another wake-up it sleeps to the end. WFIT may end earlier, but not under a hypervisor that lets it
        // sleep.
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
    // While the condition holds and the timer masks its interrupt, no interrupt may arrive.
    let before = timer.load(Ordering::Acquire);
    controller::arm_masked();
    let came = cpu::wait_until(tsc::ticks(5000), || timer.load(Ordering::Acquire) != before);
    controller::disarm();
    cases.check("masked", "a timer that masks its interrupt", "nothing", format_args!("came: {came}"), !came);
    cases.done()
}

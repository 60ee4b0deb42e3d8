//! Forbidden actions of a guest, on any machine. Each gets the architecture's answer, or ends this VM alone.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Context, Outcome};
use crate::arch::attempt::{self, Fault};
use crate::arch::{control, controller, cpu_local, interrupts, power, tsc, window};
use crate::cpu;
use crate::interrupt::{TIMER, taken};
use crate::record::record;

/// Name of what an instruction did: the exception, or `none`.
pub(super) fn name<T>(seen: &Result<T, Fault>) -> impl core::fmt::Display + use<T> {
    struct Seen(Option<Fault>);
    impl core::fmt::Display for Seen {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            match self.0 {
                Some(fault) => fault.fmt(f),
                None => f.write_str("none"),
            }
        }
    }
    Seen(seen.as_ref().err().copied())
}

pub(super) fn write_nowhere(context: &Context) -> Outcome {
    let top = (1u64 << control::physical_bits()) - 4096;
    let mut failures = 0;
    for at in [0xd000_0000, top] {
        record!("record", experiment = "write-nowhere", at = format_args!("{at:#x}"), about = "trying");
        let mapped = window::map_physical(cpu_local::index(), at);
        let stored = attempt::store_u32(mapped, 0x1234_5678);
        let loaded = attempt::load_u32(mapped);
        let wide = attempt::load_u64(mapped + 8);
        record!(
            "record",
            experiment = "write-nowhere",
            at = format_args!("{at:#x}"),
            store = name(&stored),
            load = name(&loaded),
            value = format_args!("{:#x}", loaded.unwrap_or(0)),
            wide = format_args!("{:#x}", wide.unwrap_or(0)),
        );
        // The access may have any answer except that of memory.
        let kept = loaded == Ok(0x1234_5678);
        failures +=
            context.expect("write-nowhere", format_args!("{at:#x}"), "no-memory", format_args!("memory"), !kept);
    }
    Outcome::Done { failures }
}

pub(super) fn timer_storm(context: &Context) -> Outcome {
    let timer = &taken(cpu_local::index()).timer;
    let before = timer.load(Ordering::Acquire);
    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(1));
    let mut passes = 0u64;

    interrupts::enable();
    controller::arm_periodic(TIMER, controller::STORM);
    while tsc::now() < end {
        passes += 1;
    }
    controller::disarm();
    interrupts::disable();

    let interrupts = timer.load(Ordering::Acquire) - before;
    record!("record", experiment = "timer-storm", passes = passes, interrupts = interrupts);
    let failures = context.expect(
        "timer-storm",
        format_args!("progress"),
        "passes-and-interrupts",
        format_args!("{passes}-passes-{interrupts}-interrupts"),
        passes > 100 && interrupts > 0,
    );
    Outcome::Done { failures }
}

static REACHED: AtomicBool = AtomicBool::new(false);

pub(super) fn halt_cli(context: &Context) -> Outcome {
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    REACHED.store(false, Ordering::SeqCst);
    let given = cpu::give(1, |_| {
        REACHED.store(true, Ordering::SeqCst);
        power::halt_for_ever()
    });
    let halted = given && cpu::wait_until(tsc::seconds(5), || REACHED.load(Ordering::SeqCst));
    cpu::retire(1);
    record!("record", experiment = "halt-cli", cpu = 1, halted = halted);

    // An interrupt to a CPU that will never take it: it stays pending there and harms no one.
    controller::send(cpu::hardware_id(1), TIMER);
    match super::mixed::run(context) {
        Outcome::Done { failures } => Outcome::Done { failures: failures + u64::from(!halted) },
        other => other,
    }
}

static SPIN_UNTIL: AtomicU64 = AtomicU64::new(0);

fn spin(_: usize) {
    let until = SPIN_UNTIL.load(Ordering::SeqCst);
    while tsc::now() < until {}
}

pub(super) fn spin_cli(context: &Context) -> Outcome {
    let until = match context.settings.seconds.unwrap_or(2) {
        0 => u64::MAX,
        seconds => tsc::now() + tsc::seconds(seconds),
    };
    SPIN_UNTIL.store(until, Ordering::SeqCst);
    record!("record", experiment = "spin-cli", cpus = cpu::count(), for_ever = until == u64::MAX);
    for index in 1..cpu::count() {
        cpu::give(index, spin);
    }
    spin(0);
    let stuck = cpu::wait_for_all(tsc::seconds(30));
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

pub(super) fn unexpected_exception(_: &Context) -> Outcome {
    power::invalid_opcode();
    Outcome::Done { failures: 1 }
}

pub(super) fn panic(_: &Context) -> Outcome {
    panic!("asked for on the command line")
}

pub(super) fn power_off(_: &Context) -> Outcome {
    power::off(true)
}

pub(super) fn reset(_: &Context) -> Outcome {
    record!("record", experiment = "reset", about = "now");
    power::reset();
    tsc::pause_until(tsc::now() + tsc::seconds(1));
    record!("violation", experiment = "reset", expected = "reset", seen = "nothing");
    Outcome::Done { failures: 1 }
}

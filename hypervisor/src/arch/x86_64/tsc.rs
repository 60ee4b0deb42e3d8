//! The host's clock: the time stamp counter, which all pCPUs share.
//!
//! Its rate is what CPUID leaf 15h says, or is measured once against the ACPI PM timer, together with the rate of the
//! local APIC's timer. A reading of several clocks is as good as the time it took: the pCPU may be taken away in the
//! middle of it when it is a thread of an emulator. So each end of the measurement is the quickest of many readings.

#![expect(unsafe_code, reason = "the instruction that reads the counter")]

use core::arch::x86_64::{__cpuid, _rdtsc};

use super::acpi::{Machine, PmTimer};
use super::{apic, port, power};
use crate::arch::clock::Clock;

/// Rate of the ACPI PM timer (ACPI 4.8.3.3).
const PM_HZ: u32 = 3_579_545;
/// Length of the measurement: one PM tick more or less is 28 parts per million of it.
const WINDOW_PM_TICKS: u32 = PM_HZ / 100;
/// Readings at each end of which the quickest counts.
const READINGS: usize = 24;

static CLOCK: Clock = Clock::new();

/// The counter now.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction, and nobody disables it in the hypervisor.
    unsafe { _rdtsc() }
}

/// Ticks per second; 0 before it is known.
#[inline]
pub(crate) fn hz() -> u64 {
    CLOCK.hz()
}

/// Nanoseconds since boot; 0 while the rate is not known.
#[inline]
pub(crate) fn nanos() -> u64 {
    CLOCK.nanos(now())
}

/// Nanoseconds that `ticks` take.
#[inline]
pub(crate) fn ticks_to_nanos(ticks: u64) -> u64 {
    CLOCK.ticks_to_nanos(ticks)
}

/// Ticks that `nanos` take.
#[inline]
pub(crate) fn nanos_to_ticks(nanos: u64) -> u64 {
    CLOCK.nanos_to_ticks(nanos)
}

/// Busy for `micros` microseconds. For bring-up only.
pub(super) fn delay(micros: u64) {
    let end = now() + nanos_to_ticks(micros * 1000);
    while now() < end {
        core::hint::spin_loop();
    }
}

/// Lets [`nanos`] count from here.
pub(super) fn start() {
    CLOCK.start_at(now());
}

/// Finds the rates of the counter and of the local APIC's timer.
pub(super) fn calibrate(machine: &Machine) {
    apic::start_count();
    let told = told_by_cpuid();
    let (hz, timer_hz) = match (machine.pm_timer, told) {
        (Some(pm), told) => {
            let (measured, timer_hz) = measure(pm);
            (told.unwrap_or(measured), timer_hz)
        }
        (None, Some(hz)) => (hz, measure_timer(hz)),
        (None, None) => {
            log::error!("no ACPI PM timer and no CPUID leaf 15h: the TSC's rate cannot be found");
            power::exit(abi::exit_code::REFUSED)
        }
    };
    CLOCK.set_rate(hz);
    apic::set_rate(timer_hz, hz);
    log::debug!("TSC {hz} Hz, local APIC timer {timer_hz} Hz");
}

/// Crystal rate times ratio (CPUID leaf 15h), when the CPU gives all three numbers.
fn told_by_cpuid() -> Option<u64> {
    if __cpuid(0).eax < 0x15 {
        return None;
    }
    let leaf = __cpuid(0x15);
    if leaf.eax == 0 || leaf.ebx == 0 || leaf.ecx == 0 {
        return None;
    }
    Some(u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax))
}

/// One reading of the three clocks.
struct Reading {
    tsc: u64,
    pm: u32,
    timer: u32,
}

/// Rates of TSC and local APIC timer by the PM timer.
fn measure(pm: PmTimer) -> (u64, u64) {
    let first = quickest_reading(pm);
    let elapsed = |now: u32| now.wrapping_sub(first.pm) & pm.mask;
    while elapsed(port::read_u32(pm.port)) < WINDOW_PM_TICKS {
        core::hint::spin_loop();
    }
    let last = quickest_reading(pm);

    let window = u128::from(elapsed(last.pm));
    let rate = |counts: u64| {
        let hz = (u128::from(counts) * u128::from(PM_HZ) + window / 2) / window;
        u64::try_from(hz).unwrap_or(u64::MAX)
    };
    (rate(last.tsc - first.tsc), rate(u64::from(last.timer - first.timer)))
}

fn quickest_reading(pm: PmTimer) -> Reading {
    let mut best = Reading { tsc: 0, pm: 0, timer: 0 };
    let mut best_took = u64::MAX;
    for _ in 0..READINGS {
        let before = now();
        let (ticks, timer) = (port::read_u32(pm.port), apic::count());
        let took = now() - before;
        if took < best_took {
            best_took = took;
            best = Reading { tsc: before + took / 2, pm: ticks, timer };
        }
    }
    best
}

/// Rate of the local APIC timer by a TSC whose rate is known: 10 ms.
fn measure_timer(hz: u64) -> u64 {
    let (start, first) = (now(), apic::count());
    while now() - start < hz / 100 {
        core::hint::spin_loop();
    }
    let (ticks, counts) = (now() - start, apic::count() - first);
    u64::from(counts) * hz / ticks
}

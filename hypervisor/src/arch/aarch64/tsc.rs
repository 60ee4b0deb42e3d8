//! The host's clock: the system counter, which all pCPUs share (Arm ARM, chapter D11).
//!
//! The physical counter is read; guests see the same one as their virtual counter. Its rate is what the firmware says.

#![expect(unsafe_code, reason = "the counter must not be read early")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::register::read_register;

static START: AtomicU64 = AtomicU64::new(0);
static HZ: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds per tick, times 2^32.
static NANOS_PER_TICK: AtomicU64 = AtomicU64::new(0);

/// The counter now.
#[inline(always)]
pub(crate) fn now() -> u64 {
    let now: u64;
    // SAFETY: reads a register that every processor has. The barrier keeps the reading from being taken ahead of what came
    // before in the program.
    unsafe { asm!("isb", "mrs {}, cntpct_el0", out(reg) now, options(nostack, preserves_flags)) };
    now
}

/// Ticks per second; 0 before it is known.
#[inline]
pub(crate) fn hz() -> u64 {
    HZ.load(Ordering::Relaxed)
}

/// Nanoseconds since boot; 0 while the rate is not known.
#[inline]
pub(crate) fn nanos() -> u64 {
    ticks_to_nanos(now().wrapping_sub(START.load(Ordering::Relaxed)))
}

/// Nanoseconds that `ticks` take.
#[inline]
pub(crate) fn ticks_to_nanos(ticks: u64) -> u64 {
    let nanos = (u128::from(ticks) * u128::from(NANOS_PER_TICK.load(Ordering::Relaxed))) >> 32;
    wrap(nanos)
}

/// The lower half: 2^64 nanoseconds are 584 years.
#[expect(clippy::cast_possible_truncation, reason = "the host does not run that long")]
const fn wrap(nanos: u128) -> u64 {
    nanos as u64
}

/// Ticks that `nanos` take.
#[inline]
pub(crate) fn nanos_to_ticks(nanos: u64) -> u64 {
    let ticks = u128::from(nanos) * u128::from(hz()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// Reads the rate, and lets [`nanos`] count from here.
pub(super) fn start() {
    let hz = read_register!("cntfrq_el0").max(1);
    HZ.store(hz, Ordering::Relaxed);
    NANOS_PER_TICK.store((1_000_000_000 << 32) / hz, Ordering::Relaxed);
    START.store(now(), Ordering::Relaxed);
}

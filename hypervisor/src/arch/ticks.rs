//! A clock that counts ticks: its rate, and the conversion between ticks and nanoseconds.
//!
//! Each architecture's `clock` reads the ticks and finds their rate.

use core::sync::atomic::{AtomicU64, Ordering};

use super::clock::now;

/// The host's clock.
pub(super) static CLOCK: Clock = Clock::new();

/// Ticks per second; 0 before it is known.
#[inline]
pub(crate) fn hz() -> u64 {
    CLOCK.hz.load(Ordering::Relaxed)
}

/// Nanoseconds since boot; 0 while the rate is not known.
#[inline]
pub(crate) fn nanos() -> u64 {
    // Log lines from before the rate is known may also be from before the pCPU can read its clock.
    if hz() == 0 { 0 } else { ticks_to_nanos(now().wrapping_sub(CLOCK.start.load(Ordering::Relaxed))) }
}

/// Nanoseconds that `ticks` take.
#[inline]
pub(crate) fn ticks_to_nanos(ticks: u64) -> u64 {
    let nanos = (u128::from(ticks) * u128::from(CLOCK.nanos_per_tick.load(Ordering::Relaxed))) >> 32;
    wrap(nanos)
}

/// Ticks that `nanos` nanoseconds take.
#[inline]
pub(crate) fn nanos_to_ticks(nanos: u64) -> u64 {
    let ticks = u128::from(nanos) * u128::from(hz()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// Set once, by the first pCPU, before others read it.
pub(super) struct Clock {
    start: AtomicU64,
    hz: AtomicU64,
    /// Nanoseconds per tick, times 2^32.
    nanos_per_tick: AtomicU64,
}

impl Clock {
    /// A clock whose rate is not known yet.
    const fn new() -> Self {
        Self { start: AtomicU64::new(0), hz: AtomicU64::new(0), nanos_per_tick: AtomicU64::new(0) }
    }

    /// Nanoseconds are counted from this tick.
    pub(super) fn start_at(&self, tick: u64) {
        self.start.store(tick, Ordering::Relaxed);
    }

    /// It has `hz` ticks per second.
    pub(super) fn set_rate(&self, hz: u64) {
        self.hz.store(hz, Ordering::Relaxed);
        self.nanos_per_tick.store((1_000_000_000 << 32) / hz.max(1), Ordering::Relaxed);
    }
}

/// The lower half: 2^64 nanoseconds are 584 years.
#[expect(clippy::cast_possible_truncation, reason = "the host does not run that long")]
const fn wrap(nanos: u128) -> u64 {
    nanos as u64
}

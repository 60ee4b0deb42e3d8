//! Time: the virtual counter, whose rate CNTFRQ_EL0 gives.
//!
//! If that rate divides 10^9, ticks are nanoseconds. That is so on QEMU's machine; under `-icount shift=0` they are
//! instructions there. Otherwise they are counts of the counter.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

static KHZ: AtomicU64 = AtomicU64::new(1_000_000);
/// Ticks per count of the counter.
static SCALE: AtomicU64 = AtomicU64::new(1);

/// Ticks now. Earlier instructions have completed.
pub(crate) fn now() -> u64 {
    let count: u64;
    // SAFETY: reads a counter.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) count, options(nostack, nomem, preserves_flags)) };
    count.wrapping_mul(SCALE.load(Ordering::Relaxed))
}

/// Counts of the counter in `ticks`, rounded up.
pub(super) fn counts(ticks: u64) -> u64 {
    ticks.div_ceil(SCALE.load(Ordering::Relaxed))
}

/// Ticks of this many counts.
pub(super) fn of_counts(counts: u64) -> u64 {
    counts.saturating_mul(SCALE.load(Ordering::Relaxed))
}

/// Ticks in a thousandth of a second.
pub(crate) fn khz() -> u64 {
    KHZ.load(Ordering::Relaxed)
}

/// Ticks in `microseconds`.
pub(crate) fn ticks(microseconds: u64) -> u64 {
    microseconds.saturating_mul(khz()) / 1000
}

/// Ticks in `seconds`.
pub(crate) fn seconds(seconds: u64) -> u64 {
    seconds.saturating_mul(khz()).saturating_mul(1000)
}

/// Microseconds in `ticks`.
pub(crate) fn microseconds(ticks: u64) -> u64 {
    ticks.saturating_mul(1000) / khz().max(1)
}

/// Spins until it is `deadline`.
pub(crate) fn pause_until(deadline: u64) {
    while now() < deadline {
        core::hint::spin_loop();
    }
}

/// Finds the frequency and answers the name of the source.
pub(crate) fn calibrate(from_command_line: Option<u64>) -> &'static str {
    const NANOSECONDS: u64 = 1_000_000_000;
    let register: u64;
    // SAFETY: reads a value that firmware has written.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) register, options(nostack, nomem, preserves_flags)) };
    let (hz, source) = match from_command_line {
        Some(khz) => (khz.saturating_mul(1000), "command-line"),
        None if (1_000_000..=NANOSECONDS).contains(&register) => (register, "cntfrq"),
        None => (NANOSECONDS, "assumed"),
    };
    let scale = if NANOSECONDS.is_multiple_of(hz) { NANOSECONDS / hz } else { 1 };
    SCALE.store(scale, Ordering::Relaxed);
    KHZ.store(hz * scale / 1000, Ordering::Relaxed);
    source
}

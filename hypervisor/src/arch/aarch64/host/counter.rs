//! The host's clock: the system counter, common to all pCPUs (Arm ARM, chapter D11).
//!
//! The hypervisor reads the physical counter; guests see the same one as their virtual counter. Its rate comes from the
//! firmware.

#![expect(unsafe_code, reason = "the counter must not be read early")]

use core::arch::asm;

use crate::arch::aarch64::register::read_register;
use crate::arch::ticks::CLOCK;
pub(crate) use crate::arch::ticks::{hz, nanos, nanos_to_ticks, ticks_to_nanos};

/// The counter now.
#[inline(always)]
pub(crate) fn now() -> u64 {
    let now: u64;
    // SAFETY: reads a register that every processor has. The barrier keeps the read behind earlier instructions.
    unsafe { asm!("isb", "mrs {}, cntpct_el0", out(reg) now, options(nostack, preserves_flags)) };
    now
}

/// The counter now, directly behind an exit: nothing is read ahead of the exception that it is.
#[inline(always)]
pub(in crate::arch::aarch64) fn now_after_exit() -> u64 {
    let now: u64;
    // SAFETY: reads a register that every processor has.
    unsafe { asm!("mrs {}, cntpct_el0", out(reg) now, options(nostack, preserves_flags)) };
    now
}

/// Reads the rate, and lets [`nanos`] count from here.
pub(super) fn start() {
    let hz = read_register!("cntfrq_el0").max(1);
    CLOCK.set_rate(hz);
    CLOCK.start_at(now());
}

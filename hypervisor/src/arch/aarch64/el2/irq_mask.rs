//! Masking of interrupts in the vCPU loop.
//!
//! The hypervisor always runs with interrupts masked at EL2. The mask does not affect a guest: physical interrupts go
//! to EL2 (HCR_EL2.IMO). So an interrupt that became pending on the way into a guest ends the new entry before its
//! first instruction. It is still pending afterwards, and [`take`] acknowledges it; there is no handler.

use crate::arch::aarch64::host::gic;

/// From here on nothing interrupts this pCPU outside of the guest and of [`take`]. As always here.
#[inline]
pub(crate) fn defer() {}

/// Ends what [`defer`] began.
#[inline]
pub(crate) fn stop_deferring() {}

/// Takes pending interrupts, wherever it is called.
#[inline]
pub(crate) fn take_anywhere() {
    take();
}

/// Takes pending interrupts.
#[inline]
pub(crate) fn take() {
    gic::acknowledge_all();
}

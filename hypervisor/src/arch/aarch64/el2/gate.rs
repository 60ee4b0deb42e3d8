//! Who may interrupt the vCPU loop, and when.
//!
//! The hypervisor runs with interrupts masked at EL2, always. The mask means nothing to a guest: physical interrupts are
//! routed to EL2 (HCR_EL2.IMO), so one that became pending on the way into a guest ends the new entry before its
//! first instruction. Afterwards it is still pending, and [`take`] acknowledges it; there is no handler to run.

use crate::arch::aarch64::host::gic;

/// From here on nothing interrupts this pCPU outside of the guest and of [`take`]. As always here.
#[inline]
pub(crate) fn hold() {}

/// The end of what [`hold`] began.
#[inline]
pub(crate) fn release() {}

/// Takes what waits.
#[inline]
pub(crate) fn take() {
    gic::acknowledge_all();
}

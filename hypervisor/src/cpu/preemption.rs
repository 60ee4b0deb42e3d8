//! Preemption points, as seL4 has them: places in long work at which a pCPU takes the interrupts that wait.
//!
//! The hypervisor runs with interrupts masked. Work that grows with a VM calls [`preemption_point`] now and then, where
//! it holds no lock that an interrupt of a device needs. Handlers count, and pass interrupts of devices on. They run no
//! other vCPU and no other work, so nothing changes under the caller.

use super::this;
use crate::arch::{Arch, Machine};
use crate::trace::longest;

/// Takes the interrupts of this pCPU that wait.
pub(crate) fn preemption_point() {
    longest::ends_now();
    Machine::take_interrupts_anywhere();
    longest::begins_now();
}

/// The same in the middle of a vCPU's exit. Returns whether there was one: then the vCPU has to look what it was about
/// before it enters its guest.
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) fn preemption_point_in_exit() -> bool {
    let taken = || {
        let taken = &this().taken;
        taken.kick.get().wrapping_add(taken.timer.get()).wrapping_add(taken.device.get())
    };
    let before = taken();
    preemption_point();
    taken() != before
}

/// The same between two parts of housekeeping. `next` names the part that follows, for measurements.
pub(crate) fn preemption_point_before(next: &'static str) {
    preemption_point();
    longest::busy_with(next);
}

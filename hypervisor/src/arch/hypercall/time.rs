//! A child's time: the time-stamp counter of its vCPUs, and its reference time. Both stand still while the parent has
//! frozen them, and go on where they stood. So do timers, because no timer of a suspended vCPU expires.
//!
//! A change reaches the vCPUs one by one. Monitors change the time of a guest that they have stopped.

use alloc::sync::Arc;

use hyperv_defs::Status;

use super::Held;
use super::parent::Family;
use crate::arch::{Arch, Machine, machine};
use crate::mutants::{self, Mutant};
use crate::vm::child::MAX_VPS;
use crate::vm::{VcpuRef, Vm};

/// Writes the time-stamp counter, which all vCPUs of a child share.
pub(super) fn set_tsc(family: &Family<'_>, vcpu: &VcpuRef, value: u64) -> Result<(), Status> {
    let child = vcpu.vm().as_child().ok_or(Status::InvalidParameter)?;
    let (before, after) = {
        let mut tsc = child.tsc.lock();
        (tsc.offset(), tsc.write(value, Machine::now(), Machine::hz()))
    };
    if before == after {
        // This vCPU may be newer than the offset.
        renew(vcpu);
    } else {
        renew_all(family, vcpu.vm(), Changed { later: 0 });
    }
    Ok(())
}

/// A change that the vCPUs do not know of yet: [`renew_all`] tells them.
#[must_use]
#[derive(Clone, Copy)]
pub(super) struct Changed {
    /// Ticks for which time stood still: timers that count come by so much later.
    later: u64,
}

/// Stops a child's time, or lets it go on.
pub(super) fn freeze(vm: &Vm, is_frozen: bool) -> Option<Changed> {
    let mut tsc = vm.as_child()?.tsc.lock();
    let now = Machine::now();
    if is_frozen {
        tsc.freeze(now);
        return None;
    }
    let stood_at = tsc.thaw(now)?;
    machine::registers::set_reference_time(vm, now, machine::registers::reference_time(vm, stood_at));
    Some(Changed { later: if mutants::is(Mutant::TimerNotMoved) { 0 } else { now.saturating_sub(stood_at) } })
}

/// A child's reference time now.
pub(super) fn reference(vm: &Vm) -> u64 {
    let tick = vm.as_child().map_or(0, |child| child.tsc.lock().tick(Machine::now()));
    machine::registers::reference_time(vm, tick)
}

/// Sets it.
pub(super) fn set_reference(vm: &Vm, time: u64) -> Option<Changed> {
    let tsc = vm.as_child()?.tsc.lock();
    machine::registers::set_reference_time(vm, tsc.tick(Machine::now()), time);
    Some(Changed { later: 0 })
}

/// Tells all vCPUs of a child of its time. The caller does not hold the lock of the children's descriptions: a vCPU may
/// have to wait for it before it leaves its registers.
pub(super) fn renew_all(family: &Family<'_>, vm: &Arc<Vm>, changed: Changed) {
    for vcpu in (0..MAX_VPS).filter_map(|index| vm.vp(index)) {
        family.preemption_point();
        renew(&vcpu);
        if changed.later != 0 {
            Held::with(&vcpu, |held| machine::registers::move_timers(held, changed.later));
        }
    }
}

/// Tells one.
pub(super) fn renew(vcpu: &VcpuRef) {
    let Some(child) = vcpu.vm().as_child() else { return };
    // The lock is not held while a vCPU leaves its guest, so another write may come in between: the last one counts.
    Held::with(vcpu, |held| {
        // Nor while the clock's page is written, which reads the offset.
        let offset = child.tsc.lock().offset();
        machine::registers::set_tsc_offset(held, offset);
    });
}

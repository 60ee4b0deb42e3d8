//! Calls about virtual processors of a child, and about the pages that show their state.

use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::Status;
use hyperv_defs::vp::{MapStatePage, StatePage, UnmapStatePage, Vp};

use partition::State;

use super::budget::Budget;
use super::parent::Caller;
use super::{Ended, Held, register_page, time};
use crate::arch::machine;
use crate::mutants::{self, Mutant};

/// HvCallCreateVp.
pub(super) fn create(caller: &Caller<'_>, vp: Vp) -> Result<Ended, Status> {
    if !add_absent(caller, vp)? {
        return Ok(Ended::NotYet(caller.checked.control()));
    }
    // One caller gets past this, until the vCPU is deleted again.
    if !mutants::is(Mutant::BegunTwice) {
        describe(caller, vp)?;
    }
    caller.preemption_point();
    // Without the lock: this waits until nobody uses its registers. Nobody finds it meanwhile.
    if let Ok(vm) = caller.children.vm(vp.partition)
        && let Some(vcpu) = vm.absent_vp(vp.index)
    {
        Held::with(&vcpu, machine::registers::power_on);
        vcpu.power_on();
    }
    if mutants::is(Mutant::BegunTwice) {
        describe(caller, vp)?;
    }
    caller.preemption_point();
    // The lock keeps the partition from being finalized meanwhile.
    let mut parent = caller.lock();
    let (child, ledger) = parent.child_mut(vp.partition)?;
    if child.state() != State::Initialized {
        return Err(Status::InvalidPartitionState);
    }
    if let Err(status) = add_vcpu(caller, vp) {
        child.delete_vp(vp.index, ledger, &mut caller.store())?;
        return Err(status);
    }
    drop(parent);
    caller.preemption_point();
    // Its parent may have changed the child's time before.
    if let Ok(vcpu) = caller.vcpu(vp) {
        time::renew(&vcpu);
    }
    caller.done()
}

/// Adds the vCPUs before this one to the child's VM, as many as there is time for: a parent may create the last one
/// first. Returns whether all are there, or will never be.
fn add_absent(caller: &Caller<'_>, vp: Vp) -> Result<bool, Status> {
    let Ok(vm) = caller.children.vm(vp.partition) else { return Ok(true) };
    if (vp.index as usize) <= vm.vcpus().len() {
        return Ok(true);
    }
    {
        let parent = caller.lock();
        parent.child(vp.partition)?.check_new_vp(vp.index, &parent.host)?;
    }
    let budget = Budget::start();
    let more = || {
        caller.preemption_point();
        !budget.is_spent()
    };
    vm.add_absent_vcpus(vp.index, more).map_err(|_| Status::NoResources)
}

/// The vCPU is in the description of its partition, and paid for.
fn describe(caller: &Caller<'_>, vp: Vp) -> Result<(), Status> {
    let mut parent = caller.lock();
    let host = parent.host;
    let (child, _) = parent.child_mut(vp.partition)?;
    child.create_vp(vp.index, &host, &mut caller.store()).map(|_| ())
}

/// Gives the child's VM the vCPU, and the vCPU its number as a sender of messages.
fn add_vcpu(caller: &Caller<'_>, vp: Vp) -> Result<(), Status> {
    let mail = &caller.children.mail;
    let vm = caller.children.vm(vp.partition)?;
    let sender = mail.add_sender(vp).ok_or(Status::NoResources)?;
    let added = vm.add_vcpu(vp.index).map_err(|_| Status::NoResources);
    match vm.vp(vp.index) {
        // One that comes back keeps its number.
        Some(vcpu) if added.is_ok() && vcpu.sender().is_none() => vcpu.set_sender(sender),
        _ => mail.remove_sender(sender),
    }
    added
}

/// HvCallDeleteVp.
pub(super) fn delete(caller: &Caller<'_>, vp: Vp) -> Result<Ended, Status> {
    caller.vcpu(vp)?.remove();
    caller.children.statistics.remove_vp(vp);
    let mut parent = caller.lock();
    let (child, ledger) = parent.child_mut(vp.partition)?;
    child.delete_vp(vp.index, ledger, &mut caller.store())?;
    caller.done()
}

/// HvCallMapVpStatePage.
pub(super) fn map_state_page(caller: &Caller<'_>, map: &MapStatePage) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(map.vp)?;
    let page = {
        let mut parent = caller.lock();
        let (child, ledger) = parent.child_mut(map.vp.partition)?;
        child.map_state_page(map, ledger)?
    };
    let gpa = Gpa(page * PAGE_BYTES);
    if map.page == StatePage::Registers {
        register_page::fill(&vcpu, &caller.vm.memory, gpa)?;
    }
    vcpu.show(map.page, gpa);
    caller.output.write(&page.to_le_bytes())?;
    caller.done()
}

/// HvCallUnmapVpStatePage.
pub(super) fn unmap_state_page(caller: &Caller<'_>, unmap: &UnmapStatePage) -> Result<Ended, Status> {
    // First the hypervisor stops writing there, then the page is the parent's alone.
    caller.vcpu(unmap.vp)?.hide(unmap.page);
    let mut parent = caller.lock();
    let (child, ledger) = parent.child_mut(unmap.vp.partition)?;
    child.unmap_state_page(unmap, ledger)?;
    caller.done()
}

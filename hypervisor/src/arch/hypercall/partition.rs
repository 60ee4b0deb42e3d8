//! Calls about the life of a partition, and about its properties.

use alloc::format;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::payload::{ApicMode, Devices, HyperV, RemoteFlush, Role, VmConfig};
use hyperv_defs::partition::{CreatePartition, CreationFlags, GetProperty, SetProperty};
use hyperv_defs::property::SyntheticFeatures;
use hyperv_defs::{PartitionId, Status};
use partition::{Change, Host, Partition, Progress, Value};

use super::budget::Budget;
use super::parent::{Caller, Family};
use super::{Ended, memory, time, tracking};
use crate::frames::Exhausted;
use crate::vm::child::MAX_VPS;
use crate::vm::{Vm, table};

/// Ids are the host's: no partition ever has one that another had.
static NEXT_ID: AtomicU64 = AtomicU64::new(0x100);

/// HvCallCreatePartition.
pub(super) fn create(caller: &Caller<'_>, create: &CreatePartition) -> Result<Ended, Status> {
    // Under the lock: a parent's ids ascend.
    let mut parent = caller.lock();
    let id = parent.create(PartitionId(NEXT_ID.fetch_add(1, Ordering::Relaxed)), create)?;
    caller.output.write(&id.0.to_le_bytes())?;
    caller.done()
}

/// HvCallInitializePartition: the partition gets its VM.
pub(super) fn initialize(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    let parent_vm = caller.parent()?;
    let mut parent = caller.lock();
    let host = parent.host;
    let (child, _) = parent.child_mut(id)?;
    let config = config_of(child, &host, &parent_vm.config);
    let room = Vm::room_for_child(id, child.features(&host), parent_vm).map_err(|Exhausted| Status::NoResources)?;
    child.initialize(&mut caller.store())?;
    caller.preemption_point();
    // The last step that can fail: the pages of its tables would have to be given back.
    let memory = memory::of_child(caller, child, &config)?;
    let vm = Vm::child(table::new_number(), config, memory, room);
    tracking::track(child, &vm, child.is_tracking(), &mut caller.store());
    // No vCPU has to hear of it.
    let _ = time::freeze(&vm, child.is_frozen());
    table::table().add_child(vm.clone());
    caller.children.add_vm(id, vm);
    caller.done()
}

/// The description of a child's VM. What the parent's file says about tags and caches holds for its children.
fn config_of(child: &Partition, host: &Host, parent: &VmConfig) -> VmConfig {
    let features = child.synthetic_features(host);
    let is_offered = features.contains(SyntheticFeatures::HV1 | SyntheticFeatures::HYPERCALL);
    let is_x2apic = child.created.flags.contains(CreationFlags::X2APIC_CAPABLE);
    VmConfig {
        name: format!("{}/{:x}", parent.name, child.id.0),
        vcpus: MAX_VPS,
        memory_bytes: 0,
        role: Role::Guest,
        devices: Devices::None,
        apic: if is_x2apic { ApicMode::X2Apic } else { ApicMode::XApic },
        hyperv: match (is_offered, features.contains(SyntheticFeatures::CLUSTER_IPI)) {
            (false, _) => HyperV::Off,
            (true, false) => HyperV::Flush,
            (true, true) => HyperV::FlushIpi,
        },
        flush: if features.contains(SyntheticFeatures::TB_FLUSH) { parent.flush } else { RemoteFlush::Ipi },
        ..parent.clone()
    }
}

/// HvCallFinalizePartition: its VM ends, and gives back all that it has but its deposits.
pub(super) fn finalize(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    let progress = finalize_part(caller, id, Budget::start())?;
    ended(caller, progress)
}

/// HvCallDeletePartition.
pub(super) fn delete(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    let progress = delete_part(caller, id, Budget::start())?;
    ended(caller, progress)
}

fn ended(caller: &Caller<'_>, progress: Progress) -> Result<Ended, Status> {
    match progress {
        Progress::Done => caller.done(),
        Progress::More => Ok(Ended::NotYet(caller.checked.control())),
    }
}

/// As much of HvCallFinalizePartition as the `budget` allows.
pub(super) fn finalize_part(family: &Family<'_>, id: PartitionId, budget: Budget) -> Result<Progress, Status> {
    // From then on it gets no ports, and no pages with its counters.
    if family.lock().finalize(id)? {
        family.children.mail.remove_ports_of(id, || family.preemption_point());
        family.children.statistics.remove_partition(id);
    }
    if let Ok(vm) = family.children.vm(id) {
        if !vm.end_child() {
            return Ok(Progress::More);
        }
        table::table().remove_child(vm.number);
    }
    // The last vCPU may not have quite let go of its VM.
    let Ok(vm) = family.children.take_vm(id) else { return Ok(Progress::More) };
    if let Some(mut vm) = vm {
        let is_gone = Arc::get_mut(&mut vm).is_none_or(|vm| take_apart(family, id, vm, budget));
        family.children.leave_vm(id, (!is_gone).then_some(vm));
        if !is_gone {
            return Ok(Progress::More);
        }
    }

    let mut parent = family.lock();
    let (child, ledger) = parent.child_mut(id)?;
    let store = &mut family.store();
    while child.empty(ledger, store) == Progress::More {
        if budget.is_spent() {
            return Ok(Progress::More);
        }
    }
    Ok(Progress::Done)
}

/// Takes a child's VM apart, as far as the `budget` allows. Nobody else refers to it, so this takes no lock but to give
/// the child's pages back. Returns whether nothing is left but what it has of the host.
fn take_apart(family: &Family<'_>, id: PartitionId, vm: &mut Vm, budget: Budget) -> bool {
    while vm.free_vcpu() {
        family.preemption_point();
        if budget.is_spent() {
            return false;
        }
    }
    let is_apart = vm.memory.take_tree_apart(|| !budget.is_spent());
    family.preemption_point();
    if !is_apart || !memory::return_tables(family, id, &mut vm.memory, budget) {
        return false;
    }
    family.children.mail.remove_senders_of(id, || family.preemption_point());
    true
}

/// As much of HvCallDeletePartition as the `budget` allows.
pub(super) fn delete_part(family: &Family<'_>, id: PartitionId, budget: Budget) -> Result<Progress, Status> {
    // It may never have been finalized.
    family.children.statistics.remove_partition(id);
    while memory::delete(family, id, PAGES_AT_A_TIME)? == Progress::More {
        if budget.is_spent() {
            return Ok(Progress::More);
        }
    }
    Ok(Progress::Done)
}

const PAGES_AT_A_TIME: usize = 32;

/// HvCallGetPartitionProperty and HvCallGetPartitionPropertyEx.
pub(super) fn property(caller: &Caller<'_>, get: &GetProperty) -> Result<Ended, Status> {
    let value = caller.lock().property(get.partition, get.property)?;
    match value {
        Value::Word(value) => caller.output.write(&value.to_le_bytes())?,
        Value::Bank(bank) => caller.output.write(bank.bytes())?,
        Value::ReferenceTime => {
            // Until it is initialized, its time has not begun.
            let time = caller.children.vm(get.partition).map_or(0, |vm| time::reference(&vm));
            caller.output.write(&time.to_le_bytes())?;
        }
    }
    caller.done()
}

/// HvCallSetPartitionProperty.
pub(super) fn set_property(caller: &Caller<'_>, set: &SetProperty) -> Result<Ended, Status> {
    // Under the lock: two changes of one property have one order.
    let mut parent = caller.lock();
    let (child, _) = parent.child_mut(set.partition)?;
    match child.set_property(set)? {
        Change::IgnoreUnknownMsrs(ignore) => {
            if let Some(child) = caller.children.vm(set.partition)?.as_child() {
                child.ignores_unknown_msrs.store(ignore, Ordering::Relaxed);
            }
        }
        Change::Tracking(is_on) => {
            if let Ok(vm) = caller.children.vm(set.partition) {
                tracking::track(child, &vm, is_on, &mut caller.store());
            }
        }
        Change::TimeFreeze(is_frozen) => {
            if let Ok(vm) = caller.children.vm(set.partition) {
                let changed = time::freeze(&vm, is_frozen);
                drop(parent);
                return renewed(caller, &vm, changed);
            }
        }
        Change::ReferenceTime(units) => {
            let vm = caller.children.vm(set.partition)?;
            let changed = time::set_reference(&vm, units);
            drop(parent);
            return renewed(caller, &vm, changed);
        }
        Change::Nothing => {}
    }
    caller.done()
}

/// A change of a child's time ends when all of its vCPUs know of it.
fn renewed(caller: &Caller<'_>, vm: &Arc<Vm>, changed: Option<time::Changed>) -> Result<Ended, Status> {
    if let Some(changed) = changed {
        time::renew_all(caller, vm, changed);
    }
    caller.done()
}

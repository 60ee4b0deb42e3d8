//! Calls about the memory that a parent gives to a child: deposits for the hypervisor, and pages for the guest.

use abi::payload::VmConfig;
use hyperv_defs::memory::{Deposit, GetAccessStates, MapPages, UnmapPages, Withdraw};
use hyperv_defs::{Answer, Status};
use partition::Partition;

use super::Ended;
use super::parent::{Caller, Family};
use crate::vm::Vm;
use crate::vm::memory::Memory;

/// HvCallDepositMemory.
pub(super) fn deposit(caller: &Caller<'_>, deposit: &Deposit<'_>) -> Result<Ended, Status> {
    caller.check_child(deposit.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallWithdrawMemory: there are no pages.
pub(super) fn withdraw(caller: &Caller<'_>, withdraw: &Withdraw) -> Result<Ended, Status> {
    caller.check_child(withdraw.partition)?;
    Ok(Ended::With(Answer::new(Status::NoResources, caller.checked.control().rep_start())))
}

/// HvCallMapGpaPages.
pub(super) fn map(caller: &Caller<'_>, map: &MapPages<'_>) -> Result<Ended, Status> {
    caller.check_child(map.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallUnmapGpaPages.
pub(super) fn unmap(caller: &Caller<'_>, unmap: &UnmapPages) -> Result<Ended, Status> {
    caller.check_child(unmap.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallGetGpaPagesAccessStates.
pub(super) fn access_states(caller: &Caller<'_>, get: &GetAccessStates) -> Result<Ended, Status> {
    caller.check_child(get.partition)?;
    Err(Status::FeatureUnavailable)
}

/// The memory of a child that has just been initialized.
pub(super) fn of_child(_: &Caller<'_>, _: &mut Partition, _: &VmConfig) -> Result<Memory, Status> {
    Err(Status::FeatureUnavailable)
}

/// A child's VM has ended: its tables are free pages of its deposits again.
pub(super) fn end_of_child(_: &Family<'_>, _: &mut Partition, vm: Vm) {
    drop(vm);
}

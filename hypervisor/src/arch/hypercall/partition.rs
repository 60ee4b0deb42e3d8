//! Calls about partitions: a parent creates VMs of its own.
//!
//! What can be done so far needs no memory: partitions are created, described, read, finalized and deleted. Everything
//! that needs a page of the parent, or a virtual processor, is answered with FEATURE_UNAVAILABLE.

use core::sync::atomic::{AtomicU64, Ordering};

use addr::Gpa;
use hyperv_defs::partition::GetProperty;
use hyperv_defs::{Answer, Checked, PartitionId, Request, Status};
use partition::{Host, Ledger, Parent, Progress, Store, Value};
use spin::Mutex;

use super::Ended;
use super::budget::Budget;
use crate::arch::machine::cpuid;
use crate::vm::Vm;

/// The children of a VM that is a parent.
pub(in crate::arch) struct Children(Mutex<Parent>);

impl Children {
    /// None yet. They can have what `host` says.
    pub(in crate::arch) fn new(host: Host) -> Option<Self> {
        // No page of the parent can be given to a child yet.
        let ledger = Ledger::new(&[])?;
        Some(Self(Mutex::new(Parent::new(ledger, host))))
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.lock().children().len()
    }
}

/// Ids are the host's: no partition ever has one that another had.
static NEXT_ID: AtomicU64 = AtomicU64::new(0x100);

/// Executes a parent's call. Its output goes to `output`.
#[cold]
#[inline(never)]
pub(super) fn perform(
    vm: &Vm,
    checked: &Checked,
    request: &Request<'_>,
    children: Option<&Children>,
    output: Gpa,
) -> Result<Ended, Status> {
    let mut parent = children.ok_or(Status::AccessDenied)?.0.lock();
    let output = Output::new(vm, checked, output)?;
    match request {
        Request::CreatePartition(create) => {
            // Under the lock: a parent's ids ascend.
            let id = parent.create(PartitionId(NEXT_ID.fetch_add(1, Ordering::Relaxed)), create)?;
            output.write(&id.0.to_le_bytes())?;
        }
        Request::GetProperty(GetProperty { partition, property, .. }) => {
            let value = parent.property(*partition, *property)?;
            match value {
                Value::Word(value) => output.write(&value.to_le_bytes())?,
                Value::Bank(bank) => output.write(bank.bytes())?,
                // It has no VPs, so its time has not begun.
                Value::ReferenceTime => output.write(&0_u64.to_le_bytes())?,
            }
        }
        Request::SetProperty(set) => {
            let (child, _) = parent.child_mut(set.partition)?;
            // It has no VPs that would notice.
            let _change = child.set_property(set)?;
        }
        Request::FinalizePartition(id) => {
            let budget = Budget::start();
            parent.finalize(*id)?;
            let (child, ledger) = parent.child_mut(*id)?;
            while child.empty(ledger, &mut NoPages) == Progress::More {
                if budget.is_spent() {
                    return Ok(Ended::NotYet(checked.control()));
                }
            }
        }
        Request::DeletePartition(id) => {
            let budget = Budget::start();
            while parent.delete(*id, PAGES_AT_A_TIME, &mut NoPages, |_| {})? == Progress::More {
                if budget.is_spent() {
                    return Ok(Ended::NotYet(checked.control()));
                }
            }
        }
        Request::Withdraw(withdraw) => {
            parent.child(withdraw.partition)?;
            return Ok(Ended::With(Answer::new(Status::NoResources, checked.control().rep_start())));
        }
        _ => return Err(Status::FeatureUnavailable),
    }
    Ok(Ended::With(checked.success()))
}

const PAGES_AT_A_TIME: usize = 64;

/// The place of a call's output.
struct Output<'a> {
    vm: &'a Vm,
    at: Gpa,
}

impl<'a> Output<'a> {
    /// A place that can be written to, or none for a call without output. It is cleared, before the call has done
    /// anything that could not be told.
    fn new(vm: &'a Vm, checked: &Checked, at: Gpa) -> Result<Self, Status> {
        checked.check_output_placement(at, cpuid::physical_addresses_end())?;
        let output = Self { vm, at };
        let bytes = checked.output_bytes();
        if bytes != 0 {
            output.write([0; LARGEST_OUTPUT].get(..bytes).ok_or(Status::InvalidHypercallInput)?)?;
        }
        Ok(output)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Status> {
        if self.vm.memory.write(self.at, bytes) { Ok(()) } else { Err(Status::InvalidHypercallInput) }
    }
}

/// An output is within one page.
const LARGEST_OUTPUT: usize = 4096;

/// The pages that are deposited: none.
struct NoPages;

impl Store for NoPages {
    fn read(&self, _: u64, _: usize) -> u64 {
        0
    }

    fn write(&mut self, _: u64, _: usize, _: u64) {}

    fn clear(&mut self, _: u64) {}
}

//! Calls about the life of a partition, and about its properties.

use core::sync::atomic::{AtomicU64, Ordering};

use hyperv_defs::partition::{CreatePartition, GetProperty, SetProperty};
use hyperv_defs::{PartitionId, Status};
use partition::{Progress, Store, Value};

use super::Ended;
use super::budget::Budget;
use super::parent::Caller;

/// Ids are the host's: no partition ever has one that another had.
static NEXT_ID: AtomicU64 = AtomicU64::new(0x100);

/// HvCallCreatePartition.
pub(super) fn create(caller: &Caller<'_>, create: &CreatePartition) -> Result<Ended, Status> {
    // Under the lock: a parent's ids ascend.
    let mut parent = caller.children.lock();
    let id = parent.create(PartitionId(NEXT_ID.fetch_add(1, Ordering::Relaxed)), create)?;
    caller.output.write(&id.0.to_le_bytes())?;
    caller.done()
}

/// HvCallInitializePartition.
pub(super) fn initialize(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    caller.check_child(id)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallFinalizePartition.
pub(super) fn finalize(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    let budget = Budget::start();
    let mut parent = caller.children.lock();
    parent.finalize(id)?;
    let (child, ledger) = parent.child_mut(id)?;
    while child.empty(ledger, &mut NoPages) == Progress::More {
        if budget.is_spent() {
            return Ok(Ended::NotYet(caller.checked.control()));
        }
    }
    caller.done()
}

/// HvCallDeletePartition.
pub(super) fn delete(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    let budget = Budget::start();
    let mut parent = caller.children.lock();
    while parent.delete(id, PAGES_AT_A_TIME, &mut NoPages, |_| {})? == Progress::More {
        if budget.is_spent() {
            return Ok(Ended::NotYet(caller.checked.control()));
        }
    }
    caller.done()
}

const PAGES_AT_A_TIME: usize = 64;

/// HvCallGetPartitionProperty and HvCallGetPartitionPropertyEx.
pub(super) fn property(caller: &Caller<'_>, get: &GetProperty) -> Result<Ended, Status> {
    let value = caller.children.lock().property(get.partition, get.property)?;
    match value {
        Value::Word(value) => caller.output.write(&value.to_le_bytes())?,
        Value::Bank(bank) => caller.output.write(bank.bytes())?,
        // It has no VPs, so its time has not begun.
        Value::ReferenceTime => caller.output.write(&0_u64.to_le_bytes())?,
    }
    caller.done()
}

/// HvCallSetPartitionProperty.
pub(super) fn set_property(caller: &Caller<'_>, set: &SetProperty) -> Result<Ended, Status> {
    let mut parent = caller.children.lock();
    let (child, _) = parent.child_mut(set.partition)?;
    // It has no VPs that would notice.
    let _change = child.set_property(set)?;
    caller.done()
}

/// The pages that are deposited: none.
struct NoPages;

impl Store for NoPages {
    fn read(&self, _: u64, _: usize) -> u64 {
        0
    }

    fn write(&mut self, _: u64, _: usize, _: u64) {}

    fn clear(&mut self, _: u64) {}
}

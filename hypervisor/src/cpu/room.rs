//! Room for vCPUs in run queues and timer lists.
//!
//! Any vCPU may wait on any pCPU. So each pCPU has room for all vCPUs of the host. It is reserved before a VM gets its
//! vCPUs, when failure can still be an answer. Later, waking and blocking allocate nothing.

use alloc::collections::TryReserveError;

use crossbeam_utils::CachePadded;

use super::all;
use crate::frames::{self, Exhausted};
use crate::sync::{AtomicU32, Mutex, Ordering, per_host};

per_host! {
    /// The number of vCPUs that the queues have room for.
    static VCPUS: Mutex<usize> = Mutex::new(0);
    /// The number of VMs that have room. Each exit may read it.
    static VMS: CachePadded<AtomicU32> = CachePadded::new(AtomicU32::new(0));
}

/// Whether there is one VM, which has all pCPUs to itself.
#[inline]
pub(crate) fn has_one_vm() -> bool {
    VMS.load(Ordering::Relaxed) == 1
}

/// Room for the vCPUs of a VM. Goes back when it is dropped, which is after the last of them has run.
#[derive(Debug)]
pub(crate) struct Room {
    vcpus: usize,
}

impl Room {
    /// Reserves room for this number of additional vCPUs.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn take(vcpus: u32) -> Result<Self, Exhausted> {
        let mut all_vcpus = VCPUS.lock();
        let before = *all_vcpus;
        let wanted = before + vcpus as usize;
        let reserved = all().iter().try_for_each(|cpu| -> Result<(), TryReserveError> {
            cpu.scheduler.reserve(wanted)?;
            cpu.timers.reserve(wanted)
        });
        if reserved.is_err() || frames::is_low() {
            shrink(before);
            return Err(Exhausted);
        }
        *all_vcpus = wanted;
        VMS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { vcpus: vcpus as usize })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut all_vcpus = VCPUS.lock();
        VMS.fetch_sub(1, Ordering::Relaxed);
        *all_vcpus -= self.vcpus;
        shrink(*all_vcpus);
    }
}

fn shrink(vcpus: usize) {
    for cpu in all() {
        cpu.scheduler.shrink(vcpus);
        cpu.timers.shrink(vcpus);
    }
}

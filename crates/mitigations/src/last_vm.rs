//! Which VM a pCPU ran last: its predictions must not serve another one.

use core::sync::atomic::{AtomicU64, Ordering};

/// The VM that ran last on a pCPU, which alone uses this.
#[derive(Debug)]
pub struct LastVm {
    /// Its stage-2 tables.
    root: AtomicU64,
    /// vCPUs that had been made by then, of all VMs. A new VM may have the tables of one that has ended, but it has
    /// vCPUs of its own.
    vcpus_made: AtomicU64,
}

impl LastVm {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { root: AtomicU64::new(0), vcpus_made: AtomicU64::new(0) }
    }

    /// The VM with these tables comes, when so many vCPUs were made. Returns whether another one was there last, as far
    /// as can be known.
    pub fn is_another(&self, root: u64, vcpus_made: u64) -> bool {
        let is_same = self.root.swap(root, Ordering::Relaxed) == root;
        let is_as_before = self.vcpus_made.swap(vcpus_made, Ordering::Relaxed) == vcpus_made;
        !(is_same && is_as_before)
    }
}

impl Default for LastVm {
    fn default() -> Self {
        Self::new()
    }
}

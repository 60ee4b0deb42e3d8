//! Which VM a pCPU ran last: its predictions must not serve another one.

use core::sync::atomic::{AtomicU64, Ordering};

/// The VM that ran last on a pCPU, which alone uses this.
#[derive(Debug)]
pub struct LastVm {
    /// Its stage-2 tables.
    root: AtomicU64,
    /// How many events there had been by then that may have brought another VM: vCPUs that were made, of all VMs,
    /// because a new VM may have the tables of one that has ended; and changes of the core's VM, on its other threads.
    events: AtomicU64,
}

impl LastVm {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { root: AtomicU64::new(0), events: AtomicU64::new(0) }
    }

    /// The VM with these tables comes, after so many such events. Returns whether another one was there last, as far
    /// as can be known.
    pub fn is_another(&self, root: u64, events: u64) -> bool {
        let is_same = self.root.swap(root, Ordering::Relaxed) == root;
        let is_as_before = self.events.swap(events, Ordering::Relaxed) == events;
        !(is_same && is_as_before)
    }
}

impl Default for LastVm {
    fn default() -> Self {
        Self::new()
    }
}

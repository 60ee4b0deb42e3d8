//! Which pCPUs have nothing to run, so that a vCPU never waits beside one.
//!
//! ```text
//!  a pCPU without work                     one who has a vCPU to run
//!
//!  1 announce                              1 push the vCPU into a run queue
//!    ---- full barrier ----                  ---- full barrier ----
//!  2 look at all queues                    2 claim any idle pCPU, whichever queue it was
//!  3 all empty: sleep until kicked         3 kick the claimed one
//!  4 withdraw, then look for work
//! ```
//!
//! Either the pCPU sees the vCPU, or it is seen. A claim takes the pCPU out of the set, so that two who push claim two. A claimed
//! pCPU looks at all queues once more after the push. It may find another vCPU there than the one for which it was claimed: then
//! whoever pushed that one claims another pCPU, if there is one.

use crate::CpuId;
use crate::sync::{AtomicU64, Ordering, fence};

/// pCPUs that have nothing to run, with numbers below 64.
#[derive(Debug)]
pub struct IdleSet {
    bits: AtomicU64,
}

impl IdleSet {
    /// Highest number of pCPUs.
    pub const CAPACITY: u32 = u64::BITS;

    /// None is idle.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new() -> Self {
        Self { bits: AtomicU64::new(0) }
    }

    /// None is idle.
    #[cfg(loom)]
    #[must_use]
    pub fn new() -> Self {
        Self { bits: AtomicU64::new(0) }
    }

    /// `cpu` has nothing to run. It looks at all queues after this, and sleeps only if they are empty.
    pub fn announce(&self, cpu: CpuId) {
        self.bits.fetch_or(bit(cpu), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// `cpu` looks for work from now on, whether it was claimed or not.
    pub fn withdraw(&self, cpu: CpuId) {
        self.bits.fetch_and(!bit(cpu), Ordering::SeqCst);
    }

    /// An idle pCPU, `preferred` if it is one. A guess where to push: it may be claimed by another at the same time.
    #[must_use]
    pub fn find(&self, preferred: CpuId) -> Option<CpuId> {
        choose(self.bits.load(Ordering::Relaxed), preferred)
    }

    /// Takes an idle pCPU out of the set, `preferred` if it is idle. The caller has pushed a vCPU, and kicks the pCPU.
    #[must_use = "the pCPU sleeps until it is kicked"]
    pub fn claim(&self, preferred: CpuId) -> Option<CpuId> {
        fence(Ordering::SeqCst);
        let mut bits = self.bits.load(Ordering::Relaxed);
        loop {
            let cpu = choose(bits, preferred)?;
            bits = self.bits.fetch_and(!bit(cpu), Ordering::SeqCst);
            if bits & bit(cpu) != 0 {
                return Some(cpu);
            }
        }
    }
}

impl Default for IdleSet {
    fn default() -> Self {
        Self::new()
    }
}

fn choose(bits: u64, preferred: CpuId) -> Option<CpuId> {
    match bits {
        0 => None,
        bits if bits & bit(preferred) != 0 => Some(preferred),
        bits => Some(CpuId(bits.trailing_zeros())),
    }
}

fn bit(cpu: CpuId) -> u64 {
    debug_assert!(cpu.0 < IdleSet::CAPACITY, "cpu{} is beyond the set", cpu.0);
    1 << (cpu.0 % IdleSet::CAPACITY)
}

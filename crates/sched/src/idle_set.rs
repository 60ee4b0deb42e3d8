//! The set of pCPUs without work, so that a vCPU never waits while a pCPU is idle.
//!
//! ```text
//!  a pCPU without work                     a pCPU with a vCPU to wake
//!
//!  1 announce                              1 push the vCPU into a run queue
//!    ---- full barrier ----                  ---- full barrier ----
//!  2 look at all queues                    2 claim any idle pCPU that may run it, whichever queue it was
//!  3 nothing for it: sleep until kicked    3 kick the claimed one
//!  4 withdraw, then look for work
//! ```
//!
//! Either the idle pCPU sees the vCPU, or the other one sees the idle pCPU. A claim removes the pCPU from the set, so
//! two wakers claim two pCPUs. A claimed pCPU looks at all queues again after the push. It may find another vCPU there
//! than the one for which it was claimed. Then the waker of that other vCPU claims another pCPU, if there is one.

use crate::sync::{AtomicU64, Ordering, fence};
use crate::{CpuId, CpuSet};

/// The idle pCPUs, with numbers below 64.
#[derive(Debug)]
pub struct IdleSet {
    bits: AtomicU64,
}

impl IdleSet {
    /// Maximum number of pCPUs.
    pub const CAPACITY: u32 = u64::BITS;

    /// An empty set.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new() -> Self {
        Self { bits: AtomicU64::new(0) }
    }

    /// An empty set.
    #[cfg(loom)]
    #[must_use]
    pub fn new() -> Self {
        Self { bits: AtomicU64::new(0) }
    }

    /// `cpu` has nothing to run. After this call it looks at all queues, and sleeps only if they have nothing for it.
    pub fn announce(&self, cpu: CpuId) {
        self.bits.fetch_or(bit(cpu), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// `cpu` looks for work from now on, whether it was claimed or not.
    pub fn withdraw(&self, cpu: CpuId) {
        self.bits.fetch_and(!bit(cpu), Ordering::SeqCst);
    }

    /// An idle pCPU of those `among`, `preferred` if it is idle. Only a hint where to push: another waker may claim it.
    #[must_use]
    pub fn find(&self, preferred: CpuId, among: CpuSet) -> Option<CpuId> {
        choose(self.bits.load(Ordering::Relaxed) & among.0, preferred)
    }

    /// Removes an idle pCPU from the set, one of those `among`, `preferred` if it is idle. The caller has pushed a vCPU
    /// that may run there, and kicks the pCPU.
    #[must_use = "the pCPU sleeps until it is kicked"]
    pub fn claim(&self, preferred: CpuId, among: CpuSet) -> Option<CpuId> {
        fence(Ordering::SeqCst);
        let mut bits = self.bits.load(Ordering::Relaxed);
        loop {
            let cpu = choose(bits & among.0, preferred)?;
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

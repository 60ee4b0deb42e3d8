//! TLB tags of this architecture: ASIDs, which each pCPU assigns by itself. Each vCPU has an ASID of its own; a VM has
//! none.

use sched::CpuId;
pub(crate) use tlb_tag::{CpuTags, Pool, VcpuTags};
use tlb_tag::{Scheme, TagRange};

/// A pool for VMs of one scheme. Whether it inherits its tags makes no difference: each vCPU's first entry on a pCPU
/// flushes.
pub(crate) fn pool(scheme: Scheme, range: TagRange, can_flush_one: bool, _: bool) -> Pool {
    Pool::new(scheme, range, can_flush_one)
}

/// A pCPU's state of a pool.
pub(crate) fn cpu(pool: &Pool, _: CpuId) -> CpuTags {
    pool.cpu()
}

/// A VM's part of a pool: none.
pub(crate) struct VmTags;

impl VmTags {
    pub(crate) fn new(_: &Pool) -> Self {
        Self
    }

    /// A new vCPU's part.
    #[expect(clippy::unused_self, reason = "each architecture has this function")]
    pub(crate) fn vcpu(&self, pool: &Pool) -> VcpuTags {
        pool.vcpu()
    }

    /// The vCPU was removed.
    #[expect(clippy::unused_self, reason = "each architecture has this function")]
    pub(crate) fn release(&self, pool: &Pool, vcpu: VcpuTags) {
        pool.release(vcpu);
    }
}

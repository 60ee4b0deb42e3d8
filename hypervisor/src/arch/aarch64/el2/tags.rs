//! TLB tags of this architecture: VMIDs (Arm ARM, D8.16), and the flushes of this pCPU that an entry needs.
//!
//! A guest flushes TLBs of all its vCPUs by one instruction, and the processor uses the VMID of the vCPU that executes
//! it. So all vCPUs of a VM run under one VMID: [`tlb_tag::by_vm`]. Each VM chooses one of two ways to get its tag, and
//! there is a third for comparison; `docs/decisions/0011-vmids.md` gives the reasons.
//!
//! pCPUs' TLBs are not shared (VTTBR_EL2.CnP is clear), so a VMID may mean another VM on each pCPU.

#![expect(unsafe_code, reason = "TLB maintenance")]

use core::arch::asm;

use aarch64_defs::registers::vttbr_el2;
use addr::Hpa;
use sched::CpuId;
pub(crate) use tlb_tag::by_vm::{CpuTags, Pool, VcpuTags};
use tlb_tag::by_vm::{Flush, VmTags as OfVm};
use tlb_tag::{Scheme, Tag, TagRange};

use crate::arch::trace::{self, TraceEvent};
use crate::cpu;

/// A pool for VMs of one scheme. The entries of one VMID can always be flushed alone. `inherits`: another pool had its
/// tags before.
pub(crate) fn pool(scheme: Scheme, range: TagRange, _: bool, inherits: bool) -> Pool {
    let pool = Pool::new(scheme, range, cpu::count());
    if inherits { pool.inheriting() } else { pool }
}

/// A pCPU's state of a pool.
pub(crate) fn cpu(pool: &Pool, id: CpuId) -> CpuTags {
    pool.cpu(id.index())
}

/// A VM's part of a pool: its VMID.
pub(crate) struct VmTags(OfVm);

impl VmTags {
    pub(crate) fn new(pool: &Pool) -> Self {
        Self(pool.vm())
    }

    /// A new vCPU's part.
    pub(crate) fn vcpu(&self, _: &Pool) -> VcpuTags {
        self.0.vcpu()
    }

    /// Under which TLBs may hold entries of the VM at this moment, see [`OfVm::tag`].
    pub(super) fn tag(&self) -> Option<Tag> {
        self.0.tag()
    }

    /// The vCPU is removed. The VMID returns when its last reference is dropped.
    #[expect(clippy::unused_self, reason = "each architecture has this function")]
    pub(crate) fn release(&self, _: &Pool, vcpu: VcpuTags) {
        drop(vcpu);
    }
}

/// VTTBR_EL2 for a VM.
pub(super) fn vttbr(root: Hpa, tag: Tag) -> u64 {
    root.0 | u64::from(tag.get()) << vttbr_el2::VMID_SHIFT
}

/// The trace event of a pCPU that loads the VM in this VTTBR_EL2.
pub(super) fn load_of(vttbr: u64) -> TraceEvent {
    let tag = (vttbr >> vttbr_el2::VMID_SHIFT) as u32;
    TraceEvent::Load { tag, root: Hpa(vttbr & ((1 << vttbr_el2::VMID_SHIFT) - 2)) }
}

/// Drops entries of this pCPU's TLB; for one tag, that in VTTBR_EL2. Also drops cached instructions, because a guest's
/// local flush of those is as local as that of its TLB.
pub(super) fn flush(what: Flush) {
    trace::step(
        || (),
        |()| {
            let name = match what {
                Flush::Nothing => return None,
                Flush::OwnTables => "vmalle1",
                Flush::Tag => "vmalls12e1",
                Flush::Everything => "alle1",
            };
            Some(TraceEvent::TlbiAll { name })
        },
    );
    match what {
        Flush::Nothing => return,
        // SAFETY: only drops cached copies.
        Flush::OwnTables => unsafe { asm!("tlbi vmalle1", options(nostack, preserves_flags)) },
        // SAFETY: as above.
        Flush::Tag => unsafe { asm!("tlbi vmalls12e1", options(nostack, preserves_flags)) },
        // SAFETY: as above.
        Flush::Everything => unsafe { asm!("tlbi alle1", options(nostack, preserves_flags)) },
    }
    // SAFETY: as above.
    unsafe { asm!("ic iallu", "dsb nsh", "isb", options(nostack, preserves_flags)) };
    trace::note(|| TraceEvent::Barrier { name: "nsh" });
}

/// Waits until all pCPUs have done the guest's flushes of their TLBs and caches. The guest may wait for them on another
/// pCPU, which does not know of them.
pub(super) fn complete_guests_flushes() {
    // SAFETY: a barrier.
    unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    trace::note(|| TraceEvent::Barrier { name: "ish" });
}

//! The flushes that changes of stage 2 need, by the processor's own instructions (Arm ARM, D8.17).
//!
//! [`stage2::tlbi`] chooses the instructions and their order; they affect the VM whose VMID is in VTTBR_EL2.

#![expect(unsafe_code, reason = "loads the VM whose entries a flush is about")]

use stage2::Stale;
use stage2::tlbi::{self, Barrier, Maintenance};

use super::instructions::ThisCpu;
use super::tags::VmTags;
use super::{el1, tags};
use crate::arch::aarch64::el2;
use crate::arch::aarch64::register::{read_register, write_register};
use crate::arch::block::Block;
use crate::arch::trace::{self, TraceEvent};
use crate::vcpu::Vcpu;
use crate::vm::memory::Memory;

/// Makes entries visible to all walkers.
pub(crate) fn publish() {
    ThisCpu.dsb(Barrier::Stores);
}

/// Flushes `stale` on all pCPUs. On return no pCPU uses a stale translation.
pub(crate) fn flush(memory: &Memory, tags: &VmTags, _: &[Block<Vcpu>], stale: Stale) {
    // The tag is read after the tables were changed: see there.
    ThisCpu.dsb(Barrier::Stores);
    let root = memory.stage2_root();
    trace::note(|| TraceEvent::Flush { root });
    let Some(tag) = tags.tag() else { return };
    let vttbr = tags::vttbr(root, tag);
    let before = read_register!("vttbr_el2");
    let mut walks = None;
    if before != vttbr {
        // A guest's registers may be in this pCPU, and are not of this VM: see `el1`.
        walks = Some(el1::disable_walks());
        // SAFETY: names the VM that instructions are about. No guest runs here, and its tables are not walked.
        unsafe { write_register!("vttbr_el2", vttbr) };
        ThisCpu.isb();
        trace::note(|| tags::load_of(vttbr));
    }
    features().pay(stale, &ThisCpu);
    trace::paid(root, stale);
    if before != vttbr {
        // SAFETY: as it was.
        unsafe { write_register!("vttbr_el2", before) };
        ThisCpu.isb();
        trace::note(|| tags::load_of(before));
    }
    if let Some(walks) = walks {
        walks.resume();
    }
}

fn features() -> tlbi::TlbiFeatures {
    el2::features().tlbi
}

/// The rules of this processor, as the trace has them.
#[cfg(debug_assertions)]
pub(crate) fn rules() -> alloc::string::String {
    use stage2::Format;
    let features = el2::features();
    let levels = super::format::stage2_format().levels();
    alloc::format!("rules=arm bbm={} hafdbs={} levels={levels}", features.bbm, u32::from(features.records_writes))
}

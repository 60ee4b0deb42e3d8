//! The flushes that changes of stage 2 need, by the processor's own instructions (Arm ARM, D8.17).
//!
//! [`stage2::tlbi`] chooses the instructions and their order; they affect the VM whose VMID is in VTTBR_EL2.

#![expect(unsafe_code, reason = "TLB maintenance")]

use core::arch::asm;

use addr::Gpa;
use stage2::Stale;
use stage2::tlbi::{self, Barrier, Maintenance, Tlbi};

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

/// Flushes a denied access to the page at `gpa`, in the VM of the running vCPU, from this pCPU's TLB.
pub(crate) fn flush_local_page(gpa: Gpa) {
    tlbi::flush_local_page(gpa, &ThisCpu);
}

/// The TLB holds two entries for one address: all of the VM's go from this pCPU.
pub(super) fn resolve_conflict() {
    tlbi::resolve_conflict(&ThisCpu);
}

fn features() -> tlbi::TlbiFeatures {
    el2::features().tlbi
}

/// The processor that runs this.
struct ThisCpu;

macro_rules! operation {
    ($text:literal) => {
        // SAFETY: entries of the TLB are copies of tables; to lose one costs a walk.
        unsafe { asm!($text, options(nostack, preserves_flags)) }
    };
    ($text:literal, $operand:expr) => {
        // SAFETY: as above.
        unsafe { asm!($text, in(reg) $operand, options(nostack, preserves_flags)) }
    };
}

impl Maintenance for ThisCpu {
    #[inline]
    fn dsb(&self, barrier: Barrier) {
        match barrier {
            Barrier::LocalStores => operation!("dsb nshst"),
            Barrier::Stores => operation!("dsb ishst"),
            Barrier::Local => operation!("dsb nsh"),
            Barrier::Full => operation!("dsb ish"),
        }
        trace::note(|| TraceEvent::Barrier {
            name: match barrier {
                Barrier::LocalStores => "nshst",
                Barrier::Stores => "ishst",
                Barrier::Local => "nsh",
                Barrier::Full => "ish",
            },
        });
    }

    #[inline]
    fn isb(&self) {
        operation!("isb");
    }

    #[inline]
    fn tlbi(&self, operation: Tlbi) {
        trace::note(|| noted(operation));
        let operand = operation.operand();
        match operation {
            Tlbi::Ipa { leaves: false, everywhere: false, .. } => operation!("tlbi ipas2e1, {}", operand),
            Tlbi::Ipa { leaves: true, everywhere: false, .. } => operation!("tlbi ipas2le1, {}", operand),
            Tlbi::Ipa { leaves: false, everywhere: true, .. } => operation!("tlbi ipas2e1is, {}", operand),
            Tlbi::Ipa { leaves: true, everywhere: true, .. } => operation!("tlbi ipas2le1is, {}", operand),
            // RIPAS2E1IS and RIPAS2LE1IS by their encodings, which are only used where they exist.
            Tlbi::Range { leaves: false, .. } => operation!("sys #4, c8, c0, #2, {}", operand),
            Tlbi::Range { leaves: true, .. } => operation!("sys #4, c8, c0, #6, {}", operand),
            Tlbi::Combined { everywhere: false } => operation!("tlbi vmalle1"),
            Tlbi::Combined { everywhere: true } => operation!("tlbi vmalle1is"),
            Tlbi::All { everywhere: false } => operation!("tlbi vmalls12e1"),
            Tlbi::All { everywhere: true } => operation!("tlbi vmalls12e1is"),
        }
    }
}

/// A TLBI as the trace has it.
fn noted(operation: Tlbi) -> TraceEvent {
    let bytes = operation.bytes();
    match operation {
        Tlbi::Ipa { leaves, everywhere, ipa, level } => {
            let name = match (leaves, everywhere) {
                (false, false) => "ipas2e1",
                (true, false) => "ipas2le1",
                (false, true) => "ipas2e1is",
                (true, true) => "ipas2le1is",
            };
            TraceEvent::Tlbi { name, start: ipa, bytes, level }
        }
        Tlbi::Range { leaves, ipa, .. } => {
            TraceEvent::Tlbi { name: if leaves { "ripas2le1is" } else { "ripas2e1is" }, start: ipa, bytes, level: None }
        }
        Tlbi::Combined { everywhere } => TraceEvent::TlbiAll { name: if everywhere { "vmalle1is" } else { "vmalle1" } },
        Tlbi::All { everywhere } => {
            TraceEvent::TlbiAll { name: if everywhere { "vmalls12e1is" } else { "vmalls12e1" } }
        }
    }
}

/// The rules of this processor, as the trace has them.
#[cfg(debug_assertions)]
pub(crate) fn rules() -> alloc::string::String {
    use stage2::Format;
    let features = el2::features();
    let levels = super::format::stage2_format().levels();
    alloc::format!("rules=arm bbm={} hafdbs={} levels={levels}", features.bbm, u32::from(features.records_writes))
}

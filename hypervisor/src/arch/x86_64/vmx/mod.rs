//! Intel VT-x on this machine: detection, enabling, and the controls of every guest (SDM vol. 3C, chapters 24 to 29).
//!
//! A vCPU's registers, intercepts and events are in the [control block](super::svm) of AMD's format on either machine:
//! plain memory that all of `guest/` reads and writes. Here it is an image. [`entry`] carries what has changed into the
//! VMCS before an entry, and what an exit needs back after it ([`carry`]). So the code of a guest's exits is the same,
//! and costs nothing more on AMD's processors (docs/decisions/0028-vt-x.md).

#![expect(unsafe_code, reason = "turning VMX on writes MSRs and control registers")]

mod carry;
mod entry;
mod exit;
mod vcpu;
mod vmcs;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::arch::asm;
use core::fmt;

use addr::{Hpa, Hva};
use spin::Once;
use stage2::Ept;
use vmx_image::{Instruction, Scope};
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags};
use x86_64::registers::model_specific::Msr;
use x86_defs::cpuid::leaf_1_ecx;
use x86_defs::msr;
use x86_defs::vmx::controls::{self, Capability, FEATURE_CONTROL_LOCKED, FEATURE_CONTROL_VMXON};

use super::backend::Features;
use super::host::paging;
use super::host::processor::leaf;
use super::speculation;
use crate::check::{Finding, Verdict};
pub(super) use entry::enter;
pub(super) use exit::{handle, load_directory_pointers, report_writes};
pub(crate) use vcpu::Vmx;
use vmcs::Region;

static CAPABILITY: Once<Capability> = Once::new();

/// What the machine can, after [`check`].
fn capability() -> &'static Capability {
    CAPABILITY.get().unwrap_or(&Capability::NONE)
}

/// Whether the processor reports VMX.
pub(super) fn is_there() -> bool {
    leaf(1).ecx & leaf_1_ecx::VMX != 0
}

/// A missing feature.
pub(crate) enum Missing {
    /// Of VT-x.
    Control(controls::Missing),
    /// No XSAVE.
    Xsave,
}

impl Missing {
    /// The problem, and how to fix it.
    fn explained(&self) -> (String, &'static str) {
        match self {
            Self::Control(missing) => (missing.to_string(), missing.remedy()),
            Self::Xsave => {
                (String::from("this machine has no XSAVE (CPUID 1 ECX bit 26)"), "this needs another processor")
            }
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, remedy) = self.explained();
        write!(f, "{what}: {remedy}")
    }
}

/// What the machine has.
fn read() -> Result<Capability, Missing> {
    if leaf(1).ecx & leaf_1_ecx::XSAVE == 0 {
        return Err(Missing::Xsave);
    }
    // SAFETY: the MSRs exist where CPUID reports VMX (SDM vol. 3D, appendix A), and those of which others must tell are
    // asked for after those. Reading them has no effect.
    Capability::read(|number| unsafe { Msr::new(number).read() }).map_err(Missing::Control)
}

/// See [`Backend::check`](super::backend::Backend::check).
///
/// # Errors
/// The first missing feature.
pub(super) fn check() -> Result<(), Missing> {
    let found = read()?;
    CAPABILITY.call_once(|| found);
    Ok(())
}

/// The results of `check` for VMX.
pub(super) fn findings() -> Vec<Finding> {
    match read() {
        Err(missing) => {
            let (found, remedy) = missing.explained();
            Vec::from([Finding { about: "virtualization", found, verdict: Verdict::Missing(String::from(remedy)) }])
        }
        Ok(found) => Vec::from([Finding::good("features", format!("VT-x: {}", options_of(&found)))]),
    }
}

/// VMX in words, with the features in use.
pub(super) fn describe() -> String {
    format!("VT-x with EPT, {} VPIDs for guests, {}", features().tags, options_of(capability()))
}

/// The optional features, in words.
fn options_of(capability: &Capability) -> String {
    let has = |is_there: bool| if is_there { "" } else { "no " };
    let (gib_pages, records) = (has(capability.has_gib_pages()), has(capability.has_accessed_dirty()));
    let lists = has(capability.has_pml());
    format!("{gib_pages}pages of 1 GiB, {records}accessed and dirty bits, {lists}PML")
}

/// The optional features of the machine.
pub(super) fn features() -> Features {
    // VPID 0 is the host's.
    Features { can_flush_one_tag: true, tags: u16::MAX.into() }
}

/// Whether pCPUs list the pages that they write.
pub(super) fn lists_writes() -> bool {
    capability().has_pml()
}

/// The format of the stage-2 tables that this machine walks.
pub(super) fn stage2_format() -> Ept {
    let capability = capability();
    let (one_gib_pages, accessed_dirty) = (capability.has_gib_pages(), capability.has_accessed_dirty());
    Ept { one_gib_pages, accessed_dirty, small_code: speculation::code_is_small() }
}

/// Turns VMX on for this pCPU. [`check`] must have succeeded.
pub(super) fn enable() {
    // SAFETY: the MSR exists where CPUID reports VMX (SDM vol. 3C, 24.7); reading it has no effect.
    let control = unsafe { Msr::new(msr::FEATURE_CONTROL).read() };
    if control & FEATURE_CONTROL_LOCKED == 0 {
        // Firmware has left the decision to the system.
        // SAFETY: both bits exist, see above.
        unsafe { Msr::new(msr::FEATURE_CONTROL).write(control | FEATURE_CONTROL_LOCKED | FEATURE_CONTROL_VMXON) };
    }
    // SAFETY: the bit exists (`check`). It makes VMX's instructions legal.
    unsafe { Cr4::update(|cr4| cr4.insert(Cr4Flags::VIRTUAL_MACHINE_EXTENSIONS)) };
    // SAFETY: the bit makes x87 errors exceptions. The hypervisor uses no x87.
    unsafe { Cr0::update(|cr0| cr0.insert(Cr0Flags::NUMERIC_ERROR)) };
    // Only the processor uses it, for as long as VMX is on.
    let region = Box::leak(Region::new(capability().revision()));
    let hpa = region.hpa();
    // SAFETY: CR0 and CR4 have the values that VMX wants. The region is the processor's for ever.
    unsafe { asm!("vmxon [{}]", in(reg) &raw const hpa.0, options(nostack)) };
    // What the processor has cached of an earlier life of VMX.
    flush(Scope::All);
}

/// This pCPU drops cached translations.
pub(in crate::arch::x86_64) fn flush(scope: Scope) {
    for instruction in scope.instructions().into_iter().flatten() {
        match instruction {
            // SAFETY: the instruction drops copies. Its types exist (`check`).
            Instruction::Invvpid(kind, descriptor) => unsafe {
                asm!("invvpid {}, [{}]", in(reg) kind, in(reg) &raw const descriptor, options(nostack));
            },
            // SAFETY: as above.
            Instruction::Invept(kind, descriptor) => unsafe {
                asm!("invept {}, [{}]", in(reg) kind, in(reg) &raw const descriptor, options(nostack));
            },
        }
    }
}

/// Host physical address of a heap object. The heap is in the direct map.
#[inline]
fn hpa_of<T>(object: &T) -> Hpa {
    paging::direct_map_inverse(Hva(core::ptr::from_ref(object) as u64))
}

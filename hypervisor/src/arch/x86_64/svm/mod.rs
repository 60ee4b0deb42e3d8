//! AMD SVM on this machine: detection, enabling, and the intercepts of every guest.
//!
//! A guest may access only the MSRs and ports that are named here; all others exit. Nothing depends on a feature that
//! the CPU does not report: next-RIP, flush-by-ASID and similar are optional ([`Features`]).

#![expect(unsafe_code, reason = "turning SVM on writes MSRs and control registers")]

mod entry;
mod events;
mod exit;
mod format;
mod gif;
mod old_code;
mod repeated;
pub(crate) mod tags;
pub(crate) mod tlb;
mod vcpu;

pub(super) use vcpu::{place, write_cr2};

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::arch::asm;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use addr::{Hpa, Hva};
use spin::Once;
use stage2::Npt;
use tlb_tag::CpuTags;
use x86_64::registers::model_specific::{Efer, EferFlags, Msr};
use x86_defs::cpuid::{leaf_1_ecx, leaf_8000_0001_ecx, svm_feature};
use x86_defs::msr;
use x86_defs::vmcb::Vmcb;
use x86_emulate::Vendor;

use super::backend::{self, Backend, Passed};
use super::guest::vcpu::ArchVcpu;
use super::host::paging;
use super::host::processor::leaf;
use super::host::quirks;
use crate::check::{Finding, Verdict};
use crate::vcpu::Tally;
use crate::vcpu::run::{Next, Running};

/// AMD SVM, as a back end.
pub(crate) struct Svm;

impl Backend for Svm {
    type Vcpu = vcpu::Vcpu;
    type State = Vmcb;
    type Host = Host;
    type Stage2Format = Npt;
    type Missing = Missing;

    const VENDOR: Vendor = Vendor::Amd;

    fn check() -> Result<(), Missing> {
        check()
    }

    fn findings() -> Vec<Finding> {
        findings()
    }

    fn describe() -> String {
        describe()
    }

    fn features() -> backend::Features {
        let Features { can_flush_one_tag, tags, .. } = features();
        backend::Features { can_flush_one_tag, tags }
    }

    fn spares_first_cpu() -> bool {
        quirks::spares_first_cpu()
    }

    fn plant_lock() {
        LOCK_IS_PLANTED.store(true, Ordering::Relaxed);
    }

    fn enable() -> Host {
        enable()
    }

    fn stage2_format() -> Npt {
        format::stage2_format()
    }

    #[inline]
    fn defer_interrupts() {
        gif::clear();
    }

    #[inline]
    fn take_interrupts() {
        gif::take();
    }

    #[inline]
    fn stop_deferring_interrupts() {
        gif::set();
    }

    #[inline(always)]
    fn enter(vcpu: &mut ArchVcpu, host: &Host, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
        entry::enter(vcpu, host, tags, epoch, tally);
    }

    #[inline(always)]
    fn handle(run: &mut Running<'_>) -> Next {
        exit::handle(run)
    }
}

/// A pCPU's context for running guests.
pub(crate) struct Host {
    /// VMRUN stores the host's state here; no other code uses it.
    _save: Box<Page>,
    /// FS, GS, TR, LDTR and system-call MSRs of the host, saved once by VMSAVE and loaded after each exit.
    state: Box<Vmcb>,
}

/// A page that only hardware reads and writes.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Optional features of SVM, as this machine reports them.
#[derive(Clone, Copy, Debug, Default)]
struct Features {
    /// The VMCB has the next RIP after an intercepted instruction.
    next_rip: bool,
    /// The entries of one TLB tag (ASID) can be flushed alone.
    can_flush_one_tag: bool,
    /// Number of TLB tags (ASIDs) for guests: 1 to this.
    tags: u32,
}

static FEATURES: Once<Features> = Once::new();

/// The optional features of this machine's SVM.
fn features() -> Features {
    FEATURES.get().copied().unwrap_or_default()
}

/// VM_CR: SVM is turned off (APM vol. 2, 15.30.1).
const VM_CR_SVMDIS: u64 = 1 << 4;

/// A missing feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Not an AMD SVM machine.
    Svm,
    /// SVM is there, but the firmware has locked it off.
    LockedByFirmware,
    /// SVM without nested paging.
    NestedPaging,
    /// No XSAVE.
    Xsave,
}

impl Missing {
    /// The problem, and how to fix it.
    const fn explained(self) -> (&'static str, &'static str) {
        const ANOTHER: &str = "this needs another processor";
        match self {
            Self::Svm => (
                "this machine has no AMD SVM (CPUID 8000_0001 ECX bit 2), and no Intel VT-x (CPUID 1 ECX bit 5)",
                "on QEMU use `-cpu max`, in a VM let its hypervisor nest, otherwise this needs another processor",
            ),
            Self::LockedByFirmware => (
                "the firmware has locked SVM off (VM_CR.SVMDIS)",
                "allow it in the firmware's set-up, where it is called SVM Mode or Virtualization",
            ),
            Self::NestedPaging => ("this machine's SVM has no nested paging (CPUID 8000_000A EDX bit 0)", ANOTHER),
            Self::Xsave => ("this machine has no XSAVE (CPUID 1 ECX bit 26)", ANOTHER),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, remedy) = self.explained();
        write!(f, "{what}: {remedy}")
    }
}

/// SVM counts as locked, for `selftest=svm-locked`.
static LOCK_IS_PLANTED: AtomicBool = AtomicBool::new(false);

/// The required features that the machine lacks. Checks of later ones may need the earlier ones.
fn missing() -> impl Iterator<Item = Missing> {
    let has_svm = leaf(0x8000_0001).ecx & leaf_8000_0001_ecx::SVM != 0;
    // SAFETY: VM_CR exists wherever CPUID reports SVM (APM vol. 2, 15.30.1); reading it has no effect.
    let is_off = || unsafe { Msr::new(msr::VM_CR).read() } & VM_CR_SVMDIS != 0;
    let is_locked = has_svm && (is_off() || LOCK_IS_PLANTED.load(Ordering::Relaxed));
    let has_nested_paging = leaf(0x8000_000a).edx & svm_feature::NP != 0;
    let has_xsave = leaf(1).ecx & leaf_1_ecx::XSAVE != 0;
    [
        (!has_svm, Missing::Svm),
        (is_locked, Missing::LockedByFirmware),
        (has_svm && !has_nested_paging, Missing::NestedPaging),
        (!has_xsave, Missing::Xsave),
    ]
    .into_iter()
    .filter_map(|(is_missing, what)| is_missing.then_some(what))
}

/// See [`Backend::check`].
///
/// # Errors
/// The first missing feature.
fn check() -> Result<(), Missing> {
    if let Some(missing) = missing().next() {
        return Err(missing);
    }
    let svm = leaf(0x8000_000a);
    FEATURES.call_once(|| Features {
        next_rip: svm.edx & svm_feature::NRIP_SAVE != 0,
        can_flush_one_tag: quirks::flushes_one_asid(svm.edx & svm_feature::FLUSH_BY_ASID != 0),
        // ASID 0 is the host's.
        tags: quirks::asids(svm.ebx).saturating_sub(1).max(1),
    });
    Ok(())
}

/// The results of `check` for SVM.
fn findings() -> Vec<Finding> {
    let missing = missing().map(|missing| {
        let (what, remedy) = missing.explained();
        Finding { about: "virtualization", found: String::from(what), verdict: Verdict::Missing(String::from(remedy)) }
    });
    let mut findings: Vec<_> = missing.collect();
    if leaf(0x8000_0001).ecx & leaf_8000_0001_ecx::SVM != 0 {
        let svm = leaf(0x8000_000a);
        let has = |bit: u32| if svm.edx & bit != 0 { "" } else { "no " };
        let found = format!(
            "SVM: {} ASIDs, {}next RIP, {}flush by ASID, {}decode assists, {}AVIC, {}virtual GIF",
            svm.ebx,
            has(svm_feature::NRIP_SAVE),
            has(svm_feature::FLUSH_BY_ASID),
            has(svm_feature::DECODE_ASSISTS),
            has(svm_feature::AVIC),
            has(svm_feature::VGIF),
        );
        findings.push(Finding::good("features", found));
    }
    findings
}

/// SVM in words, with the features in use.
fn describe() -> String {
    let features = features();
    let mut text = format!("SVM with nested paging, {} ASIDs for guests", features.tags);
    for (present, name) in [(features.next_rip, ", next RIP"), (features.can_flush_one_tag, ", flush by ASID")] {
        if present {
            text.push_str(name);
        }
    }
    text
}

/// Turns SVM on for this pCPU. [`check`] must have succeeded.
fn enable() -> Host {
    let save = Box::new(Page([0; 4096]));
    let state = Box::new(Vmcb::zeroed());

    // SAFETY: the bit exists (`check`). While no guest runs it changes nothing but which instructions are legal.
    unsafe { Efer::update(|efer| efer.insert(EferFlags::SECURE_VIRTUAL_MACHINE_ENABLE)) };
    // SAFETY: the page is ours and is kept, untouched, for as long as SVM is on: `Host` is never dropped.
    unsafe { Msr::new(msr::VM_HSAVE_PA).write(hpa_of(&*save).0) };
    // SAFETY: the page is ours; VMSAVE writes only within it.
    unsafe { asm!("vmsave rax", in("rax") hpa_of(&*state).0, options(nostack)) };

    Host { _save: save, state }
}

impl Host {
    /// The page that VMLOAD restores the host's state from.
    #[inline]
    fn state(&self) -> Hpa {
        hpa_of(&*self.state)
    }
}

/// Host physical address of a heap object. The heap is in the direct map.
#[inline]
fn hpa_of<T>(object: &T) -> Hpa {
    paging::direct_map_inverse(Hva(core::ptr::from_ref(object) as u64))
}

/// Which MSRs and ports leave the guest (APM vol. 2, 15.10 and 15.11). The same for all guests, never changed.
struct PermissionMaps {
    /// By what is [`Passed`].
    msrs: [Box<MsrMap>; Passed::ALL.len()],
    ports: Box<PortMap>,
}

/// The ports of the VM that has the machine's devices.
static OPEN_PORTS: Once<Box<PortMap>> = Once::new();

/// A map with all ports open but these. The first caller's are everybody's.
fn open_ports(closed: impl Iterator<Item = u16>) -> Hpa {
    let map = OPEN_PORTS.call_once(|| {
        // SAFETY: all bytes of a map may be zero.
        let mut map = unsafe { Box::<PortMap>::new_zeroed().assume_init() };
        for port in closed {
            map.0[usize::from(port / 8)] |= 1 << (port % 8);
        }
        map
    });
    hpa_of(&**map)
}

#[repr(C, align(4096))]
struct MsrMap([u8; 0x2000]);

/// Three pages: the third catches accesses that begin at the last port.
#[repr(C, align(4096))]
struct PortMap([u8; 0x3000]);

/// MSRs that a guest accesses without an exit: VMLOAD and VMSAVE, or the VMCB, give each guest its own.
const PASSED_THROUGH: [u32; 11] = [
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SFMASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    // Switched by code when the vCPU comes to or leaves a pCPU.
    msr::TSC_AUX,
];

static MAPS: Once<PermissionMaps> = Once::new();

/// The maps.
fn permission_maps() -> &'static PermissionMaps {
    MAPS.call_once(|| {
        // Made in place: they do not fit on the stack. SAFETY: all bytes of a map may be zero.
        let mut ports = unsafe { Box::<PortMap>::new_zeroed().assume_init() };
        ports.0.fill(0xff);
        PermissionMaps { msrs: Passed::ALL.map(msr_map), ports }
    })
}

fn msr_map(passed: Passed) -> Box<MsrMap> {
    // SAFETY: all bytes of a map may be zero.
    let mut map = unsafe { Box::<MsrMap>::new_zeroed().assume_init() };
    map.0.fill(0xff);
    for (number, reads, writes) in PASSED_THROUGH.map(|number| (number, true, true)).into_iter().chain(passed.msrs()) {
        pass_through(&mut map.0, number, reads, writes);
    }
    map
}

/// Clears the bits of an MSR for reads and for writes, if the map has it.
fn pass_through(map: &mut [u8], number: u32, reads: bool, writes: bool) {
    // Three vectors of 2 KiB: 0000_0000 to 0000_1fff, C000_0000 to C000_1fff, C001_0000 to C001_1fff.
    let vector = match number >> 13 {
        0 => 0,
        0x6_0000 => 1,
        0x6_0008 => 2,
        _ => return,
    };
    let bit = (number as usize & 0x1fff) * 2;
    let bits = u8::from(reads) | u8::from(writes) << 1;
    map[vector * 0x800 + bit / 8] &= !(bits << (bit % 8));
}

impl PermissionMaps {
    /// HPA of the MSR permission map of guests with this.
    fn msrs(&self, passed: Passed) -> Hpa {
        hpa_of(&*self.msrs[passed as usize])
    }

    /// HPA of the I/O permission map.
    fn ports(&self) -> Hpa {
        hpa_of(&*self.ports)
    }
}

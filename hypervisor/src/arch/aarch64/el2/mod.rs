//! EL2 on this machine: its features, and each pCPU's context for running guests.
//!
//! VHE is not used. Without it the same code runs on all processors, and stage 2 can always stay on (HCR_EL2.VM does
//! not affect EL2), so no exit costs a TLB flush.

#![expect(unsafe_code, reason = "registers that decide what guests can reach")]

pub(crate) mod debug;
mod el1;
pub(crate) mod entry;
pub(crate) mod exit;
pub(crate) mod format;
mod instructions;
pub(crate) mod irq_mask;
pub(crate) mod tags;
pub(crate) mod tlb;
pub(crate) mod vcpu;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::arch::asm;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aarch64_defs::features::GUEST_PHYSICAL_BITS as GUEST_BITS;
use aarch64_defs::registers::{
    cnthctl_el2, cptr_el2, hcr_el2, hcrx_el2, hdfgxtr_el2, mdcr_el2, mpam2_el2, mpamhcr_el2, mpamidr_el1, vtcr_el2,
};
use spin::Once;
use stage2::Vmsa;
use stage2::tlbi::TlbiFeatures;

use crate::arch::aarch64::guest::{fpu, id_registers};
use crate::arch::aarch64::host::{counter, gic};
use crate::arch::aarch64::register::{isb, read_register, write_register};
use crate::check::{Finding, Verdict};

/// A pCPU's context for running guests.
pub(crate) struct HostContext {
    /// Identity of the vCPU whose floating-point state is in the registers, or [`fpu::NOBODY`].
    pub(super) fp_holder: AtomicU64,
    /// VDISR_EL2 exists, which a guest reaches by the name of DISR_EL1.
    pub(super) has_vdisr: bool,
    /// TPIDR2_EL0 exists.
    pub(super) has_tpidr2: bool,
}

/// Features of the machine's EL2.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Features {
    /// TLB tags for guests that the pools are cut from.
    pub(crate) tags: u32,
    /// The entries of one tag can be flushed alone.
    pub(crate) can_flush_one_tag: bool,
    /// Bits of a physical address.
    pub(in crate::arch::aarch64) physical_bits: u32,
    /// VMIDs have 16 bits, not 8.
    pub(super) wide_vmids: bool,
    /// Guests are offered keys for pointer authentication.
    pub(super) has_pointer_authentication: bool,
    /// Registers of error records exist, on at least one pCPU.
    pub(super) has_ras: bool,
    /// Limited ordering regions exist.
    has_lor: bool,
    /// Level of FEAT_BBM.
    pub(super) bbm: u32,
    /// Stage 2 can record writes in leaves (FEAT_HAFDBS).
    pub(super) records_writes: bool,
    /// TLB maintenance.
    pub(super) tlbi: TlbiFeatures,
}

static FEATURES: Once<Features> = Once::new();

/// Features of this machine's EL2.
pub(crate) fn features() -> Features {
    FEATURES.get().copied().unwrap_or_default()
}

/// A missing feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Tables of 4 KiB pages.
    SmallPages,
    /// Physical addresses with at least 32 bits, as stage 2 must translate them.
    Addresses,
    /// List registers.
    ListRegisters,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmallPages => write!(f, "this machine has no 4 KiB pages (ID_AA64MMFR0_EL1.TGran4)"),
            Self::Addresses => {
                write!(f, "this machine's stage 2 has no known format (ID_AA64MMFR0_EL1.PARange)")
            }
            Self::ListRegisters => {
                write!(f, "this machine's interrupt controller has no virtual interface (ICH_VTR_EL2)")
            }
        }
    }
}

/// A field of four bits of an ID register.
const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// The results of `check` for the machine.
pub(crate) fn findings() -> Vec<Finding> {
    let found = match check() {
        Ok(()) => Finding::good("EL2", describe()),
        Err(missing) => {
            let verdict = Verdict::Missing(String::from("this needs another processor"));
            Finding { about: "EL2", found: missing.to_string(), verdict }
        }
    };
    vec![found, Finding::good("clock", format!("{} kHz", counter::hz() / 1000))]
}

/// Checks the machine's features. Once, before [`enable`].
///
/// # Errors
/// The first missing feature.
pub(crate) fn check() -> Result<(), Missing> {
    let (mmfr0, mmfr1) = (read_register!("id_aa64mmfr0_el1"), read_register!("id_aa64mmfr1_el1"));
    let (mmfr2, isar0) = (read_register!("id_aa64mmfr2_el1"), read_register!("id_aa64isar0_el1"));
    let pfr0 = read_register!("id_aa64pfr0_el1");
    if field(mmfr0, 28) == 0xf {
        return Err(Missing::SmallPages);
    }
    if field(pfr0, 24) == 0 {
        return Err(Missing::ListRegisters);
    }
    let physical_bits = match field(mmfr0, 0) {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        // Descriptors of our kind hold no more.
        _ => 48,
    };
    let wide_vmids = field(mmfr1, 4) == 2;
    let features = Features {
        tags: if wide_vmids { 0xffff } else { 0xff },
        can_flush_one_tag: true,
        physical_bits,
        wide_vmids,
        has_pointer_authentication: id_registers::offered().has_pointer_authentication(),
        has_ras: id_registers::any_ras(),
        has_lor: id_registers::any_lor(),
        bbm: match field(mmfr2, 52) {
            0 => 0,
            1 => 1,
            _ => 2,
        },
        records_writes: field(mmfr1, 0) >= 2,
        tlbi: TlbiFeatures { ttl: field(mmfr2, 48) != 0, ranges: field(isar0, 56) >= 2 },
    };
    if Vmsa::new(GUEST_BITS.min(physical_bits), physical_bits, false).is_none() {
        return Err(Missing::Addresses);
    }
    if id_registers::differ() {
        log::info!("the pCPUs are not alike: guests get the features that all of them have");
    }
    FEATURES.call_once(|| features);
    Ok(())
}

/// A vCPU runs for at most 1 ms while others wait. A spinning vCPU cannot be detected, because YIELD does not trap.
/// When all vCPUs of a large VM spin for each other, each step costs a slice of each.
pub(crate) const SLICES_PER_SECOND: u64 = 1000;

/// No pCPU is spared: nothing is wrong with the first one.
pub(crate) fn spares_first_cpu() -> bool {
    false
}

/// There is one back end.
pub(crate) const fn uses_second_back_end() -> bool {
    false
}

/// Processors that list writes (FEAT_HDBSS) are newer than all known ones.
pub(crate) const fn lists_writes() -> bool {
    false
}

/// The architecture's name, as the tool calls it.
pub(crate) const fn name() -> &'static str {
    "aarch64"
}

/// The processor in words, with the features in use.
pub(crate) fn describe() -> String {
    let midr = read_register!("midr_el1");
    let Features { physical_bits, wide_vmids, bbm, records_writes, .. } = features();
    const QEMUS_MAX: u64 = 0x0051;
    let part = match (mitigations::arm::core_name(midr), midr >> 4 & 0xfff) {
        (Some(name), _) => name,
        (None, QEMUS_MAX) => "QEMU's max",
        (None, _) => "AArch64 processor",
    };
    format!(
        "{part} (MIDR {midr:#x}); EL2 with stage 2, {physical_bits}-bit physical addresses, {}-bit VMIDs, FEAT_BBM level {bbm}, {}, {} list registers",
        if wide_vmids { 16 } else { 8 },
        if records_writes { "writes recorded in tables" } else { "writes not recorded" },
        gic::list_registers(),
    )
}

/// HCR_EL2 while a guest runs, without the bits that change from entry to entry.
pub(super) fn hcr() -> u64 {
    let Features { has_pointer_authentication, has_ras, has_lor, .. } = features();
    let mut value = hcr_el2::VM
        | hcr_el2::PTW
        | hcr_el2::FMO
        | hcr_el2::IMO
        | hcr_el2::AMO
        | hcr_el2::BSU_INNER
        | hcr_el2::TWI
        | hcr_el2::TID1
        | hcr_el2::TID3
        | hcr_el2::TSC
        | hcr_el2::TIDCP
        | hcr_el2::TACR
        | hcr_el2::TSW
        | hcr_el2::RW;
    if has_pointer_authentication {
        value |= hcr_el2::APK | hcr_el2::API;
    }
    if has_ras {
        value |= hcr_el2::TERR;
    }
    if has_lor {
        value |= hcr_el2::TLOR;
    }
    value
}

/// CPTR_EL2 while a guest runs. `open`: vector and floating-point registers hold its own state.
pub(super) fn cptr(open: bool) -> u64 {
    let closed = if open { 0 } else { cptr_el2::TFP };
    let monitors = if field(read_register!("id_aa64pfr0_el1"), 44) != 0 { cptr_el2::TAM } else { 0 };
    cptr_el2::RES1 | cptr_el2::TZ | cptr_el2::TSM | cptr_el2::TTA | monitors | closed
}

/// MDCR_EL2 while a guest runs. `open`: the debug registers hold its own state.
pub(super) fn mdcr(open: bool) -> u64 {
    let debug = read_register!("id_aa64dfr0_el1");
    // The number of counters is PMCR_EL0.N, where there are any.
    let counters =
        if matches!(field(debug, 8), 0 | 0xf) { 0 } else { read_register!("pmcr_el0") >> 11 & mdcr_el2::HPMN };
    let closed = if open { 0 } else { mdcr_el2::TDA };
    let trace = if field(debug, 40) != 0 { mdcr_el2::TTRF } else { 0 };
    let profiling = if field(debug, 32) != 0 { mdcr_el2::TPMS } else { 0 };
    let channel = if has_fine_traps() { mdcr_el2::TDCC } else { 0 };
    let always = mdcr_el2::TPM | mdcr_el2::TPMCR | mdcr_el2::TDOSA | mdcr_el2::TDRA;
    always | counters | closed | trace | profiling | channel
}

/// Fine-grained traps exist on this pCPU (FEAT_FGT).
fn has_fine_traps() -> bool {
    field(read_register!("id_aa64mmfr0_el1"), 56) != 0
}

/// Disables extensions of this pCPU that guests do not get, and that no older register disables. Firmware may have left
/// any value there. Registers are named by their encodings, because older assemblers do not know them.
fn close_extensions() {
    let (pfr0, pfr1) = (read_register!("id_aa64pfr0_el1"), read_register!("id_aa64pfr1_el1"));

    if field(read_register!("id_aa64mmfr1_el1"), 40) != 0 {
        // HCRX_EL2. Most of its bits enable something, and are clear: EnAS0, EnALS, EnASR (LS64), MSCEn (MOPS), TCR2En,
        // SCTLR2En, D128En, EnFPM, GCSEn, EnSDERR, EnSNERR, PACMEn. FnXS and FGTnXS are clear: a guest's TLBI completes
        // as the guest specifies.
        let interrupts = if field(pfr1, 36) != 0 { hcrx_el2::TALLINT } else { 0 };
        // SAFETY: enables none of its features.
        unsafe { write_register!("s3_4_c1_c2_2", interrupts) };
    }

    if has_fine_traps() {
        // Bits of extensions since Armv8.7 trap when they are clear (TPIDR2_EL0, SMPRI_EL1, ACCDATA_EL1, guarded
        // stacks, permission indirection, branch records). Bits of older ones trap when they are set, and other
        // registers disable those. So all bits are clear, except for debug registers that are open to a guest while it
        // uses breakpoints, and are not switched.
        let debug = hdfgxtr_el2::DBGCLAIM | hdfgxtr_el2::OSECCR;
        // SAFETY: HFGRTR_EL2: traps more than before, or what other registers control.
        unsafe { write_register!("s3_4_c1_c1_4", 0u64) };
        // SAFETY: HFGWTR_EL2, as above.
        unsafe { write_register!("s3_4_c1_c1_5", 0u64) };
        // SAFETY: HFGITR_EL2, as above.
        unsafe { write_register!("s3_4_c1_c1_6", 0u64) };
        // SAFETY: HDFGRTR_EL2, as above.
        unsafe { write_register!("s3_4_c3_c1_4", debug) };
        // SAFETY: HDFGWTR_EL2, as above.
        unsafe { write_register!("s3_4_c3_c1_5", debug) };
        if field(pfr0, 44) != 0 {
            // SAFETY: HAFGRTR_EL2: CPTR_EL2.TAM traps all of it.
            unsafe { write_register!("s3_4_c3_c1_6", 0u64) };
        }
    }
    if field(read_register!("id_aa64mmfr0_el1"), 56) >= 2 {
        // FEAT_FGT2: HFGRTR2_EL2, HFGWTR2_EL2, HFGITR2_EL2, HDFGRTR2_EL2, HDFGWTR2_EL2. Clear, they trap all registers
        // that they know. SAFETY: as above.
        unsafe { write_register!("s3_4_c3_c1_2", 0u64) };
        // SAFETY: as above.
        unsafe { write_register!("s3_4_c3_c1_3", 0u64) };
        // SAFETY: as above.
        unsafe { write_register!("s3_4_c3_c1_7", 0u64) };
        // SAFETY: as above.
        unsafe { write_register!("s3_4_c3_c1_0", 0u64) };
        // SAFETY: as above.
        unsafe { write_register!("s3_4_c3_c1_1", 0u64) };
    }

    // FEAT_MPAM: guests run with partition 0, and cannot ask for others.
    if field(pfr0, 40) != 0 || field(pfr1, 16) != 0 {
        let identity = read_register!("s3_0_c10_c4_4");
        let hides_identity = if identity & mpamidr_el1::HAS_TIDR != 0 { mpam2_el2::TIDR } else { 0 };
        let traps = mpam2_el2::TRAPMPAM0EL1 | mpam2_el2::TRAPMPAM1EL1 | hides_identity;
        // SAFETY: MPAM1_EL1: partition 0, which is the one after reset, for EL1.
        unsafe { write_register!("s3_0_c10_c5_0", 0u64) };
        // SAFETY: MPAM0_EL1: the same for EL0.
        unsafe { write_register!("s3_0_c10_c5_1", 0u64) };
        // SAFETY: MPAM2_EL2: the same for EL2, and the two above trap.
        unsafe { write_register!("s3_4_c10_c5_0", traps) };
        if identity & mpamidr_el1::HAS_HCR != 0 {
            // SAFETY: MPAMHCR_EL2: partitions are not mapped, and MPAMIDR_EL1 traps.
            unsafe { write_register!("s3_4_c10_c4_0", mpamhcr_el2::TRAP_MPAMIDR_EL1) };
        }
    }

    if field(pfr0, 28) != 0 {
        // SAFETY: VSESR_EL2: the syndrome of virtual SErrors, which the hypervisor never injects.
        unsafe { write_register!("s3_4_c5_c2_3", 0u64) };
    }
}

/// Clears registers that the arriving vCPU can access although they are hidden. (DISR_EL1 accesses VDISR_EL2 there, by
/// HCR_EL2.AMO, and nothing traps it. Only FEAT_FGT traps TPIDR2_EL0.)
pub(super) fn clear_hidden(cpu: &HostContext) {
    if cpu.has_vdisr {
        // SAFETY: VDISR_EL2: a record of virtual SErrors, which the hypervisor never injects.
        unsafe { write_register!("s3_4_c12_c1_1", 0u64) };
    }
    if cpu.has_tpidr2 {
        // SAFETY: TPIDR2_EL0: means nothing to EL2.
        unsafe { write_register!("s3_3_c13_c0_5", 0u64) };
    }
}

/// Prepares this pCPU for guests. [`check`] must have succeeded.
pub(crate) fn enable() -> HostContext {
    static SAID: AtomicBool = AtomicBool::new(false);
    let features = features();
    let format = format::stage2_format();
    let size = read_register!("id_aa64mmfr0_el1") & 0xf;
    let mut vtcr =
        vtcr_el2::WALKS | format.t0sz() | format.sl0() << vtcr_el2::SL0_SHIFT | size.min(5) << vtcr_el2::PS_SHIFT;
    if features.wide_vmids {
        vtcr |= vtcr_el2::VS;
    }
    if features.records_writes {
        vtcr |= vtcr_el2::HA | vtcr_el2::HD;
    }
    let mdcr = mdcr(false);
    let midr = read_register!("midr_el1");
    let cptr = cptr(false);

    // SAFETY: EL2's own registers, or registers that only a guest's translation uses; no guest runs. They keep guests
    // away from everything except what stage 2 maps.
    unsafe {
        asm!(
            "msr vtcr_el2, {vtcr}",
            "msr hcr_el2, {hcr}",
            "msr cptr_el2, {cptr}",
            "msr mdcr_el2, {mdcr}",
            "msr hstr_el2, xzr",
            "msr cnthctl_el2, {timers}",
            "msr cntvoff_el2, xzr",
            "msr vpidr_el2, {midr}",
            "isb",
            // Any guest entries in the TLB are from before the hypervisor's start.
            "tlbi alle1",
            "ic iallu",
            "dsb nsh",
            "isb",
            vtcr = in(reg) vtcr,
            hcr = in(reg) hcr(),
            cptr = in(reg) cptr,
            mdcr = in(reg) mdcr,
            timers = in(reg) cnthctl_el2::EL1PCTEN,
            midr = in(reg) midr,
            options(nostack, preserves_flags),
        );
    }
    el1::disable_walks();
    close_extensions();
    isb();
    debug::unlock();
    if !SAID.swap(true, Ordering::Relaxed) {
        log::debug!("VTCR_EL2 {vtcr:#x}, HCR_EL2 {:#x}, CPTR_EL2 {cptr:#x}, MDCR_EL2 {mdcr:#x}", hcr());
    }
    HostContext {
        fp_holder: AtomicU64::new(fpu::NOBODY),
        has_vdisr: field(read_register!("id_aa64pfr0_el1"), 28) != 0,
        has_tpidr2: field(read_register!("id_aa64pfr1_el1"), 24) != 0,
    }
}

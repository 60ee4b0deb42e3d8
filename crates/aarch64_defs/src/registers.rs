//! Fields of system registers, by the manual's names (Arm ARM DDI 0487, chapter D19).

/// HCR_EL2: translation, traps and routing for the guest.
pub mod hcr_el2 {
    /// Stage 2 translates.
    pub const VM: u64 = 1 << 0;
    /// A stage-1 table walk in device memory (by stage 2) faults.
    pub const PTW: u64 = 1 << 2;
    /// FIQs go to EL2, virtual ones to the guest.
    pub const FMO: u64 = 1 << 3;
    /// IRQs go to EL2, virtual ones to the guest.
    pub const IMO: u64 = 1 << 4;
    /// SErrors go to EL2, virtual ones to the guest.
    pub const AMO: u64 = 1 << 5;
    /// A virtual SError is pending.
    pub const VSE: u64 = 1 << 8;
    /// The guest's barriers reach at least the inner shareable domain.
    pub const BSU_INNER: u64 = 1 << 10;
    /// WFI traps.
    pub const TWI: u64 = 1 << 13;
    /// WFE traps.
    pub const TWE: u64 = 1 << 14;
    /// ID registers of group 1 (REVIDR, AIDR) trap.
    pub const TID1: u64 = 1 << 16;
    /// ID registers of group 3 (features) trap.
    pub const TID3: u64 = 1 << 18;
    /// SMC traps.
    pub const TSC: u64 = 1 << 19;
    /// Implementation-defined registers trap.
    pub const TIDCP: u64 = 1 << 20;
    /// ACTLR_EL1 traps.
    pub const TACR: u64 = 1 << 21;
    /// Cache maintenance by set and way traps.
    pub const TSW: u64 = 1 << 22;
    /// EL1 is AArch64.
    pub const RW: u64 = 1 << 31;
    /// Registers of limited ordering regions trap.
    pub const TLOR: u64 = 1 << 35;
    /// Registers of error records trap.
    pub const TERR: u64 = 1 << 36;
    /// Keys for pointer authentication do not trap.
    pub const APK: u64 = 1 << 40;
    /// Instructions for pointer authentication do not trap.
    pub const API: u64 = 1 << 41;
    /// Scratch registers of software context numbers do not trap.
    pub const EN_SCXT: u64 = 1 << 53;
}

/// SCTLR_EL2 and SCTLR_EL1.
pub mod sctlr {
    /// Translation is on.
    pub const M: u64 = 1 << 0;
    /// Data accesses are cacheable.
    pub const C: u64 = 1 << 2;
    /// The stack pointer must be aligned.
    pub const SA: u64 = 1 << 3;
    /// Instruction fetches are cacheable.
    pub const I: u64 = 1 << 12;
    /// Writable memory is not executable.
    pub const WXN: u64 = 1 << 19;
    /// PSTATE.SSBS at an exception to this level: loads may overtake stores to the same address.
    pub const DSSBS: u64 = 1 << 44;
    /// Bits of SCTLR_EL2 that are one (with HCR_EL2.E2H clear).
    pub const EL2_RES1: u64 = 0x30c5_0830;
    /// SCTLR_EL1 at reset: translation and caches off, bits that are one on processors of Armv8.0.
    pub const EL1_RESET: u64 = 0x30d0_0800;
}

/// TCR_EL1.
pub mod tcr_el1 {
    /// Walks by TTBR0_EL1 are disabled: they fault.
    pub const EPD0: u64 = 1 << 7;
    /// The same for TTBR1_EL1.
    pub const EPD1: u64 = 1 << 23;
}

/// TCR_EL2 without HCR_EL2.E2H.
pub mod tcr_el2 {
    /// 48-bit addresses, 4 KiB pages, walks in write-back inner-shareable memory; RES1 bits.
    pub const FOUR_LEVELS: u64 = 0x8080_3510;
    /// Shift of the physical address size.
    pub const PS_SHIFT: u32 = 16;
}

/// MAIR_EL2: the memory types, by the index in entries of EL2's own tables.
pub mod mair {
    /// Index of normal memory, write-back, allocating on reads and writes.
    pub const NORMAL: u64 = 0;
    /// Index of device memory, nGnRE.
    pub const DEVICE: u64 = 1;
    /// The register's value.
    pub const VALUE: u64 = 0xff | 0x04 << 8;
}

/// SPSR_EL2 and similar: the state before EL2 was entered, or after EL2 is left.
pub mod spsr {
    /// Mode field: EL1 with its own stack pointer.
    pub const EL1H: u64 = 0b0101;
    /// Mode field: EL2 with its own stack pointer.
    pub const EL2H: u64 = 0b1001;
    /// Mode and width of registers.
    pub const MODE: u64 = 0x1f;
    /// FIQs masked.
    pub const F: u64 = 1 << 6;
    /// IRQs masked.
    pub const I: u64 = 1 << 7;
    /// SErrors masked.
    pub const A: u64 = 1 << 8;
    /// Debug exceptions masked.
    pub const D: u64 = 1 << 9;
    /// Loads may overtake earlier stores to the same address.
    pub const SSBS: u64 = 1 << 12;
    /// The illegal execution state.
    pub const IL: u64 = 1 << 20;
    /// Single-stepping.
    pub const SS: u64 = 1 << 21;
    /// Privileged access never.
    pub const PAN: u64 = 1 << 22;
    /// Time does not depend on data.
    pub const DIT: u64 = 1 << 24;

    /// Whether ERET at EL2 leads to a guest's level by this value, and not to EL2 itself, where also an illegal return
    /// stays (Arm ARM, D1.4.4). `aarch32`: EL0 may use AArch32. EL1 may not.
    #[must_use]
    pub const fn is_guests(value: u64, aarch32: bool) -> bool {
        match value & MODE {
            0b0_0000 | 0b0_0100 | EL1H => true,
            0b1_0000 => aarch32,
            _ => false,
        }
    }
}

/// MPIDR_EL1: a processor's affinity.
pub mod mpidr {
    /// The four levels of affinity.
    pub const AFFINITY: u64 = 0xff_00ff_ffff;
    /// The lowest level of affinity numbers the threads of a core.
    pub const MT: u64 = 1 << 24;
    /// Always one.
    pub const RES1: u64 = 1 << 31;
}

/// VTCR_EL2: how stage 2 is walked.
pub mod vtcr_el2 {
    /// Walks in write-back, inner-shareable memory; 4 KiB pages; the bit that is always one.
    pub const WALKS: u64 = 1 << 8 | 1 << 10 | 0b11 << 12 | 1 << 31;
    /// Shift of the start level.
    pub const SL0_SHIFT: u32 = 6;
    /// Shift of the physical address size.
    pub const PS_SHIFT: u32 = 16;
    /// VMIDs have 16 bits.
    pub const VS: u64 = 1 << 19;
    /// The hardware sets the access flag in leaves.
    pub const HA: u64 = 1 << 21;
    /// The hardware sets the right to write in leaves with DBM at the first write.
    pub const HD: u64 = 1 << 22;
}

/// VTTBR_EL2: root of stage 2.
pub mod vttbr_el2 {
    /// Shift of the VMID.
    pub const VMID_SHIFT: u32 = 48;
}

/// CPTR_EL2 without HCR_EL2.E2H: which extensions trap.
pub mod cptr_el2 {
    /// Bits that are always one.
    pub const RES1: u64 = 0x32ff & !(TZ | TSM);
    /// SVE traps. Always one without SVE.
    pub const TZ: u64 = 1 << 8;
    /// SME traps. Always one without SME.
    pub const TSM: u64 = 1 << 12;
    /// Vector and floating-point registers trap, at EL2 too.
    pub const TFP: u64 = 1 << 10;
    /// Trace registers trap.
    pub const TTA: u64 = 1 << 20;
    /// Registers of activity monitors trap.
    pub const TAM: u64 = 1 << 30;
}

/// MDCR_EL2: debug and performance monitors.
pub mod mdcr_el2 {
    /// The performance monitors trap.
    pub const TPM: u64 = 1 << 6;
    /// PMCR_EL0 traps.
    pub const TPMCR: u64 = 1 << 5;
    /// Debug registers trap.
    pub const TDA: u64 = 1 << 9;
    /// Registers of the OS lock and similar trap.
    pub const TDOSA: u64 = 1 << 10;
    /// Addresses of the debug ROM trap.
    pub const TDRA: u64 = 1 << 11;
    /// Registers of statistical profiling trap. (Those of its buffer trap while E2PB is zero.)
    pub const TPMS: u64 = 1 << 14;
    /// The debug communications channel traps (FEAT_FGT).
    pub const TDCC: u64 = 1 << 27;
    /// Filters of trace trap.
    pub const TTRF: u64 = 1 << 19;
    /// Number of counters for the guest.
    pub const HPMN: u64 = 0x1f;
}

/// HCRX_EL2: more traps and permissions for the guest.
pub mod hcrx_el2 {
    /// Writes of PSTATE.ALLINT trap (FEAT_NMI).
    pub const TALLINT: u64 = 1 << 6;
}

/// HDFGRTR_EL2 and HDFGWTR_EL2: which reads and writes of debug registers trap (FEAT_FGT).
pub mod hdfgxtr_el2 {
    /// DBGCLAIMSET_EL1, DBGCLAIMCLR_EL1.
    pub const DBGCLAIM: u64 = 1 << 5;
    /// OSECCR_EL1.
    pub const OSECCR: u64 = 1 << 10;
}

/// MPAM2_EL2: partitions of caches and memory bandwidth (FEAT_MPAM).
pub mod mpam2_el2 {
    /// MPAM1_EL1 traps.
    pub const TRAPMPAM1EL1: u64 = 1 << 48;
    /// MPAM0_EL1 traps.
    pub const TRAPMPAM0EL1: u64 = 1 << 49;
    /// MPAMIDR_EL1 traps, if MPAMIDR_EL1.HAS_TIDR is set.
    pub const TIDR: u64 = 1 << 58;
}

/// MPAMIDR_EL1.
pub mod mpamidr_el1 {
    /// MPAMHCR_EL2 exists.
    pub const HAS_HCR: u64 = 1 << 17;
    /// MPAM2_EL2.TIDR exists.
    pub const HAS_TIDR: u64 = 1 << 58;
}

/// MPAMHCR_EL2.
pub mod mpamhcr_el2 {
    /// MPAMIDR_EL1 traps.
    pub const TRAP_MPAMIDR_EL1: u64 = 1 << 31;
}

/// MDSCR_EL1: requests of a debugger in the guest.
pub mod mdscr_el1 {
    /// Single steps.
    pub const SS: u64 = 1 << 0;
    /// Debug exceptions of EL1 itself.
    pub const KDE: u64 = 1 << 13;
    /// Breakpoints, watchpoints.
    pub const MDE: u64 = 1 << 15;
    /// Any of these needs the processor's debug hardware.
    pub const ASKS: u64 = SS | KDE | MDE;
    /// The bits that a guest may set. The others are for external debuggers.
    pub const GUESTS: u64 = ASKS | 1 << 12;
}

/// CNTHCTL_EL2 without HCR_EL2.E2H: timer accesses that do not trap.
pub mod cnthctl_el2 {
    /// Reads of the physical counter.
    pub const EL1PCTEN: u64 = 1 << 0;
    /// The physical timer.
    pub const EL1PCEN: u64 = 1 << 1;
}

/// CNTV_CTL_EL0 and similar.
pub mod timer_control {
    /// The timer runs.
    pub const ENABLE: u64 = 1 << 0;
    /// Its interrupt is masked.
    pub const IMASK: u64 = 1 << 1;
    /// Its condition holds.
    pub const ISTATUS: u64 = 1 << 2;
}

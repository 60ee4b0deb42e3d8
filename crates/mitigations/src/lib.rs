//! What a host does against speculative execution: from a processor to the steps at each entry and exit.
//!
//! A guest can lead the processor astray in two ways. It trains predictions that the host, or another guest, follows
//! later. Or it reads what an earlier owner left in a buffer of the core. A [`Plan`] has what is done, and for each
//! [`Weakness`] whether that holds it ([`State`]). The names are those of Linux
//! (`/sys/devices/system/cpu/vulnerabilities`). This file is about x86, and [`arm`] is about AArch64.
//!
//! Which of the known weaknesses a processor of x86 has is told by its family and model, by CPUID, and by an MSR of
//! Intel's, which newer processors and newer microcode use to say what they do *not* have. [`Plan::of`] puts that
//! together.
//!
//! ```
//! use mitigations::{Plan, Processor, State, Steps, Vendor, Weakness};
//!
//! // An EPYC of Zen 3, with the microcode of 2024: IBPB, IBRS, VERW clears buffers, IBPB forgets kinds of branches.
//! let milan = Processor {
//!     extended_8_ebx: 1 << 12 | 1 << 14,
//!     extended_21_eax: 1 << 2 | 1 << 5 | 1 << 28,
//!     ..Processor::new(Vendor::Amd, 0x19, 0x01, 1)
//! };
//! let plan = Plan::of(&milan);
//! assert!(plan.steps.contains(Steps::IBPB_AT_EXIT | Steps::CLEAR_BUFFERS));
//! assert!(matches!(plan.state(Weakness::SpecRstackOverflow), State::Held(_)));
//! assert_eq!(plan.state(Weakness::Mds), State::NotAffected);
//! ```
//!
//! Sources: Intel's "Affected processors" and "CPUID enumeration and architectural MSRs"; AMD's "Software techniques
//! for managing speculation" and the bulletins AMD-SB-7005 (SRSO), AMD-SB-1037 (Retbleed), AMD-SB-7029 (TSA), and
//! AMD-SB-7046 (VMScape).

#![no_std]
#![forbid(unsafe_code)]

mod amd;
pub mod arm;
mod guest;
mod intel;
mod last_vm;
#[cfg(test)]
mod tests;

use bitflags::bitflags;
use x86_defs::msr;
use x86_defs::registers::efer;

pub use guest::Reports;
pub use last_vm::LastVm;

/// Whose processor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel's.
    Intel,
    /// AMD's, or Hygon's.
    Amd,
}

/// A processor, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    /// Whose it is.
    pub vendor: Vendor,
    /// Its family, with the extended one.
    pub family: u32,
    /// Its model, with the extended one.
    pub model: u32,
    /// Its stepping.
    pub stepping: u32,
    /// CPUID leaf 7, subleaf 0, EBX.
    pub leaf_7_ebx: u32,
    /// CPUID leaf 7, subleaf 0, EDX.
    pub leaf_7_edx: u32,
    /// CPUID leaf 7, subleaf 2, EDX.
    pub leaf_7_2_edx: u32,
    /// CPUID leaf 8000_0008, EBX.
    pub extended_8_ebx: u32,
    /// CPUID leaf 8000_0021, EAX.
    pub extended_21_eax: u32,
    /// CPUID leaf 8000_0021, ECX.
    pub extended_21_ecx: u32,
    /// The MSR IA32_ARCH_CAPABILITIES. Zero if there is none.
    pub capabilities: u64,
    /// Threads of a core.
    pub threads_per_core: u32,
    /// The processor gives guests a SPEC_CTRL of their own: in the VMCB, and in force beside the host's.
    pub switches_spec_ctrl: bool,
}

/// CPUID leaf 7 EDX: there is the MSR that says what a processor does not have.
const HAS_ARCH_CAPABILITIES: u32 = 1 << 29;

impl Processor {
    /// A processor that reports nothing.
    #[must_use]
    pub const fn new(vendor: Vendor, family: u32, model: u32, stepping: u32) -> Self {
        Self {
            vendor,
            family,
            model,
            stepping,
            leaf_7_ebx: 0,
            leaf_7_edx: 0,
            leaf_7_2_edx: 0,
            extended_8_ebx: 0,
            extended_21_eax: 0,
            extended_21_ecx: 0,
            capabilities: 0,
            threads_per_core: 1,
            switches_spec_ctrl: false,
        }
    }

    /// This processor. `cpuid` answers a leaf and subleaf with EAX, EBX, ECX and EDX, and with zeros beyond the last
    /// leaf; `msr` reads an MSR that exists. `None` if it is of another vendor.
    #[must_use]
    pub fn read(cpuid: impl Fn(u32, u32) -> [u32; 4], msr: impl Fn(u32) -> u64) -> Option<Self> {
        const THREADS: u32 = 0xff;
        let [_, ebx, ecx, edx] = cpuid(0, 0);
        let vendor = match [ebx, edx, ecx].map(u32::to_le_bytes).as_flattened() {
            b"GenuineIntel" => Vendor::Intel,
            b"AuthenticAMD" | b"HygonGenuine" => Vendor::Amd,
            _ => return None,
        };
        let [signature, ..] = cpuid(1, 0);
        let family = signature >> 8 & 0xf;
        let model = signature >> 4 & 0xf;
        let is_extended = family == 0xf || vendor == Vendor::Intel && family == 6;
        let [_, leaf_7_ebx, _, leaf_7_edx] = cpuid(7, 0);
        let [_, _, _, leaf_7_2_edx] = cpuid(7, 2);
        let [_, extended_8_ebx, ..] = cpuid(0x8000_0008, 0);
        let [extended_21_eax, _, extended_21_ecx, _] = cpuid(0x8000_0021, 0);
        let [_, _, _, extended_a_edx] = cpuid(0x8000_000a, 0);
        // Threads of a core: Intel's topology leaf, or AMD's.
        let [_, by_leaf_b, ..] = cpuid(0xb, 0);
        let [_, by_leaf_1e, ..] = cpuid(0x8000_001e, 0);
        let threads_per_core = match (vendor, by_leaf_b & 0xffff) {
            (Vendor::Amd, 0) => (by_leaf_1e >> 8 & THREADS) + 1,
            (_, threads) => threads.max(1),
        };
        Some(Self {
            vendor,
            family: if family == 0xf { family + (signature >> 20 & 0xff) } else { family },
            model: if is_extended { signature >> 12 & 0xf0 | model } else { model },
            stepping: signature & 0xf,
            leaf_7_ebx,
            leaf_7_edx,
            leaf_7_2_edx,
            extended_8_ebx,
            extended_21_eax,
            extended_21_ecx,
            capabilities: if leaf_7_edx & HAS_ARCH_CAPABILITIES != 0 { msr(msr::ARCH_CAPABILITIES) } else { 0 },
            threads_per_core,
            switches_spec_ctrl: extended_a_edx & amd::VIRTUAL_SPEC_CTRL != 0,
        })
    }
}

bitflags! {
    /// What the host does.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Steps: u32 {
        /// At the start: SPEC_CTRL.IBRS, which stays set (enhanced IBRS).
        const IBRS_ALWAYS = 1 << 0;
        /// At the start: EFER.AIBRSE (automatic IBRS).
        const AUTOMATIC_IBRS = 1 << 1;
        /// At the start: SPEC_CTRL.BHI_DIS_S. Branch history of guests does not steer the host.
        const HISTORY_DISABLED = 1 << 2;
        /// At the start: LFENCE waits for all earlier instructions (DE_CFG).
        const SERIALIZING_LFENCE = 1 << 3;
        /// At each exit: SPEC_CTRL.IBRS, also where it is set already.
        const IBRS_AT_EXIT = 1 << 4;
        /// At each exit: the return stack is filled with calls.
        const FILL_RETURN_STACK = 1 << 5;
        /// At each exit: one call, and LFENCE behind it.
        const ONE_CALL = 1 << 6;
        /// At each exit: a sequence of branches that replaces the guest's history.
        const CLEAR_HISTORY = 1 << 7;
        /// At each exit: PRED_CMD.IBPB. All predictions are forgotten.
        const IBPB_AT_EXIT = 1 << 8;
        /// When a pCPU changes to another VM: the same.
        const IBPB_BETWEEN_VMS = 1 << 9;
        /// At each entry: VERW, which clears buffers of the core.
        const CLEAR_BUFFERS = 1 << 10;
        /// At each entry: the L1 data cache is flushed.
        const FLUSH_L1D = 1 << 11;
        /// At each exit: general registers of the guest are cleared, once they are stored.
        const CLEAR_REGISTERS = 1 << 12;
        /// For good: stage 2 has no large page that a guest can execute. A fetch splits it.
        const SMALL_CODE = 1 << 13;
        /// Guests have SPEC_CTRL and PRED_CMD.
        const GUEST_CONTROLS = 1 << 14;
        /// At each exit and entry: SPEC_CTRL is the host's, and the guest's again.
        const SWITCH_SPEC_CTRL = 1 << 15;
    }
}

impl Steps {
    /// All that an entry and an exit can do. No processor needs all of it.
    pub const OF_SWITCHES: Self = Self::IBRS_AT_EXIT
        .union(Self::FILL_RETURN_STACK)
        .union(Self::ONE_CALL)
        .union(Self::CLEAR_HISTORY)
        .union(Self::IBPB_AT_EXIT)
        .union(Self::CLEAR_BUFFERS)
        .union(Self::FLUSH_L1D)
        .union(Self::CLEAR_REGISTERS)
        .union(Self::SWITCH_SPEC_CTRL);

    /// What the start of a pCPU writes: the bits to set, and the registers that they are in.
    pub fn at_start(self) -> impl Iterator<Item = (u32, u64)> {
        let bit = |step: Self, bit: u64| if self.contains(step) { bit } else { 0 };
        [
            (msr::SPEC_CTRL, self.difference(Self::IBRS_AT_EXIT).spec_ctrl()),
            (msr::EFER, bit(Self::AUTOMATIC_IBRS, efer::AIBRSE)),
            (msr::DE_CFG, bit(Self::SERIALIZING_LFENCE, msr::DE_CFG_LFENCE_SERIALIZES)),
        ]
        .into_iter()
        .filter(|&(_, bits)| bits != 0)
    }

    /// SPEC_CTRL while the hypervisor runs.
    #[must_use]
    pub const fn spec_ctrl(self) -> u64 {
        let has_ibrs = self.intersects(Self::IBRS_ALWAYS.union(Self::IBRS_AT_EXIT));
        let ibrs = if has_ibrs { msr::SPEC_CTRL_IBRS } else { 0 };
        ibrs | if self.contains(Self::HISTORY_DISABLED) { msr::SPEC_CTRL_BHI_DIS_S } else { 0 }
    }
}

/// A weakness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weakness {
    /// Branch target injection (CVE-2017-5715).
    SpectreV2,
    /// Branch history injection (CVE-2022-0001, CVE-2024-2201).
    BranchHistory,
    /// Returns that are predicted as other branches (CVE-2022-29900, CVE-2022-29901).
    Retbleed,
    /// Speculative return stack overflow (CVE-2023-20569).
    SpecRstackOverflow,
    /// L1 terminal fault (CVE-2018-3646).
    L1tf,
    /// Microarchitectural data sampling (CVE-2018-12126 and others).
    Mds,
    /// TSX asynchronous abort (CVE-2019-11135).
    TsxAsyncAbort,
    /// Stale data of MMIO (CVE-2022-21123 and others).
    MmioStaleData,
    /// Sampling of the register file (CVE-2023-28746).
    RegFileDataSampling,
    /// Sampling by gathers (CVE-2022-40982): microcode holds it.
    GatherDataSampling,
    /// Indirect target selection (CVE-2024-28956).
    IndirectTargetSelection,
    /// Transient scheduler attacks (CVE-2024-36350, CVE-2024-36357).
    Tsa,
    /// A guest that stops the machine by large pages of code (CVE-2018-12207).
    ItlbMultihit,
    /// Reading what one's own tables have for a higher level (CVE-2017-5754). On x86 no plan has it: a guest's tables
    /// have nothing of the host's.
    Meltdown,
    /// Loads that overtake earlier stores to the same address (CVE-2018-3639). Only plans for Arm have it.
    SpecStoreBypass,
    /// Branch target injection from a guest into its VMM (CVE-2025-40300), which is a program of the parent.
    Vmscape,
}

impl Weakness {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::SpectreV2,
        Self::BranchHistory,
        Self::Retbleed,
        Self::SpecRstackOverflow,
        Self::L1tf,
        Self::Mds,
        Self::TsxAsyncAbort,
        Self::MmioStaleData,
        Self::RegFileDataSampling,
        Self::GatherDataSampling,
        Self::IndirectTargetSelection,
        Self::Tsa,
        Self::ItlbMultihit,
        Self::Meltdown,
        Self::SpecStoreBypass,
        Self::Vmscape,
    ];

    /// Its name, as in Linux where that has one.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SpectreV2 => "spectre_v2",
            Self::BranchHistory => "bhi",
            Self::Retbleed => "retbleed",
            Self::SpecRstackOverflow => "spec_rstack_overflow",
            Self::L1tf => "l1tf",
            Self::Mds => "mds",
            Self::TsxAsyncAbort => "tsx_async_abort",
            Self::MmioStaleData => "mmio_stale_data",
            Self::RegFileDataSampling => "reg_file_data_sampling",
            Self::GatherDataSampling => "gather_data_sampling",
            Self::IndirectTargetSelection => "indirect_target_selection",
            Self::Tsa => "tsa",
            Self::ItlbMultihit => "itlb_multihit",
            Self::Meltdown => "meltdown",
            Self::SpecStoreBypass => "spec_store_bypass",
            Self::Vmscape => "vmscape",
        }
    }

    /// Whether a thread of the same core can use it against another one, whatever is done at entries and exits.
    #[must_use]
    pub const fn crosses_threads(self) -> bool {
        matches!(
            self,
            Self::L1tf
                | Self::Mds
                | Self::TsxAsyncAbort
                | Self::MmioStaleData
                | Self::SpectreV2
                | Self::Retbleed
                | Self::Vmscape
        )
    }
}

/// Weaknesses that somebody does not mind: nothing is done against them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored(u32);

impl Ignored {
    /// None.
    pub const NONE: Self = Self(0);

    /// Those for which `is_ignored` says so.
    pub fn by(is_ignored: impl Fn(Weakness) -> bool) -> Self {
        let ignored = Weakness::ALL.into_iter().filter(|&weakness| is_ignored(weakness));
        Self(ignored.fold(0, |bits, weakness| bits | 1 << weakness as u32))
    }

    const fn contains(self, weakness: Weakness) -> bool {
        self.0 & 1 << weakness as u32 != 0
    }
}

/// How a processor stands with a weakness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It does not have it.
    NotAffected,
    /// It has it, and this holds it.
    Held(&'static str),
    /// It has it, and nothing holds it, for this reason.
    Vulnerable(&'static str),
}

impl State {
    /// The worse one of two processors' states.
    const fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Vulnerable(_), _) | (Self::Held(_), Self::NotAffected | Self::Held(_)) => self,
            (Self::NotAffected, _) | (Self::Held(_), Self::Vulnerable(_)) => other,
        }
    }
}

/// What is done on a processor, by steps of its architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan<S = Steps> {
    /// The steps.
    pub steps: S,
    states: [State; Weakness::ALL.len()],
    ignored: Ignored,
    has_siblings: bool,
    /// Threads of a core run vCPUs of one VM at a time.
    keeps_vms_apart: bool,
}

impl Plan {
    /// The plan for a processor of x86.
    #[must_use]
    pub fn of(processor: &Processor) -> Self {
        Self::of_but(processor, Ignored::NONE)
    }

    /// The same, but nothing is done against these weaknesses alone.
    #[must_use]
    pub fn of_but(processor: &Processor, ignored: Ignored) -> Self {
        let steps = Steps::CLEAR_REGISTERS | guest::steps(processor);
        let mut plan = Self::new(steps, ignored, processor.threads_per_core > 1);
        match processor.vendor {
            Vendor::Intel => intel::plan(processor, &mut plan),
            Vendor::Amd => amd::plan(processor, &mut plan),
        }
        plan
    }

    /// The processor has `weakness`: `steps` hold it, if `can`, and otherwise it is open because of `why`.
    fn hold(&mut self, weakness: Weakness, steps: Steps, can: bool, by: &'static str, why: &'static str) {
        if self.ignores(weakness) {
            return;
        }
        self.set(weakness, if can { State::Held(by) } else { State::Vulnerable(why) });
        if can {
            self.steps |= steps;
        }
    }
}

impl<S: Default> Plan<S> {
    /// These steps, on a processor without weaknesses.
    const fn new(steps: S, ignored: Ignored, has_siblings: bool) -> Self {
        let states = [State::NotAffected; Weakness::ALL.len()];
        Self { steps, states, ignored, has_siblings, keeps_vms_apart: false }
    }

    /// Whether nothing is to be done against a weakness that the processor has. Notes it then.
    fn ignores(&mut self, weakness: Weakness) -> bool {
        let is_ignored = self.ignored.contains(weakness);
        if is_ignored {
            self.set(weakness, State::Vulnerable("turned off"));
        }
        is_ignored
    }

    fn set(&mut self, weakness: Weakness, state: State) {
        self.states[weakness as usize] = state;
    }

    /// The same with other steps.
    #[must_use]
    pub fn with_steps(self, steps: S) -> Self {
        Self { steps, ..self }
    }

    /// The same, and whether the threads of a core run vCPUs of one VM at a time.
    #[must_use]
    pub fn with_vms_apart(self, keeps_vms_apart: bool) -> Self {
        Self { keeps_vms_apart, ..self }
    }

    /// Nothing is done.
    #[must_use]
    pub fn off(self) -> Self {
        let states = self.states.map(|state| match state {
            State::NotAffected => State::NotAffected,
            State::Held(_) | State::Vulnerable(_) => State::Vulnerable("mitigations=off"),
        });
        Self { steps: S::default(), states, ..self }
    }

    /// This plan's steps, and of each weakness the worse state of two processors.
    #[must_use]
    pub fn with_states_of(mut self, other: &Self) -> Self {
        for (own, other) in self.states.iter_mut().zip(other.states) {
            *own = own.worse(other);
        }
        self.has_siblings |= other.has_siblings;
        self
    }

    /// How the processor stands with a weakness.
    #[must_use]
    pub fn state(&self, weakness: Weakness) -> State {
        self.states[weakness as usize]
    }

    /// Weaknesses that nothing holds, with the reasons.
    pub fn open(&self) -> impl Iterator<Item = (Weakness, &'static str)> {
        Weakness::ALL.into_iter().filter_map(|weakness| match self.state(weakness) {
            State::Vulnerable(why) => Some((weakness, why)),
            State::NotAffected | State::Held(_) => None,
        })
    }

    /// Whether threads of a core can attack each other by one of the weaknesses, whatever the steps hold.
    #[must_use]
    pub fn siblings_must_not_be_strangers(&self) -> bool {
        let is_here = |weakness: &Weakness| self.state(*weakness) != State::NotAffected;
        self.has_siblings && Weakness::ALL.iter().any(|weakness| weakness.crosses_threads() && is_here(weakness))
    }

    /// Whether VMs of strangers may share this machine, in a line for the log.
    #[must_use]
    pub fn verdict(&self) -> &'static str {
        if self.open().next().is_some() {
            "some weaknesses are not held: only VMs that trust each other may share this processor"
        } else if self.siblings_must_not_be_strangers() && self.keeps_vms_apart {
            "the threads of a core run one VM at a time; what the hypervisor does beside a guest is not kept from it"
        } else if self.siblings_must_not_be_strangers() {
            "two threads of a core may run different VMs: only VMs that trust each other may share this processor"
        } else {
            "all known weaknesses of this processor are held"
        }
    }
}

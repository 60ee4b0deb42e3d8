//! Arm's processors: from the identification registers and the firmware's answers to the steps at EL2.
//!
//! The rules, with their sources:
//!
//! - **spectre_v2.** ID_AA64PFR0_EL1.CSV2 says that branch targets that one context has trained do not steer another
//!   (Arm ARM, "CSV2"). The exception level and the VMID are parts of a context, so neither the hypervisor nor another
//!   VM follows a guest, and nothing is done. Without CSV2, only firmware can make the processor forget its branch
//!   targets: SMCCC_ARCH_WORKAROUND_1 (Arm DEN0028, 7.4). It is called at each exit. An exit lies between any two VMs,
//!   so no call is needed when a pCPU changes to another VM.
//! - **bhi.** History of branches that a guest has made selects among the hypervisor's own targets, also with CSV2
//!   (Arm, "Spectre-BHB: Speculative target reuse attacks", which has the table of branches per core). In this order:
//!   hardware does it (CSV2 of 3, or ID_AA64MMFR1_EL1.ECBHB), firmware that is called anyhow does it
//!   (SMCCC_ARCH_WORKAROUND_3 contains the first one), CLRBHB, a loop of branches that is long enough for the core, or
//!   firmware.
//! - **spec_store_bypass.** With PSTATE.SSBS clear, no load overtakes an earlier store to the same address.
//!   SCTLR_EL2.DSSBS gives the value at each exception to EL2, so an exit costs no instruction. Without SSBS, firmware
//!   has a switch for the whole pCPU, SMCCC_ARCH_WORKAROUND_2 (DEN0028, 7.5).
//! - **meltdown.** A program reads what is mapped for a higher level in the tables of its own regime. EL2 has a regime
//!   of its own, so the hypervisor's memory is in no table that a guest uses.
//!
//! pCPUs of a machine may differ, and each has its own vectors. So each takes the steps of its own plan, and only what
//! is said about the machine, to the log and to guests, is the worst of all: [`Plan::with_states_of`].
//!
//! ```
//! use mitigations::arm::{Firmware, Processor};
//! use mitigations::{State, Weakness};
//!
//! // Neoverse N1 r3p1: CSV2, CSV3, SSBS, and firmware without the calls.
//! let n1 = Processor { midr: 0x413f_d0c1, pfr0: 0x11 << 56, pfr1: 2 << 4, ..Processor::default() };
//! let plan = n1.plan(&Firmware::NONE);
//! assert_eq!(plan.steps.branches, 24);
//! assert_eq!(plan.state(Weakness::SpectreV2), State::NotAffected);
//! ```

mod cores;
#[cfg(test)]
mod tests;

use bitflags::bitflags;

use crate::{Ignored, State, Weakness};
use cores::Core;

/// What is done on a pCPU.
pub type Plan = crate::Plan<Steps>;

/// A processor, as far as it matters here: registers by their names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// MIDR_EL1.
    pub midr: u64,
    /// Whether it is one of several threads of a core: see [`shares_core`].
    pub shares_core: bool,
    /// ID_AA64PFR0_EL1.
    pub pfr0: u64,
    /// ID_AA64PFR1_EL1.
    pub pfr1: u64,
    /// ID_AA64ISAR2_EL1.
    pub isar2: u64,
    /// ID_AA64MMFR1_EL1.
    pub mmfr1: u64,
}

/// A field of four bits of an ID register.
const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// Whether a pCPU with this MPIDR_EL1 is one of several threads of a core, on a machine whose pCPUs have these
/// affinities. MT alone is not enough: it is set on many cores of one thread.
#[must_use]
pub fn shares_core(mpidr: u64, affinities: impl IntoIterator<Item = u64>) -> bool {
    const MT: u64 = 1 << 24;
    /// Aff3, Aff2 and Aff1, which name the core where Aff0 names the thread.
    const CORE: u64 = 0xff_00ff_ff00;
    mpidr & MT != 0 && affinities.into_iter().filter(|affinity| (affinity ^ mpidr) & CORE == 0).count() > 1
}

/// What firmware says of one of its functions against speculation (SMCCC_ARCH_FEATURES).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It does not have the function, or does not know the question.
    Unknown,
    /// This processor needs it.
    Needed,
    /// This processor does not need it.
    NotNeeded,
}

impl Answer {
    /// Of SMCCC_ARCH_FEATURES for SMCCC_ARCH_WORKAROUND_1, 2 or 3.
    #[must_use]
    pub const fn of(code: i32) -> Self {
        match code {
            0 => Self::Needed,
            // -2 is the answer for the second one where that is not needed (DEN0028, 7.5.3).
            1 | -2 => Self::NotNeeded,
            _ => Self::Unknown,
        }
    }

    /// The same, as a number.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Unknown => -1,
            Self::Needed => 0,
            Self::NotNeeded => 1,
        }
    }

    /// What can be said of two processors.
    const fn common(self, other: Self) -> Self {
        match (self, other) {
            (Self::Needed, _) | (_, Self::Needed) => Self::Needed,
            (Self::NotNeeded, Self::NotNeeded) => Self::NotNeeded,
            _ => Self::Unknown,
        }
    }
}

/// The firmware's functions SMCCC_ARCH_WORKAROUND_1, 2 and 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Firmware(pub [Answer; 3]);

impl Firmware {
    /// There is none, or it knows nothing of speculation.
    pub const NONE: Self = Self([Answer::Unknown; 3]);

    /// What can be said of two processors.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        let [Self([a1, a2, a3]), Self([b1, b2, b3])] = [self, other];
        Self([a1.common(b1), a2.common(b2), a3.common(b3)])
    }

    /// What guests are told of these functions, on a machine with this `plan` and this firmware.
    ///
    /// A function that guests may call does its work: at the exit that the call makes, by the hypervisor's own steps,
    /// or by the firmware if those are off. The second one is a switch of the pCPU, which stays as it is for all vCPUs.
    #[must_use]
    pub fn for_guests(self, plan: &Plan) -> Self {
        let Self([targets, switch, history]) = self;
        let call = |weakness, firmware| match (plan.state(weakness), firmware) {
            (State::NotAffected, _) => Answer::NotNeeded,
            (State::Held(_), _) | (_, Answer::Needed) => Answer::Needed,
            _ => Answer::Unknown,
        };
        let bypass = match (plan.state(Weakness::SpecStoreBypass), switch) {
            (State::NotAffected, _) | (State::Held(_), Answer::Needed) => Answer::NotNeeded,
            // The guest has SSBS, or nothing.
            _ => Answer::Unknown,
        };
        Self([call(Weakness::SpectreV2, targets), bypass, call(Weakness::BranchHistory, history)])
    }
}

bitflags! {
    /// Steps, but for their numbers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Kinds: u8 {
        /// At each exit: SMCCC_ARCH_WORKAROUND_1. Branch targets are forgotten.
        const FIRMWARE_1 = 1 << 0;
        /// At each exit: SMCCC_ARCH_WORKAROUND_3. The same, and the history of branches.
        const FIRMWARE_3 = 1 << 1;
        /// At each exit: CLRBHB. The history of branches is forgotten.
        const CLEAR_HISTORY = 1 << 2;
        /// At each exit: general registers of the guest are cleared, once they are stored; and a barrier for
        /// speculation is behind all steps.
        const CLEAR_REGISTERS = 1 << 3;
        /// For good: PSTATE.SSBS is clear at EL2.
        const NO_STORE_BYPASS = 1 << 4;
        /// At the start: SMCCC_ARCH_WORKAROUND_2 turns the firmware's switch on.
        const FIRMWARE_2 = 1 << 5;
    }
}

/// What the host does on a pCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The kinds.
    pub kinds: Kinds,
    /// At each exit: this many branches, which replace the guest's history.
    pub branches: u8,
}

impl Steps {
    /// The most that an exit does on any core (Neoverse V2), without its firmware.
    pub const MOST: Self = Self { kinds: Kinds::CLEAR_REGISTERS.union(Kinds::CLEAR_HISTORY), branches: 132 };

    /// The steps at an exit as a word for assembly: the kinds in bits 7:0, the branches in bits 15:8, and the function
    /// of the firmware in bits 63:32. Zero: none.
    #[must_use]
    pub const fn word(self) -> u64 {
        /// SMCCC_ARCH_WORKAROUND_1 and 3 (DEN0028, 7.4 and 7.6).
        const WORKAROUND_1: u64 = 0x8000_8000;
        const WORKAROUND_3: u64 = 0x8000_3fff;
        let function = if self.kinds.contains(Kinds::FIRMWARE_3) {
            WORKAROUND_3
        } else if self.kinds.contains(Kinds::FIRMWARE_1) {
            WORKAROUND_1
        } else {
            0
        };
        function << 32 | (self.branches as u64) << 8 | self.kinds.bits() as u64
    }
}

const FIRMWARE_1: &str = "SMCCC_ARCH_WORKAROUND_1 at exits";
const FIRMWARE_2: &str = "SMCCC_ARCH_WORKAROUND_2, for good";
const FIRMWARE_3: &str = "SMCCC_ARCH_WORKAROUND_3 at exits";

/// Name of the core with this MIDR_EL1, if it is in the table.
#[must_use]
pub fn core_name(midr: u64) -> Option<&'static str> {
    Core::of(midr).map(|core| core.name)
}

impl Processor {
    /// The plan for this pCPU, whose firmware gives these answers on it.
    #[must_use]
    pub fn plan(&self, firmware: &Firmware) -> Plan {
        self.plan_but(firmware, Ignored::NONE)
    }

    /// The same, but nothing is done against these weaknesses alone.
    #[must_use]
    pub fn plan_but(&self, firmware: &Firmware, ignored: Ignored) -> Plan {
        let kinds = Kinds::CLEAR_REGISTERS;
        let mut plan = Plan::new(Steps { kinds, branches: 0 }, ignored, self.shares_core);
        let core = Core::of(self.midr);
        self.plan_targets(core, firmware, &mut plan);
        self.plan_history(core, firmware, &mut plan);
        self.plan_bypass(core, firmware, &mut plan);
        // Cores without CSV3 that are not in the table may have it.
        if field(self.pfr0, 60) == 0 && core.is_none_or(|core| core.reads_ahead) {
            plan.set(Weakness::Meltdown, State::Held("EL2 has tables of its own"));
        }
        plan
    }

    fn plan_targets(&self, core: Option<&Core>, Firmware(firmware): &Firmware, plan: &mut Plan) {
        let [targets, _, history] = *firmware;
        let has_csv2 = field(self.pfr0, 56) != 0;
        if has_csv2 || targets == Answer::NotNeeded || core.is_some_and(|core| core.trains_nobody) {
            return;
        }
        if plan.ignores(Weakness::SpectreV2) {
            return;
        }
        // The third function does the work of the first one, too.
        let state = if history == Answer::Needed {
            plan.steps.kinds |= Kinds::FIRMWARE_3;
            State::Held(FIRMWARE_3)
        } else if targets == Answer::Needed {
            plan.steps.kinds |= Kinds::FIRMWARE_1;
            State::Held(FIRMWARE_1)
        } else {
            State::Vulnerable("the firmware has no SMCCC_ARCH_WORKAROUND_1")
        };
        plan.set(Weakness::SpectreV2, state);
    }

    fn plan_history(&self, core: Option<&Core>, Firmware(firmware): &Firmware, plan: &mut Plan) {
        let [_, _, history] = *firmware;
        let has_csv2_3 = field(self.pfr0, 56) >= 3;
        if has_csv2_3 || history == Answer::NotNeeded || core.is_some_and(|core| core.keeps_no_history) {
            return;
        }
        if plan.ignores(Weakness::BranchHistory) {
            return;
        }
        let has_ecbhb = field(self.mmfr1, 60) != 0;
        let has_clrbhb = field(self.isar2, 28) != 0;
        let state = if has_ecbhb {
            State::Held("exceptions separate the histories (ECBHB)")
        } else if plan.steps.kinds.contains(Kinds::FIRMWARE_3) {
            State::Held(FIRMWARE_3)
        } else if has_clrbhb {
            plan.steps.kinds |= Kinds::CLEAR_HISTORY;
            State::Held("CLRBHB at exits")
        } else if let Some(branches) = core.and_then(|core| core.branches) {
            plan.steps.branches = branches;
            State::Held("a loop of branches at exits")
        } else if history == Answer::Needed {
            plan.steps.kinds |= Kinds::FIRMWARE_3;
            State::Held(FIRMWARE_3)
        } else if core.is_some() {
            State::Vulnerable("the firmware has no SMCCC_ARCH_WORKAROUND_3")
        } else {
            State::Vulnerable("the table does not know this core, nor does the firmware")
        };
        plan.set(Weakness::BranchHistory, state);
    }

    fn plan_bypass(&self, core: Option<&Core>, Firmware(firmware): &Firmware, plan: &mut Plan) {
        let [_, switch, _] = *firmware;
        let has_ssbs = field(self.pfr1, 4) != 0;
        if core.is_some_and(|core| core.bypasses_nothing) || !has_ssbs && switch == Answer::NotNeeded {
            return;
        }
        if plan.ignores(Weakness::SpecStoreBypass) {
            return;
        }
        let state = if has_ssbs {
            plan.steps.kinds |= Kinds::NO_STORE_BYPASS;
            State::Held("PSTATE.SSBS is clear at EL2")
        } else if switch == Answer::Needed {
            plan.steps.kinds |= Kinds::FIRMWARE_2;
            State::Held(FIRMWARE_2)
        } else {
            State::Vulnerable("there is no SSBS, and the firmware has no SMCCC_ARCH_WORKAROUND_2")
        };
        plan.set(Weakness::SpecStoreBypass, state);
    }
}

//! What a guest is told of the processor's weaknesses, and which controls of speculation it has.
//!
//! A guest's kernel protects its processes from each other as it would without a hypervisor: by SPEC_CTRL, by
//! PRED_CMD, and by instructions such as VERW. It looks for them where a processor reports them ([`Reports`]). What
//! it need not do, because the host holds a weakness already or the processor does not have it, it should know, too.

use x86_defs::msr;

use crate::{Plan, Processor, State, Steps, Weakness};

/// CPUID leaf 7, EDX.
mod leaf_7_edx {
    pub(super) const MD_CLEAR: u32 = 1 << 10;
    pub(super) const IBRS_AND_IBPB: u32 = 1 << 26;
    pub(super) const STIBP: u32 = 1 << 27;
    pub(super) const ARCH_CAPABILITIES: u32 = 1 << 29;
    pub(super) const SSBD: u32 = 1 << 31;
}

/// CPUID leaf 7, subleaf 2, EDX: controls that Intel's later processors have.
mod leaf_7_2_edx {
    pub(super) const PSFD: u32 = 1 << 0;
    pub(super) const IPRED_CTRL: u32 = 1 << 1;
    pub(super) const RRSBA_CTRL: u32 = 1 << 2;
    pub(super) const DDPD_U: u32 = 1 << 3;
    pub(super) const BHI_CTRL: u32 = 1 << 4;
    /// Not a control: no time of MUL and the like depends on data.
    pub(super) const MCDT_NO: u32 = 1 << 5;
}

/// CPUID leaf 8000_0008, EBX: AMD's.
mod extended_8_ebx {
    pub(super) const IBPB: u32 = 1 << 12;
    pub(super) const IBRS: u32 = 1 << 14;
    pub(super) const STIBP: u32 = 1 << 15;
    /// How IBRS and STIBP are meant to be used: always on, preferred, in the same mode.
    pub(super) const HINTS: u32 = 1 << 16 | 1 << 17 | 1 << 18 | 1 << 19;
    pub(super) const SSBD: u32 = 1 << 24;
    pub(super) const SSB_NO: u32 = 1 << 26;
    pub(super) const PSFD: u32 = 1 << 28;
    pub(super) const BTC_NO: u32 = 1 << 29;
    pub(super) const IBPB_RET: u32 = 1 << 30;
}

/// CPUID leaf 8000_0021, EAX: AMD's.
mod extended_21_eax {
    pub(super) const LFENCE_SERIALIZES: u32 = 1 << 2;
    pub(super) const VERW_CLEARS: u32 = 1 << 5;
    /// A bit of EFER, which each guest has for itself.
    pub(super) const AUTOMATIC_IBRS: u32 = 1 << 8;
    pub(super) const SBPB: u32 = 1 << 27;
    pub(super) const IBPB_OF_TYPES: u32 = 1 << 28;
    pub(super) const SRSO_NO: u32 = 1 << 29;
}

/// CPUID leaf 8000_0021, ECX: no transient scheduler attack by stores, none by the L1 cache.
const TSA_NO: u32 = 1 << 1 | 1 << 2;

/// Bits of IA32_ARCH_CAPABILITIES that say what the processor does not have, or that VERW clears more. Left out are
/// those of controls that only a host has.
mod capability {
    pub(super) const RDCL_NO: u64 = 1 << 0;
    pub(super) const IBRS_ALL: u64 = 1 << 1;
    pub(super) const RSBA: u64 = 1 << 2;
    pub(super) const SKIP_L1D_FLUSH: u64 = 1 << 3;
    pub(super) const SSB_NO: u64 = 1 << 4;
    pub(super) const MDS_NO: u64 = 1 << 5;
    pub(super) const PSCHANGE_MC_NO: u64 = 1 << 6;
    pub(super) const TAA_NO: u64 = 1 << 8;
    pub(super) const MMIO_NO: u64 = 7 << 13;
    pub(super) const FB_CLEAR: u64 = 1 << 17;
    pub(super) const RRSBA: u64 = 1 << 19;
    pub(super) const BHI_NO: u64 = 1 << 20;
    pub(super) const PBRSB_NO: u64 = 1 << 24;
    pub(super) const GDS_NO: u64 = 1 << 26;
    pub(super) const RFDS_NO: u64 = 1 << 27;
    pub(super) const RFDS_CLEAR: u64 = 1 << 28;
    pub(super) const ITS_NO: u64 = 1 << 62;

    pub(super) const TOLD: u64 = RDCL_NO
        | IBRS_ALL
        | RSBA
        | SKIP_L1D_FLUSH
        | SSB_NO
        | MDS_NO
        | PSCHANGE_MC_NO
        | TAA_NO
        | MMIO_NO
        | FB_CLEAR
        | RRSBA
        | BHI_NO
        | PBRSB_NO
        | GDS_NO
        | RFDS_NO
        | RFDS_CLEAR
        | ITS_NO;
}

/// What a processor reports of weaknesses and of controls of speculation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reports {
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
    /// The MSR IA32_ARCH_CAPABILITIES.
    pub capabilities: u64,
}

impl Processor {
    /// What it reports.
    #[must_use]
    pub const fn reports(&self) -> Reports {
        Reports {
            leaf_7_edx: self.leaf_7_edx,
            leaf_7_2_edx: self.leaf_7_2_edx,
            extended_8_ebx: self.extended_8_ebx,
            extended_21_eax: self.extended_21_eax,
            extended_21_ecx: self.extended_21_ecx,
            capabilities: self.capabilities,
        }
    }
}

impl Reports {
    /// What guests are told, where the host does what `plan` says. They get the controls only if it has that step.
    #[must_use]
    pub fn for_guests(self, plan: &Plan) -> Self {
        let has_controls = plan.steps.contains(Steps::GUEST_CONTROLS);
        let controls = |bits: u32| if has_controls { bits } else { 0 };
        let mut told = Self {
            leaf_7_edx: self.leaf_7_edx
                & (leaf_7_edx::MD_CLEAR
                    | leaf_7_edx::ARCH_CAPABILITIES
                    | controls(leaf_7_edx::IBRS_AND_IBPB | leaf_7_edx::STIBP | leaf_7_edx::SSBD)),
            leaf_7_2_edx: self.leaf_7_2_edx
                & (leaf_7_2_edx::MCDT_NO
                    | controls(
                        leaf_7_2_edx::PSFD
                            | leaf_7_2_edx::IPRED_CTRL
                            | leaf_7_2_edx::RRSBA_CTRL
                            | leaf_7_2_edx::DDPD_U
                            | leaf_7_2_edx::BHI_CTRL,
                    )),
            extended_8_ebx: self.extended_8_ebx
                & (extended_8_ebx::SSB_NO
                    | extended_8_ebx::BTC_NO
                    | controls(
                        extended_8_ebx::IBPB
                            | extended_8_ebx::IBRS
                            | extended_8_ebx::STIBP
                            | extended_8_ebx::HINTS
                            | extended_8_ebx::SSBD
                            | extended_8_ebx::PSFD
                            | extended_8_ebx::IBPB_RET,
                    )),
            extended_21_eax: self.extended_21_eax
                & (extended_21_eax::LFENCE_SERIALIZES
                    | extended_21_eax::VERW_CLEARS
                    | extended_21_eax::AUTOMATIC_IBRS
                    | extended_21_eax::SRSO_NO
                    | controls(extended_21_eax::SBPB | extended_21_eax::IBPB_OF_TYPES)),
            extended_21_ecx: self.extended_21_ecx & TSA_NO,
            capabilities: self.capabilities & capability::TOLD,
        };
        if plan.steps.contains(Steps::SERIALIZING_LFENCE) {
            told.extended_21_eax |= extended_21_eax::LFENCE_SERIALIZES;
        }
        if told.leaf_7_edx & leaf_7_edx::ARCH_CAPABILITIES == 0 {
            told.capabilities = 0;
            return told;
        }
        // What the host holds for all guests, they need not hold themselves.
        let is_closed = |weakness| !matches!(plan.state(weakness), State::Vulnerable(_));
        if is_closed(Weakness::L1tf) {
            told.capabilities |= capability::SKIP_L1D_FLUSH;
        }
        if is_closed(Weakness::ItlbMultihit) {
            told.capabilities |= capability::PSCHANGE_MC_NO;
        }
        told
    }

    /// The bits of SPEC_CTRL that exist where this is reported; 0 if the register does not exist.
    #[must_use]
    pub fn spec_ctrl(&self) -> u64 {
        let bit = |has: bool, bits: u64| if has { bits } else { 0 };
        let (intel, amd) = (self.leaf_7_edx, self.extended_8_ebx);
        let later = self.leaf_7_2_edx;
        bit(intel & leaf_7_edx::IBRS_AND_IBPB != 0 || amd & extended_8_ebx::IBRS != 0, msr::SPEC_CTRL_IBRS)
            | bit(intel & leaf_7_edx::STIBP != 0 || amd & extended_8_ebx::STIBP != 0, msr::SPEC_CTRL_STIBP)
            | bit(intel & leaf_7_edx::SSBD != 0 || amd & extended_8_ebx::SSBD != 0, msr::SPEC_CTRL_SSBD)
            | bit(later & leaf_7_2_edx::PSFD != 0 || amd & extended_8_ebx::PSFD != 0, msr::SPEC_CTRL_PSFD)
            | bit(later & leaf_7_2_edx::IPRED_CTRL != 0, msr::SPEC_CTRL_IPRED_DIS)
            | bit(later & leaf_7_2_edx::RRSBA_CTRL != 0, msr::SPEC_CTRL_RRSBA_DIS)
            | bit(later & leaf_7_2_edx::DDPD_U != 0, msr::SPEC_CTRL_DDPD_U)
            | bit(later & leaf_7_2_edx::BHI_CTRL != 0, msr::SPEC_CTRL_BHI_DIS_S)
    }

    /// The bits of PRED_CMD that exist where this is reported; 0 if the register does not exist.
    #[must_use]
    pub const fn pred_cmd(&self) -> u64 {
        let has_ibpb =
            self.leaf_7_edx & leaf_7_edx::IBRS_AND_IBPB != 0 || self.extended_8_ebx & extended_8_ebx::IBPB != 0;
        let has_sbpb = self.extended_21_eax & extended_21_eax::SBPB != 0;
        (if has_ibpb { msr::PRED_CMD_IBPB } else { 0 }) | (if has_sbpb { msr::PRED_CMD_SBPB } else { 0 })
    }

    /// The value of IA32_ARCH_CAPABILITIES, if the register exists where this is reported. It promises enhanced IBRS
    /// only beside SPEC_CTRL.IBRS: a kernel that finds the promise writes that bit without a further look.
    #[must_use]
    pub const fn arch_capabilities(&self) -> Option<u64> {
        if self.leaf_7_edx & leaf_7_edx::ARCH_CAPABILITIES == 0 {
            return None;
        }
        let has_ibrs = self.leaf_7_edx & leaf_7_edx::IBRS_AND_IBPB != 0;
        Some(if has_ibrs { self.capabilities } else { self.capabilities & !capability::IBRS_ALL })
    }
}

/// The steps by which guests have controls of their own on a processor.
pub(crate) fn steps(processor: &Processor) -> Steps {
    let reports = processor.reports();
    if reports.spec_ctrl() == 0 && reports.pred_cmd() == 0 {
        return Steps::empty();
    }
    if reports.spec_ctrl() == 0 || processor.switches_spec_ctrl {
        return Steps::GUEST_CONTROLS;
    }
    Steps::GUEST_CONTROLS | Steps::SWITCH_SPEC_CTRL
}

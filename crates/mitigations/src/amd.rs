//! AMD's processors, and Hygon's.

use crate::{Plan, Processor, Steps, Weakness};

/// CPUID leaf 8000_0008, EBX.
const IBPB: u32 = 1 << 12;
const IBRS: u32 = 1 << 14;
/// CPUID leaf 8000_0021, EAX.
const LFENCE_SERIALIZES: u32 = 1 << 2;
const VERW_CLEARS: u32 = 1 << 5;
const AUTOMATIC_IBRS: u32 = 1 << 8;
/// IBPB forgets kinds of branches, too.
const IBPB_OF_TYPES: u32 = 1 << 28;
const SRSO_NO: u32 = 1 << 29;
/// CPUID leaf 8000_0021, ECX.
const TSA_NO: u32 = 1 << 1 | 1 << 2;

/// CPUID leaf 8000_000A, EDX.
pub(crate) const VIRTUAL_SPEC_CTRL: u32 = 1 << 20;

/// The families of Zen: 1 and 2 (and Hygon's), 3 and 4, 5.
const ZEN: u32 = 0x17;
const HYGON: u32 = 0x18;
const ZEN_3: u32 = 0x19;
const ZEN_5: u32 = 0x1a;

const NO_MICROCODE: &str = "the microcode is too old";

pub(crate) fn plan(processor: &Processor, plan: &mut Plan) {
    let &Processor { family, extended_8_ebx, extended_21_eax, extended_21_ecx, .. } = processor;
    let has_ibpb = extended_8_ebx & IBPB != 0;

    // Both let a return go where another branch went before. Other kernels train their own returns, by code that a
    // compiler makes of each; here all predictions are forgotten at an exit.
    const FORGET: &str = "IBPB at exits";
    let forgets = |plan: &mut Plan, weakness: Weakness, can: bool| {
        plan.hold(weakness, Steps::IBPB_AT_EXIT, can, FORGET, NO_MICROCODE);
    };
    if (0x15..=HYGON).contains(&family) {
        forgets(plan, Weakness::Retbleed, has_ibpb);
    }
    if matches!(family, ZEN | HYGON | ZEN_3 | ZEN_5) && extended_21_eax & SRSO_NO == 0 {
        // On the first two generations every IBPB does that.
        let is_enough = matches!(family, ZEN | HYGON) || extended_21_eax & IBPB_OF_TYPES != 0;
        forgets(plan, Weakness::SpecRstackOverflow, has_ibpb && is_enough);
    }

    // Where nothing of the guest's is left at an exit, no more is needed. Automatic IBRS covers the return stack, too.
    if plan.steps.contains(Steps::IBPB_AT_EXIT) {
        forgets(plan, Weakness::SpectreV2, true);
    } else if extended_21_eax & AUTOMATIC_IBRS != 0 {
        let steps = Steps::AUTOMATIC_IBRS | Steps::IBPB_BETWEEN_VMS;
        plan.hold(Weakness::SpectreV2, steps, has_ibpb, "automatic IBRS, IBPB between VMs", NO_MICROCODE);
    } else {
        let steps = Steps::IBRS_AT_EXIT | Steps::FILL_RETURN_STACK | Steps::IBPB_BETWEEN_VMS;
        let can = has_ibpb && extended_8_ebx & IBRS != 0;
        plan.hold(Weakness::SpectreV2, steps, can, "IBRS at exits, IBPB between VMs", NO_MICROCODE);
    }
    // A VMM in the parent runs behind a change of the VM.
    if (0x15..=ZEN_5).contains(&family) {
        if plan.steps.contains(Steps::IBPB_AT_EXIT) {
            forgets(plan, Weakness::Vmscape, true);
        } else {
            plan.hold(Weakness::Vmscape, Steps::IBPB_BETWEEN_VMS, has_ibpb, "IBPB between VMs", NO_MICROCODE);
        }
    }
    if family == ZEN_3 && extended_21_ecx & TSA_NO != TSA_NO {
        let can = extended_21_eax & VERW_CLEARS != 0;
        plan.hold(Weakness::Tsa, Steps::CLEAR_BUFFERS, can, "VERW at entries", NO_MICROCODE);
    }
    if extended_21_eax & LFENCE_SERIALIZES == 0 && family >= 0x10 && family != 0x11 {
        plan.steps |= Steps::SERIALIZING_LFENCE;
    }
}

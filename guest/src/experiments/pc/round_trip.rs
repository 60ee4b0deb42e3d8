//! Round trips of x86: CPUID, MSRs, ports, the local APIC in both modes.

use crate::arch::round_trip::{self as loops, SelfIpi};
use crate::arch::{apic, control};
use crate::experiments::round_trip::{measure, measure_interrupts, wake};
use crate::experiments::{Context, Outcome};

const NEEDS_X2APIC: Outcome = Outcome::Unsupported("the x2APIC is not in use");
const NEEDS_XAPIC: Outcome = Outcome::Unsupported("the x2APIC is in use; boot with apic=xapic");

pub(super) fn cpuid_0(context: &Context) -> Outcome {
    measure(context, "cpuid", loops::CPUID_0)
}

pub(super) fn cpuid_1(context: &Context) -> Outcome {
    measure(context, "cpuid-1", loops::CPUID_1)
}

pub(super) fn rdmsr(context: &Context) -> Outcome {
    measure(context, "rdmsr", loops::RDMSR)
}

pub(super) fn wrmsr(context: &Context) -> Outcome {
    if control::has_tsc_deadline() {
        apic::disarm();
        measure(context, "wrmsr", loops::WRMSR)
    } else if apic::is_x2apic() {
        measure(context, "wrmsr", loops::X2APIC_TPR)
    } else {
        Outcome::Unsupported("neither TSC_DEADLINE nor an x2APIC")
    }
}

pub(super) fn cr4_write(context: &Context) -> Outcome {
    measure(context, "cr4-write", loops::CR4_WRITE)
}

pub(super) fn x2apic_read(context: &Context) -> Outcome {
    if apic::is_x2apic() { measure(context, "x2apic-read", loops::X2APIC_READ) } else { NEEDS_X2APIC }
}

pub(super) fn x2apic_eoi(context: &Context) -> Outcome {
    if apic::is_x2apic() { measure(context, "x2apic-eoi", loops::X2APIC_EOI) } else { NEEDS_X2APIC }
}

pub(super) fn port_in(context: &Context) -> Outcome {
    measure(context, "port-in", loops::PORT_IN)
}

pub(super) fn port_out(context: &Context) -> Outcome {
    measure(context, "port-out", loops::PORT_OUT)
}

pub(super) fn port_vacant(context: &Context) -> Outcome {
    measure(context, "port-vacant", loops::PORT_VACANT)
}

/// Two registers, with a record each: the version, which never changes, and the task priority, for which some
/// hypervisors must ask another component.
pub(super) fn xapic_read(context: &Context) -> Outcome {
    if apic::is_x2apic() { NEEDS_XAPIC } else { measure(context, "xapic-read", loops::XAPIC_READ) }
}

pub(super) fn xapic_tpr_read(context: &Context) -> Outcome {
    if apic::is_x2apic() { NEEDS_XAPIC } else { measure(context, "xapic-tpr-read", loops::XAPIC_TPR_READ) }
}

pub(super) fn xapic_eoi(context: &Context) -> Outcome {
    if apic::is_x2apic() { NEEDS_XAPIC } else { measure(context, "xapic-eoi", loops::XAPIC_EOI) }
}

pub(super) fn vmmcall(context: &Context) -> Outcome {
    if loops::has_hypercalls() {
        measure(context, "vmmcall", loops::HYPERCALL)
    } else {
        Outcome::Unsupported("a hypercall raises an exception")
    }
}

pub(super) fn self_ipi(context: &Context) -> Outcome {
    if !apic::is_x2apic() {
        return NEEDS_X2APIC;
    }
    measure_interrupts(context, "self-ipi", |n| loops::self_ipi(SelfIpi::Register, n))
}

pub(super) fn self_ipi_icr(context: &Context) -> Outcome {
    measure_interrupts(context, "self-ipi-icr", |n| loops::self_ipi(SelfIpi::Command, n))
}

pub(super) fn hlt_wake(context: &Context) -> Outcome {
    wake(context, "hlt-wake")
}

//! What one exit costs, seen from inside: ticks of the TSC per operation, less the loop around it.
//!
//! Under QEMU's `-icount shift=0` the TSC counts instructions, and the figures are exact and repeatable.

use core::sync::atomic::Ordering;

use guest_model::batches::{BATCHES, Batches, per_iteration};

use super::{Context, Outcome};
use crate::arch::round_trip::{self as loops, Pair, SelfIpi};
use crate::arch::{apic, control, cpu_local, interrupts, tsc, window};
use crate::interrupt::{TIMER, taken};
use crate::record::record;

const DONE: Outcome = Outcome::Done { failures: 0 };
const NEEDS_X2APIC: Outcome = Outcome::Unsupported("the x2APIC is not in use");
const NEEDS_XAPIC: Outcome = Outcome::Unsupported("the x2APIC is in use; boot with apic=xapic");

fn iterations(context: &Context) -> u64 {
    context.settings.iterations.unwrap_or(1000)
}

fn measure(context: &Context, name: &str, pair: Pair) -> Outcome {
    let n = iterations(context);
    let empty = Batches::measure(|| (pair.empty)(n)).median();
    let full = Batches::measure(|| (pair.full)(n));
    report(name, n, full, empty);
    DONE
}

fn report(name: &str, n: u64, full: Batches, empty: u64) {
    record!(
        "record",
        experiment = name,
        iterations = n,
        ticks_per_iteration = per_iteration(full.median(), empty, n),
        min = per_iteration(full.min(), empty, n),
        max = per_iteration(full.max(), empty, n),
        empty_loop_ticks = empty,
        batches = BATCHES,
    );
}

pub(super) fn empty(context: &Context) -> Outcome {
    let n = iterations(context);
    report("empty", n, Batches::measure(|| (loops::EMPTY.full)(n)), 0);
    DONE
}

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

/// Two registers, with a record of its own for each: the version, which never changes, and the task priority, which some
/// hypervisors must ask somebody else for.
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
    if loops::has_vmmcall() {
        measure(context, "vmmcall", loops::VMMCALL)
    } else {
        Outcome::Unsupported("VMMCALL raises an exception")
    }
}

pub(super) fn page_fault(context: &Context) -> Outcome {
    let cpu = cpu_local::index();
    window::serve_demand(cpu, false);
    window::unmap(cpu, 0);
    measure(context, "page-fault", loops::PAGE_FAULT)
}

pub(super) fn self_ipi(context: &Context) -> Outcome {
    if !apic::is_x2apic() {
        return NEEDS_X2APIC;
    }
    measure_self_ipi(context, "self-ipi", SelfIpi::Register)
}

pub(super) fn self_ipi_icr(context: &Context) -> Outcome {
    measure_self_ipi(context, "self-ipi-icr", SelfIpi::Command)
}

fn measure_self_ipi(context: &Context, name: &str, kind: SelfIpi) -> Outcome {
    let n = iterations(context);
    let mut lost = 0;
    let empty = Batches::measure(|| (loops::EMPTY.full)(n)).median();
    let full = Batches::measure(|| {
        loops::self_ipi(kind, n).unwrap_or_else(|| {
            lost += 1;
            0
        })
    });
    if lost > 0 {
        record!(
            "violation",
            experiment = name,
            of = "interrupt",
            expected = "delivered",
            seen = "lost",
            batches = lost
        );
        return Outcome::Done { failures: lost };
    }
    report(name, n, full, empty);
    DONE
}

/// Time between the moment for which the timer was armed and the first instruction after HLT.
pub(super) fn hlt_wake(context: &Context) -> Outcome {
    let n = iterations(context).min(10_000);
    let delay = tsc::ticks(50);
    let timer = &taken(cpu_local::index()).timer;

    let full = Batches::measure(|| {
        let mut beyond = 0;
        for _ in 0..n {
            let before = timer.load(Ordering::Acquire);
            let due = if control::has_tsc_deadline() {
                let due = tsc::now() + delay;
                apic::arm_deadline(TIMER, due);
                due
            } else {
                let start = tsc::now();
                start + apic::arm_once(TIMER, delay)
            };
            while timer.load(Ordering::Acquire) == before {
                interrupts::sleep();
            }
            beyond += tsc::now().saturating_sub(due);
        }
        beyond
    });
    apic::disarm();
    report("hlt-wake", n, full, 0);
    DONE
}

//! Round trips of AArch64: calls, trapped registers, devices, interrupts.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::batches::{BATCHES, Batches};

use crate::arch::round_trip as loops;
use crate::arch::{controller, interrupts, tsc};
use crate::cpu;
use crate::experiments::round_trip::{iterations, measure, measure_interrupts, report, wake};
use crate::experiments::{Context, Outcome};
use crate::interrupt::{COUNTED, WAKE, taken};

pub(super) fn hvc(context: &Context) -> Outcome {
    if loops::has_hvc() { measure(context, "hvc", loops::HVC) } else { Outcome::Unsupported("HVC raises an exception") }
}

pub(super) fn smc(context: &Context) -> Outcome {
    if loops::has_smc() { measure(context, "smc", loops::SMC) } else { Outcome::Unsupported("nobody answers SMC") }
}

pub(super) fn sysreg_read(context: &Context) -> Outcome {
    measure(context, "sysreg-read", loops::SYSREG_READ)
}

pub(super) fn sysreg_write(context: &Context) -> Outcome {
    measure(context, "sysreg-write", loops::SYSREG_WRITE)
}

pub(super) fn cache_type(context: &Context) -> Outcome {
    measure(context, "ctr-read", loops::CACHE_TYPE)
}

pub(super) fn mmio_read(context: &Context) -> Outcome {
    measure(context, "mmio-read", loops::MMIO_READ)
}

pub(super) fn mmio_write(context: &Context) -> Outcome {
    measure(context, "mmio-write", loops::MMIO_WRITE)
}

pub(super) fn gic_read(context: &Context) -> Outcome {
    measure(context, "gic-read", loops::GIC_READ)
}

pub(super) fn tlbi(context: &Context) -> Outcome {
    measure(context, "tlbi-page", loops::TLBI_PAGE);
    measure(context, "tlbi-all", loops::TLBI_ALL)
}

pub(super) fn self_sgi(context: &Context) -> Outcome {
    measure_interrupts(context, "self-sgi", loops::self_sgi)
}

/// A message to CPU 1, which sleeps, and its answer, for which CPU 0 sleeps.
pub(super) fn other_sgi(context: &Context) -> Outcome {
    static ANSWERS: AtomicU64 = AtomicU64::new(0);
    static WANTED: AtomicU64 = AtomicU64::new(0);
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    let n = iterations(context).min(1000);
    WANTED.store(n * (BATCHES as u64 + 1), Ordering::SeqCst);
    ANSWERS.store(0, Ordering::SeqCst);
    let given = cpu::give(1, |cpu| {
        let counted = &taken(cpu).counted;
        for _ in 0..WANTED.load(Ordering::SeqCst) {
            let before = ANSWERS.load(Ordering::SeqCst);
            let seen = counted.load(Ordering::Acquire);
            // CPU 0 asks only when it has seen the answer.
            ANSWERS.store(before + 1, Ordering::SeqCst);
            controller::send(cpu::hardware_id(0), WAKE);
            while counted.load(Ordering::Acquire) == seen {
                interrupts::sleep();
            }
        }
    });
    if !given {
        return Outcome::Unsupported("CPU 1 is busy");
    }
    let mut asked = 0;
    let full = Batches::measure(|| {
        let start = tsc::now();
        for _ in 0..n {
            while ANSWERS.load(Ordering::SeqCst) == asked {
                interrupts::sleep();
            }
            asked += 1;
            controller::send(cpu::hardware_id(1), COUNTED);
        }
        tsc::now() - start
    });
    let stuck = cpu::wait_for_all(tsc::seconds(30));
    report("other-sgi", n, full, 0);
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

pub(super) fn wfi_wake(context: &Context) -> Outcome {
    wake(context, "wfi-wake")
}

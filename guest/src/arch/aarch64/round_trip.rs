//! The measured loops.
//!
//! Each comes twice: with the instruction, and without it but otherwise the same. The difference per iteration is the
//! cost of the instruction with its exit, handling and entry.

use core::arch::asm;
use core::sync::atomic::Ordering;

use super::vectors::MEASURED;
use super::{attempt, control, cpu_local, gic, interrupts, power, serial, tsc};
use crate::arch::window;

/// A loop with the instruction, and the same loop without it. Both take a number of iterations and return ticks.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) full: fn(u64) -> u64,
    pub(crate) empty: fn(u64) -> u64,
}

/// One loop. Per iteration: `$setup`, `$body`, and the counting of X9. X10 is loaded before; both may change X0 to X7.
macro_rules! run {
    ($setup:literal, $body:literal, $n:expr, $x10:expr) => {{
        let start = tsc::now();
        // SAFETY: the body is one of those named in this file: it reads, or writes a device register or a system
        // register to no effect on memory.
        unsafe {
            asm!(
                ".p2align 5",
                "2:",
                $setup,
                $body,
                "subs x9, x9, #1",
                "b.ne 2b",
                inout("x9") $n => _, in("x10") $x10,
                out("x0") _, out("x1") _, out("x2") _, out("x3") _, out("x4") _, out("x5") _, out("x6") _, out("x7") _,
                out("x8") _, out("x11") _, out("x12") _, out("x13") _, out("x14") _, out("x15") _, out("x16") _,
                out("x17") _,
            );
        }
        tsc::now() - start
    }};
}

macro_rules! pair {
    ($setup:literal, $body:literal) => {
        pair!($setup, $body, 0)
    };
    ($setup:literal, $body:literal, $x10:expr) => {
        Pair { full: |n| run!($setup, $body, n, $x10), empty: |n| run!($setup, "", n, $x10) }
    };
}

/// No instruction: the cost of the loop itself.
pub(crate) const EMPTY: Pair = pair!("", "");
/// A call that asks for the version of the calling convention.
pub(crate) const HVC: Pair = pair!("mov x0, #0x80000000", "hvc #0");
/// The same by the other instruction.
pub(crate) const SMC: Pair = pair!("mov x0, #0x80000000", "smc #0");
/// A read of an ID register.
pub(crate) const SYSREG_READ: Pair = pair!("", "mrs x0, id_aa64pfr0_el1");
/// A write to a register that ignores it.
pub(crate) const SYSREG_WRITE: Pair = pair!("mov x0, #0", "msr actlr_el1, x0");
/// The cache type register, which kernels read often.
pub(crate) const CACHE_TYPE: Pair = pair!("", "mrs x0, ctr_el0");
/// The serial port's flags.
pub(crate) const MMIO_READ: Pair = pair!("", "ldr w0, [x10]", serial::base() + serial::FLAGS);
/// A register of the serial port that does nothing.
pub(crate) const MMIO_WRITE: Pair = pair!("mov x0, #0", "str w0, [x10]", serial::base() + serial::DIVISOR);
/// The kind of the interrupt controller.
pub(crate) const GIC_READ: Pair = pair!("", "ldr w0, [x10]", gic::distributor() + gic::GICD_TYPER);
/// One page, dropped from all TLBs.
pub(crate) const TLBI_PAGE: Pair = pair!("mov x0, #0x1000", "tlbi vaae1is, x0\n dsb ish");
/// Everything, dropped from all TLBs.
pub(crate) const TLBI_ALL: Pair = pair!("", "tlbi vmalle1is\n dsb ish");

/// Whether a hypervisor handles the call.
pub(crate) fn has_hvc() -> bool {
    attempt::hvc(power::SMCCC_VERSION, [0; 3]).is_ok()
}

/// The same of SMC.
pub(crate) fn has_smc() -> bool {
    (control::is_judged() || power::is_by_smc()) && attempt::smc(power::SMCCC_VERSION, [0; 3]).is_ok()
}

/// A page fault that is handled inside of the guest: a load from a page that is missing, and its handler.
pub(crate) const PAGE_FAULT: Pair = Pair {
    full: |n| {
        let missing = window::demand_page(cpu_local::index(), 0);
        time(n, || attempt::load_u8(missing).is_err())
    },
    empty: |n| {
        let present = &raw const PRESENT_BYTE as u64;
        time(n, || attempt::load_u8(present).is_ok())
    },
};

static PRESENT_BYTE: u8 = 0;

fn time(n: u64, mut step: impl FnMut() -> bool) -> u64 {
    let start = tsc::now();
    for _ in 0..n {
        core::hint::black_box(step());
    }
    tsc::now() - start
}

/// Ticks that the wait for one interrupt may take.
const PATIENCE_SECONDS: u64 = 10;

/// Ticks of `n` SGIs that this CPU sends to itself and takes, or `None` if one did not arrive.
pub(crate) fn self_sgi(n: u64) -> Option<u64> {
    let own = control::hardware_id();
    let taken = &cpu_local::own().own_sgis;
    let mut expected = taken.load(Ordering::Acquire);
    interrupts::enable();
    let start = tsc::now();
    let mut lost = false;
    for _ in 0..n {
        expected += 1;
        gic::send(own, MEASURED);
        if taken.load(Ordering::Acquire) < expected {
            let last = tsc::now() + tsc::seconds(PATIENCE_SECONDS);
            while taken.load(Ordering::Acquire) < expected && !lost {
                lost = tsc::now() > last;
            }
        }
    }
    let ticks = tsc::now() - start;
    interrupts::disable();
    (!lost).then_some(ticks)
}

//! Experiments that only AArch64 can run.

mod calls;
mod hidden;
mod interrupts;
mod mmio;
mod private;
mod round_trip;
mod speculation;
mod system;
mod tables;

use core::fmt;

use super::{Experiment, by_default, on_request};
use crate::arch::attempt::Fault;

/// The register that an instruction wrote, or the exception that it raised.
struct Seen(Result<u64, Fault>);

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(value) => write!(f, "{value:#x}"),
            Err(fault) => write!(f, "{fault} (syndrome {:#x})", fault.syndrome),
        }
    }
}

/// All of them, in the order in which they run by default.
pub(super) const EXPERIMENTS: [Experiment; 35] = [
    by_default("hvc", "HVC: the version of the calling convention", round_trip::hvc),
    by_default("smc", "the same by SMC", round_trip::smc),
    by_default("sysreg-read", "read of an ID register", round_trip::sysreg_read),
    by_default("sysreg-write", "write of ACTLR_EL1, of which nothing is kept", round_trip::sysreg_write),
    by_default("mmio-read", "read of the serial port's flags", round_trip::mmio_read),
    by_default("mmio-write", "write of a register of the serial port", round_trip::mmio_write),
    by_default("gic-read", "read of a register of the distributor", round_trip::gic_read),
    by_default("self-sgi", "an SGI to oneself: send, deliver, end of interrupt", round_trip::self_sgi),
    by_default("other-sgi", "an SGI to CPU 1, which sleeps, and its answer", round_trip::other_sgi),
    by_default("wfi-wake", "arm the timer, wait for it, wake: the time beyond the delay", round_trip::wfi_wake),
    by_default("ctr-read", "read of CTR_EL0, which should cost no exit", round_trip::cache_type),
    by_default("tlbi", "pages dropped from all TLBs, which should cost no exit", round_trip::tlbi),
    by_default("timer-extremes", "times in the past and the far future", interrupts::timers),
    by_default("private-pages", "each CPU has a page at one address, and flushes it for itself alone", private::run),
    on_request("call-fuzz", "calls of the firmware that make no sense", calls::run),
    on_request("off-and-on", "CPU 1 turns itself off and is turned on again", calls::off_and_on),
    on_request("mmio-forms", "devices and nowhere, by instructions that say little to a hypervisor", mmio::forms),
    on_request("mmio-fuzz", "devices at random offsets, at all widths", mmio::random),
    on_request("fetch-nowhere", "instructions from devices and from nowhere", mmio::fetches),
    on_request("icc-fuzz", "the interrupt controller's CPU interface with random data", interrupts::interface),
    on_request("sysreg-sweep", "every encoding of a system register or instruction", system::sweep),
    on_request(
        "physical-timer",
        "the physical timer: its registers, its interrupt, its level",
        interrupts::physical_timer,
    ),
    on_request("timed-waits", "WFIT and WFET, where there are such", interrupts::timed_waits),
    on_request("id-registers", "the ID registers, and registers that they hide", hidden::id_registers),
    on_request(
        "hidden-registers",
        "registers that hold a pattern, for seconds=N (3): run VMs with seed=1 to 4",
        hidden::registers,
    ),
    on_request("speculation", "bits of the state and calls of the firmware against speculation", speculation::run),
    on_request("debug", "breakpoints, steps, event counters, extensions that are not there", system::debug),
    on_request("el0", "programs of 64 and 32 bits that overstep", system::lower),
    on_request("bad-tables", "the guest's own tables outside of memory and at themselves", tables::run),
    on_request("lost-tables", "CPU 1 loses its tables for ever; the others go on", tables::lost_tables),
    on_request("lost-vectors", "CPU 1 loses its vectors for ever; the others go on", tables::lost_vectors),
    on_request(
        "illegal-return",
        "CPU 1 returns to a state that is not there; the others go on",
        tables::illegal_return,
    ),
    on_request("off-by-another", "CPU 1 turns the machine off", tables::off_by_another),
    on_request("private-selftest", "private-pages without a flush: would it be noticed?", private::selftest),
    on_request("private-storm", "private-pages on all CPUs for seconds=N (10)", private::storm),
];

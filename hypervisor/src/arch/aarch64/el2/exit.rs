//! Exits: the one match on the exit reason (Arm ARM, ESR_EL2).
//!
//! This file and its neighbours handle the architecture's own exits (system registers, calls to the firmware). Exits
//! that any architecture has (a stage-2 fault, an idle guest) are passed on as small typed facts.

use aarch64_defs::syndrome::{Rest, class};
use abi::control::StopReason;
use abi::counters::ExitReason;

use super::entry::vector;
use super::vcpu::stop;
use crate::arch::aarch64::guest::{firmware, stage2_fault, sysreg};
use crate::vcpu::run::{Next, Running};

/// Handles the exit that the guest just made.
// A part of the loop: to save the registers for a call would be a tenth of a fast exit.
#[inline(always)]
pub(crate) fn handle(run: &mut Running<'_>) -> Next {
    let tally = run.tally;
    let arch = &mut run.owner.arch;
    arch.fold_interrupts(tally);
    match arch.registers.vector {
        vector::SYNCHRONOUS => {}
        vector::IRQ | vector::FIQ => {
            tally.exit(ExitReason::HostInterrupt);
            return Next::Interrupted;
        }
        _ => {
            // The machine reports an error without a source; it came while this guest ran, so it is most likely this
            // guest's.
            tally.exit(ExitReason::Other);
            return stop(run, StopReason::Unsupported, "met an error of the machine (SError)");
        }
    }

    let syndrome = arch.syndrome();
    match syndrome.class() {
        class::WFX => match arch.rest(syndrome) {
            Rest::Yield => {
                tally.exit(ExitReason::Pause);
                arch.skip();
                Next::Yield
            }
            Rest::Over => {
                tally.exit(ExitReason::Halt);
                arch.skip();
                Next::Resume
            }
            Rest::Sleep(until) => {
                tally.exit(ExitReason::Halt);
                arch.skip();
                arch.sleep(until);
                Next::Idle
            }
        },
        class::SYSTEM => sysreg::access(run, syndrome.system()),
        class::DATA_ABORT => stage2_fault::data_abort(run, syndrome),
        class::INSTRUCTION_ABORT => stage2_fault::instruction_abort(run, syndrome),
        class::HVC64 => {
            tally.exit(ExitReason::Hypercall);
            firmware::call(run)
        }
        class::SMC64 => {
            // Unlike HVC, a trapped SMC has not been carried out yet (Arm ARM, HCR_EL2.TSC).
            tally.exit(ExitReason::Hypercall);
            arch.skip();
            firmware::call(run)
        }
        class::FP if arch.open_fpu(run.cpu.host_context()) => {
            // The guest executes the instruction again.
            tally.exit(ExitReason::Other);
            Next::Resume
        }
        // Extensions that the ID registers hide.
        class::FP | class::SVE | class::SME | class::PAUTH => {
            tally.exit(ExitReason::Other);
            arch.undefined();
            Next::Resume
        }
        class::ILLEGAL_STATE => {
            tally.exit(ExitReason::Other);
            stop(run, StopReason::Unsupported, "is in an execution state that does not exist")
        }
        _ => {
            tally.exit(ExitReason::Other);
            arch.undefined();
            Next::Resume
        }
    }
}

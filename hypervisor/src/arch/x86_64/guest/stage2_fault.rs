//! Stage-2 faults: the guest was stopped at memory that it has, or at a device.

use abi::control::StopReason;
use abi::counters::ExitReason;
use decode_cache::Cause;
use stage2::Access;

use super::mmio;
use super::vcpu::stop;
use crate::arch::x86_64::backend::{Injection as _, Stage2Access, Stage2Fault};
use crate::vcpu::run::{Next, Running};
use crate::vm::fault::{Resolved, resolve_fault};

/// Handles a stage-2 fault: nothing is mapped there, or not for this access.
#[inline(always)]
pub(in crate::arch::x86_64) fn handle(run: &mut Running<'_>, fault: Stage2Fault<impl Fn() -> Stage2Access>) -> Next {
    let Stage2Fault { gpa, is_present, access } = fault;
    let needs = || {
        let Stage2Access { is_write, is_fetch, is_table_walk } = access();
        let cause = if is_table_walk { Cause::Walk } else { Cause::Write };
        (Access { read: true, write: is_write, execute: is_fetch }, cause)
    };
    match resolve_fault(run, gpa, is_present, needs) {
        Resolved::Again => {
            run.owner.arch.before_instruction();
            return Next::Resume;
        }
        Resolved::Device => {}
        Resolved::End(problem) => return stop(run, StopReason::Unsupported, problem.text()),
    }
    run.tally.exit(ExitReason::Mmio);
    if run.owner.arch.hardware.has_interrupted_delivery() {
        // Not an instruction's access: the guest's descriptor tables or its stack are at an address without memory. A
        // retry would fail again, before any interrupt of the host is taken.
        return stop(run, StopReason::Unsupported, "delivers an event through addresses where there is no memory");
    }
    let Stage2Access { is_fetch, is_table_walk, .. } = access();
    if is_fetch || is_table_walk {
        // Code or page tables where there is no memory: on a PC, ones from an empty bus, and soon a triple fault.
        let what = if is_fetch { "fetched an instruction from" } else { "keeps page tables at" };
        run.vm.stop(
            StopReason::Unsupported,
            format_args!(
                "vCPU {}: {what} GPA {gpa}, where there is no memory, {}",
                run.index,
                run.owner.arch.whereabouts()
            ),
        );
        return Next::Resume;
    }
    mmio::access(run, gpa)
}

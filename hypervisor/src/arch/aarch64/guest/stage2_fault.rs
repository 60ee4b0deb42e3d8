//! Stage-2 faults: the guest was stopped at memory that it has, or at a device.

use aarch64_defs::syndrome::{Fault, Syndrome};
use abi::control::StopReason;
use abi::counters::ExitReason;
use addr::Gpa;
use decode_cache::Cause;
use stage2::Access;

use super::mmio;
use crate::arch::aarch64::el2::tlb;
use crate::arch::aarch64::el2::vcpu::stop;
use crate::vcpu::run::{Next, Running};
use crate::vm::fault::{Resolved, resolve_fault};

/// A data abort of stage 2.
pub(in crate::arch::aarch64) fn data_abort(run: &mut Running<'_>, syndrome: Syndrome) -> Next {
    let fault = syndrome.fault();
    let is_mapped = match fault {
        Fault::Translation => false,
        Fault::AccessFlag | Fault::Permission => true,
        Fault::TlbConflict => return tlb_conflict(run),
        Fault::Other => {
            run.tally.exit(ExitReason::Mmio);
            return stop(run, StopReason::Unsupported, "met an error of the machine's memory");
        }
    };
    let Some(gpa) = address(run, syndrome) else { return Next::Resume };
    let needs = || {
        let write = syndrome.is_write() || is_denied_walk(syndrome);
        (Access { read: true, write, execute: false }, cause(syndrome))
    };
    match resolve_fault(run, gpa, is_mapped, needs) {
        Resolved::Again => Next::Resume,
        Resolved::Device => mmio::access(run, gpa, syndrome),
        Resolved::End(problem) => stop(run, StopReason::Unsupported, problem.text()),
    }
}

/// An instruction abort of stage 2.
pub(in crate::arch::aarch64) fn instruction_abort(run: &mut Running<'_>, syndrome: Syndrome) -> Next {
    let fault = syndrome.fault();
    if fault == Fault::TlbConflict {
        return tlb_conflict(run);
    }
    let Some(gpa) = address(run, syndrome) else { return Next::Resume };
    if fault != Fault::Other {
        let needs = || {
            let write = is_denied_walk(syndrome);
            (Access { read: true, write, execute: !write }, cause(syndrome))
        };
        match resolve_fault(run, gpa, fault != Fault::Translation, needs) {
            Resolved::Again => return Next::Resume,
            Resolved::Device => {}
            Resolved::End(problem) => return stop(run, StopReason::Unsupported, problem.text()),
        }
    }
    run.tally.exit(ExitReason::Mmio);
    run.owner.arch.external_abort(true);
    Next::Resume
}

/// The TLB holds two entries for one address, because the guest has changed its tables in a forbidden way. All its
/// entries on this pCPU are flushed, and it retries (Arm ARM, I_JCCRT).
#[cold]
fn tlb_conflict(run: &mut Running<'_>) -> Next {
    run.tally.exit(ExitReason::Stage2Fault);
    tlb::resolve_conflict();
    Next::Resume
}

/// Whether a walk of the guest's own tables was not allowed: the processor writes flags to them, also for a read or for
/// the fetch of an instruction.
fn is_denied_walk(syndrome: Syndrome) -> bool {
    syndrome.is_table_walk() && syndrome.fault() == Fault::Permission
}

/// The physical address of an abort, if the guest's tables still lead there.
fn address(run: &mut Running<'_>, syndrome: Syndrome) -> Option<Gpa> {
    let registers = &run.owner.arch.registers;
    if syndrome.fault() != Fault::Permission || syndrome.is_table_walk() {
        return Some(gpa_of(registers.hpfar, registers.far));
    }
    let found = tlb::translate(registers.far).map(Gpa);
    if found.is_none() {
        // Another vCPU has changed the tables meanwhile: this one retries.
        run.tally.exit(ExitReason::Stage2Fault);
    }
    found
}

/// Whether an instruction or a walk of the guest's own tables needs the page.
fn cause(syndrome: Syndrome) -> Cause {
    if syndrome.is_table_walk() { Cause::Walk } else { Cause::Write }
}

/// The physical address of an abort: the page of HPFAR_EL2 and the rest of FAR_EL2.
fn gpa_of(hpfar: u64, far: u64) -> Gpa {
    const PAGE: u64 = 0x0000_0fff_ffff_fff0;
    Gpa((hpfar & PAGE) << 8 | far & 0xfff)
}

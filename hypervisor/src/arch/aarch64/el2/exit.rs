//! Exits: the one match on the exit reason (Arm ARM, ESR_EL2).
//!
//! This file and its neighbours handle the architecture's own exits (system registers, calls to the firmware). Exits
//! that any architecture has (a stage-2 fault, an idle guest) are passed on as small typed facts.

#![expect(unsafe_code, reason = "asks the processor where an address leads")]

use core::arch::asm;

use aarch64_defs::syndrome::{Fault, Rest, Syndrome, class};
use abi::control::StopReason;
use abi::counters::ExitReason;
use addr::Gpa;
use stage2::{Access, Denial, tlbi};

use super::entry::vector;
use super::instructions::ThisCpu;
use super::vcpu::stop;
use crate::arch::aarch64::guest::{firmware, mmio, sysreg};
use crate::arch::aarch64::register::{read_register, write_register};
use crate::vcpu::run::{Next, Running};
use crate::vm::fault::{Needs, Resolved, resolve_fault};

/// Handles the exit that the guest just made.
// A part of the loop: to save the registers for a call would be a tenth of a fast exit.
#[inline(always)]
pub(crate) fn handle(_: bool, run: &mut Running<'_>) -> Next {
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
        class::DATA_ABORT => data_abort(run, syndrome),
        class::INSTRUCTION_ABORT => instruction_abort(run, syndrome),
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

/// A data abort of stage 2.
fn data_abort(run: &mut Running<'_>, syndrome: Syndrome) -> Next {
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
        Needs { access: Access { read: true, write, execute: false }, is_table_walk: syndrome.is_table_walk() }
    };
    match resolve_fault(run, gpa, is_mapped, needs) {
        Resolved::Again(denial) => retry(run, gpa, denial),
        Resolved::Device | Resolved::DeviceOfChild | Resolved::NoAccess | Resolved::Deposited => {
            mmio::access(run, gpa, syndrome)
        }
        Resolved::End(problem) => stop(run, StopReason::Unsupported, problem.text()),
    }
}

/// An instruction abort of stage 2.
fn instruction_abort(run: &mut Running<'_>, syndrome: Syndrome) -> Next {
    let fault = syndrome.fault();
    if fault == Fault::TlbConflict {
        return tlb_conflict(run);
    }
    let Some(gpa) = address(run, syndrome) else { return Next::Resume };
    if fault != Fault::Other {
        let needs = || {
            let write = is_denied_walk(syndrome);
            Needs { access: Access { read: true, write, execute: !write }, is_table_walk: syndrome.is_table_walk() }
        };
        match resolve_fault(run, gpa, fault != Fault::Translation, needs) {
            Resolved::Again(denial) => return retry(run, gpa, denial),
            Resolved::Device | Resolved::DeviceOfChild | Resolved::NoAccess | Resolved::Deposited => {}
            Resolved::End(problem) => return stop(run, StopReason::Unsupported, problem.text()),
        }
    }
    run.tally.exit(ExitReason::Mmio);
    run.owner.arch.external_abort(true);
    Next::Resume
}

/// The guest retries its access to `gpa`, without the entry that denied it.
fn retry(run: &Running<'_>, gpa: Gpa, denial: Denial) -> Next {
    if denial.is_cached() {
        denial.flush(gpa, &ThisCpu);
        run.tally.add(|count| &count.stage2_local_flushes, 1);
    }
    Next::Resume
}

/// The physical address of an abort, if the guest's tables still lead there.
fn address(run: &mut Running<'_>, syndrome: Syndrome) -> Option<Gpa> {
    let registers = &run.owner.arch.registers;
    if syndrome.fault() != Fault::Permission || syndrome.is_table_walk() {
        return Some(gpa_of(registers.hpfar, registers.far));
    }
    let found = translate(registers.far).map(Gpa);
    if found.is_none() {
        // Another vCPU has changed the tables in between: this one retries.
        run.tally.exit(ExitReason::Stage2Fault);
    }
    found
}

/// The physical address of an abort: the page of HPFAR_EL2 and the rest of FAR_EL2.
fn gpa_of(hpfar: u64, far: u64) -> Gpa {
    const PAGE: u64 = 0x0000_0fff_ffff_fff0;
    Gpa((hpfar & PAGE) << 8 | far & 0xfff)
}

/// The physical page of an abort, if the processor does not report it: for permission faults it need not (HPFAR_EL2).
/// The result of stage 1 for `address` now, which may have changed since, or be none.
fn translate(address: u64) -> Option<u64> {
    const FAILED: u64 = 1;
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    let guests = read_register!("par_el1");
    // SAFETY: walks the tables of the guest that this pCPU has just left, whose registers are still loaded, and reports
    // in PAR_EL1. That register belongs to the guest.
    unsafe { asm!("at s1e1r, {}", "isb", in(reg) address, options(nostack, preserves_flags)) };
    let found = read_register!("par_el1");
    // SAFETY: as the guest has it.
    unsafe { write_register!("par_el1", guests) };
    (found & FAILED == 0).then_some(found & ADDRESS | address & 0xfff)
}

/// Whether a walk of the guest's own tables was not allowed: the processor writes flags to them, also for a read or for
/// the fetch of an instruction.
fn is_denied_walk(syndrome: Syndrome) -> bool {
    syndrome.is_table_walk() && syndrome.fault() == Fault::Permission
}

/// The TLB holds two entries for one address, because the guest has changed its tables in a forbidden way. All its
/// entries on this pCPU are flushed, and it retries (Arm ARM, I_JCCRT).
#[cold]
fn tlb_conflict(run: &mut Running<'_>) -> Next {
    run.tally.exit(ExitReason::Stage2Fault);
    tlbi::resolve_conflict(&ThisCpu);
    Next::Resume
}

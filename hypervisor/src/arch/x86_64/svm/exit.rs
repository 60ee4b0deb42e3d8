//! Exits: the one match on the exit reason (APM vol. 2, appendix C).
//!
//! This file and its neighbours handle the architecture's own exits (CPUID, MSRs, the local APIC). Exits that any
//! architecture has (a stage-2 fault, an idle guest) are passed on as small typed facts.

use abi::control::StopReason;
use abi::counters::ExitReason;
use addr::Gpa;
use stage2::Access;
use x86_defs::control::assisted;
use x86_defs::exit_code as code;
use x86_defs::registers::vector;
use x86_defs::vmcb::ControlArea;
use x86_events::Flags;

use super::old_code;
use crate::arch::x86_64::backend::{ControlWrite, PortAccess};
use crate::arch::x86_64::guest::vcpu::stop;
use crate::arch::x86_64::guest::{assist, control, fpu, hyperv, intercept, mmio, msr, platform, vmware};
use crate::arch::x86_64::host::machine_check;
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};
use crate::vm::fault::{Needs, Resolved, resolve_fault};

/// Handles the exit that the guest just made.
// A part of the loop: to save the registers for a call would be a tenth of a fast exit.
#[inline(always)]
pub(super) fn handle(run: &mut Running<'_>) -> Next {
    let arch = &mut run.owner.arch;
    let tally = run.tally;

    let reason = arch.hardware.reason();
    if arch.is_armed() && is_over(run, reason) {
        return stepped(run);
    }
    let arch = &mut run.owner.arch;
    match reason {
        code::MSR => {
            let is_write = arch.hardware.vmcb.control.exit_info_1 & 1 != 0;
            msr::access(run, is_write)
        }
        code::CPUID => {
            tally.exit(ExitReason::Cpuid);
            run.vm.platform().cpuid.answer(arch);
            arch.skip(2);
            Next::Resume
        }
        code::INTR => {
            tally.exit(ExitReason::HostInterrupt);
            arch.before_instruction();
            Next::Interrupted
        }
        code::HLT => {
            tally.exit(ExitReason::Halt);
            arch.skip(1);
            arch.activity = Activity::Halted;
            Next::Idle
        }
        code::VINTR => {
            // The window was closed above; the interrupt goes in with the next entry.
            tally.exit(ExitReason::InterruptWindow);
            Next::Resume
        }
        code::IOIO => {
            tally.exit(ExitReason::PortIo);
            if run.vm.as_child().is_some() {
                return port_of_child(run);
            }
            platform::port_access(run, port_access(&run.owner.arch.hardware.vmcb.control))
        }
        code::NPF => nested_page_fault(run),
        code::PAUSE => {
            tally.exit(ExitReason::Pause);
            arch.skip(2);
            Next::Yield
        }
        code::VMMCALL => {
            tally.exit(ExitReason::Hypercall);
            match run.vm.platform().hyperv {
                Some(_) => hyperv::hypercall(run),
                None => vmware::call(run),
            }
        }
        code::IRET => {
            tally.exit(ExitReason::NmiWindow);
            arch.at_iret();
            Next::Resume
        }
        code::POPF => {
            tally.exit(ExitReason::Other);
            arch.at_flags(Flags::Loaded);
            Next::Resume
        }
        code::PUSHF => {
            tally.exit(ExitReason::Other);
            arch.at_flags(Flags::Saved);
            Next::Resume
        }
        code::SWINT => {
            tally.exit(ExitReason::Exception);
            old_code::software_interrupt(run);
            Next::Resume
        }
        code::XSETBV => {
            tally.exit(ExitReason::ControlRegister);
            fpu::set_xcr0(arch);
            Next::Resume
        }
        code::CR0_SEL_WRITE => {
            tally.exit(ExitReason::ControlRegister);
            control::write(run, 0, control_write(&run.owner.arch.hardware.vmcb.control))
        }
        code::CR4_WRITE => {
            tally.exit(ExitReason::ControlRegister);
            control::write(run, 4, control_write(&run.owner.arch.hardware.vmcb.control))
        }
        code::CR8_WRITE => {
            tally.exit(ExitReason::ControlRegister);
            control::write(run, 8, control_write(&run.owner.arch.hardware.vmcb.control))
        }
        code::NMI => {
            tally.exit(ExitReason::HostInterrupt);
            arch.before_instruction();
            Next::Interrupted
        }
        code::INIT => {
            // The machine resets this pCPU next; nothing sends INIT once the pCPUs are up.
            tally.exit(ExitReason::Other);
            Next::Interrupted
        }
        code::WBINVD | code::INVD => {
            // Caches are coherent and the guest has no device that reads memory behind them.
            tally.exit(ExitReason::Other);
            arch.skip(2);
            Next::Resume
        }
        code::RDPMC => {
            tally.exit(ExitReason::Other);
            arch.general_protection();
            Next::Resume
        }
        // Instructions of features that CPUID hides: SVM, MONITOR, and those of later CPUs.
        code::VMRUN
        | code::VMLOAD
        | code::VMSAVE
        | code::STGI
        | code::CLGI
        | code::SKINIT
        | code::INVLPGA
        | code::MONITOR
        | code::MWAIT
        | code::MWAIT_ARMED
        | code::RDPRU
        | code::INVLPGB
        | code::INVLPGB_ILLEGAL
        | code::INVPCID
        | code::MCOMMIT
        | code::TLBSYNC => {
            tally.exit(ExitReason::Other);
            arch.undefined();
            Next::Resume
        }
        code::EXCEPTION_BASE..=code::EXCEPTION_LAST => {
            tally.exit(ExitReason::Exception);
            if reason == code::EXCEPTION_BASE + u32::from(vector::MACHINE_CHECK) {
                return machine_check::intercepted(run);
            }
            let [vector, ..] = (reason - code::EXCEPTION_BASE).to_le_bytes();
            let control = &arch.hardware.vmcb.control;
            #[expect(clippy::cast_possible_truncation, reason = "an error code has 32 bits")]
            let (error, address) = (control.exit_info_1 as u32, control.exit_info_2);
            arch.give_back(vector, error, address);
            Next::Resume
        }
        code::SHUTDOWN => {
            tally.exit(ExitReason::Other);
            machine_check::explain_shutdown(run).unwrap_or_else(|| stop(run, StopReason::TripleFault, "triple fault"))
        }
        code::TASK_SWITCH => {
            tally.exit(ExitReason::Other);
            stop(run, StopReason::Unsupported, "task switch by hardware, which is not emulated")
        }
        code::INVALID => {
            tally.exit(ExitReason::Other);
            stop(run, StopReason::Unsupported, "put its control registers into a state that does not exist")
        }
        _ => {
            tally.exit(ExitReason::Other);
            stop(run, StopReason::Unsupported, "exited for an unknown reason")
        }
    }
}

/// Ends what the last entry has requested. Returns whether the exit served only that.
#[inline(never)]
fn is_over(run: &mut Running<'_>, reason: u32) -> bool {
    let is_step = run.owner.arch.disarm(reason == code::EXCEPTION_BASE + u32::from(vector::DEBUG), run.tally);
    assist::settle(run);
    is_step
}

/// A step over one instruction is over.
#[cold]
fn stepped(run: &mut Running<'_>) -> Next {
    run.tally.exit(ExitReason::Exception);
    if core::mem::take(&mut run.owner.arch.shows_trap_flag) {
        mmio::clear_saved_trap_flag(run);
    }
    Next::Resume
}

/// A nested page fault (APM vol. 2, 15.25.6): stage 2 maps nothing there, or does not allow the access.
#[inline(always)]
fn nested_page_fault(run: &mut Running<'_>) -> Next {
    const PRESENT: u64 = 1 << 0;
    const WRITE: u64 = 1 << 1;
    const FETCH: u64 = 1 << 4;
    const TABLE_WALK: u64 = 1 << 33;
    let control = &run.owner.arch.hardware.vmcb.control;
    let (error, gpa) = (control.exit_info_1, Gpa(control.exit_info_2));
    let needs = || Needs {
        access: Access { read: true, write: error & WRITE != 0, execute: error & FETCH != 0 },
        is_table_walk: error & TABLE_WALK != 0,
    };
    match resolve_fault(run, gpa, error & PRESENT != 0, needs) {
        // A denial is never cached: the processor walks again before it reports one (APM vol. 2, 15.25).
        Resolved::Again(_) => {
            run.owner.arch.before_instruction();
            Next::Resume
        }
        Resolved::Device => mmio::access(run, gpa, needs()),
        Resolved::DeviceOfChild => mmio::access_of_child(run, gpa, needs()),
        Resolved::NoAccess => intercept::not_here_now(run, gpa, needs()),
        Resolved::Deposited => mmio::read_of_deposited(run, gpa),
        Resolved::End(problem) => stop(run, StopReason::Unsupported, problem.text()),
    }
}

/// EXITINFO1 of a port access (APM vol. 2, 15.10.2); EXITINFO2 is the next RIP.
#[inline]
fn port_access(control: &ControlArea) -> PortAccess {
    const IN: u64 = 1 << 0;
    const STRING: u64 = 1 << 2;
    const SIZE_SHIFT: u64 = 4;
    const PORT_SHIFT: u64 = 16;
    let details = control.exit_info_1;
    #[expect(clippy::cast_possible_truncation, reason = "the port has 16 bits, the size 3")]
    PortAccess {
        port: (details >> PORT_SHIFT) as u16,
        // One of the bits for 8, 16 or 32 is set: the field's value is the number of bytes.
        bytes: (details >> SIZE_SHIFT & 7) as u8,
        is_in: details & IN != 0,
        is_string: details & STRING != 0,
        next_rip: control.exit_info_2,
    }
}

/// The parent handles a child's ports.
#[cold]
#[inline(never)]
fn port_of_child(run: &mut Running<'_>) -> Next {
    const REPEATED: u64 = 1 << 3;
    let control = &run.owner.arch.hardware.vmcb.control;
    let is_repeated = control.exit_info_1 & REPEATED != 0;
    let access = port_access(control);
    intercept::port(run, access, is_repeated)
}

/// The CPU's decode of a write of a control register. The two features that it needs came with different processors.
#[inline]
fn control_write(control: &ControlArea) -> Option<ControlWrite> {
    let next_rip = control.next_rip;
    assisted(control.exit_info_1).filter(|_| next_rip != 0).map(|from| ControlWrite { from, next_rip })
}

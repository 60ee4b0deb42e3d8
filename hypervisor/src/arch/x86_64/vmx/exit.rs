//! Exits: the one match on the exit reason (SDM vol. 3D, appendix C).
//!
//! As in `svm/exit.rs`, what any back end has is passed on as typed facts. An exit that needs more of the guest's
//! registers than RIP and the general ones has them [read](super::vcpu::Vmx::complete) first.

#![expect(unsafe_code, reason = "calls the handler of an NMI that an exit has consumed, and makes bitmaps in place")]

use alloc::boxed::Box;
use core::arch::asm;

use abi::control::StopReason;
use abi::counters::ExitReason;
use addr::{Gpa, Hpa, PageSize};
use sched::CpuId;
use spin::Once;
use stage2::Access;
use x86_defs::exit_code;
use x86_defs::msr;
use x86_defs::registers::{cr0, rflags, vector};
use x86_defs::vmx::event::Information;
use x86_defs::vmx::{field, reason};

use super::carry::{self, word};
use super::hpa_of;
use super::vmcs::{self, read};
use crate::arch::x86_64::backend::{ControlWrite, Passed, PortAccess};
use crate::arch::x86_64::guest::state::{State as _, gpr};
use crate::arch::x86_64::guest::vcpu::{ArchVcpu, stop};
use crate::arch::x86_64::guest::{assist, control, fpu, hyperv, intercept, mmio, msr as msrs, platform, vmware};
use crate::arch::x86_64::host::machine_check;
use crate::arch::x86_64::svm::place;
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;
use crate::vm::fault::{Needs, Resolved, resolve_fault};

/// Handles the exit that the guest just made.
#[inline(always)]
pub(in crate::arch::x86_64) fn handle(run: &mut Running<'_>) -> Next {
    let arch = &mut run.owner.arch;
    let mut reason = word(arch.hardware.control.exit_code);
    // Also what stands for an entry that did not even begin.
    if reason & reason::FAILED_ENTRY != 0 {
        return refused(run, reason);
    }
    let mut event = 0;
    if reason == reason::EXCEPTION_OR_NMI {
        event = word(read(field::EXIT_EVENT));
    }
    if vmx_image::masks_nmis(&arch.hardware.control) {
        look_for_iret(arch, reason, event);
    }
    if arch.is_armed() {
        show_debug(arch);
        let is_trap = reason == reason::MONITOR_TRAP;
        let trap_flag = arch.hardware.rflags() & rflags::TF;
        if is_trap {
            vmx_image::end_step(arch.hardware.parts().0);
        }
        let is_debug = is_trap || reason == reason::EXCEPTION_OR_NMI && Information(event).is_debug();
        if is_debug && !is_trap {
            take_debug(arch);
        }
        if is_over(run, is_debug) {
            return stepped(run, if is_trap { trap_flag } else { 0 });
        }
        if is_trap {
            // A step that was not armed, or was over: nothing has happened.
            reason = reason::INTERRUPT_WINDOW;
        }
    }
    if run.vm.as_child().is_some() {
        // Its parent may be asked, who sees the registers.
        complete(&mut run.owner.arch);
    }
    let arch = &mut run.owner.arch;
    let tally = run.tally;
    match reason {
        reason::WRMSR => msrs::access(run, true),
        reason::RDMSR => msrs::access(run, false),
        reason::CPUID => {
            tally.exit(ExitReason::Cpuid);
            run.vm.platform().cpuid.answer(arch);
            arch.skip(2);
            Next::Resume
        }
        reason::EXTERNAL_INTERRUPT => {
            tally.exit(ExitReason::HostInterrupt);
            Next::Interrupted
        }
        reason::HLT => {
            tally.exit(ExitReason::Halt);
            arch.skip(1);
            arch.activity = Activity::Halted;
            Next::Idle
        }
        reason::INTERRUPT_WINDOW | reason::NMI_WINDOW => {
            tally.exit(if reason == reason::NMI_WINDOW { ExitReason::NmiWindow } else { ExitReason::InterruptWindow });
            Next::Resume
        }
        reason::PORT => {
            tally.exit(ExitReason::PortIo);
            port(run)
        }
        reason::EPT_VIOLATION => violation(run),
        reason::PAUSE => {
            tally.exit(ExitReason::Pause);
            arch.skip(2);
            Next::Yield
        }
        reason::VMCALL => {
            tally.exit(ExitReason::Hypercall);
            complete_for_call(arch);
            match run.vm.platform().hyperv {
                Some(_) => hyperv::hypercall(run),
                None => vmware::call(run),
            }
        }
        reason::CONTROL_REGISTER => {
            tally.exit(ExitReason::ControlRegister);
            complete(arch);
            control_register(run)
        }
        reason::XSETBV => {
            tally.exit(ExitReason::ControlRegister);
            complete(arch);
            fpu::set_xcr0(arch);
            Next::Resume
        }
        reason::EXCEPTION_OR_NMI => exception(run, event),
        reason::PML_FULL => {
            // What it has listed is reported.
            tally.exit(ExitReason::Stage2Fault);
            Next::Resume
        }
        reason::INIT | reason::SIPI => {
            tally.exit(ExitReason::Other);
            Next::Interrupted
        }
        reason::WBINVD | reason::INVD => {
            tally.exit(ExitReason::Other);
            arch.skip(2);
            Next::Resume
        }
        reason::RDPMC => {
            tally.exit(ExitReason::Other);
            arch.general_protection();
            Next::Resume
        }
        // Instructions of features that CPUID hides.
        reason::VMCLEAR..=reason::VMXON | reason::MONITOR | reason::MWAIT | reason::INVEPT | reason::INVVPID => {
            tally.exit(ExitReason::Other);
            arch.undefined();
            Next::Resume
        }
        reason::TRIPLE_FAULT => {
            tally.exit(ExitReason::Other);
            complete(arch);
            machine_check::explain_shutdown(run).unwrap_or_else(|| stop(run, StopReason::TripleFault, "triple fault"))
        }
        reason::TASK_SWITCH => {
            tally.exit(ExitReason::Other);
            complete(arch);
            stop(run, StopReason::Unsupported, "task switch by hardware, which is not emulated")
        }
        reason::EPT_MISCONFIGURATION => {
            tally.exit(ExitReason::Other);
            complete(arch);
            stop(run, StopReason::Unsupported, "met an entry of stage 2 that does not exist")
        }
        _ => {
            tally.exit(ExitReason::Other);
            complete(arch);
            stop(run, StopReason::Unsupported, "exited for an unknown reason")
        }
    }
}

/// Reports the writes that the pCPU has listed.
#[inline(always)]
pub(in crate::arch::x86_64) fn report_writes(run: &mut Running<'_>) {
    let (_, Some(vmx)) = run.owner.arch.hardware.parts() else { return };
    if let Some(pages) = vmx.take_list() {
        report(run.vm, run.cpu.id, pages);
    }
}

#[cold]
#[inline(never)]
fn report(vm: &Vm, cpu: CpuId, pages: impl Iterator<Item = Gpa>) {
    let (tlbs, walking) = (AllTlbs::of(vm), vm.memory.announce(cpu));
    let walk = vm.memory.walk(&tlbs, &walking);
    // One report is enough for the pages of a table.
    let mut last = None;
    for gpa in pages {
        let table = gpa.page(PageSize::Size2M);
        if last != Some(table) {
            walk.report(gpa);
            last = Some(table);
        }
    }
}

/// The rest of the guest's registers is in the control block after this.
#[inline]
fn complete(arch: &mut ArchVcpu) {
    if let (image, Some(vmx)) = arch.hardware.parts() {
        vmx.complete(image);
    }
}

/// CR2 and the debug registers are in the control block after this.
#[inline]
fn show_debug(arch: &mut ArchVcpu) {
    if let (image, Some(vmx)) = arch.hardware.parts() {
        vmx.show_debug(image);
    }
}

/// As [`complete`], before a hypercall. The frequent ones need no more than where the caller is.
#[inline]
fn complete_for_call(arch: &mut ArchVcpu) {
    /// Flushes and interrupts, in the forms without and with sets of vCPUs, and the notice of a long spin (TLFS,
    /// appendix A).
    const FREQUENT: [u64; 7] = [0x02, 0x03, 0x08, 0x0b, 0x13, 0x14, 0x15];
    if !(FREQUENT.contains(&(arch.gprs[gpr::RCX] & 0xffff)) && look_at_code(arch)) {
        complete(arch);
    }
}

/// Reads the privilege level and the kind of code. Returns whether it is 64-bit code.
fn look_at_code(arch: &mut ArchVcpu) -> bool {
    let (image, Some(vmx)) = arch.hardware.parts() else { return false };
    carry::code_out(vmx, image)
}

/// The processor did not enter.
#[cold]
fn refused(run: &mut Running<'_>, reason: u32) -> Next {
    run.tally.exit(ExitReason::Other);
    let arch = &mut run.owner.arch;
    arch.hardware.parts().0.control.exit_code = exit_code::INVALID.into();
    if reason & !reason::FAILED_ENTRY == reason::ENTRY_MACHINE_CHECK {
        return machine_check::intercepted(run);
    }
    log::warn!(
        "{} vCPU {}: entry failed: reason {reason:#x}, qualification {:#x}",
        run.vm.name(),
        run.index,
        read(field::EXIT_QUALIFICATION)
    );
    stop(run, StopReason::Unsupported, "put its control registers into a state that does not exist")
}

/// NMIs were masked at the entry. Sees whether an IRET has ended that.
#[cold]
fn look_for_iret(arch: &mut ArchVcpu, reason: u32, event: u32) {
    let has_qualification = matches!(reason, reason::EPT_VIOLATION | reason::PML_FULL);
    let details = if has_qualification { word(read(field::EXIT_QUALIFICATION)) } else { event };
    let interruptibility = word(read(field::GUEST_INTERRUPTIBILITY));
    if vmx_image::unmasks_nmis(arch.hardware.parts().0, interruptibility, reason, details) {
        arch.set_nmi_mask(false);
    }
}

/// Ends what the last entry has requested. Returns whether the exit served only that.
#[inline(never)]
fn is_over(run: &mut Running<'_>, by_debug: bool) -> bool {
    let is_step = run.owner.arch.disarm(by_debug, run.tally);
    assist::settle(run);
    is_step
}

/// A step over one instruction is over. If the monitor trap flag did it, TF and what was saved of it are the guest's.
#[cold]
fn stepped(run: &mut Running<'_>, trap_flag: u64) -> Next {
    run.tally.exit(ExitReason::Exception);
    let arch = &mut run.owner.arch;
    arch.shows_trap_flag = false;
    let flags = arch.hardware.rflags() | trap_flag;
    arch.hardware.set_rflags(flags);
    Next::Resume
}

/// A #DB has exited: see [`vmx_image::take_debug`].
#[cold]
fn take_debug(arch: &mut ArchVcpu) {
    let causes = read(field::EXIT_QUALIFICATION);
    let image = arch.hardware.parts().0;
    vmx_image::take_debug(image, causes);
    // SAFETY: the guest's own register.
    unsafe { vmcs::write(field::GUEST_DR7, image.save.dr7) };
}

/// An exception, or an NMI of the host.
#[cold]
fn exception(run: &mut Running<'_>, event: u32) -> Next {
    let arch = &mut run.owner.arch;
    let vector = Information(event).vector();
    if vector == vector::NMI {
        run.tally.exit(ExitReason::HostInterrupt);
        // SAFETY: the exit has taken the NMI (SDM vol. 3C, 28.1), so its handler is called here. Its IRET lets the next
        // one in.
        unsafe { asm!("int 2") };
        return Next::Interrupted;
    }
    run.tally.exit(ExitReason::Exception);
    if vector == vector::MACHINE_CHECK {
        return machine_check::intercepted(run);
    }
    show_debug(arch);
    if vector == vector::DEBUG {
        if Information(event).is_by_instruction() {
            // INT1: a trap, whose handler returns behind it. DR6 says nothing of it.
            let behind = arch.hardware.control.next_rip;
            arch.hardware.set_rip(behind);
        } else {
            take_debug(arch);
        }
    }
    let code = word(read(field::EXIT_EVENT_CODE));
    let address = read(field::EXIT_QUALIFICATION);
    arch.give_back(vector, code, address);
    Next::Resume
}

/// A port (SDM vol. 3C, table 28-5).
#[inline]
fn port(run: &mut Running<'_>) -> Next {
    const IN: u64 = 1 << 3;
    const STRING: u64 = 1 << 4;
    const REPEATED: u64 = 1 << 5;
    let details = read(field::EXIT_QUALIFICATION);
    let arch = &mut run.owner.arch;
    let [_, _, low, high, ..] = details.to_le_bytes();
    let [size, ..] = (details & 7).to_le_bytes();
    let access = PortAccess {
        port: u16::from_le_bytes([low, high]),
        bytes: size + 1,
        is_in: details & IN != 0,
        is_string: details & STRING != 0,
        next_rip: arch.hardware.control.next_rip,
    };
    if run.vm.as_child().is_some() {
        return intercept::port(run, access, details & REPEATED != 0);
    }
    if access.is_string {
        complete(arch);
    }
    platform::port_access(run, access)
}

/// MOV to or from a control register, LMSW or CLTS (SDM vol. 3C, table 28-3).
#[cold]
fn control_register(run: &mut Running<'_>) -> Next {
    const MOV_TO: u64 = 0;
    const MOV_FROM: u64 = 1;
    const CLTS: u64 = 2;
    let details = read(field::EXIT_QUALIFICATION);
    let [number, from, ..] = details.to_le_bytes().map(|byte| byte & 0xf);
    let arch = &mut run.owner.arch;
    let next_rip = arch.hardware.control.next_rip;
    let next = match details >> 4 & 3 {
        MOV_TO => control::write(run, number, Some(ControlWrite { from, next_rip })),
        MOV_FROM => {
            // Only CR8 exits.
            control::read_task_priority(arch, from, next_rip);
            Next::Resume
        }
        CLTS => {
            let state = arch.hardware.control();
            arch.hardware.set_control(x86_defs::control::State { cr0: state.cr0 & !cr0::TS, ..state });
            arch.skip_to(next_rip);
            Next::Resume
        }
        // LMSW: the instruction is read.
        _ => control::write(run, 0, None),
    };
    load_directory_pointers(run);
    next
}

/// With PAE paging the processor has four entries of the first table in registers, and loads them at MOV to a control
/// register. One that exits loads nothing (SDM vol. 3C, 27.3.1.6), nor does an entry with EPT: it takes them from the
/// VMCS. So this loads them when the guest has written a control register, and when somebody else has.
pub(in crate::arch::x86_64) fn load_directory_pointers(run: &mut Running<'_>) {
    let hardware = &mut run.owner.arch.hardware;
    hardware.parts().0.control.host_use[place::PAGING_WRITTEN] = 0;
    let Some(directory) = hardware.control().directory(hardware.cr3()) else { return };
    let mut bytes = [0; 32];
    // A table that is not there has no entries.
    if !run.vm.memory.read(Gpa(directory), &mut bytes) {
        bytes = [0; 32];
    }
    for (number, entry) in (0..).zip(bytes.as_chunks::<8>().0) {
        // SAFETY: the guest's own registers.
        unsafe { vmcs::write(field::GUEST_PDPTE0 + 2 * number, u64::from_le_bytes(*entry)) };
    }
}

/// An EPT violation (SDM vol. 3C, table 28-7): stage 2 maps nothing there, or does not allow the access.
#[inline(always)]
fn violation(run: &mut Running<'_>) -> Next {
    const WRITE: u64 = 1 << 1;
    const FETCH: u64 = 1 << 2;
    const ALLOWED: u64 = 7 << 3;
    const HAS_ADDRESS: u64 = 1 << 7;
    const FINAL: u64 = 1 << 8;
    let details = read(field::EXIT_QUALIFICATION);
    let gpa = Gpa(read(field::GUEST_PHYSICAL_ADDRESS));
    let control = &mut run.owner.arch.hardware.parts().0.control;
    (control.exit_info_1, control.exit_info_2) = (details, gpa.0);
    let needs = || Needs {
        access: Access { read: true, write: details & WRITE != 0, execute: details & FETCH != 0 },
        is_table_walk: details & HAS_ADDRESS != 0 && details & FINAL == 0,
    };
    match resolve_fault(run, gpa, details & ALLOWED != 0, needs) {
        Resolved::Again(_) => Next::Resume,
        Resolved::Device => {
            complete(&mut run.owner.arch);
            mmio::access(run, gpa, needs())
        }
        Resolved::DeviceOfChild => {
            complete(&mut run.owner.arch);
            mmio::access_of_child(run, gpa, needs())
        }
        Resolved::NoAccess => {
            complete(&mut run.owner.arch);
            intercept::not_here_now(run, gpa, needs())
        }
        Resolved::Deposited => {
            complete(&mut run.owner.arch);
            mmio::read_of_deposited(run, gpa)
        }
        Resolved::End(problem) => {
            complete(&mut run.owner.arch);
            stop(run, StopReason::Unsupported, problem.text())
        }
    }
}

#[repr(C, align(4096))]
struct MsrMap([u8; 4096]);

/// MSRs that a guest accesses without an exit: the VMCS gives each guest its own, or code when the vCPU comes and goes.
const PASSED_THROUGH: [u32; 11] = [
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SFMASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    msr::TSC_AUX,
];

/// Which MSRs leave the guest (SDM vol. 3C, 25.6.9): the same for all guests with this, never changed.
pub(super) fn msr_map(passed: Passed) -> Hpa {
    static MAPS: Once<[Box<MsrMap>; Passed::ALL.len()]> = Once::new();
    let maps = MAPS.call_once(|| Passed::ALL.map(make_msr_map));
    hpa_of(&*maps[passed as usize])
}

fn make_msr_map(passed: Passed) -> Box<MsrMap> {
    // SAFETY: all bytes of a map may be zero.
    let mut map = unsafe { Box::<MsrMap>::new_zeroed().assume_init() };
    map.0.fill(0xff);
    for (number, reads, writes) in PASSED_THROUGH.map(|number| (number, true, true)).into_iter().chain(passed.msrs()) {
        // Reads of 0 to 1fff and of C000_0000 to C000_1fff, then writes of both, 1 KiB each.
        let half = if number >> 31 == 0 { 0 } else { 1024 };
        let (byte, bit) = ((number as usize & 0x1fff) / 8, number % 8);
        map.0[half + byte] &= !(u8::from(reads) << bit);
        map.0[2048 + half + byte] &= !(u8::from(writes) << bit);
    }
    map
}

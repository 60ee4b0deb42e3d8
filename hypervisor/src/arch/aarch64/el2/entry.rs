//! The world switch: into the guest and back.
//!
//! ERET, and the exception that ends the guest's run, switch the program counter, the state word and the stack pointer.
//! This code switches the general registers. System registers of EL1 and vector registers do not change while the vCPU
//! is on its pCPU, because the hypervisor uses none of them.

#![expect(unsafe_code, reason = "switches register state, which no type can express")]

use core::arch::{global_asm, naked_asm};
use core::mem::offset_of;

use super::HostContext;
use super::tags::CpuTags;
use super::vcpu::{ArchVcpu, flush};
use crate::arch::aarch64::host::{counter, gic as host_gic, percpu};
use crate::arch::aarch64::register::write_register;
use crate::arch::aarch64::speculation::behind_exit;
use crate::arch::trace::{self, TraceEvent};
use crate::vcpu::Tally;
use crate::vcpu::run::Running;

/// The registers that the switch loads and stores.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(in crate::arch::aarch64) struct Registers {
    /// X0 to X30.
    pub(in crate::arch::aarch64) x: [u64; 31],
    /// ELR_EL2: where the guest continues.
    pub(super) pc: u64,
    /// SPSR_EL2: its state.
    pub(super) pstate: u64,
    /// ESR_EL2: why it was left.
    pub(in crate::arch::aarch64) esr: u64,
    /// FAR_EL2: the virtual address, for aborts.
    pub(in crate::arch::aarch64) far: u64,
    /// HPFAR_EL2: the physical page, for aborts of stage 2.
    pub(in crate::arch::aarch64) hpfar: u64,
    /// Which vector it was left by, see [`vector`].
    pub(super) vector: u64,
}

/// Values of [`Registers::vector`].
pub(super) mod vector {
    /// A synchronous exception; the syndrome gives its kind.
    pub(in super::super) const SYNCHRONOUS: u64 = 0;
    /// A physical interrupt.
    pub(in super::super) const IRQ: u64 = 1;
    /// A fast one.
    pub(in super::super) const FIQ: u64 = 2;
    /// A physical SError.
    pub(in super::super) const ERROR: u64 = 3;
}

/// Runs the guest until its next exit. After an error it does not: it is left for that again.
#[inline(always)]
pub(crate) fn enter(_: bool, vcpu: &mut ArchVcpu, _: &HostContext, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
    if vcpu.has_erred {
        tally.add(|count| &count.entries, 1);
        vcpu.registers.vector = vector::ERROR;
        return;
    }
    let entered_at = counter::now();
    tally.add(|count| &count.host_ticks, entered_at.wrapping_sub(vcpu.left_at));
    tally.add(|count| &count.entries, 1);

    if !vcpu.tags.is_current(epoch) {
        flush(vcpu.tags.enter(tags, epoch), tally);
    }
    let is_idle = vcpu.gic.is_idle();
    if !(is_idle && vcpu.lists_are_clear) {
        vcpu.lists_are_clear = is_idle;
        vcpu.gic.lists().enumerate().for_each(|(index, list)| host_gic::write_list(index, list));
        // SAFETY: controls the list registers, which belong to the guest.
        unsafe { write_register!("ich_hcr_el2", vcpu.gic.control()) };
    }

    trace::note(|| TraceEvent::Enter { tag: vcpu.tags.tag().get(), root: vcpu.stage2_root });
    // SAFETY: `load` has loaded everything that controls this guest into this pCPU, and the vCPU has not left it
    // since. Its stage 2 maps only the VM's own memory.
    unsafe { switch(&raw mut vcpu.registers) };
    trace::note(|| TraceEvent::Leave { tag: vcpu.tags.tag().get(), root: vcpu.stage2_root });

    vcpu.left_at = counter::now_after_exit();
    tally.add(|count| &count.guest_ticks, vcpu.left_at.wrapping_sub(entered_at));
}

/// No processor lists writes.
pub(crate) const fn report_writes(_: bool, _: &mut Running<'_>) {}

/// Runs the guest until its next exit.
///
/// # Safety
/// The registers of EL2 and EL1 that control the guest belong to the vCPU of these general registers, and its stage 2
/// confines the guest to its own memory.
#[unsafe(naked)]
unsafe extern "C" fn switch(registers: *mut Registers) {
    naked_asm!(
        "stp x29, x30, [sp, #-96]!",
        "stp x27, x28, [sp, #16]",
        "stp x25, x26, [sp, #32]",
        "stp x23, x24, [sp, #48]",
        "stp x21, x22, [sp, #64]",
        "stp x19, x20, [sp, #80]",
        "str x0, [sp, #-16]!",
        //
        "ldp x1, x2, [x0, #{pc}]",
        "msr elr_el2, x1",
        "msr spsr_el2, x2",
        "ldp x2, x3, [x0, #16]",
        "ldp x4, x5, [x0, #32]",
        "ldp x6, x7, [x0, #48]",
        "ldp x8, x9, [x0, #64]",
        "ldp x10, x11, [x0, #80]",
        "ldp x12, x13, [x0, #96]",
        "ldp x14, x15, [x0, #112]",
        "ldp x16, x17, [x0, #128]",
        "ldp x18, x19, [x0, #144]",
        "ldp x20, x21, [x0, #160]",
        "ldp x22, x23, [x0, #176]",
        "ldp x24, x25, [x0, #192]",
        "ldp x26, x27, [x0, #208]",
        "ldp x28, x29, [x0, #224]",
        "ldr x30, [x0, #240]",
        "ldp x0, x1, [x0]",
        "eret",
        // No processor may run ahead of that.
        "dsb nsh",
        "isb",
        pc = const offset_of!(Registers, pc),
    )
}

/// The way from the vectors back to the caller of `switch`: `$steps` come when the guest's registers are stored. The
/// guest's X0 and X1 are on our stack, and the vector's number is in X0. Below them are the registers that `switch` has
/// pushed.
macro_rules! guest_left {
    ($name:literal, $steps:expr $(, $operand:ident = const $value:expr)?) => {
        global_asm!(
            concat!(".section .text.", $name, ", \"ax\""),
            ".balign 64",
            concat!(".global ", $name),
            concat!($name, ":"),
            "ldr x1, [sp, #16]",
            "stp x2, x3, [x1, #16]",
            "stp x4, x5, [x1, #32]",
            "stp x6, x7, [x1, #48]",
            "stp x8, x9, [x1, #64]",
            "stp x10, x11, [x1, #80]",
            "stp x12, x13, [x1, #96]",
            "stp x14, x15, [x1, #112]",
            "stp x16, x17, [x1, #128]",
            "stp x18, x19, [x1, #144]",
            "stp x20, x21, [x1, #160]",
            "stp x22, x23, [x1, #176]",
            "stp x24, x25, [x1, #192]",
            "stp x26, x27, [x1, #208]",
            "stp x28, x29, [x1, #224]",
            "str x30, [x1, #240]",
            "ldp x2, x3, [sp], #32",
            "stp x2, x3, [x1]",
            "str x0, [x1, #{vector}]",
            "mrs x2, elr_el2",
            "mrs x3, spsr_el2",
            "stp x2, x3, [x1, #{pc}]",
            "mrs x2, esr_el2",
            "mrs x3, far_el2",
            "stp x2, x3, [x1, #{esr}]",
            "mrs x2, hpfar_el2",
            "str x2, [x1, #{hpfar}]",
            $steps,
            "ldp x27, x28, [sp, #16]",
            "ldp x25, x26, [sp, #32]",
            "ldp x23, x24, [sp, #48]",
            "ldp x21, x22, [sp, #64]",
            "ldp x19, x20, [sp, #80]",
            "ldp x29, x30, [sp], #96",
            "ret",
            pc = const offset_of!(Registers, pc),
            esr = const offset_of!(Registers, esr),
            hpfar = const offset_of!(Registers, hpfar),
            vector = const offset_of!(Registers, vector),
            $($operand = const $value,)?
        );
    };
}

guest_left!("guest_left", "");
guest_left!("guest_left_guarded", behind_exit!(), steps = const percpu::STEPS);

const _: () = assert!(offset_of!(Registers, pstate) == offset_of!(Registers, pc) + 8);
const _: () = assert!(offset_of!(Registers, far) == offset_of!(Registers, esr) + 8);

//! Exceptions of the hypervisor, and sleep.
//!
//! An exception in the hypervisor is a bug: it is reported like a panic and ends the machine. The vectors first switch
//! to a stack of their own, so even a stack overflow is reported. Guests' exceptions use the same vectors and go to
//! [`crate::arch::aarch64::el2::entry`].

#![expect(unsafe_code, reason = "the vectors, and the instructions that wait")]

use core::arch::{asm, global_asm};

use aarch64_defs::syndrome::{Syndrome, class_name};
use addr::{Hva, PAGE_BYTES};

use super::{gic, paging, percpu};
use crate::arch::aarch64::register::{isb, read_register, write_register};
use crate::panic;

/// Sleeps until an interrupt is pending, and takes it.
///
/// The caller has checked that there is nothing to do. An interrupt after that check ends the sleep: WFI continues when
/// an interrupt is pending, masked or not.
#[inline(always)]
pub(crate) fn wait() {
    // SAFETY: waits.
    unsafe { asm!("dsb sy", "wfi", options(nostack, preserves_flags)) };
    gic::acknowledge_all();
}

/// Masks interrupts. They are, always.
pub(crate) fn mask() {
    // SAFETY: nothing relies on interrupts being unmasked.
    unsafe { asm!("msr daifset, #0xf", options(nomem, nostack)) };
}

/// The stack pointer of the caller, about.
#[inline(always)]
pub(crate) fn stack_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, sp", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// Reads through a null pointer, to see that it is caught and reported (`selftest=null`).
pub(crate) fn read_null() -> u64 {
    let value: u64;
    // SAFETY: not a Rust access: the instruction faults, and the handler does not return.
    unsafe { asm!("ldr {0}, [{0}]", inout(reg) 0u64 => value, options(nostack, preserves_flags)) };
    value
}

/// Whether the instruction before `address` is a call: BL, or BLR.
pub(crate) fn follows_call(address: u64) -> bool {
    if !address.is_multiple_of(4) || !paging::is_text(address) || !paging::is_text(address - 4) {
        return false;
    }
    // SAFETY: text, which is never unmapped.
    let instruction = unsafe { ((address - 4) as *const u32).read_volatile() };
    instruction >> 26 == 0b10_0101 || instruction & 0xffff_fc1f == 0xd63f_0000
}

// Sixteen entries of 128 bytes (Arm ARM, D1.3.1): from EL2 on SP_EL0, from EL2 on SP_EL2, from the guest in AArch64,
// from the guest in AArch32; of each, synchronous, IRQ, FIQ, SError. Those of the guest go to `guest_left` with their
// number in X0. A second table has those with the steps against speculative execution (`speculation`), and is the same
// otherwise.
global_asm!(
    r#"
    .macro report number
    .balign 128
        msr tpidr_el0, x0
        mov x0, #\number
        b report_entry
    .endm

    .macro guest number, left
    .balign 128
        stp x0, x1, [sp, #-16]!
        mov x0, #\number
        b \left
    .endm

    .macro table name, left
    .balign 2048
    .global \name
    \name:
        report 0
        report 1
        report 2
        report 3
        report 4
        report 5
        report 6
        report 7
        guest 0, \left
        guest 1, \left
        guest 2, \left
        guest 3, \left
        guest 0, \left
        guest 1, \left
        guest 2, \left
        guest 3, \left
    .endm

    .section .text.vectors, "ax"
    .balign 2048
    table vectors, guest_left
    table guarded_vectors, guest_left_guarded

    /* X0 is in TPIDR_EL0, the vector's number in X0. The stack pointer may be what is wrong, so SP_EL0 becomes that of the
       stack for reports. (Both registers are a guest's; no guest runs here any more.) Without a block there is only the
       stack that we are on. */
    .balign 4
    report_entry:
        msr tpidr_el1, x1
        msr tpidrro_el0, x0
        mov x0, sp
        mrs x1, tpidr_el2
        cbz x1, 2f
        ldr x1, [x1, #{report_stack}]
        b 3f
    2:  mov x1, sp
    3:  msr sp_el0, x1
        msr spsel, #0
        sub sp, sp, #272
        stp x2, x3, [sp, #16]
        stp x4, x5, [sp, #32]
        stp x6, x7, [sp, #48]
        stp x8, x9, [sp, #64]
        stp x10, x11, [sp, #80]
        stp x12, x13, [sp, #96]
        stp x14, x15, [sp, #112]
        stp x16, x17, [sp, #128]
        stp x18, x19, [sp, #144]
        stp x20, x21, [sp, #160]
        stp x22, x23, [sp, #176]
        stp x24, x25, [sp, #192]
        stp x26, x27, [sp, #208]
        stp x28, x29, [sp, #224]
        stp x30, x0, [sp, #240]
        mrs x0, tpidr_el0
        mrs x1, tpidr_el1
        stp x0, x1, [sp, #0]
        mrs x0, tpidrro_el0
        str x0, [sp, #256]
        mov x0, sp
        bl {report}
        brk #1
    "#,
    report = sym report_exception,
    report_stack = const percpu::REPORT_STACK,
);

/// Sets this pCPU's vectors.
pub(super) fn load() {
    unsafe extern "C" {
        static vectors: u8;
    }
    // SAFETY: the table above, aligned as the register wants it.
    unsafe { write_register!("vbar_el2", &raw const vectors) };
    isb();
}

/// Sets this pCPU's vectors to those with the steps against speculative execution.
pub(in crate::arch::aarch64) fn load_guarded() {
    unsafe extern "C" {
        static guarded_vectors: u8;
    }
    // SAFETY: the second table above, aligned as the register wants it.
    unsafe { write_register!("vbar_el2", &raw const guarded_vectors) };
    isb();
}

/// Registers at an exception, as `report_entry` has stored them.
#[repr(C)]
struct Frame {
    x: [u64; 31],
    sp: u64,
    vector: u64,
}

extern "C" fn report_exception(frame: &Frame) -> ! {
    const KINDS: [&str; 4] = ["", "interrupt: ", "fast interrupt: ", "SError: "];
    let Frame { x, sp, vector } = frame;
    let (esr, far, elr, spsr) =
        (read_register!("esr_el2"), read_register!("far_el2"), read_register!("elr_el2"), read_register!("spsr_el2"));
    let class = Syndrome(esr).class();
    let is_data_abort = class_name(class) == "data abort";
    let why = if is_data_abort && paging::is_guard(Hva(far)) {
        ": stack overflow"
    } else if is_data_abort && far < PAGE_BYTES {
        ": null pointer"
    } else {
        ""
    };
    let kind = KINDS[usize::try_from(vector % 4).unwrap_or(0)];
    panic::report(
        format_args!(
            "{kind}{} (vector {vector}, syndrome {esr:#x}){why}\n\
             \x20   elr {elr:#018x} spsr {spsr:#x} far {far:#018x} sp {sp:#018x}\n{}",
            class_name(class),
            Registers(x)
        ),
        *sp,
    )
}

struct Registers<'a>(&'a [u64; 31]);

impl core::fmt::Display for Registers<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (number, value) in self.0.iter().enumerate() {
            let end = if number % 4 == 3 { "\n" } else { "" };
            let start = if number % 4 == 0 { "    " } else { " " };
            write!(f, "{start}x{number:<2} {value:#018x}{end}")?;
        }
        Ok(())
    }
}

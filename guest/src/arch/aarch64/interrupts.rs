//! Interrupts and exceptions: the vectors, the one dispatcher, and the switch that masks interrupts.

use core::arch::{asm, global_asm};
use core::sync::atomic::Ordering;

use super::attempt::{self, Fault};
use super::registers::{read_register, write_register};
use super::{cpu_local, gic, lower_level, tsc, vectors};
use crate::arch::window;
use crate::interrupt;

/// What the entry code pushes on the stack.
#[repr(C)]
pub(crate) struct Frame {
    x: [u64; 31],
    pc: u64,
    pstate: u64,
    _align: u64,
}

impl Frame {
    /// Lets the CPU continue at `pc`, at EL1, with `x17` in X17.
    pub(super) fn go_to(&mut self, pc: u64, x17: u64) {
        /// EL1 with its own stack, interrupts held off.
        const EL1H: u64 = 0x3c5;
        /// SSBS and DIT, which stay as they were.
        const KEPT: u64 = 1 << 12 | 1 << 24;
        (self.pc, self.pstate, self.x[17]) = (pc, self.pstate & KEPT | EL1H, x17);
    }

    /// As [`Self::go_to`], with these in X16 and X17.
    pub(super) fn end_trip(&mut self, pc: u64, x16: u64, x17: u64) {
        self.x[16] = x16;
        self.go_to(pc, x17);
    }

    /// A general register.
    pub(super) fn general(&self, number: usize) -> u64 {
        self.x[number]
    }
}

global_asm!(
    ".section .text.vectors, \"ax\"",
    ".balign 2048",
    ".globl vector_table",
    "vector_table:",
    ".set vector_number, 0",
    ".rept 16",
    ".balign 128",
    "sub sp, sp, #272",
    "stp x0, x1, [sp]",
    "mov x0, #vector_number",
    "b vector_any",
    ".set vector_number, vector_number + 1",
    ".endr",
    "vector_any:",
    "stp x2, x3, [sp, #16]",
    "stp x4, x5, [sp, #32]",
    "stp x6, x7, [sp, #48]",
    "stp x8, x9, [sp, #64]",
    "stp x10, x11, [sp, #80]",
    "stp x12, x13, [sp, #96]",
    "stp x14, x15, [sp, #112]",
    "stp x16, x17, [sp, #128]",
    "stp x18, x19, [sp, #144]",
    "stp x20, x21, [sp, #160]",
    "stp x22, x23, [sp, #176]",
    "stp x24, x25, [sp, #192]",
    "stp x26, x27, [sp, #208]",
    "stp x28, x29, [sp, #224]",
    "mrs x2, elr_el1",
    "mrs x3, spsr_el1",
    "stp x30, x2, [sp, #240]",
    "str x3, [sp, #256]",
    "mov x1, sp",
    "bl dispatch_exception",
    "ldp x30, x2, [sp, #240]",
    "ldr x3, [sp, #256]",
    "msr elr_el1, x2",
    "msr spsr_el1, x3",
    "ldp x28, x29, [sp, #224]",
    "ldp x26, x27, [sp, #208]",
    "ldp x24, x25, [sp, #192]",
    "ldp x22, x23, [sp, #176]",
    "ldp x20, x21, [sp, #160]",
    "ldp x18, x19, [sp, #144]",
    "ldp x16, x17, [sp, #128]",
    "ldp x14, x15, [sp, #112]",
    "ldp x12, x13, [sp, #96]",
    "ldp x10, x11, [sp, #80]",
    "ldp x8, x9, [sp, #64]",
    "ldp x6, x7, [sp, #48]",
    "ldp x4, x5, [sp, #32]",
    "ldp x2, x3, [sp, #16]",
    "ldp x0, x1, [sp]",
    "add sp, sp, #272",
    "eret",
    ".text",
);

unsafe extern "C" {
    #[link_name = "vector_table"]
    static VECTORS: u8;
}

/// Where this kernel's vectors are.
pub(super) fn vectors() -> u64 {
    &raw const VECTORS as u64
}

/// Has this CPU take exceptions here.
pub(super) fn load_vectors() {
    // SAFETY: each of the 16 entries saves all registers and handles its exception.
    unsafe { write_register!("vbar_el1", vectors()) };
}

/// Called by the entry code with the number of the vector.
#[unsafe(no_mangle)]
extern "C" fn dispatch_exception(vector: u64, frame: &mut Frame) {
    const FROM_EL0: u64 = 8;
    match vector % 4 {
        0 if vector >= FROM_EL0 => lower_level::end_trip(read_register!("esr_el1"), frame),
        0 => synchronous(frame),
        1 | 2 => interrupts(),
        _ => unexpected("serror", frame),
    }
}

fn interrupts() {
    const NONE: u64 = 1020;
    loop {
        let intid = gic::acknowledge();
        if intid >= NONE {
            return;
        }
        match u8::try_from(intid) {
            Ok(vectors::MEASURED) => {
                cpu_local::own().own_sgis.fetch_add(1, Ordering::Release);
                gic::end_of_interrupt(vectors::MEASURED);
            }
            Ok(vectors::PHYSICAL_TIMER) => gic::physical_timer_was_taken(),
            Ok(vectors::TIMER) if !gic::timer_is_due() => {
                // It was disarmed while its interrupt was on its way.
                cpu_local::own().late_timers.fetch_add(1, Ordering::Relaxed);
                gic::end_of_interrupt(vectors::TIMER);
            }
            Ok(intid) => interrupt::handle(intid),
            Err(_) => gic::end_of_any(intid),
        }
    }
}

fn synchronous(frame: &mut Frame) {
    const DATA_ABORT: u64 = 0x25;
    let (esr, far) = (read_register!("esr_el1"), read_register!("far_el1"));
    let is_missing = esr >> 26 & 0x3f == DATA_ABORT && esr & 0x3c == 4;
    if is_missing && window::resolve(cpu_local::index(), far) {
        return;
    }
    if let Some(resume) = attempt::resume_after(frame.pc) {
        frame.pc = resume;
        frame.x[17] = Fault::encode(esr);
        return;
    }
    let landing = cpu_local::own().landing.swap(0, Ordering::Relaxed);
    if landing != 0 {
        frame.go_to(landing, Fault::encode(esr));
        return;
    }
    unexpected("synchronous", frame);
}

fn unexpected(kind: &str, frame: &Frame) {
    let (esr, far) = (read_register!("esr_el1"), read_register!("far_el1"));
    interrupt::unexpected_exception(format_args!(
        "kind={kind} esr={esr:#x} far={far:#x} pc={:#x} pstate={:#x} x30={:#x}",
        frame.pc, frame.pstate, frame.x[30]
    ));
}

/// Lets interrupts in.
pub(crate) fn enable() {
    // SAFETY: the vectors are complete before any caller runs.
    unsafe { asm!("msr daifclr, #2", "isb", options(nostack)) };
}

/// Holds interrupts off.
pub(crate) fn disable() {
    // SAFETY: delays interrupts, no more.
    unsafe { asm!("msr daifset, #2", options(nostack)) };
}

/// Sleeps until an interrupt; interrupts must be off, and are off again on return. WFI does not sleep while an
/// interrupt is pending, so one that arrived after the caller's last check still ends it.
pub(crate) fn sleep() {
    // SAFETY: the handlers that run in between save what they change.
    unsafe { asm!("dsb sy", "wfi", "msr daifclr, #2", "isb", "msr daifset, #2", options(nostack)) };
}

/// As [`sleep`], but not beyond a time, in ticks (WFIT X0, which older assemblers do not know).
pub(crate) fn sleep_until(end: u64) {
    // SAFETY: as above.
    unsafe {
        asm!("dsb sy", ".inst 0xd5031020", "msr daifclr, #2", "isb", "msr daifset, #2", in("x0") tsc::counts(end), options(nostack));
    }
}

/// Waits for an event, but not beyond a time, in ticks (WFET X0).
pub(crate) fn wait_for_event_until(end: u64) {
    // SAFETY: waits.
    unsafe { asm!(".inst 0xd5031000", in("x0") tsc::counts(end), options(nostack)) };
}

/// Runs `work` with interrupts off, and restores the former state.
pub(crate) fn held_off<T>(work: impl FnOnce() -> T) -> T {
    let flags = read_register!("daif");
    disable();
    let result = work();
    if flags >> 7 & 1 == 0 {
        enable();
    }
    result
}

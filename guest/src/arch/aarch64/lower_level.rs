//! Short runs at EL0, in 64 bits or 32, that end with the first exception.

use core::arch::naked_asm;

use super::interrupts::Frame;
use super::{cpu_local, remap, tlb};

/// State that EL0 is entered in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// AArch64.
    A64,
    /// AArch32, A32 instructions.
    A32,
    /// AArch32, T32 instructions.
    T32,
}

impl State {
    /// PSTATE: interrupts held off.
    const fn pstate(self) -> u64 {
        match self {
            Self::A64 => 0x3c0,
            Self::A32 => 0x1d0,
            Self::T32 => 0x1f0,
        }
    }
}

/// Executes the instructions at EL0; answers ESR_EL1 of the exception that ended it, and X0.
pub(crate) fn execute(state: State, code: [u32; 2]) -> (u64, u64) {
    let frame = remap::frame(cpu_local::index(), 1);
    remap::fill(frame, u64::from(code[0]) | u64::from(code[1]) << 32);
    remap::point(remap::USER, frame, remap::Kind::User);
    tlb::synchronise_code(frame);
    let mut registers = [0; 2];
    // SAFETY: the run ends in `end_trip`, which returns here. EL0 can access only that one page.
    unsafe { trip(remap::address(remap::USER), state.pstate(), &mut registers) };
    remap::clear(remap::USER);
    tlb::flush_page(remap::address(remap::USER));
    (registers[0], registers[1])
}

/// An exception came from EL0: the trip is over.
pub(super) fn end_trip(syndrome: u64, frame: &mut Frame) {
    let x0 = frame.general(0);
    frame.end_trip(trip_end as *const () as u64, syndrome, x0);
}

/// Saves the registers that the calling convention preserves, and enters EL0. The stack stays where it is.
#[unsafe(naked)]
unsafe extern "C" fn trip(at: u64, pstate: u64, registers: &mut [u64; 2]) {
    naked_asm!(
        "stp x19, x20, [sp, #-112]!",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "str x2, [sp, #96]",
        "msr elr_el1, x0",
        "msr spsr_el1, x1",
        "mov x0, #0",
        "eret",
    )
}

/// Where the exception handler continues: the syndrome is in X16, the X0 of EL0 in X17.
#[unsafe(naked)]
extern "C" fn trip_end() {
    naked_asm!(
        "ldr x2, [sp, #96]",
        "stp x16, x17, [x2]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldp x19, x20, [sp], #112",
        "ret",
    )
}

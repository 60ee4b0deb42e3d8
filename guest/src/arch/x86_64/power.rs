//! Ways to end the machine.

use core::arch::asm;

use super::{descriptors, interrupts, port, tsc};

/// ACPI sleep control register of the hypervisor: SLP_EN with SLP_TYP 5.
const SLEEP_CONTROL: u16 = 0x600;
/// QEMU's `isa-debug-exit`, for a run without a hypervisor.
const DEBUG_EXIT: u16 = 0xf4;

/// Ticks for which [`off`] waits for its end: about a second.
const PATIENCE: u64 = 2_000_000_000;

/// Ends the VM: ACPI power-off, else QEMU's exit device with 0x10 (success) or 0x11, else a triple fault.
pub(crate) fn off(success: bool) -> ! {
    interrupts::disable();
    port::write(SLEEP_CONTROL, 1, 0x34);
    port::write(DEBUG_EXIT, 1, if success { 0x10 } else { 0x11 });
    // QEMU ends in a thread of its own. Faults without end would keep that thread from a CPU.
    let start = tsc::now();
    while tsc::now().wrapping_sub(start) < PATIENCE {}
    triple_fault()
}

/// Asks the reset register for a reset. Returns if nothing happened.
pub(crate) fn reset() {
    port::write(0xcf9, 1, 6);
}

/// An exception that cannot be delivered: shutdown.
pub(crate) fn triple_fault() -> ! {
    descriptors::load_idt(0);
    // SAFETY: with no IDT the invalid opcode ends the VM here.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// Stops this CPU for ever: no interrupt can wake it, only INIT.
pub(crate) fn halt_for_ever() -> ! {
    loop {
        // SAFETY: stops the CPU; nothing of this CPU's is in use by others.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

/// An exception that the handler does not expect.
pub(crate) fn invalid_opcode() {
    // SAFETY: raises #UD, whose handler ends the guest.
    unsafe { asm!("ud2", options(nostack)) };
}

//! Ends of the machine, and of a single pCPU.

#![expect(unsafe_code, reason = "halting a pCPU, and a triple fault as the last resort")]

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering};

use super::acpi::Machine;
use super::port;

/// Port in the upper half, value in the lower; 0 when there is no reset register.
static RESET: AtomicU32 = AtomicU32::new(0);

/// Remembers how this machine is reset.
pub(super) fn init(machine: &Machine) {
    if let Some((port, value)) = machine.reset {
        RESET.store(u32::from(port) << 16 | u32::from(value), Ordering::Relaxed);
    }
}

/// Ends the machine with one of [`abi::exit_code`].
///
/// QEMU ends at the first step. A machine without the debug-exit device is reset: by ACPI, by a triple fault.
pub(crate) fn exit(code: u8) -> ! {
    port::write_u8(abi::exit_code::PORT, code);

    let [port_high, port_low, _, value] = RESET.load(Ordering::Relaxed).to_be_bytes();
    let reset_port = u16::from_be_bytes([port_high, port_low]);
    if reset_port != 0 {
        port::write_u8(reset_port, value);
    }

    let nothing = [0u8; 10];
    // SAFETY: with an empty descriptor table the breakpoint cannot be delivered, which ends in a reset.
    unsafe { asm!("lidt [{}]", "int3", in(reg) &nothing, options(nostack)) };
    stop_this_cpu()
}

/// Stops this pCPU until the machine is reset.
pub(crate) fn stop_this_cpu() -> ! {
    loop {
        // SAFETY: with interrupts off only an NMI ends the halt; then it is halted again.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

//! Ends the machine, or stops a single pCPU.

#![expect(unsafe_code, reason = "halting a pCPU, and a triple fault as the last resort")]

use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::acpi::{self, Machine, SoftOff};
use super::port;

/// PM1 control register (ACPI 4.8.3.2.1): the machine is in ACPI mode; the type of the sleep; begin it.
mod pm1 {
    pub(super) const SCI_ENABLED: u16 = 1 << 0;
    pub(super) const SLEEP_TYPE_SHIFT: u16 = 10;
    pub(super) const SLEEP_TYPE: u16 = 7 << SLEEP_TYPE_SHIFT;
    pub(super) const SLEEP_ENABLE: u16 = 1 << 13;
}

/// Maximum number of polls until a machine has changed to ACPI mode: about a second.
const ENABLE_PATIENCE: u32 = 1_000_000;
/// Maximum number of polls until the machine is off: the power goes some milliseconds after the command.
const OFF_PATIENCE: u32 = 1_000_000;

/// Whether an end that is no success resets the machine. Otherwise it stops, with the reason on its console.
static RESETS: AtomicBool = AtomicBool::new(false);

/// Port in the upper half, value in the lower; 0 when there is no reset register.
static RESET: AtomicU32 = AtomicU32::new(0);

/// Stores how this machine is reset.
pub(super) fn init(machine: &Machine) {
    if let Some((port, value)) = machine.reset {
        RESET.store(u32::from(port) << 16 | u32::from(value), Ordering::Relaxed);
    }
}

/// What happens at an end that is no success, from `panic=`: `reset`, or else `halt`.
pub(super) fn set_panic(how: &str) {
    RESETS.store(how == "reset", Ordering::Relaxed);
}

/// Ends the machine with one of [`abi::exit_code`].
///
/// QEMU ends at the first step. A machine without the debug-exit device powers off after a success. Otherwise it stops,
/// so that a user can read the reason, or is reset with `panic=reset`.
pub(crate) fn exit(code: u8) -> ! {
    crate::log::open();
    crate::log::flush();
    port::write_u8(abi::exit_code::PORT, code);
    if code == abi::exit_code::CLEAN {
        if let Some(off) = acpi::machine().and_then(|machine| machine.soft_off.as_ref()) {
            turn_off(off);
        }
        log::info!("the machine cannot be powered off by software; power it off by hand");
        stop_this_cpu()
    }
    if RESETS.load(Ordering::Relaxed) { reset() } else { stop_this_cpu() }
}

/// Stops with one of [`abi::exit_code`] and keeps the screen, also after a success.
pub(crate) fn end_check(code: u8) -> ! {
    port::write_u8(abi::exit_code::PORT, code);
    stop_this_cpu()
}

/// Turns the machine off. Comes back when it does not go off.
fn turn_off(off: &SoftOff) {
    if let Some((command, enable)) = off.enable.filter(|_| port::read_u16(off.control_a) & pm1::SCI_ENABLED == 0) {
        port::write_u8(command, enable);
        let _ = (0..ENABLE_PATIENCE).find(|_| port::read_u16(off.control_a) & pm1::SCI_ENABLED != 0);
    }
    for (control, kind) in [(Some(off.control_a), off.types.a), (off.control_b, off.types.b)] {
        let Some(control) = control else { continue };
        let kept = port::read_u16(control) & !(pm1::SLEEP_TYPE | pm1::SLEEP_ENABLE);
        port::write_u16(control, kept | u16::from(kind) << pm1::SLEEP_TYPE_SHIFT | pm1::SLEEP_ENABLE);
    }
    for _ in 0..OFF_PATIENCE {
        let _ = port::read_u16(off.control_a);
    }
}

/// Restarts the machine. QEMU ends instead, where it has the debug-exit device.
pub(crate) fn restart() -> ! {
    crate::log::flush();
    port::write_u8(abi::exit_code::PORT, abi::exit_code::CLEAN);
    reset()
}

/// Resets the machine: by ACPI, by a triple fault.
fn reset() -> ! {
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

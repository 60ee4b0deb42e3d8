//! Calls of the firmware (PSCI, Arm DEN0022), which can also end the machine.

use core::arch::asm;
use core::sync::atomic::{AtomicBool, Ordering};

use super::firmware_tables::Conduit;
use super::{attempt, interrupts};

/// Functions (SMC64 where there are two).
pub(crate) const PSCI_VERSION: u64 = 0x8400_0000;
pub(crate) const CPU_OFF: u64 = 0x8400_0002;
pub(crate) const CPU_ON: u64 = 0xc400_0003;
pub(crate) const AFFINITY_INFO: u64 = 0xc400_0004;
pub(crate) const SYSTEM_OFF: u64 = 0x8400_0008;
pub(crate) const SYSTEM_RESET: u64 = 0x8400_0009;
/// Which version of the calling convention there is (Arm DEN0028).
pub(crate) const SMCCC_VERSION: u64 = 0x8000_0000;

static BY_SMC: AtomicBool = AtomicBool::new(false);

/// Calls by this instruction from here on.
pub(super) fn choose(conduit: Conduit) {
    BY_SMC.store(conduit == Conduit::Smc, Ordering::Relaxed);
}

/// Whether this is the instruction that the firmware tables name.
pub(crate) fn is_by_smc() -> bool {
    BY_SMC.load(Ordering::Relaxed)
}

/// Calls the firmware. A function that does not exist returns -1.
pub(crate) fn call(function: u64, arguments: [u64; 3]) -> u64 {
    let answer = if is_by_smc() { attempt::smc(function, arguments) } else { attempt::hvc(function, arguments) };
    answer.unwrap_or(u64::MAX)
}

/// Starts a CPU; zero is success.
pub(crate) fn cpu_on(affinity: u64, entry: u64, context: u64) -> u64 {
    call(CPU_ON, [affinity, entry, context])
}

/// Turns this CPU off; only [`cpu_on`] starts it again. Returns if the firmware refuses.
pub(crate) fn cpu_off() {
    interrupts::disable();
    call(CPU_OFF, [0; 3]);
}

/// Ends the VM, after success or failure: the records tell what failed.
pub(crate) fn off(_success: bool) -> ! {
    interrupts::disable();
    call(SYSTEM_OFF, [0; 3]);
    halt_for_ever()
}

/// Asks for a reset. Returns if nothing happened.
pub(crate) fn reset() {
    call(SYSTEM_RESET, [0; 3]);
}

/// Stops this CPU for ever: interrupts wake it, but are not taken.
pub(crate) fn halt_for_ever() -> ! {
    interrupts::disable();
    loop {
        // SAFETY: stops the CPU; nothing of this CPU's is in use by others.
        unsafe { asm!("wfi", options(nomem, nostack)) };
    }
}

/// An exception that the handler does not expect.
pub(crate) fn invalid_opcode() {
    // SAFETY: is undefined, and its handler ends the guest.
    unsafe { asm!("udf #0", options(nostack)) };
}

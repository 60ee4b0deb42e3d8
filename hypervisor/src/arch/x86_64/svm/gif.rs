//! The global interrupt flag (GIF): masks interrupts in the vCPU loop (APM vol. 2, 15.17).
//!
//! While a pCPU runs a vCPU, GIF is clear and RFLAGS.IF set. Then nothing interrupts the hypervisor. VMRUN sets GIF,
//! and with V_INTR_MASKING the *host's* IF decides about physical interrupts. So an interrupt that became pending in
//! between ends the new entry at once. After the exit GIF is clear again and the interrupt still pending: [`take`] lets
//! it in.

#![expect(unsafe_code, reason = "GIF is changed by instructions that the compiler does not know")]

use core::arch::asm;

/// From here on nothing interrupts this pCPU outside of the guest and of [`take`].
#[inline]
pub(super) fn clear() {
    // SAFETY: SVM is enabled on this pCPU before its first vCPU runs. Clearing GIF only delays interrupts, and with GIF
    // clear, setting IF lets none in.
    unsafe { asm!("clgi", "sti", options(nomem, nostack)) }
}

/// Ends what [`clear`] began: interrupts are masked by IF again.
#[inline]
pub(super) fn set() {
    // SAFETY: IF is clear before GIF is set, so nothing is let in.
    unsafe { asm!("cli", "stgi", options(nomem, nostack)) }
}

/// Takes pending interrupts, then masks them again.
#[inline]
pub(super) fn take() {
    // SAFETY: the host's GS, TR and IDT are in place whenever Rust code runs, so handlers can run here. They may change
    // memory, hence no `nomem`; they use the stack.
    unsafe { asm!("stgi", "nop", "nop", "clgi") }
}

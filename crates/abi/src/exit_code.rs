//! How the hypervisor ends QEMU: values for the `isa-debug-exit` device.
//!
//! QEMU ends with status `(value << 1) | 1`, so that no value collides with success (0) or with QEMU's own failure (1).

/// Port of the `isa-debug-exit` device that `dunlin run` configures.
pub const PORT: u16 = 0xf4;

/// All VMs have ended, or a power-off was commanded. QEMU's exit status: 33.
pub const CLEAN: u8 = 0x10;
/// The hypervisor panicked; the log says what, where and on which pCPU. QEMU's exit status: 65.
pub const PANIC: u8 = 0x20;
/// The hypervisor could not start: no SVM, no payload, not enough memory. The log says which. QEMU's exit status: 97.
pub const REFUSED: u8 = 0x30;

/// The exit status that QEMU ends with when `value` is written to [`PORT`].
#[must_use]
pub const fn qemu_status(value: u8) -> i32 {
    ((value as i32) << 1) | 1
}

//! How the hypervisor ends QEMU: values for the `isa-debug-exit` device.
//!
//! QEMU ends with status `(value << 1) | 1`, so that no value collides with success (0) or with QEMU's own failure (1).
//!
//! A machine that has no such device (QEMU's `virt`) is turned off by its firmware, and QEMU ends with 0. There the last
//! line of the hypervisor's log says the status: [`last_words`], read by [`told_status`]. (Semihosting could end QEMU with
//! a status, but whoever turns it on turns it on for guests as well.)

use core::fmt;

/// Port of the `isa-debug-exit` device that `dunlin run` configures.
pub const PORT: u16 = 0xf4;

/// All VMs have ended, or a power-off was commanded. QEMU's exit status: 33.
pub const CLEAN: u8 = 0x10;
/// The hypervisor panicked; the log says what, where and on which pCPU. QEMU's exit status: 65.
pub const PANIC: u8 = 0x20;
/// The hypervisor could not start: no SVM, no payload, not enough memory. The log says which. QEMU's exit status: 97.
pub const REFUSED: u8 = 0x30;
/// The machine below the hypervisor reported an error that nothing can go on with. QEMU's exit status: 129.
pub const HARDWARE_ERROR: u8 = 0x40;

const WORDS: &str = "the machine ends with status ";

/// What the last line of the log says where a machine has no place for `value`.
#[must_use]
pub fn last_words(value: u8) -> impl fmt::Display {
    fmt::from_fn(move |f| write!(f, "{WORDS}{}", qemu_status(value)))
}

/// The status that the last line of a log tells, if it does.
#[must_use]
pub fn told_status(last_line: &str) -> Option<i32> {
    last_line.trim_end().rsplit_once(WORDS)?.1.parse().ok()
}

/// The exit status that QEMU ends with when `value` is written to [`PORT`].
#[must_use]
pub const fn qemu_status(value: u8) -> i32 {
    ((value as i32) << 1) | 1
}

//! How the hypervisor ends QEMU: values for the `isa-debug-exit` device.
//!
//! QEMU ends with status `(value << 1) | 1`, so no value equals success (0) or QEMU's own failure (1).
//!
//! A machine without this device (QEMU's `virt`) is powered off by its firmware, and QEMU ends with 0. There the last
//! line of the hypervisor's log gives the status: [`last_words`] writes it, [`told_status`] reads it. (Semihosting
//! could end QEMU with a status, but it would be enabled for guests as well.)

use core::fmt;

/// Port of the `isa-debug-exit` device that `dunlin run` configures.
pub const PORT: u16 = 0xf4;

/// All VMs have ended, or a command powered the host off. QEMU's exit status: 33.
pub const CLEAN: u8 = 0x10;
/// The hypervisor panicked; the log says what, where and on which pCPU. QEMU's exit status: 65.
pub const PANIC: u8 = 0x20;
/// The hypervisor could not start: no SVM, no payload, not enough memory. The log says which. QEMU's exit status: 97.
pub const REFUSED: u8 = 0x30;
/// The host's hardware reported an unrecoverable error. QEMU's exit status: 129.
pub const HARDWARE_ERROR: u8 = 0x40;

const WORDS: &str = "the machine ends with status ";

/// The last line of the log on a machine without a debug exit device.
#[must_use]
pub fn last_words(value: u8) -> impl fmt::Display {
    fmt::from_fn(move |f| write!(f, "{WORDS}{}", qemu_status(value)))
}

/// The status in the last line of a log, if there is one.
#[must_use]
pub fn told_status(last_line: &str) -> Option<i32> {
    last_line.trim_end().rsplit_once(WORDS)?.1.parse().ok()
}

/// QEMU's exit status after a write of `value` to [`PORT`].
#[must_use]
pub const fn qemu_status(value: u8) -> i32 {
    ((value as i32) << 1) | 1
}

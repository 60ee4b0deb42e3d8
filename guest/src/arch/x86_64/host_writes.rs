//! Instructions that an emulator executes and whose destination is memory: they copy from a port or a device register.

use core::arch::asm;

use super::boot;
use super::serial::LINE_STATUS;

/// Has the `count` bytes from `at` on written.
pub(in crate::arch) fn fill(at: u64, count: u64) {
    // SAFETY: reads a port into this many bytes, which the caller owns.
    unsafe {
        asm!("rep insb", inout("rdi") at => _, inout("rcx") count => _, in("dx") LINE_STATUS,
            options(nostack, preserves_flags));
    }
}

/// Has some of the eight bytes at `at` written, in a way that `choice` chooses. Answers whether there is one.
pub(in crate::arch) fn write(at: u64, choice: u64) -> bool {
    match (choice % 2, boot::io_apic()) {
        (0, _) | (_, None) => {
            fill(at, 1 + choice / 2 % 4);
        }
        (_, Some(device)) => {
            // SAFETY: writes four bytes of the word: the I/O APIC's index register is read into them.
            unsafe {
                asm!("movs dword ptr [rdi], dword ptr [rsi]", inout("rdi") at => _, inout("rsi") device => _,
                    options(nostack, preserves_flags));
            }
        }
    }
    true
}

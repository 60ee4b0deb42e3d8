//! I/O ports.

use core::arch::asm;

/// Reads `bytes` (1, 2 or 4) from a port.
pub(crate) fn read(port: u16, bytes: u8) -> u32 {
    let mut value: u32 = 0;
    match bytes {
        // SAFETY: by the rule of the parent module. Devices write this kernel's memory only on request.
        1 => unsafe { asm!("in al, dx", in("dx") port, inout("eax") value, options(nostack)) },
        // SAFETY: as above.
        2 => unsafe { asm!("in ax, dx", in("dx") port, inout("eax") value, options(nostack)) },
        // SAFETY: as above.
        _ => unsafe { asm!("in eax, dx", in("dx") port, inout("eax") value, options(nostack)) },
    }
    value
}

/// Writes `bytes` (1, 2 or 4) to a port.
pub(crate) fn write(port: u16, bytes: u8, value: u32) {
    match bytes {
        // SAFETY: by the rule of the parent module. Devices write this kernel's memory only on request.
        1 => unsafe { asm!("out dx, al", in("dx") port, in("eax") value, options(nostack)) },
        // SAFETY: as above.
        2 => unsafe { asm!("out dx, ax", in("dx") port, in("eax") value, options(nostack)) },
        // SAFETY: as above.
        _ => unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack)) },
    }
}

//! I/O ports.
//!
//! The functions are safe. A port access alone cannot break Rust's rules: of the enabled devices, only those with
//! buffers from `virtio.rs` write to memory, and those of a VM that has the machine's devices, as it tells them.
#![expect(unsafe_code, reason = "port accesses are instructions that Rust has no safe form of")]

use x86_64::instructions::port::Port;

/// Reads a byte.
pub(crate) fn read_u8(port: u16) -> u8 {
    // SAFETY: see the module's text; reading has device effects only.
    unsafe { Port::new(port).read() }
}

/// Reads four bytes.
pub(crate) fn read_u32(port: u16) -> u32 {
    // SAFETY: as above.
    unsafe { Port::new(port).read() }
}

/// Reads two bytes.
pub(crate) fn read_u16(port: u16) -> u16 {
    // SAFETY: as above.
    unsafe { Port::new(port).read() }
}

/// Writes two bytes.
pub(crate) fn write_u16(port: u16, value: u16) {
    // SAFETY: as above.
    unsafe { Port::new(port).write(value) }
}

/// Writes four bytes.
pub(crate) fn write_u32(port: u16, value: u32) {
    // SAFETY: as above.
    unsafe { Port::new(port).write(value) }
}

/// Writes a byte.
pub(crate) fn write_u8(port: u16, value: u8) {
    // SAFETY: as above.
    unsafe { Port::new(port).write(value) }
}

//! I/O ports.
//!
//! Safe functions: a port access cannot break Rust's rules by itself, since no device that the hypervisor leaves
//! enabled writes to memory on its own except those that `virtio.rs` has given buffers to.
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

/// Writes a byte.
pub(crate) fn write_u8(port: u16, value: u8) {
    // SAFETY: as above.
    unsafe { Port::new(port).write(value) }
}

//! COM1, by polling: a 16550 at 0x3f8.

use super::port;

const DATA: u16 = 0x3f8;
/// Line status; bit 5: the transmitter takes another byte.
pub(crate) const LINE_STATUS: u16 = 0x3fd;
/// Scratch register: holds a byte and does nothing.
pub(crate) const SCRATCH: u16 = 0x3ff;

/// The next byte that was typed, if there is one.
pub(crate) fn receive() -> Option<u8> {
    // Bit 0: a byte is there.
    let is_there = port::read(LINE_STATUS, 1) & 1 != 0;
    if is_there { u8::try_from(port::read(DATA, 1) & 0xff).ok() } else { None }
}

/// 115200 8N1, FIFOs on, no interrupts.
pub(crate) fn prepare() {
    for (offset, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
        port::write(DATA + offset, 1, value);
    }
}

/// Sends bytes. A transmitter that is never ready is written to all the same, after a bounded wait.
pub(crate) fn send(bytes: &[u8]) {
    for &byte in bytes {
        for _ in 0..100_000 {
            if port::read(LINE_STATUS, 1) & 0x20 != 0 {
                break;
            }
        }
        port::write(DATA, 1, u32::from(byte));
    }
}

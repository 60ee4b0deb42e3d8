//! The first serial port, by polling: a PL011 (Arm DDI 0183).

use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt;

const DATA: u64 = 0;
/// Flags; bit 5: the transmitter takes no byte.
pub(crate) const FLAGS: u64 = 0x18;
/// Fractional divisor of the rate: holds a number and does nothing here.
pub(crate) const DIVISOR: u64 = 0x28;
/// Bit 4 of the flags: nothing was received.
const EMPTY: u32 = 1 << 4;
const LINE_CONTROL: u64 = 0x2c;
const CONTROL: u64 = 0x30;
const FULL: u32 = 1 << 5;

static BASE: AtomicU64 = AtomicU64::new(0x0900_0000);

/// Sends to the port at this address from here on.
pub(super) fn choose(base: Option<u64>) {
    if let Some(base) = base {
        BASE.store(base, Ordering::Relaxed);
    }
}

/// Where its registers are.
pub(crate) fn base() -> u64 {
    BASE.load(Ordering::Relaxed)
}

/// Eight bits, FIFOs on, no interrupts.
pub(crate) fn prepare() {
    for (register, value) in [(LINE_CONTROL, 0x70), (CONTROL, 0x301)] {
        let _ = attempt::store_u32(base() + register, value);
    }
}

/// The next byte that was typed, if there is one.
pub(crate) fn receive() -> Option<u8> {
    let is_there = attempt::load_u32(base() + FLAGS).is_ok_and(|flags| flags & EMPTY == 0);
    let byte = is_there.then(|| attempt::load_u32(base() + DATA).ok()).flatten()?;
    u8::try_from(byte & 0xff).ok()
}

/// Sends bytes. A transmitter that is never ready is written to all the same, after a bounded wait.
pub(crate) fn send(bytes: &[u8]) {
    for &byte in bytes {
        for _ in 0..100_000 {
            if attempt::load_u32(base() + FLAGS).is_ok_and(|flags| flags & FULL == 0) {
                break;
            }
        }
        let _ = attempt::store_u32(base() + DATA, byte.into());
    }
}

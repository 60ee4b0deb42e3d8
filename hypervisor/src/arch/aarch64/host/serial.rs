//! The UART of the log: a PL011, as set up by the firmware, polled.

#![expect(unsafe_code, reason = "taking possession of the UART's registers")]

use core::ptr::NonNull;

use arm_pl011_uart::{PL011Registers, Uart, UniqueMmioPointer};

use super::{boot, paging};

/// Maximum number of polls of a full transmitter before the rest of a line is dropped: a missing reader at the other
/// end must not block a pCPU.
const PATIENCE: u32 = 100_000;

/// The UART as a sink for text.
pub(crate) struct Serial {
    uart: Option<Uart<'static>>,
}

impl Serial {
    /// A UART that is not open yet and swallows everything.
    pub(crate) const fn closed() -> Self {
        Self { uart: None }
    }

    /// Opens the UART in the device tree; without one, the result stays closed.
    pub(crate) fn open() -> Self {
        let Some(registers) = boot::machine().and_then(|machine| machine.uart) else { return Self::closed() };
        if registers.bytes() < size_of::<PL011Registers>() as u64 {
            return Self::closed();
        }
        let start = paging::map_mmio(registers.start, registers.bytes());
        let pointer = NonNull::new(start.0 as *mut PL011Registers).expect("device registers are not at address 0");
        // SAFETY: device registers of that length, never unmapped. No other code of the hypervisor drives this UART. (A
        // panic opens it a second time, after the first owner was stopped for good.)
        let registers = unsafe { UniqueMmioPointer::new(pointer) };
        Self { uart: Some(Uart::new(registers)) }
    }

    /// Sends the bytes, or as many as the other end takes in bounded time.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let Some(uart) = &mut self.uart else { return };
        let mut patience = PATIENCE;
        for &byte in bytes {
            while uart.is_tx_fifo_full() {
                patience -= 1;
                if patience == 0 {
                    return;
                }
            }
            uart.write_word(byte);
        }
    }

    /// Waits a bounded time until all of it has left.
    pub(crate) fn flush(&mut self) {
        let Some(uart) = &mut self.uart else { return };
        let _ = (0..PATIENCE).find(|_| !uart.is_busy());
    }

    /// Takes input. Returns the number of bytes; damaged ones are left out.
    pub(crate) fn receive(&mut self, into: &mut [u8]) -> usize {
        let Some(uart) = &mut self.uart else { return 0 };
        let mut taken = 0;
        for _ in 0..into.len() {
            match uart.read_word() {
                Ok(Some(byte)) => {
                    into[taken] = byte;
                    taken += 1;
                }
                Ok(None) => break,
                Err(_) => {}
            }
        }
        taken
    }
}

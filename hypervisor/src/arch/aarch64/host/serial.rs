//! The UART of the log: a PL011, as set up by the firmware, polled.

#![expect(unsafe_code, reason = "taking possession of the UART's registers")]

use core::ptr::NonNull;

use arm_pl011_uart::{PL011Registers, Uart, UniqueMmioPointer};

use super::{boot, paging};
use crate::arch::HostConsole;

/// Maximum number of polls of a full transmitter before the rest of a line is dropped: a missing reader at the other
/// end must not block a pCPU.
const PATIENCE: u32 = 100_000;

/// The UART as a sink for text.
pub(crate) struct Serial {
    uart: Option<Uart<'static>>,
}

impl HostConsole for Serial {
    const CLOSED: Self = Self { uart: None };

    /// The UART in the device tree.
    fn open() -> Self {
        let Some(registers) = boot::machine().and_then(|machine| machine.uart) else { return Self::CLOSED };
        if registers.bytes() < size_of::<PL011Registers>() as u64 {
            return Self::CLOSED;
        }
        let start = paging::map_mmio(registers.start, registers.bytes());
        let pointer = NonNull::new(start.0 as *mut PL011Registers).expect("device registers are not at address 0");
        // SAFETY: device registers of that length, never unmapped. No other code of the hypervisor drives this UART. (A
        // panic opens it a second time, after the first owner was stopped for good.)
        let registers = unsafe { UniqueMmioPointer::new(pointer) };
        Self { uart: Some(Uart::new(registers)) }
    }

    fn send(&mut self, bytes: &[u8]) {
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

    fn flush(&mut self) {
        let Some(uart) = &mut self.uart else { return };
        let _ = (0..PATIENCE).find(|_| !uart.is_busy());
    }

    /// Damaged bytes are left out.
    fn receive(&mut self, into: &mut [u8]) -> usize {
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

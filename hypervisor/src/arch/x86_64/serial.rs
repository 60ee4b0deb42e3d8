//! The UART of the log: COM1, 115200 8N1, polled. What goes there is shown on the screen, too, where the machine has one.

#![expect(unsafe_code, reason = "taking possession of the UART's ports")]

use uart_16550::backend::PioBackend;
use uart_16550::{BaudRate, Config, Uart16550};

use super::framebuffer;

/// I/O ports of COM1.
const COM1: u16 = 0x3f8;

/// How often a full transmitter is asked again before the rest of a line is dropped: whoever should read the other
/// end must not be able to stall a pCPU. At 115200 baud a full FIFO drains in 1.4 ms, far less than this takes.
const PATIENCE: u32 = 100_000;

/// COM1 as a sink for text.
pub(crate) struct Serial {
    uart: Option<Uart16550<PioBackend>>,
}

impl Serial {
    /// A UART that is not open yet and swallows everything.
    pub(crate) const fn closed() -> Self {
        Self { uart: None }
    }

    /// Opens COM1; where there is none, the result stays closed.
    pub(crate) fn open() -> Self {
        // SAFETY: nothing else in the hypervisor drives COM1. (A panic opens it a second time, when the first owner
        // has been stopped for good.)
        let Ok(mut uart) = (unsafe { Uart16550::new_port(COM1) }) else { return Self::closed() };
        match uart.init(Config { baud_rate: BaudRate::Baud115200, ..Config::DEFAULT }) {
            Ok(()) => Self { uart: Some(uart) },
            Err(_) => Self::closed(),
        }
    }

    /// Sends the bytes, or as many as the other end takes in bounded time.
    pub(crate) fn send(&mut self, mut bytes: &[u8]) {
        framebuffer::write(bytes);
        let Some(uart) = &mut self.uart else { return };
        let mut patience = PATIENCE;
        while !bytes.is_empty() && patience != 0 {
            let sent = uart.send_bytes(bytes);
            bytes = &bytes[sent..];
            if sent == 0 {
                patience -= 1;
            }
        }
    }
}

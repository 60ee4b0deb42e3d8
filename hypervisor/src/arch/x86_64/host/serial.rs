//! The consoles of the machine: serial ports, and the screen, if the machine has one, with the same output.

#![expect(unsafe_code, reason = "registers in memory")]

use addr::Hva;
use spin::Once;

use super::{framebuffer, keyboard, paging, port};
use crate::arch::HostConsole;
use crate::boot::console::{self, Consoles, MOST_UARTS, Place, Uart};
use crate::serial_port::{Registers, SerialPort};

/// The chosen consoles.
static CHOSEN: Once<Consoles> = Once::new();

/// Chooses the consoles: by the value of `console=`, if there is one, and by the UART that the firmware reports. Until
/// then they are COM1 and the screen.
pub(super) fn choose(option: Option<&str>, firmware: Option<Uart>) {
    let mut complaint = None;
    let consoles = CHOSEN.call_once(|| {
        let (consoles, why) = console::choose(option, firmware, |uart| {
            map(uart.place);
            answers(uart)
        });
        complaint = why;
        consoles
    });
    if let Some(complaint) = complaint {
        log::warn!("{complaint}");
    }
    for uart in consoles.uarts() {
        let whose = if uart.is_of_firmware { ", from the firmware (SPCR)" } else { "" };
        log::debug!("console: {}{whose}", uart.place);
    }
}

fn answers(uart: &Uart) -> bool {
    let mut registers = Access::to(uart.place);
    if uart.is_of_firmware { SerialPort::is_there(&mut registers) } else { SerialPort::answers(&mut registers) }
}

/// The consoles as a sink for text.
pub(crate) struct Serial {
    ports: [Option<SerialPort<Access>>; MOST_UARTS],
    has_screen: bool,
}

impl HostConsole for Serial {
    const CLOSED: Self = Self { ports: [const { None }; MOST_UARTS], has_screen: false };

    /// No other code of the hypervisor drives their UARTs.
    fn open() -> Self {
        let consoles = CHOSEN.get().copied().unwrap_or(Consoles::FIRST);
        let mut serial = Self { has_screen: consoles.has_screen, ..Self::CLOSED };
        for (slot, uart) in serial.ports.iter_mut().zip(consoles.uarts().filter(answers)) {
            *slot = Some(SerialPort::open(Access::to(uart.place), uart.is_of_firmware));
        }
        serial
    }

    fn send(&mut self, bytes: &[u8]) {
        if self.has_screen {
            framebuffer::write(bytes);
        }
        for port in self.ports.iter_mut().flatten() {
            port.send(bytes);
        }
    }

    fn flush(&mut self) {
        self.ports.iter_mut().flatten().for_each(SerialPort::flush);
    }

    /// From one of them.
    fn receive(&mut self, into: &mut [u8]) -> usize {
        let typed = self.ports.iter_mut().flatten().map(|port| port.receive(into)).find(|&taken| taken != 0);
        // The owner of the screen has the keyboard.
        typed.unwrap_or_else(|| if self.has_screen { keyboard::receive(into) } else { 0 })
    }
}

/// How the registers of a UART are reached.
enum Access {
    /// From this I/O port on.
    Ports(u16),
    /// In memory, with this distance of two registers, and this access size.
    Memory { start: Hva, distance: u8, access_bytes: u8 },
}

impl Access {
    /// To a UART at ports, or to one in memory that [`map`] was called for.
    fn to(place: Place) -> Self {
        match place {
            Place::Ports(first) => Self::Ports(first),
            Place::Memory { start, distance, access_bytes } => {
                Self::Memory { start: Hva(paging::MMIO + start.0), distance, access_bytes }
            }
        }
    }
}

/// Maps the registers of a UART. Not for a panic: it takes a lock.
fn map(place: Place) {
    if let Place::Memory { start, distance, .. } = place {
        paging::map_mmio(start, u64::from(distance) * 8);
    }
}

impl Registers for Access {
    fn read(&mut self, offset: u8) -> u8 {
        let (start, distance, access_bytes) = match *self {
            Self::Ports(first) => return port::read_u8(first + u16::from(offset)),
            Self::Memory { start, distance, access_bytes } => (start, distance, access_bytes),
        };
        let register = start.0 + u64::from(offset) * u64::from(distance);
        let value = match access_bytes {
            // SAFETY: a register of the UART, mapped for good, at a multiple of its width.
            4 => unsafe { (register as *const u32).read_volatile() },
            // SAFETY: the same.
            2 => u32::from(unsafe { (register as *const u16).read_volatile() }),
            // SAFETY: the same.
            _ => u32::from(unsafe { (register as *const u8).read_volatile() }),
        };
        value.to_le_bytes()[0]
    }

    fn write(&mut self, offset: u8, value: u8) {
        let (start, distance, access_bytes) = match *self {
            Self::Ports(first) => return port::write_u8(first + u16::from(offset), value),
            Self::Memory { start, distance, access_bytes } => (start, distance, access_bytes),
        };
        let register = start.0 + u64::from(offset) * u64::from(distance);
        match access_bytes {
            // SAFETY: a register of the UART, mapped for good, at a multiple of its width.
            4 => unsafe { (register as *mut u32).write_volatile(value.into()) },
            // SAFETY: the same.
            2 => unsafe { (register as *mut u16).write_volatile(value.into()) },
            // SAFETY: the same.
            _ => unsafe { (register as *mut u8).write_volatile(value) },
        }
    }
}

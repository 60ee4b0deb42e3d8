//! A serial port: the 16550A, with its FIFOs of 16 bytes.
//!
//! Linux' 8250 driver probes the chip before it uses it: scratch and interrupt enable register, loopback of the modem
//! lines, the FIFO bits of IIR, and whether enabling the transmitter interrupt raises it. All of this behaves as in the
//! data sheet (National Semiconductor PC16550D). Settings without a meaning here do nothing: baud rate, word length,
//! parity, break.
//!
//! There is no wire, so a byte takes no time. A written byte leaves at once (`write` returns it) and the transmitter is
//! empty again. If the consumer has no room, [`Uart::set_transmit_room`] stops the transmitter: THRE and TEMT stay
//! clear, and the driver waits instead of losing output. Received bytes wait in a backlog behind the FIFO and refill it
//! as the guest reads, so a long paste does not overrun.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// Ports that a UART occupies.
pub const PORTS: u16 = 8;
/// Size of the FIFOs: after one read of LSR.THRE a driver may write this many bytes.
pub const FIFO_BYTES: usize = 16;
/// Maximum number of received bytes that wait for the guest, FIFO included.
pub const RECEIVE_BYTES: usize = 4096;

/// Interrupt enable register; the same bits name the sources in [`Uart::sources`].
mod ier {
    pub(super) const RECEIVED: u8 = 1 << 0;
    pub(super) const TRANSMITTER_EMPTY: u8 = 1 << 1;
    pub(super) const LINE_STATUS: u8 = 1 << 2;
    pub(super) const MODEM_STATUS: u8 = 1 << 3;
    pub(super) const ALL: u8 = 0x0f;
}

/// Interrupt identification register.
mod iir {
    pub(super) const NONE: u8 = 0x01;
    pub(super) const MODEM_STATUS: u8 = 0x00;
    pub(super) const TRANSMITTER_EMPTY: u8 = 0x02;
    pub(super) const RECEIVED: u8 = 0x04;
    pub(super) const LINE_STATUS: u8 = 0x06;
    /// Bytes wait, but fewer than the trigger level.
    pub(super) const TIMEOUT: u8 = 0x0c;
    pub(super) const FIFOS_ENABLED: u8 = 0xc0;
}

/// FIFO control register.
mod fcr {
    pub(super) const ENABLE: u8 = 1 << 0;
    pub(super) const CLEAR_RECEIVER: u8 = 1 << 1;
    /// Receiver trigger levels, by bits 7:6.
    pub(super) const TRIGGER: [usize; 4] = [1, 4, 8, 14];
}

/// Line control register.
mod lcr {
    /// Divisor latch access: offsets 0 and 1 are the divisor.
    pub(super) const DLAB: u8 = 1 << 7;
}

/// Modem control register.
mod mcr {
    pub(super) const DTR: u8 = 1 << 0;
    pub(super) const RTS: u8 = 1 << 1;
    pub(super) const OUT1: u8 = 1 << 2;
    /// On a PC: lets the interrupt through to the interrupt controller.
    pub(super) const OUT2: u8 = 1 << 3;
    pub(super) const LOOP: u8 = 1 << 4;
    pub(super) const ALL: u8 = 0x1f;
}

/// Line status register.
mod lsr {
    pub(super) const DATA_READY: u8 = 1 << 0;
    pub(super) const OVERRUN: u8 = 1 << 1;
    /// THRE and TEMT: nothing waits to be sent, nothing is being sent.
    pub(super) const TRANSMITTER_EMPTY: u8 = 1 << 5 | 1 << 6;
}

/// Modem status register: lines in the high half, changes since the last read in the low half.
mod msr {
    pub(super) const CTS: u8 = 1 << 4;
    pub(super) const DSR: u8 = 1 << 5;
    pub(super) const RI: u8 = 1 << 6;
    pub(super) const DCD: u8 = 1 << 7;
    /// The end of a ring, not its beginning, is a change.
    pub(super) const TRAILING_EDGE_RI: u8 = 1 << 2;
    /// The modem lines of a connected terminal.
    pub(super) const CONNECTED: u8 = CTS | DSR | DCD;
}

/// What a file keeps of a serial port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    ier: u8,
    lcr: u8,
    mcr: u8,
    scratch: u8,
    divisor: [u8; 2],
    fifos: bool,
    trigger: u8,
    received: Vec<u8>,
    overrun: bool,
    modem_lines: u8,
    modem_changes: u8,
    room: bool,
    transmitter_empty_pending: bool,
}

/// One serial port.
#[derive(Debug)]
pub struct Uart {
    ier: u8,
    lcr: u8,
    mcr: u8,
    scratch: u8,
    /// Divisor latch, low and high byte: stored, without effect.
    divisor: [u8; 2],
    fifos: bool,
    /// Number of bytes in the FIFO at which the receiver interrupts without waiting for the timeout.
    trigger: usize,
    /// Received bytes, oldest first: those in the FIFO and those behind it.
    received: VecDeque<u8>,
    overrun: bool,
    modem_lines: u8,
    modem_changes: u8,
    /// The consumer takes bytes.
    room: bool,
    /// The transmitter became empty, and the guest has not seen the interrupt yet.
    transmitter_empty_pending: bool,
}

impl Default for Uart {
    fn default() -> Self {
        Self::new()
    }
}

impl Uart {
    /// A UART after reset, connected to a terminal that is ready.
    #[must_use]
    pub fn new() -> Self {
        Self {
            ier: 0,
            lcr: 0,
            mcr: 0,
            scratch: 0,
            // 115200 baud. Undefined in hardware, but early consoles divide by it.
            divisor: [1, 0],
            fifos: false,
            trigger: fcr::TRIGGER[0],
            // All of it now: a device does not allocate while the guest runs.
            received: VecDeque::with_capacity(RECEIVE_BYTES),
            overrun: false,
            modem_lines: msr::CONNECTED,
            modem_changes: 0,
            room: true,
            transmitter_empty_pending: false,
        }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        State {
            ier: self.ier,
            lcr: self.lcr,
            mcr: self.mcr,
            scratch: self.scratch,
            divisor: self.divisor,
            fifos: self.fifos,
            trigger: u8::try_from(self.trigger).unwrap_or(u8::MAX),
            received: self.received.iter().copied().collect(),
            overrun: self.overrun,
            modem_lines: self.modem_lines,
            modem_changes: self.modem_changes,
            room: self.room,
            transmitter_empty_pending: self.transmitter_empty_pending,
        }
    }

    /// Takes over a state; bits that no UART has are ignored. `None` for more received bytes than it holds: then
    /// nothing has changed. May change [`interrupt`](Self::interrupt).
    pub fn set_state(&mut self, state: &State) -> Option<()> {
        if state.received.len() > RECEIVE_BYTES {
            return None;
        }
        self.ier = state.ier & ier::ALL;
        self.lcr = state.lcr;
        self.mcr = state.mcr & mcr::ALL;
        self.scratch = state.scratch;
        self.divisor = state.divisor;
        self.fifos = state.fifos;
        self.trigger = state.trigger.into();
        self.received.clear();
        self.received.extend(&state.received);
        self.overrun = state.overrun;
        self.modem_lines = state.modem_lines & 0xf0;
        self.modem_changes = state.modem_changes & 0x0f;
        self.room = state.room;
        self.transmitter_empty_pending = state.transmitter_empty_pending;
        Some(())
    }

    /// The guest reads the register at `offset` (0 to 7) from the first port. May change
    /// [`interrupt`](Self::interrupt).
    pub fn read(&mut self, offset: u16) -> u8 {
        match offset {
            5 => self.line_status(),
            0 if self.lcr & lcr::DLAB != 0 => self.divisor[0],
            0 => self.received.pop_front().unwrap_or(0),
            1 if self.lcr & lcr::DLAB != 0 => self.divisor[1],
            1 => self.ier,
            2 => self.identify_interrupt(),
            3 => self.lcr,
            4 => self.mcr,
            6 => self.modem_lines | core::mem::take(&mut self.modem_changes),
            7 => self.scratch,
            _ => 0xff,
        }
    }

    /// The guest writes the register at `offset` (0 to 7) from the first port. Returns the byte that this sends, if it
    /// does. May change [`interrupt`](Self::interrupt).
    #[must_use = "a byte that was sent must reach its consumer"]
    pub fn write(&mut self, offset: u16, value: u8) -> Option<u8> {
        match offset {
            0 => return self.write_data(value),
            1 if self.lcr & lcr::DLAB != 0 => self.divisor[1] = value,
            1 => self.write_interrupt_enable(value),
            2 => self.write_fifo_control(value),
            3 => self.lcr = value,
            4 => self.write_modem_control(value),
            7 => self.scratch = value,
            // LSR and MSR are for reading; writes serve the factory's tests.
            _ => {}
        }
        None
    }

    /// Bytes arrive for the guest. Returns how many were accepted; the caller keeps the rest for later. May change
    /// [`interrupt`](Self::interrupt).
    #[must_use = "bytes that were not taken must be offered again"]
    pub fn receive(&mut self, bytes: &[u8]) -> usize {
        // In loopback the receiver is cut off from the line.
        if self.mcr & mcr::LOOP != 0 {
            return 0;
        }
        let taken = bytes.len().min(RECEIVE_BYTES.saturating_sub(self.received.len()));
        self.received.extend(&bytes[..taken]);
        taken
    }

    /// Whether the consumer of sent bytes has room. May change [`interrupt`](Self::interrupt).
    ///
    /// Without room the transmitter looks busy. The caller must say so while it still has room for [`FIFO_BYTES`]
    /// bytes, because a driver may write that many after one read of the register. A driver that does not check loses
    /// the bytes without room.
    pub fn set_transmit_room(&mut self, room: bool) {
        if room != self.room {
            self.room = room;
            self.transmitter_empty_pending = room;
        }
    }

    /// Whether the interrupt line is high now.
    #[must_use]
    pub fn interrupt(&self) -> bool {
        // OUT2 gates the line on PCs; in loopback the pin is inactive whatever the register says.
        self.mcr & (mcr::OUT2 | mcr::LOOP) == mcr::OUT2 && self.sources() & self.ier != 0
    }

    /// Bytes in the receiver FIFO (or the one register); the others are still "on the wire".
    fn receiver_level(&self) -> usize {
        self.received.len().min(if self.fifos { FIFO_BYTES } else { 1 })
    }

    fn line_status(&mut self) -> u8 {
        let mut status = 0;
        if !self.received.is_empty() {
            status |= lsr::DATA_READY;
        }
        if core::mem::take(&mut self.overrun) {
            status |= lsr::OVERRUN;
        }
        if self.room {
            status |= lsr::TRANSMITTER_EMPTY;
        }
        status
    }

    fn write_data(&mut self, value: u8) -> Option<u8> {
        if self.lcr & lcr::DLAB != 0 {
            self.divisor[0] = value;
            return None;
        }

        // The write clears the interrupt; the byte is gone at once, so the interrupt is raised again.
        self.transmitter_empty_pending = self.room;

        if self.mcr & mcr::LOOP == 0 {
            return Some(value);
        }
        if self.received.len() < if self.fifos { FIFO_BYTES } else { 1 } {
            self.received.push_back(value);
        } else {
            self.overrun = true;
        }
        None
    }

    fn write_interrupt_enable(&mut self, value: u8) {
        let enabled = value & !self.ier;
        self.ier = value & ier::ALL;

        // Enabling the transmitter's interrupt raises it if the transmitter is empty, even if the guest has seen it
        // before. Drivers use this to start sending, and Linux tests for it.
        if enabled & ier::TRANSMITTER_EMPTY != 0 && self.room {
            self.transmitter_empty_pending = true;
        }
    }

    fn write_fifo_control(&mut self, value: u8) {
        let enable = value & fcr::ENABLE != 0;
        let switched = enable != self.fifos;
        if switched || (enable && value & fcr::CLEAR_RECEIVER != 0) {
            self.received.drain(..self.receiver_level());
        }

        self.fifos = enable;
        // The other bits count only with the enable bit set.
        self.trigger = if enable { fcr::TRIGGER[usize::from(value >> 6)] } else { fcr::TRIGGER[0] };
    }

    fn write_modem_control(&mut self, value: u8) {
        self.mcr = value & mcr::ALL;

        let lines = if self.mcr & mcr::LOOP == 0 { msr::CONNECTED } else { looped_back(self.mcr) };
        let changed = lines ^ self.modem_lines;
        let ring_began = changed & lines & msr::RI != 0;
        self.modem_changes |= changed >> 4 & if ring_began { !msr::TRAILING_EDGE_RI } else { !0 };
        self.modem_lines = lines;
    }

    /// Sources that request an interrupt, enabled or not, in the bits of IER.
    fn sources(&self) -> u8 {
        let source = |active: bool, bit: u8| if active { bit } else { 0 };
        source(!self.received.is_empty(), ier::RECEIVED)
            | source(self.transmitter_empty_pending, ier::TRANSMITTER_EMPTY)
            | source(self.overrun, ier::LINE_STATUS)
            | source(self.modem_changes != 0, ier::MODEM_STATUS)
    }

    /// IIR: the enabled source of highest priority. A read clears the transmitter's interrupt if it is that source.
    fn identify_interrupt(&mut self) -> u8 {
        let active = self.sources() & self.ier;
        let source = if active & ier::LINE_STATUS != 0 {
            iir::LINE_STATUS
        } else if active & ier::RECEIVED != 0 {
            // The timeout is four characters long, which here is no time.
            if self.receiver_level() >= self.trigger { iir::RECEIVED } else { iir::TIMEOUT }
        } else if active & ier::TRANSMITTER_EMPTY != 0 {
            self.transmitter_empty_pending = false;
            iir::TRANSMITTER_EMPTY
        } else if active & ier::MODEM_STATUS != 0 {
            iir::MODEM_STATUS
        } else {
            iir::NONE
        };
        source | if self.fifos { iir::FIFOS_ENABLED } else { 0 }
    }
}

/// In loopback the four outputs are wired to the four inputs.
fn looped_back(mcr: u8) -> u8 {
    [(mcr::DTR, msr::DSR), (mcr::RTS, msr::CTS), (mcr::OUT1, msr::RI), (mcr::OUT2, msr::DCD)]
        .into_iter()
        .filter(|(output, _)| mcr & output != 0)
        .fold(0, |lines, (_, input)| lines | input)
}

#[cfg(test)]
mod tests;

//! A serial port: Arm's PrimeCell UART, PL011 r1p5, with its FIFOs of 32 bytes (DDI 0183).
//!
//! Linux uses it in two ways: early consoles write to DR and read FR; the driver (`amba-pl011`) uses interrupts for
//! receiving and sending. Settings without a meaning here are stored and do nothing: baud rate, word length, parity.
//!
//! There is no wire, so a byte takes no time. A written byte leaves at once (`write` returns it) and the FIFO is empty
//! again. If the consumer has no room, [`Pl011::set_transmit_room`] stops the transmitter: FR says that the FIFO is
//! full, and the interrupt comes when there is room. Received bytes wait in a backlog behind the FIFO and refill it as
//! the guest reads, so a long paste does not overrun.
//!
//! **The transmit interrupt** is where emulations and drivers differ. Hardware raises it when the FIFO drains through
//! its trigger level, and some drivers send a first byte by hand to make that happen. Linux does not need to, if it
//! gets the interrupt as soon as it unmasks it with an empty FIFO. Here the raw status is raised after reset, after
//! each sent byte, and when there is room again; it stays until the guest clears it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// Bytes that the registers occupy.
pub const MMIO_SIZE: u64 = 0x1000;
/// Size of the FIFOs: after one read of FR.TXFF a driver may write this many bytes (the revision is in PeriphID2).
pub const FIFO_BYTES: usize = 32;
/// Maximum number of received bytes that wait for the guest, FIFO included.
pub const RECEIVE_BYTES: usize = 4096;

/// Offsets of registers.
mod register {
    pub(super) const DR: u16 = 0x00;
    /// Receive status when read, error clear when written.
    pub(super) const RSR: u16 = 0x04;
    pub(super) const FR: u16 = 0x18;
    pub(super) const ILPR: u16 = 0x20;
    pub(super) const IBRD: u16 = 0x24;
    pub(super) const FBRD: u16 = 0x28;
    pub(super) const LCR_H: u16 = 0x2c;
    pub(super) const CR: u16 = 0x30;
    pub(super) const IFLS: u16 = 0x34;
    pub(super) const IMSC: u16 = 0x38;
    pub(super) const RIS: u16 = 0x3c;
    pub(super) const MIS: u16 = 0x40;
    pub(super) const ICR: u16 = 0x44;
    pub(super) const DMACR: u16 = 0x48;
    /// Four of PeriphID, then four of CellID, a byte in each.
    pub(super) const FIRST_ID: u16 = 0xfe0;
    pub(super) const LAST_ID: u16 = 0xffc;
}

/// Flag register.
mod fr {
    pub(super) const CTS: u16 = 1 << 0;
    pub(super) const DSR: u16 = 1 << 1;
    pub(super) const DCD: u16 = 1 << 2;
    pub(super) const BUSY: u16 = 1 << 3;
    pub(super) const RXFE: u16 = 1 << 4;
    pub(super) const TXFF: u16 = 1 << 5;
    pub(super) const RXFF: u16 = 1 << 6;
    pub(super) const TXFE: u16 = 1 << 7;
    /// The modem lines of a connected terminal.
    pub(super) const CONNECTED: u16 = CTS | DSR | DCD;
}

/// Interrupts, in the bits of IMSC, RIS, MIS and ICR.
mod interrupt {
    pub(super) const RECEIVE: u16 = 1 << 4;
    pub(super) const TRANSMIT: u16 = 1 << 5;
    /// Bytes wait in the FIFO, fewer than its trigger level.
    pub(super) const RECEIVE_TIMEOUT: u16 = 1 << 6;
    pub(super) const OVERRUN: u16 = 1 << 10;
    pub(super) const ALL: u16 = 0x7ff;
}

/// Line control register: FIFOs on.
const LCR_H_FEN: u16 = 1 << 4;

/// Control register.
mod cr {
    pub(super) const UARTEN: u16 = 1 << 0;
    pub(super) const LBE: u16 = 1 << 7;
    pub(super) const TXE: u16 = 1 << 8;
    pub(super) const RXE: u16 = 1 << 9;
    pub(super) const RECEIVES: u16 = UARTEN | RXE;
    pub(super) const ALL: u16 = 0xff87;
}

/// Receive status: a byte found no place.
const RSR_OVERRUN: u16 = 1 << 3;
/// The same in the data register, with the first byte that found a place again.
const DR_OVERRUN: u16 = 1 << 11;

/// Receive trigger levels by IFLS bits 5:3, in bytes of the FIFO; the others are reserved and act as the last.
const TRIGGERS: [usize; 8] = [4, 8, 16, 24, 28, 28, 28, 28];

/// Part 0x011 of designer 0x41, revision 3 (r1p5), configuration 0; then the constant part of every PrimeCell.
const IDENTIFICATION: [u8; 8] = [0x11, 0x10, 0x34, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

/// What a file keeps of a serial port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    control: u16,
    line_control: u16,
    fifo_levels: u16,
    interrupt_mask: u16,
    raw: u16,
    integer_divisor: u16,
    fractional_divisor: u16,
    low_power_divisor: u16,
    dma_control: u16,
    overrun: bool,
    overrun_to_tell: bool,
    received: Vec<u8>,
    room: bool,
}

/// One serial port.
#[derive(Debug)]
pub struct Pl011 {
    control: u16,
    line_control: u16,
    fifo_levels: u16,
    interrupt_mask: u16,
    /// Interrupts raised and not cleared: [`interrupt`]'s bits.
    raw: u16,
    /// Baud rate, low-power and DMA registers: stored, without effect.
    integer_divisor: u16,
    fractional_divisor: u16,
    low_power_divisor: u16,
    dma_control: u16,
    /// RSR: an overrun since the last clear; and whether DR must still report it.
    overrun: bool,
    overrun_to_tell: bool,
    /// Received bytes, oldest first: those in the FIFO and those behind it.
    received: VecDeque<u8>,
    /// The consumer takes bytes.
    room: bool,
}

impl Default for Pl011 {
    fn default() -> Self {
        Self::new()
    }
}

impl Pl011 {
    /// A UART after reset, connected to a terminal that is ready.
    #[must_use]
    pub fn new() -> Self {
        Self {
            control: cr::TXE | cr::RXE,
            line_control: 0,
            fifo_levels: 0x12,
            interrupt_mask: 0,
            raw: interrupt::TRANSMIT,
            integer_divisor: 0,
            fractional_divisor: 0,
            low_power_divisor: 0,
            dma_control: 0,
            overrun: false,
            overrun_to_tell: false,
            // All of it now: a device does not allocate while the guest runs.
            received: VecDeque::with_capacity(RECEIVE_BYTES),
            room: true,
        }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        State {
            control: self.control,
            line_control: self.line_control,
            fifo_levels: self.fifo_levels,
            interrupt_mask: self.interrupt_mask,
            raw: self.raw,
            integer_divisor: self.integer_divisor,
            fractional_divisor: self.fractional_divisor,
            low_power_divisor: self.low_power_divisor,
            dma_control: self.dma_control,
            overrun: self.overrun,
            overrun_to_tell: self.overrun_to_tell,
            received: self.received.iter().copied().collect(),
            room: self.room,
        }
    }

    /// Takes over a state; bits that no UART has are ignored. `None` for more received bytes than it holds: then
    /// nothing has changed. May change [`interrupt`](Self::interrupt).
    pub fn set_state(&mut self, state: &State) -> Option<()> {
        if state.received.len() > RECEIVE_BYTES {
            return None;
        }
        self.control = state.control & cr::ALL;
        self.line_control = state.line_control & 0xff;
        self.fifo_levels = state.fifo_levels & 0x3f;
        self.interrupt_mask = state.interrupt_mask & interrupt::ALL;
        self.raw = state.raw & interrupt::ALL;
        self.integer_divisor = state.integer_divisor;
        self.fractional_divisor = state.fractional_divisor & 0x3f;
        self.low_power_divisor = state.low_power_divisor & 0xff;
        self.dma_control = state.dma_control & 0b111;
        self.overrun = state.overrun;
        self.overrun_to_tell = state.overrun_to_tell;
        self.received.clear();
        self.received.extend(&state.received);
        self.room = state.room;
        Some(())
    }

    /// The guest reads the register at `offset`, by a byte, half-word or word. Registers have up to 16 bits; upper
    /// bits, gaps and unknown registers read zero. May change [`interrupt`](Self::interrupt).
    pub fn read(&mut self, offset: u16) -> u32 {
        let value = match offset {
            register::DR => self.read_data(),
            register::RSR => flag(self.overrun, RSR_OVERRUN),
            register::FR => self.flags(),
            register::ILPR => self.low_power_divisor,
            register::IBRD => self.integer_divisor,
            register::FBRD => self.fractional_divisor,
            register::LCR_H => self.line_control,
            register::CR => self.control,
            register::IFLS => self.fifo_levels,
            register::IMSC => self.interrupt_mask,
            register::RIS => self.raw,
            register::MIS => self.raw & self.interrupt_mask,
            register::DMACR => self.dma_control,
            register::FIRST_ID..=register::LAST_ID if offset.is_multiple_of(4) => {
                IDENTIFICATION[usize::from(offset - register::FIRST_ID) / 4].into()
            }
            _ => 0,
        };
        value.into()
    }

    /// The guest writes the register at `offset`. Returns the byte that this sends, if it does. May change
    /// [`interrupt`](Self::interrupt).
    #[must_use = "a byte that was sent must reach its consumer"]
    pub fn write(&mut self, offset: u16, value: u32) -> Option<u8> {
        let [low, high, ..] = value.to_le_bytes();
        let value = u16::from_le_bytes([low, high]);
        match offset {
            register::DR => return self.write_data(low),
            register::RSR => self.overrun = false,
            register::ILPR => self.low_power_divisor = low.into(),
            register::IBRD => self.integer_divisor = value,
            register::FBRD => self.fractional_divisor = value & 0x3f,
            register::LCR_H => self.write_line_control(low.into()),
            register::CR => {
                self.control = value & cr::ALL;
                self.sample_receiver();
            }
            register::IFLS => {
                self.fifo_levels = value & 0x3f;
                self.sample_receiver();
            }
            register::IMSC => self.interrupt_mask = value & interrupt::ALL,
            register::ICR => self.clear_interrupts(value),
            register::DMACR => self.dma_control = value & 0b111,
            // The others are for reading.
            _ => {}
        }
        None
    }

    /// Bytes arrive for the guest. Returns how many were accepted; the caller keeps the rest for later. May change
    /// [`interrupt`](Self::interrupt).
    #[must_use = "bytes that were not taken must be offered again"]
    pub fn receive(&mut self, bytes: &[u8]) -> usize {
        // The driver has not enabled the receiver yet. In loopback the receiver is disconnected from the line.
        if self.control & (cr::RECEIVES | cr::LBE) != cr::RECEIVES {
            return 0;
        }
        let taken = bytes.len().min(RECEIVE_BYTES.saturating_sub(self.received.len()));
        self.received.extend(&bytes[..taken]);
        if taken != 0 {
            self.sample_receiver();
        }
        taken
    }

    /// Whether the consumer of sent bytes has room. May change [`interrupt`](Self::interrupt).
    ///
    /// Without room the transmitter's FIFO looks full. The caller must say so while it still has room for
    /// [`FIFO_BYTES`] bytes, because a driver may write that many after one read of a register. A driver that does not
    /// check loses the bytes without room.
    pub fn set_transmit_room(&mut self, room: bool) {
        if room != self.room {
            self.room = room;
            self.raw = self.raw & !interrupt::TRANSMIT | flag(room, interrupt::TRANSMIT);
        }
    }

    /// Whether the interrupt line is high now.
    #[must_use]
    pub fn interrupt(&self) -> bool {
        self.raw & self.interrupt_mask != 0
    }

    const fn fifo_bytes(&self) -> usize {
        if self.line_control & LCR_H_FEN == 0 { 1 } else { FIFO_BYTES }
    }

    /// Bytes in the FIFO; the others are still "on the wire".
    fn receiver_level(&self) -> usize {
        self.received.len().min(self.fifo_bytes())
    }

    fn trigger(&self) -> usize {
        if self.line_control & LCR_H_FEN == 0 { 1 } else { TRIGGERS[usize::from(self.fifo_levels >> 3 & 7)] }
    }

    fn flags(&self) -> u16 {
        fr::CONNECTED
            | flag(self.received.is_empty(), fr::RXFE)
            | flag(self.receiver_level() == self.fifo_bytes(), fr::RXFF)
            | if self.room { fr::TXFE } else { fr::TXFF | fr::BUSY }
    }

    fn read_data(&mut self) -> u16 {
        let data = u16::from(self.received.pop_front().unwrap_or(0));
        let told = core::mem::take(&mut self.overrun_to_tell);
        self.sample_receiver();
        data | flag(told, DR_OVERRUN)
    }

    fn write_data(&mut self, byte: u8) -> Option<u8> {
        // Hardware sends only while enabled. Early consoles trust that firmware has enabled it, so it always is.
        self.raw = self.raw & !interrupt::TRANSMIT | flag(self.room, interrupt::TRANSMIT);
        if self.control & cr::LBE == 0 {
            return Some(byte);
        }
        if self.control & cr::RECEIVES != cr::RECEIVES {
            return None;
        }
        if self.received.len() < self.fifo_bytes() {
            self.received.push_back(byte);
        } else {
            self.overrun = true;
            self.overrun_to_tell = true;
            self.raw |= interrupt::OVERRUN;
        }
        self.sample_receiver();
        None
    }

    fn write_line_control(&mut self, value: u16) {
        // Switching the FIFOs flushes them.
        if (value ^ self.line_control) & LCR_H_FEN != 0 {
            self.received.drain(..self.receiver_level());
        }
        self.line_control = value;
        self.sample_receiver();
    }

    fn clear_interrupts(&mut self, value: u16) {
        // Unread bytes keep the interrupt raised: clearing it would leave bytes that the guest never reads. Hardware
        // clears until the next byte comes; drivers clear it and then read the bytes, so they see no difference.
        self.raw &= !value;
        self.sample_receiver();
    }

    /// Computes receive interrupts from the FIFO. The timeout is 32 bit periods long, which is no time here.
    fn sample_receiver(&mut self) {
        let level = self.receiver_level();
        let listens = self.control & cr::RECEIVES == cr::RECEIVES;
        self.raw &= !(interrupt::RECEIVE | interrupt::RECEIVE_TIMEOUT);
        if listens && level >= self.trigger() {
            self.raw |= interrupt::RECEIVE;
        } else if listens && level != 0 {
            self.raw |= interrupt::RECEIVE_TIMEOUT;
        }
    }
}

const fn flag(set: bool, bits: u16) -> u16 {
    if set { bits } else { 0 }
}

#[cfg(test)]
mod tests;

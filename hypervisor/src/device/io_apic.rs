//! The I/O APIC: turns a device's line into an interrupt message (82093AA, version 0x11, 24 pins).
//!
//! Each pin has a redirection entry. An edge-triggered pin sends one message when its line becomes asserted. A
//! level-triggered pin sends one and records it (*remote IRR*) until the local APIC reports the end of that interrupt.
//! If the line is still asserted then, it sends again.
//!
//! Lines are logical: a device says whether it requests service, not at which voltage. So an entry's polarity is stored
//! without effect. Messages must be sent in the order in which they are returned here. The caller's lock serializes
//! accesses to this device.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::interrupt::{Kind, Message, Target};

/// Number of pins, and of global system interrupts.
pub const PINS: usize = 24;

/// Where guests expect the first I/O APIC's registers.
pub const MMIO_BASE: u64 = 0xfec0_0000;

/// What a file keeps of an I/O APIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    entries: [u64; PINS],
    lines: u32,
    selected: u8,
    id: u8,
}

/// An I/O APIC.
#[derive(Debug)]
pub struct IoApic {
    entries: [RedirectionEntry; PINS],
    /// Bit n: the line at pin n is asserted.
    lines: u32,
    /// Register that the window shows.
    selected: u8,
    id: u8,
}

impl IoApic {
    /// After reset: all pins masked, all lines quiet.
    #[must_use]
    pub const fn new(id: u8) -> Self {
        Self { entries: [RedirectionEntry::MASKED; PINS], lines: 0, selected: 0, id: id & 0xf }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        State { entries: self.entries.map(|entry| entry.0), lines: self.lines, selected: self.selected, id: self.id }
    }

    /// An I/O APIC with this state, which sends nothing by itself. Bits that none has are ignored.
    #[must_use]
    pub fn with_state(state: &State) -> Self {
        let entry = |bits: u64| {
            let [low, high] = [bits, bits >> 32].map(lower_half);
            let mut entry = RedirectionEntry(u64::from(high & 0xff00_0000) << 32 | bits & REMOTE_IRR);
            entry.write_low(low);
            entry
        };
        Self {
            entries: state.entries.map(entry),
            lines: state.lines & ((1 << PINS) - 1),
            selected: state.selected,
            id: state.id & 0xf,
        }
    }

    /// The device at `pin` asserts its line, or ceases to. A pin that does not exist is ignored.
    pub fn set_line(&mut self, pin: usize, asserted: bool) -> Option<Message> {
        let entry = self.entries.get_mut(pin)?;
        let line = 1 << pin;
        let was_asserted = self.lines & line != 0;
        if !asserted {
            self.lines &= !line;
            return None;
        }
        self.lines |= line;
        // An edge at a masked pin is lost, a level is found when the pin is unmasked.
        if entry.is_level() { entry.send_level() } else { entry.send_edge(!was_asserted) }
    }

    /// What the entry of `pin` says.
    #[must_use]
    pub fn route(&self, pin: usize) -> Option<Route> {
        let entry = *self.entries.get(pin)?;
        let Message { vector, kind, target, level } = entry.message(entry.is_level())?;
        let (is_masked, is_active_low) = (entry.has(MASK), entry.has(POLARITY));
        Some(Route { vector, kind, target, is_level: level, is_active_low, is_masked })
    }

    /// The pin whose entry the window shows.
    #[must_use]
    pub fn selected_pin(&self) -> Option<usize> {
        match Register::at(self.selected)? {
            Register::EntryLow(pin) | Register::EntryHigh(pin) => Some(pin),
            _ => None,
        }
    }

    /// Whether the line at `pin` is asserted.
    #[must_use]
    pub fn is_asserted(&self, pin: usize) -> bool {
        pin < PINS && self.lines >> pin & 1 != 0
    }

    /// A local APIC ended the level-triggered interrupt `vector`. Returns the messages of pins whose lines are still
    /// asserted.
    pub fn end_of_interrupt(&mut self, vector: u8) -> impl Iterator<Item = Message> {
        let mut again = [None; PINS];
        for (pin, entry) in self.entries.iter_mut().enumerate() {
            if entry.is_level() && entry.has(REMOTE_IRR) && entry.vector() == vector {
                entry.0 &= !REMOTE_IRR;
                if self.lines >> pin & 1 != 0 {
                    again[pin] = entry.send_level();
                }
            }
        }
        again.into_iter().flatten()
    }

    /// A 32-bit read at `offset` in the page of registers. Zero if there is no register.
    #[must_use]
    pub fn read(&self, offset: u16) -> u32 {
        match offset {
            SELECT => self.selected.into(),
            WINDOW => self.read_selected(),
            _ => 0,
        }
    }

    /// A 32-bit write at `offset` in the page of registers. An entry that becomes able to send a level which is
    /// asserted sends at once.
    pub fn write(&mut self, offset: u16, value: u32) -> Option<Message> {
        match offset {
            SELECT => self.selected = value.to_le_bytes()[0],
            WINDOW => return self.write_selected(value),
            _ => {}
        }
        None
    }

    fn read_selected(&self) -> u32 {
        match Register::at(self.selected) {
            Some(Register::Id | Register::Arbitration) => u32::from(self.id) << 24,
            Some(Register::Version) => version(PINS),
            Some(Register::EntryLow(pin)) => lower_half(self.entries[pin].0),
            Some(Register::EntryHigh(pin)) => lower_half(self.entries[pin].0 >> 32),
            None => 0,
        }
    }

    fn write_selected(&mut self, value: u32) -> Option<Message> {
        match Register::at(self.selected)? {
            Register::Id => self.id = value.to_be_bytes()[0] & 0xf,
            Register::Version | Register::Arbitration => {}
            Register::EntryHigh(pin) => {
                let entry = &mut self.entries[pin];
                entry.0 = entry.0 & 0xffff_ffff | u64::from(value & 0xff00_0000) << 32;
            }
            Register::EntryLow(pin) => {
                let entry = &mut self.entries[pin];
                entry.write_low(value);
                if entry.is_level() && self.lines >> pin & 1 != 0 {
                    return entry.send_level();
                }
            }
        }
        None
    }
}

/// Where an entry sends its pin's interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The vector.
    pub vector: u8,
    /// The receiver's action.
    pub kind: Kind,
    /// The receivers.
    pub target: Target,
    /// It is level-triggered.
    pub is_level: bool,
    /// Its line is asserted at a low voltage.
    pub is_active_low: bool,
    /// It sends nothing.
    pub is_masked: bool,
}

/// A redirection entry.
#[derive(Clone, Copy, Debug)]
struct RedirectionEntry(u64);

impl RedirectionEntry {
    const MASKED: Self = Self(MASK);

    const fn has(self, bits: u64) -> bool {
        self.0 & bits != 0
    }

    const fn vector(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    const fn kind(self) -> Option<Kind> {
        match Kind::from_delivery_mode(lower_half(self.0 >> 8)) {
            // Startup exists between local APICs only.
            Some(Kind::Startup) => None,
            kind => kind,
        }
    }

    /// Only interrupts with an EOI can be level-triggered; NMI and INIT are edges, whatever the entry says.
    fn is_level(self) -> bool {
        self.has(LEVEL_TRIGGERED) && self.kind().is_some_and(Kind::has_vector)
    }

    fn write_low(&mut self, value: u32) {
        self.0 = self.0 & !WRITABLE_LOW | u64::from(value) & WRITABLE_LOW;
        // There is no EOI for an edge. Kernels also switch an entry to edge and back to get rid of a stuck remote IRR.
        if !self.is_level() {
            self.0 &= !REMOTE_IRR;
        }
    }

    /// Sends for an asserted line unless the last message has not been ended yet.
    fn send_level(&mut self) -> Option<Message> {
        if self.has(MASK | REMOTE_IRR) {
            return None;
        }
        self.0 |= REMOTE_IRR;
        self.message(true)
    }

    fn send_edge(self, has_risen: bool) -> Option<Message> {
        if self.has(MASK) || !has_risen { None } else { self.message(false) }
    }

    fn message(self, level: bool) -> Option<Message> {
        let destination = self.0.to_be_bytes()[0];
        let target = Target::from_xapic(destination, self.has(LOGICAL));
        Some(Message { vector: self.vector(), kind: self.kind()?, target, level })
    }
}

/// A register in the window.
enum Register {
    Id,
    Version,
    Arbitration,
    EntryLow(usize),
    EntryHigh(usize),
}

impl Register {
    fn at(selected: u8) -> Option<Self> {
        match selected {
            0 => return Some(Self::Id),
            VERSION_REGISTER => return Some(Self::Version),
            2 => return Some(Self::Arbitration),
            _ => {}
        }
        let half = usize::from(selected.checked_sub(FIRST_ENTRY)?);
        let pin = half / 2;
        let register = if half.is_multiple_of(2) { Self::EntryLow(pin) } else { Self::EntryHigh(pin) };
        (pin < PINS).then_some(register)
    }
}

/// Offset of the register that selects one.
pub const SELECT: u16 = 0x00;
/// Offset of the window that shows it.
pub const WINDOW: u16 = 0x10;
/// The number of the register with version and number of pins.
pub const VERSION_REGISTER: u8 = 1;
/// The number of the first pin's lower half.
pub const FIRST_ENTRY: u8 = 0x10;

/// The version register of an I/O APIC with so many pins: its version, and the number of the last one.
#[must_use]
pub const fn version(pins: usize) -> u32 {
    let [last, ..] = pins.saturating_sub(1).to_le_bytes();
    0x11 | (last as u32) << 16
}

const LOGICAL: u64 = 1 << 11;
const POLARITY: u64 = 1 << 13;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL_TRIGGERED: u64 = 1 << 15;
const MASK: u64 = 1 << 16;
/// Delivery status always reads idle, as a message is on its way at once; remote IRR is ours.
const WRITABLE_LOW: u64 = MASK | LEVEL_TRIGGERED | POLARITY | LOGICAL | 0x7ff;

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn lower_half(value: u64) -> u32 {
    value as u32
}

//! PCI functions that a VM was given: what the machine says of one, what its guest finds, and what the guest's accesses
//! mean for the real one.
//!
//! | the guest uses | it gets |
//! |---|---|
//! | configuration space | bytes of the hypervisor's own ([`view`]): the function's identity, its BARs at other addresses, and the capabilities that it may use. The real space is never accessed in its name |
//! | BARs | the function's registers, mapped in stage 2 ([`window`]), except pages with the table of messages |
//! | such a page | accesses one by one: the table is emulated ([`messages`]), other registers are the function's |
//! | a message (MSI-X, MSI) | the function sends a vector of the hypervisor's ([`vectors`]), and the guest gets its own |
//! | DMA | its memory at its own addresses, by the IOMMU (`io::iommu`) |
//!
//! All of this is plain computation. Nothing that a guest writes, and nothing that a function claims, is believed.

pub mod messages;
pub mod vectors;
pub mod view;
pub mod window;

use alloc::vec::Vec;
use core::fmt;

use addr::{Hpa, HpaRange};

use crate::device::pci::config_space::{BYTES, register};

/// Configuration space of a function, and what its BARs read after ones were written to them.
#[derive(Clone, Debug)]
pub struct Raw {
    /// The first 256 bytes.
    pub config: [u8; BYTES],
    /// The sizes of the BARs, as the function encodes them.
    pub sizes: [u32; BARS],
}

/// BARs of a function that is no bridge.
pub const BARS: usize = 6;

/// A function that a VM may have.
#[derive(Clone, Debug)]
pub struct Description {
    /// What it was read from.
    raw: Raw,
    /// Its memory, in the order of its BARs. At most six.
    pub bars: Vec<Bar>,
    /// How it interrupts.
    pub messages: Messages,
    /// What of its capabilities a guest sees, besides the one for messages.
    shown: Vec<Shown>,
    /// How it is reset by itself, if it can be.
    pub reset: Option<Reset>,
    /// Where its power state is, if it has several.
    pub power: Option<usize>,
}

/// Memory of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Number of its (first) register.
    pub index: usize,
    /// Where the machine has it.
    pub range: HpaRange,
    /// Its register has 64 bits.
    is_wide: bool,
    /// The bits of its register that are no address.
    flags: u32,
}

/// A part of the memory of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Number of the BAR.
    pub bar: usize,
    /// Where it begins there.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// How a function sends messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// By a table in its memory (MSI-X; PCI Express 7.7.2).
    MsiX {
        /// Where the capability is.
        at: usize,
        /// Number of messages.
        count: usize,
        /// The table.
        table: Part,
        /// Bits of messages that wait.
        pending: Part,
    },
    /// By registers in its configuration space (MSI; PCI Express 7.7.1). It has one message here.
    Msi {
        /// Where the capability is.
        at: usize,
        /// It can name 64-bit addresses.
        is_wide: bool,
        /// It can mask messages.
        has_mask: bool,
    },
}

/// A capability that a guest may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    at: usize,
    bytes: usize,
    is_express: bool,
}

/// How a function is reset by itself (function-level reset).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// By Device Control of PCI Express, at this register (7.5.3.4).
    Express(usize),
    /// By the control register of Advanced Features, at this register.
    Advanced(usize),
}

/// Why no VM can have a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is a bridge.
    Bridge,
    /// Its header is of an unknown kind.
    Header(u8),
    /// A BAR makes no sense.
    BadBar(usize),
    /// Firmware has given a BAR no address.
    NoAddress(usize),
    /// Its memory is not where its BARs say (Enhanced Allocation).
    Fixed,
    /// It has neither MSI-X nor MSI.
    NoMessages,
    /// Its table of messages is not in its memory.
    BadTable,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridge => f.write_str("it is a bridge, and others are behind it"),
            Self::Header(kind) => write!(f, "its configuration header is of the unknown type {kind:#x}"),
            Self::BadBar(index) => write!(f, "its base address register {index} makes no sense"),
            Self::NoAddress(index) => write!(f, "firmware has given its base address register {index} no address"),
            Self::Fixed => {
                f.write_str("its memory is at fixed addresses (Enhanced Allocation), which is not supported")
            }
            Self::NoMessages => {
                f.write_str("it has neither MSI-X nor MSI, and other interrupts cannot be given to a VM")
            }
            Self::BadTable => f.write_str("its table of messages (MSI-X) is not in its memory"),
        }
    }
}

/// Capabilities (PCI Code and ID Assignment Specification 1.11, section 2).
mod capability {
    pub(super) const POWER: u8 = 0x01;
    pub(super) const MSI: u8 = 0x05;
    pub(super) const VENDOR: u8 = 0x09;
    pub(super) const EXPRESS: u8 = 0x10;
    pub(super) const MSI_X: u8 = 0x11;
    pub(super) const ADVANCED: u8 = 0x13;
    pub(super) const ENHANCED_ALLOCATION: u8 = 0x14;
}

/// Class of bridges.
const CLASS_BRIDGE: u8 = 6;
/// Where capabilities may begin.
const FIRST_CAPABILITY: usize = 0x40;

impl Raw {
    fn byte(&self, at: usize) -> u8 {
        self.config.get(at).copied().unwrap_or(u8::MAX)
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.byte(at), self.byte(at + 1)])
    }

    fn dword(&self, at: usize) -> u32 {
        u32::from(self.word(at + 2)) << 16 | u32::from(self.word(at))
    }

    /// The capabilities: what they are, and where. A list that runs in circles ends.
    fn capabilities(&self) -> impl Iterator<Item = (u8, usize)> {
        const HAS_CAPABILITIES: u16 = 1 << 4;
        let mut next = (self.word(register::STATUS) & HAS_CAPABILITIES != 0).then_some(register::CAPABILITIES);
        let mut seen = 0_u64;
        core::iter::from_fn(move || {
            let at = usize::from(self.byte(next?) & !3);
            let bit = 1 << (at.checked_sub(FIRST_CAPABILITY)? / 4);
            next = (seen & bit == 0).then_some(at + 1);
            seen |= bit;
            next.map(|_| (self.byte(at), at))
        })
    }
}

impl Description {
    /// Reads what a function says of itself.
    ///
    /// # Errors
    /// Why no VM can have it.
    pub fn new(raw: Raw) -> Result<Self, Unfit> {
        const MULTIPLE: u8 = 1 << 7;
        let header = raw.byte(register::HEADER_TYPE) & !MULTIPLE;
        if header == 1 || header == 2 || raw.byte(register::CLASS + 2) == CLASS_BRIDGE {
            return Err(Unfit::Bridge);
        }
        if header != 0 {
            return Err(Unfit::Header(header));
        }
        let bars = bars(&raw)?;
        let (mut msi_x, mut msi, mut express, mut advanced, mut power) = (None, None, None, None, None);
        let mut shown = Vec::new();
        for (kind, at) in raw.capabilities() {
            match kind {
                capability::MSI_X => msi_x = msi_x.or(Some(at)),
                capability::MSI => msi = msi.or(Some(at)),
                capability::POWER => power = power.or(Some(at + POWER_CONTROL)),
                capability::ADVANCED => advanced = advanced.or(Some(at)),
                capability::ENHANCED_ALLOCATION => return Err(Unfit::Fixed),
                capability::EXPRESS => {
                    express = express.or(Some(at));
                    let bytes = if raw.word(at + 2) & 0xf < 2 { 0x14 } else { 0x3c };
                    shown.push(Shown { at, bytes, is_express: true });
                }
                capability::VENDOR if !is_back_door(&raw, at) => {
                    shown.push(Shown { at, bytes: usize::from(raw.byte(at + 2)).max(3), is_express: false });
                }
                _ => {}
            }
        }
        let messages = match (msi_x, msi) {
            (Some(at), _) => msi_x_at(&raw, at, &bars)?,
            (None, Some(at)) => {
                let control = raw.word(at + 2);
                Messages::Msi { at, is_wide: control & MSI_IS_WIDE != 0, has_mask: control & MSI_HAS_MASK != 0 }
            }
            (None, None) => return Err(Unfit::NoMessages),
        };
        let reset = reset(&raw, express, advanced);
        Ok(Self { raw, bars, messages, shown, reset, power })
    }

    /// The value of a BAR's register.
    #[must_use]
    pub fn bar_register(&self, index: usize) -> u32 {
        self.raw.dword(register::BARS + 4 * index)
    }

    /// Where Device Control of PCI Express is, and its value from before a reset.
    #[must_use]
    pub fn express_control(&self) -> Option<(usize, u16)> {
        const RESET: u16 = 1 << 15;
        match self.reset? {
            Reset::Express(at) => Some((at, self.raw.word(at) & !RESET)),
            Reset::Advanced(_) => None,
        }
    }

    /// Number of messages that it can send here.
    #[must_use]
    pub const fn message_count(&self) -> usize {
        match self.messages {
            Messages::MsiX { count, .. } => count,
            Messages::Msi { .. } => 1,
        }
    }
}

const MSI_IS_WIDE: u16 = 1 << 7;
const MSI_HAS_MASK: u16 = 1 << 8;
/// Control and status of the power state, from the capability (PCI Power Management 1.2, 3.2.4).
const POWER_CONTROL: usize = 4;

/// virtio's capability for access to all of its BARs by configuration space (virtio 1.2, 4.1.4.9). It is of use to
/// firmware only; here it would lead nowhere.
fn is_back_door(raw: &Raw, at: usize) -> bool {
    const VIRTIO: u16 = 0x1af4;
    const PCI_CONFIGURATION: u8 = 5;
    raw.word(register::VENDOR) == VIRTIO && raw.byte(at + 3) == PCI_CONFIGURATION
}

/// The memory of a function that is no bridge.
///
/// # Errors
/// A BAR has no address, or makes no sense.
pub fn bars(raw: &Raw) -> Result<Vec<Bar>, Unfit> {
    const IS_PORTS: u32 = 1;
    const KIND: u32 = 3 << 1;
    const KIND_64: u32 = 2 << 1;
    const FLAGS: u32 = 0xf;

    let mut bars = Vec::new();
    let mut next = 0;
    while next < BARS {
        let index = next;
        next += 1;
        let (value, size) = (raw.dword(register::BARS + 4 * index), raw.sizes[index]);
        if size == 0 || size & IS_PORTS != 0 || size & !FLAGS == 0 && size & KIND != KIND_64 {
            // Not there, or ports, which a VM does not get.
            continue;
        }
        let (mut start, mut mask) = (u64::from(value & !FLAGS), u64::from(size & !FLAGS) | !0 << 32);
        let is_wide = size & KIND == KIND_64;
        if is_wide {
            let high = raw.sizes.get(next).ok_or(Unfit::BadBar(index))?;
            start |= u64::from(raw.dword(register::BARS + 4 * next)) << 32;
            mask = u64::from(*high) << 32 | u64::from(size & !FLAGS);
            next += 1;
        } else if size & KIND == KIND {
            return Err(Unfit::BadBar(index));
        }
        if mask == 0 {
            continue;
        }
        let bytes = 1 << mask.trailing_zeros();
        if start == 0 {
            return Err(Unfit::NoAddress(index));
        }
        // All bits above the size can be written, and the address is a multiple of it.
        let range = HpaRange::new(Hpa(start), bytes).filter(|_| mask.wrapping_neg() == bytes && start & !mask == 0);
        bars.push(Bar { index, range: range.ok_or(Unfit::BadBar(index))?, is_wide, flags: value & FLAGS });
    }
    Ok(bars)
}

fn msi_x_at(raw: &Raw, at: usize, bars: &[Bar]) -> Result<Messages, Unfit> {
    const BAR: u32 = 7;
    const COUNT: u16 = 0x7ff;
    let count = usize::from(raw.word(at + 2) & COUNT) + 1;
    let part = |register: usize, bytes: usize| {
        let place = raw.dword(at + register);
        let (bar, offset, bytes) = ((place & BAR) as usize, u64::from(place & !BAR), bytes as u64);
        let holds = |found: &&Bar| found.index == bar && offset + bytes <= found.range.bytes();
        bars.iter().find(holds).map(|_| Part { bar, offset, bytes }).ok_or(Unfit::BadTable)
    };
    let (table, pending) = (part(4, count * messages::ENTRY_BYTES)?, part(8, count.div_ceil(64) * 8)?);
    let overlaps = table.bar == pending.bar
        && table.offset < pending.offset + pending.bytes
        && pending.offset < table.offset + table.bytes;
    if overlaps || at + 12 > BYTES {
        return Err(Unfit::BadTable);
    }
    Ok(Messages::MsiX { at, count, table, pending })
}

fn reset(raw: &Raw, express: Option<usize>, advanced: Option<usize>) -> Option<Reset> {
    const CAN_RESET_EXPRESS: u32 = 1 << 28;
    const CAN_RESET_ADVANCED: u8 = 1 << 1;
    let by_express = express.filter(|at| raw.dword(at + 4) & CAN_RESET_EXPRESS != 0 && at + 0x14 <= BYTES);
    let by_advanced = advanced.filter(|at| raw.byte(at + 3) & CAN_RESET_ADVANCED != 0 && at + 6 <= BYTES);
    by_express.map(|at| Reset::Express(at + 8)).or(by_advanced.map(|at| Reset::Advanced(at + 4)))
}

#[cfg(test)]
pub(crate) mod tests;

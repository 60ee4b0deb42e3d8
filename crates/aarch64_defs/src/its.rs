//! The interrupt translation service of GICv3 (ITS; Arm IHI 0069, chapter 5).
//!
//! A device raises a message-signalled interrupt by a write of a number, the EventID, to the ITS. The bus adds who the
//! device is, the DeviceID. Tables in memory, which software changes by [`Command`]s only, say which interrupt of which
//! processor that is: a locality-specific peripheral interrupt (LPI), which has no state but pending.

use core::ops::Range;

use addr::Hpa;

/// The number of the first LPI.
pub const FIRST_LPI: u32 = 8192;

/// Bytes of the ITS's registers: a frame for software, and one for devices.
pub const BYTES: u64 = 0x2_0000;
/// The frame for devices.
pub const TRANSLATION_FRAME: u64 = 0x1_0000;
/// Where a device writes, in the frame for devices. In a frame of GICv2m it is the same place.
pub const TRANSLATER: u64 = 0x40;

/// Registers of the ITS (12.19).
pub mod register {
    /// GITS_CTLR.
    pub const CTLR: u64 = 0x0;
    /// GITS_TYPER: [`Typer`](super::Typer).
    pub const TYPER: u64 = 0x8;
    /// GITS_CBASER: where the queue of commands is.
    pub const CBASER: u64 = 0x80;
    /// GITS_CWRITER: behind the last command.
    pub const CWRITER: u64 = 0x88;
    /// GITS_CREADR: the next command to be executed.
    pub const CREADR: u64 = 0x90;
    /// GITS_BASER0, the first of eight: where the tables are, [`Baser`](super::Baser).
    pub const BASER: u64 = 0x100;
    /// The number of these.
    pub const BASERS: u64 = 8;

    /// GITS_CTLR.Enabled.
    pub const CTLR_ENABLED: u32 = 1 << 0;
    /// GITS_CTLR.Quiescent: the ITS has stopped.
    pub const CTLR_QUIESCENT: u32 = 1 << 31;
    /// GITS_CREADR.Stalled: a command was wrong.
    pub const CREADR_STALLED: u64 = 1 << 0;
}

/// Registers of a redistributor for LPIs (12.11).
pub mod redistributor {
    /// GICR_CTLR.
    pub const CTLR: u64 = 0x0;
    /// GICR_TYPER.
    pub const TYPER: u64 = 0x8;
    /// GICR_PROPBASER: priorities of LPIs, and which are enabled. A byte each, from [`FIRST_LPI`](super::FIRST_LPI) on.
    pub const PROPBASER: u64 = 0x70;
    /// GICR_PENDBASER: which LPIs are pending, a bit each, from 0 on.
    pub const PENDBASER: u64 = 0x78;

    /// GICR_CTLR.EnableLPIs. Where it was set, the tables are in use, and often for good.
    pub const CTLR_ENABLE_LPIS: u32 = 1 << 0;
    /// GICR_TYPER.PLPIS: there are LPIs.
    pub const TYPER_PLPIS: u64 = 1 << 0;
    /// GICR_PENDBASER.PTZ: the table is all zero.
    pub const PENDBASER_ZERO: u64 = 1 << 62;

    /// GICR_TYPER.Processor_Number.
    #[must_use]
    pub const fn processor_number(typer: u64) -> u64 {
        typer >> 8 & 0xffff
    }
}

/// Memory that the ITS or a redistributor shares with processors, through their caches.
const fn shared(inner: u32, outer: u32) -> u64 {
    /// Read-allocate, write-allocate, write-back.
    const CACHED: u64 = 7;
    const INNER_SHAREABLE: u64 = 1 << 10;
    CACHED << inner | CACHED << outer | INNER_SHAREABLE
}

const ADDRESS: Range<u32> = 12..48;

const fn address(at: Hpa) -> u64 {
    at.0 & ((1 << ADDRESS.end) - (1 << ADDRESS.start))
}

/// Whether tables and queues can be below this address: where tables have pages of 64 KiB, the format is another one
/// for higher addresses.
#[must_use]
pub const fn reaches(end: Hpa) -> bool {
    end.0 <= 1 << ADDRESS.end
}

/// GITS_CBASER for a queue of this many bytes, a multiple of 4 KiB and at most 1 MiB.
#[must_use]
pub const fn cbaser(at: Hpa, bytes: u64) -> u64 {
    1 << 63 | shared(59, 53) | address(at) | (bytes / 0x1000 - 1) & 0xff
}

/// GICR_PROPBASER for numbers of interrupts with this many bits.
#[must_use]
pub const fn propbaser(at: Hpa, bits: u32) -> u64 {
    shared(7, 56) | address(at) | (bits as u64 - 1) & 0x1f
}

/// GICR_PENDBASER for a table of zeros.
#[must_use]
pub const fn pendbaser(at: Hpa) -> u64 {
    redistributor::PENDBASER_ZERO | shared(7, 56) | address(at)
}

/// An LPI's byte in the table of GICR_PROPBASER: of a middle priority, and enabled.
pub const LPI_ENABLED: u8 = 0xa0 | 1;

/// What an ITS can do: GITS_TYPER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Typer(pub u64);

impl Typer {
    /// Bits of an EventID, at most.
    #[must_use]
    pub const fn event_bits(self) -> u32 {
        (self.0 >> 8 & 0x1f) as u32 + 1
    }

    /// Bits of a DeviceID, at most.
    #[must_use]
    pub const fn device_bits(self) -> u32 {
        (self.0 >> 13 & 0x1f) as u32 + 1
    }

    /// Bytes that a device's table has for each event.
    #[must_use]
    pub const fn entry_bytes(self) -> u64 {
        (self.0 >> 4 & 0xf) + 1
    }

    /// Commands name a redistributor by the address of its registers, and otherwise by its number.
    #[must_use]
    pub const fn names_by_address(self) -> bool {
        self.0 & 1 << 19 != 0
    }
}

/// A table that software gives to an ITS: GITS_BASER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Baser(pub u64);

/// What a table is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// For each DeviceID, where its table of events is.
    Devices,
    /// For each collection, which redistributor it means.
    Collections,
    /// None that is needed here.
    Other,
}

impl Baser {
    /// What the table is for, which hardware says.
    #[must_use]
    pub const fn table(self) -> Table {
        match self.0 >> 56 & 7 {
            1 => Table::Devices,
            4 => Table::Collections,
            _ => Table::Other,
        }
    }

    /// Bytes of an entry, which hardware says.
    #[must_use]
    pub const fn entry_bytes(self) -> u64 {
        (self.0 >> 48 & 0x1f) + 1
    }

    /// Bytes of the pages that the table is made of.
    #[must_use]
    pub const fn page_bytes(self) -> u64 {
        match self.0 >> 8 & 3 {
            0 => 0x1000,
            1 => 0x4000,
            _ => 0x1_0000,
        }
    }

    /// The register for a table of one level with this many pages of `page_bytes`, at most 256.
    #[must_use]
    pub const fn with(self, at: Hpa, pages: u64, page_bytes: u64) -> Self {
        const BY_HARDWARE: u64 = 7 << 56 | 0x1f << 48;
        let size = match page_bytes {
            0x1000 => 0,
            0x4000 => 1,
            _ => 2,
        };
        Self(1 << 63 | shared(59, 53) | self.0 & BY_HARDWARE | address(at) | size << 8 | (pages - 1) & 0xff)
    }
}

/// A redistributor, as commands name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// By the address of its registers.
    Address(Hpa),
    /// By GICR_TYPER.Processor_Number.
    Number(u64),
}

impl Target {
    const fn field(self) -> u64 {
        match self {
            Self::Address(at) => at.0 & 0x000f_ffff_ffff_0000,
            Self::Number(number) => number << 16,
        }
    }
}

/// A command (5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// MAPD: the device has a table for events of so many bits.
    MapDevice {
        /// DeviceID.
        device: u32,
        /// Where it is: a multiple of 256, all zero, and the ITS's from now on.
        table: Hpa,
        /// Bits of its EventIDs.
        event_bits: u32,
    },
    /// MAPC: the collection means this redistributor.
    MapCollection {
        /// Its number.
        collection: u16,
        /// The redistributor.
        target: Target,
    },
    /// MAPTI: the device's event is this LPI, in this collection.
    MapEvent {
        /// DeviceID.
        device: u32,
        /// EventID.
        event: u32,
        /// The interrupt.
        lpi: u32,
        /// The collection.
        collection: u16,
    },
    /// MOVI: the device's event goes to this collection from now on.
    MoveEvent {
        /// DeviceID.
        device: u32,
        /// EventID.
        event: u32,
        /// The collection.
        collection: u16,
    },
    /// SYNC: what earlier commands have done, the redistributor knows.
    Sync {
        /// The redistributor.
        target: Target,
    },
}

impl Command {
    /// Bytes of a command.
    pub const BYTES: usize = 32;

    /// The command in memory, in words of little endian.
    #[must_use]
    pub const fn words(self) -> [u64; 4] {
        const VALID: u64 = 1 << 63;
        match self {
            Self::MapDevice { device, table, event_bits } => [
                0x08 | (device as u64) << 32,
                (event_bits as u64 - 1) & 0x1f,
                VALID | table.0 & 0x000f_ffff_ffff_ff00,
                0,
            ],
            Self::MapCollection { collection, target } => [0x09, 0, VALID | target.field() | collection as u64, 0],
            Self::MapEvent { device, event, lpi, collection } => {
                [0x0a | (device as u64) << 32, event as u64 | (lpi as u64) << 32, collection as u64, 0]
            }
            Self::MoveEvent { device, event, collection } => {
                [0x01 | (device as u64) << 32, event as u64, collection as u64, 0]
            }
            Self::Sync { target } => [0x05, 0, target.field(), 0],
        }
    }

    /// The same, as bytes.
    #[must_use]
    pub fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests;

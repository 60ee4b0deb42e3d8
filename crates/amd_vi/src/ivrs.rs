//! Firmware's table that lists the IOMMUs and their devices: IVRS (5.2), and how its blocks are read.
//!
//! ```text
//! header   IVHD: one IOMMU, its registers, its devices (entries)    IVMD: memory that a device must always reach
//! ```
//!
//! Firmware may describe the same IOMMU several times, by blocks of the types 10h, 11h and 40h. Each newer type says
//! all that the older ones say, so the newest that is known counts, and the others are left out (5.2.2.1).
//!
//! Nothing in the table is believed. [`Ivrs::new`] reads all of it, and refuses a table with an error anywhere: who
//! guards memory by half a table does not guard it. Blocks and entries of unknown types are skipped by their length, as
//! the manual wants it. A skipped entry means a device that is not named; it stays as blocked as all others.

use core::fmt;
use core::ops::RangeInclusive;

use addr::Hpa;

use crate::DeviceId;

const SIGNATURE: &[u8; 4] = b"IVRS";
/// Where the fields begin, in bytes from the start of the table, of a block or of an entry.
mod at {
    pub(super) const TABLE_LENGTH: usize = 4;
    /// Of the first block.
    pub(super) const BLOCKS: usize = 48;

    pub(super) const LENGTH: usize = 2;
    pub(super) const DEVICE: usize = 4;
    pub(super) const CAPABILITY: usize = 6;
    pub(super) const BASE: usize = 8;
    pub(super) const SEGMENT: usize = 16;
    /// Of the first entry, in blocks of type 10h, and in newer ones.
    pub(super) const ENTRIES: usize = 24;
    pub(super) const ENTRIES_NEWER: usize = 40;

    pub(super) const MEMORY_LAST_DEVICE: usize = 6;
    pub(super) const MEMORY_START: usize = 16;
    pub(super) const MEMORY_LENGTH: usize = 24;
    pub(super) const MEMORY_END: usize = 32;

    pub(super) const ENTRY_DEVICE: usize = 1;
    pub(super) const ENTRY_SETTINGS: usize = 3;
    pub(super) const ENTRY_SOURCE: usize = 5;
    pub(super) const ENTRY_HANDLE: usize = 4;
    pub(super) const ENTRY_KIND: usize = 7;
    /// Of the device's unique name, in entries that name it by ACPI.
    pub(super) const ENTRY_NAME_LENGTH: usize = 21;
}

/// Types of blocks.
const IVHD_TYPES: [u8; 3] = [0x10, 0x11, 0x40];
const IVMD_ALL: u8 = 0x20;
const IVMD_DEVICE: u8 = 0x21;
const IVMD_RANGE: u8 = 0x22;

/// Types of entries in an IVHD.
mod entry {
    pub(super) const PAD: u8 = 0;
    pub(super) const ALL: u8 = 1;
    pub(super) const SELECT: u8 = 2;
    pub(super) const RANGE_START: u8 = 3;
    pub(super) const RANGE_END: u8 = 4;
    pub(super) const ALIAS_SELECT: u8 = 66;
    pub(super) const ALIAS_RANGE_START: u8 = 67;
    pub(super) const EXTENDED_SELECT: u8 = 70;
    pub(super) const EXTENDED_RANGE_START: u8 = 71;
    pub(super) const SPECIAL: u8 = 72;
    pub(super) const ACPI_NAMED: u8 = 240;
}

/// Flags of an IVMD.
const UNITY: u8 = 1 << 0;
const READABLE: u8 = 1 << 1;
const WRITABLE: u8 = 1 << 2;
const EXCLUSION: u8 = 1 << 3;

/// Registers of an IOMMU start at a multiple of this, and end below 2^52.
const BASE_ALIGNMENT: u64 = 16 << 10;
const ADDRESS_END: u64 = 1 << 52;

/// A table that was read to its end and found well formed.
#[derive(Clone, Copy, Debug)]
pub struct Ivrs<'a>(&'a [u8]);

/// One IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit<'a> {
    /// Type of the block that describes it: 10h, 11h or 40h.
    pub block_type: u8,
    /// Its own PCI function, which no entry names.
    pub device: DeviceId,
    /// Where its capability is in its configuration space.
    pub capability: u16,
    /// Its registers.
    pub base: Hpa,
    /// The PCI segment of all of its devices.
    pub segment: u16,
    entries: &'a [u8],
}

/// Devices that an entry of a [`Unit`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All that the unit serves.
    All {
        /// For [`with_system_management`](crate::DeviceTableEntry::with_system_management).
        settings: u8,
    },
    /// Functions.
    Functions {
        /// From this one on.
        first: DeviceId,
        /// The last one, not before the first.
        last: DeviceId,
        /// They appear to the IOMMU under this number instead of their own: a bridge to PCI speaks for them.
        alias: Option<DeviceId>,
        /// For [`with_system_management`](crate::DeviceTableEntry::with_system_management).
        settings: u8,
    },
    /// A device that sends interrupts, and is no PCI function.
    Special {
        /// What it is.
        kind: Special,
        /// Its number in ACPI: the I/O APIC's id, or the HPET's.
        handle: u8,
        /// The number under which the IOMMU knows it.
        source: DeviceId,
        /// For [`with_system_management`](crate::DeviceTableEntry::with_system_management).
        settings: u8,
    },
    /// A device that ACPI names.
    Named {
        /// The number under which the IOMMU knows it.
        source: DeviceId,
        /// For [`with_system_management`](crate::DeviceTableEntry::with_system_management).
        settings: u8,
    },
}

/// A device that is no PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// An I/O APIC.
    IoApic,
    /// An event timer.
    Hpet,
    /// Something else, of this number.
    Other(u8),
}

/// Memory that devices must reach, whoever owns them: firmware uses it for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// These devices.
    pub devices: RangeInclusive<u16>,
    /// First byte.
    pub start: Hpa,
    /// Length, at least 1.
    pub bytes: u64,
    /// Whether the devices read it.
    pub readable: bool,
    /// Whether they write it.
    pub writable: bool,
}

/// What is wrong with a table, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Bytes from the start of the table to the block or the entry.
    pub offset: usize,
    /// What is wrong there.
    pub what: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IVRS, byte {:#x}: {}", self.offset, self.what)
    }
}

impl core::error::Error for Malformed {}

impl<'a> Ivrs<'a> {
    /// Reads a table from its header on. Ignores bytes after the length in the header.
    ///
    /// # Errors
    /// The first error in it.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let malformed = |offset, what| Err(Malformed { offset, what });
        let length = field(bytes, at::TABLE_LENGTH).map_or(0, u32::from_le_bytes);
        let table = usize::try_from(length).ok().and_then(|length| bytes.get(..length));
        let Some(table) = table.filter(|table| table.len() >= at::BLOCKS && table.starts_with(SIGNATURE)) else {
            return malformed(0, "no IVRS, or shorter than its length");
        };
        if table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)) != 0 {
            return malformed(0, "the checksum is wrong");
        }
        let table = Self(table);
        for block in table.blocks() {
            let Block { offset, bytes } = block?;
            if IVHD_TYPES.contains(&bytes[0]) {
                let unit = unit(bytes).map_err(|what| Malformed { offset, what })?;
                let entries = offset + bytes.len() - unit.entries.len();
                if let Some(Err(Malformed { offset, what })) = unit.checked_scopes().find(Result::is_err) {
                    return malformed(entries + offset, what);
                }
                table.check_against_others(offset, &unit)?;
            } else if is_memory(bytes[0]) {
                reserved(bytes).map_err(|what| Malformed { offset, what })?;
            }
        }
        Ok(table)
    }

    /// The IOMMUs, each once, by the newest block that describes it.
    pub fn units(self) -> impl Iterator<Item = Unit<'a>> {
        self.all_units().filter(move |unit| {
            let newest = self.all_units().filter(|other| is_same(unit, other)).map(|other| other.block_type).max();
            newest == Some(unit.block_type)
        })
    }

    /// Memory that devices must always reach.
    pub fn reserved(self) -> impl Iterator<Item = Reserved> {
        self.well_formed_blocks().filter(|bytes| is_memory(bytes[0])).filter_map(|bytes| reserved(bytes).ok())
    }

    /// The blocks of known types that describe IOMMUs.
    fn all_units(self) -> impl Iterator<Item = Unit<'a>> {
        self.well_formed_blocks().filter(|bytes| IVHD_TYPES.contains(&bytes[0])).filter_map(|bytes| unit(bytes).ok())
    }

    fn well_formed_blocks(self) -> impl Iterator<Item = &'a [u8]> {
        self.blocks().filter_map(|block| block.ok().map(|block| block.bytes))
    }

    fn blocks(self) -> Blocks<'a> {
        Blocks { table: self.0, offset: at::BLOCKS }
    }

    /// No two blocks of a type describe the same IOMMU, and all blocks about one agree on where its registers are. Two
    /// IOMMUs have registers of their own.
    fn check_against_others(self, offset: usize, unit: &Unit<'_>) -> Result<(), Malformed> {
        let mut twins = 0;
        for other in self.all_units() {
            if is_same(unit, &other) {
                twins += u32::from(unit.block_type == other.block_type);
                if unit.base != other.base {
                    return Err(Malformed { offset, what: "two blocks disagree on where an IOMMU's registers are" });
                }
            } else if unit.base.0.abs_diff(other.base.0) < BASE_ALIGNMENT {
                return Err(Malformed { offset, what: "two IOMMUs have the same registers" });
            }
        }
        if twins == 1 { Ok(()) } else { Err(Malformed { offset, what: "two blocks describe the same IOMMU" }) }
    }
}

fn is_same(unit: &Unit<'_>, other: &Unit<'_>) -> bool {
    (unit.segment, unit.device) == (other.segment, other.device)
}

fn is_memory(block_type: u8) -> bool {
    matches!(block_type, IVMD_ALL..=IVMD_RANGE)
}

/// A block of the table: at least a type and a length.
struct Block<'a> {
    offset: usize,
    bytes: &'a [u8],
}

/// Walks the blocks. Ends after the first error.
struct Blocks<'a> {
    table: &'a [u8],
    offset: usize,
}

impl<'a> Iterator for Blocks<'a> {
    type Item = Result<Block<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.offset;
        let rest = self.table.get(offset..).filter(|rest| !rest.is_empty())?;
        let length = field(rest, at::LENGTH).map_or(0, |bytes| usize::from(u16::from_le_bytes(bytes)));
        let Some(bytes) = rest.get(..length).filter(|bytes| bytes.len() >= at::DEVICE) else {
            self.offset = self.table.len();
            return Some(Err(Malformed { offset, what: "a block's length is wrong" }));
        };
        self.offset += length;
        Some(Ok(Block { offset, bytes }))
    }
}

/// The IOMMU that an IVHD block describes.
fn unit(bytes: &[u8]) -> Result<Unit<'_>, &'static str> {
    let block_type = bytes[0];
    let entries = if block_type == IVHD_TYPES[0] { at::ENTRIES } else { at::ENTRIES_NEWER };
    let entries = bytes.get(entries..).ok_or("an IVHD block is too short")?;
    let word = |offset| field(bytes, offset).map_or(0, u16::from_le_bytes);
    let base = field(bytes, at::BASE).map_or(0, u64::from_le_bytes);
    if base == 0 || !base.is_multiple_of(BASE_ALIGNMENT) || base >= ADDRESS_END {
        return Err("an IOMMU's registers cannot be at this address");
    }
    Ok(Unit {
        block_type,
        device: DeviceId(word(at::DEVICE)),
        capability: word(at::CAPABILITY),
        base: Hpa(base),
        segment: word(at::SEGMENT),
        entries,
    })
}

/// The memory that an IVMD block describes.
fn reserved(bytes: &[u8]) -> Result<Reserved, &'static str> {
    if bytes.len() < at::MEMORY_END {
        return Err("an IVMD block is too short");
    }
    let word = |offset| field(bytes, offset).map_or(0, u16::from_le_bytes);
    let long = |offset| field(bytes, offset).map_or(0, u64::from_le_bytes);
    let (block_type, flags, device, last) = (bytes[0], bytes[1], word(at::DEVICE), word(at::MEMORY_LAST_DEVICE));
    let devices = match block_type {
        IVMD_ALL => 0..=u16::MAX,
        IVMD_DEVICE => device..=device,
        _ => device..=last,
    };
    let (start, length) = (long(at::MEMORY_START), long(at::MEMORY_LENGTH));
    if devices.is_empty() {
        return Err("a range of devices runs backwards");
    }
    if length == 0 || start.checked_add(length).is_none_or(|end| end > ADDRESS_END) {
        return Err("reserved memory is empty, or has no end");
    }
    // Memory that is left out of the translation is one more way to say that both rights are needed.
    let always = flags & EXCLUSION != 0;
    let right = |flag| always || flags & (UNITY | flag) == UNITY | flag;
    Ok(Reserved { devices, start: Hpa(start), bytes: length, readable: right(READABLE), writable: right(WRITABLE) })
}

impl<'a> Unit<'a> {
    /// The devices that its entries name.
    pub fn scopes(&self) -> impl Iterator<Item = Scope> + use<'a> {
        self.checked_scopes().filter_map(Result::ok)
    }

    fn checked_scopes(&self) -> Scopes<'a> {
        Scopes { entries: self.entries, offset: 0 }
    }
}

/// Walks the entries of an IVHD block. Ends after the first error.
struct Scopes<'a> {
    entries: &'a [u8],
    offset: usize,
}

impl<'a> Scopes<'a> {
    /// The next entry, at its full length.
    fn take(&mut self) -> Option<Result<&'a [u8], &'static str>> {
        let rest = self.entries.get(self.offset..).filter(|rest| !rest.is_empty())?;
        let length = match rest[0] {
            // The two highest bits of the type are the length.
            kind @ 0..entry::ACPI_NAMED => 4 << (kind >> 6),
            entry::ACPI_NAMED => match rest.get(at::ENTRY_NAME_LENGTH) {
                Some(&name) => at::ENTRY_NAME_LENGTH + 1 + usize::from(name),
                None => return Some(Err("an entry leaves its block")),
            },
            _ => return Some(Err("an entry has a type of unknown length")),
        };
        self.offset += length;
        Some(rest.get(..length).ok_or("an entry leaves its block"))
    }

    /// The devices from `first` to that of the next entry, which must end the range.
    fn range(&mut self, first: DeviceId) -> Result<DeviceId, &'static str> {
        let Some(end) = self.take() else { return Err("a range of devices has no end") };
        let end = end?;
        if end[0] != entry::RANGE_END {
            return Err("a range of devices has no end");
        }
        let last = device(end, at::ENTRY_DEVICE);
        if last < first { Err("a range of devices runs backwards") } else { Ok(last) }
    }

    /// What the entry `bytes` names; nothing if it is padding, or of an unknown type.
    fn scope(&mut self, bytes: &[u8]) -> Result<Option<Scope>, &'static str> {
        let settings = bytes[at::ENTRY_SETTINGS];
        let first = device(bytes, at::ENTRY_DEVICE);
        let mut functions = |is_range: bool, alias| {
            let last = if is_range { self.range(first)? } else { first };
            Ok(Some(Scope::Functions { first, last, alias, settings }))
        };
        match bytes[0] {
            entry::PAD => Ok(None),
            entry::ALL => Ok(Some(Scope::All { settings })),
            entry::SELECT | entry::EXTENDED_SELECT => functions(false, None),
            entry::RANGE_START | entry::EXTENDED_RANGE_START => functions(true, None),
            entry::RANGE_END => Err("a range of devices has no start"),
            kind @ (entry::ALIAS_SELECT | entry::ALIAS_RANGE_START) => {
                functions(kind == entry::ALIAS_RANGE_START, Some(device(bytes, at::ENTRY_SOURCE)))
            }
            entry::SPECIAL => {
                let kind = match bytes[at::ENTRY_KIND] {
                    1 => Special::IoApic,
                    2 => Special::Hpet,
                    other => Special::Other(other),
                };
                let (handle, source) = (bytes[at::ENTRY_HANDLE], device(bytes, at::ENTRY_SOURCE));
                Ok(Some(Scope::Special { kind, handle, source, settings }))
            }
            entry::ACPI_NAMED => Ok(Some(Scope::Named { source: first, settings })),
            _ => Ok(None),
        }
    }
}

impl Iterator for Scopes<'_> {
    type Item = Result<Scope, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let offset = self.offset;
            match self.take()?.and_then(|bytes| self.scope(bytes)) {
                Ok(None) => {}
                Ok(Some(scope)) => return Some(Ok(scope)),
                Err(what) => {
                    self.offset = self.entries.len();
                    return Some(Err(Malformed { offset, what }));
                }
            }
        }
    }
}

fn device(bytes: &[u8], offset: usize) -> DeviceId {
    DeviceId(field(bytes, offset).map_or(0, u16::from_le_bytes))
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests;

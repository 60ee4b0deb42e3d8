//! Firmware's table that lists the IOMMUs: DMAR (8.1).
//!
//! ```text
//! header   DRHD: one IOMMU, its registers, its devices    RMRR: memory that a device must always reach    others
//! ```
//!
//! Nothing in the table is believed. [`Dmar::new`] reads all of it, and refuses a table with an error anywhere: who
//! guards memory by half a table does not guard it. Structures of unknown types are skipped by their length, as the
//! manual wants it (8.2).
//!
//! The devices that a structure names are only checked for their form: all IOMMUs get the same tables, which cover all
//! functions of a segment.

use core::fmt;

use addr::{Hpa, PAGE_BYTES};

const SIGNATURE: &[u8; 4] = b"DMAR";
/// Where the fields begin, in bytes from the start of the table, of a structure or of a device's scope.
mod at {
    pub(super) const TABLE_LENGTH: usize = 4;
    pub(super) const FLAGS: usize = 37;
    /// Of the first structure.
    pub(super) const STRUCTURES: usize = 48;

    pub(super) const LENGTH: usize = 2;
    pub(super) const SEGMENT: usize = 6;
    pub(super) const BASE: usize = 8;
    /// Of the first scope of an IOMMU.
    pub(super) const SCOPES: usize = 16;
    pub(super) const LIMIT: usize = 16;
    /// Of the first scope of reserved memory.
    pub(super) const MEMORY_SCOPES: usize = 24;

    pub(super) const SCOPE_LENGTH: usize = 1;
    pub(super) const FIRST_BUS: usize = 5;
    /// Of a scope's path.
    pub(super) const PATH: usize = 6;
}

/// Types of structures.
const DRHD: u16 = 0;
const RMRR: u16 = 1;

/// INTR_REMAP, a flag of the table.
const REMAPS_INTERRUPTS: u8 = 1 << 0;

const ADDRESS_END: u64 = 1 << 52;

/// A table that was read to its end and found well formed.
#[derive(Clone, Copy, Debug)]
pub struct Dmar<'a>(&'a [u8]);

/// One IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its registers.
    pub base: Hpa,
    /// The PCI segment of all of its devices.
    pub segment: u16,
}

/// Memory that some device must reach, whoever owns it: firmware uses it for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved<'a> {
    /// First byte.
    pub start: Hpa,
    /// Last byte.
    pub last: Hpa,
    /// Which devices, in the format of the table.
    scopes: &'a [u8],
}

impl Reserved<'_> {
    /// Whether a function (bus in bits 15:8, device in 7:3, function in 2:0) is one of the devices. One behind a bridge
    /// is named by the bridge, and which bus is behind that only PCI's configuration says: all later ones count.
    #[must_use]
    pub fn may_be_of(&self, function: u16) -> bool {
        let [place, bus] = function.to_le_bytes();
        Scopes(self.scopes).flatten().any(|scope| {
            let (first_bus, path) = (scope[at::FIRST_BUS], &scope[at::PATH..]);
            let is_there = path.last_chunk().is_some_and(|[device, number]| place == device << 3 | number & 7);
            is_there && if path.len() == 2 { bus == first_bus } else { bus > first_bus }
        })
    }
}

/// What is wrong with a table, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Bytes from the start of the table to the structure.
    pub offset: usize,
    /// What is wrong there.
    pub what: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DMAR, byte {:#x}: {}", self.offset, self.what)
    }
}

impl core::error::Error for Malformed {}

impl<'a> Dmar<'a> {
    /// Reads a table from its header on. Ignores bytes after the length in the header.
    ///
    /// # Errors
    /// The first error in it.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let malformed = |offset, what| Err(Malformed { offset, what });
        let length = field(bytes, at::TABLE_LENGTH).map_or(0, u32::from_le_bytes);
        let table = usize::try_from(length).ok().and_then(|length| bytes.get(..length));
        let Some(table) = table.filter(|table| table.len() >= at::STRUCTURES && table.starts_with(SIGNATURE)) else {
            return malformed(0, "no DMAR, or shorter than its length");
        };
        if table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)) != 0 {
            return malformed(0, "the checksum is wrong");
        }
        let table = Self(table);
        for structure in table.structures() {
            let Structure { offset, bytes } = structure?;
            let checked = match kind(bytes) {
                DRHD => unit(bytes).and_then(|unit| {
                    let twins = table.units().filter(|other| other.base == unit.base).count();
                    if twins == 1 { Ok(()) } else { Err("two IOMMUs have the same registers") }
                }),
                RMRR => reserved(bytes).map(|_| ()),
                _ => Ok(()),
            };
            checked.map_err(|what| Malformed { offset, what })?;
        }
        Ok(table)
    }

    /// Whether the platform supports the remapping of interrupts.
    #[must_use]
    pub fn remaps_interrupts(self) -> bool {
        self.0[at::FLAGS] & REMAPS_INTERRUPTS != 0
    }

    /// The IOMMUs.
    pub fn units(self) -> impl Iterator<Item = Unit> {
        self.of_kind(DRHD).filter_map(|bytes| unit(bytes).ok())
    }

    /// Memory that devices must always reach.
    pub fn reserved(self) -> impl Iterator<Item = Reserved<'a>> {
        self.of_kind(RMRR).filter_map(|bytes| reserved(bytes).ok())
    }

    fn of_kind(self, wanted: u16) -> impl Iterator<Item = &'a [u8]> {
        self.structures().filter_map(Result::ok).map(|found| found.bytes).filter(move |bytes| kind(bytes) == wanted)
    }

    fn structures(self) -> Structures<'a> {
        Structures { table: self.0, offset: at::STRUCTURES }
    }
}

/// A structure of the table: at least a type and a length.
struct Structure<'a> {
    offset: usize,
    bytes: &'a [u8],
}

/// Walks the structures. Ends after the first error.
struct Structures<'a> {
    table: &'a [u8],
    offset: usize,
}

impl<'a> Iterator for Structures<'a> {
    type Item = Result<Structure<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.offset;
        let rest = self.table.get(offset..).filter(|rest| !rest.is_empty())?;
        let length = field(rest, at::LENGTH).map_or(0, |bytes| usize::from(u16::from_le_bytes(bytes)));
        let Some(bytes) = rest.get(..length).filter(|bytes| bytes.len() >= at::LENGTH + 2) else {
            self.offset = self.table.len();
            return Some(Err(Malformed { offset, what: "a structure's length is wrong" }));
        };
        self.offset += length;
        Some(Ok(Structure { offset, bytes }))
    }
}

fn kind(bytes: &[u8]) -> u16 {
    field(bytes, 0).map_or(u16::MAX, u16::from_le_bytes)
}

/// The IOMMU that a DRHD describes.
fn unit(bytes: &[u8]) -> Result<Unit, &'static str> {
    check_scopes(bytes.get(at::SCOPES..).ok_or("an IOMMU's structure is too short")?)?;
    let base = long(bytes, at::BASE);
    if base == 0 || !base.is_multiple_of(PAGE_BYTES) || base >= ADDRESS_END {
        return Err("an IOMMU's registers cannot be at this address");
    }
    Ok(Unit { base: Hpa(base), segment: field(bytes, at::SEGMENT).map_or(0, u16::from_le_bytes) })
}

/// The memory that an RMRR describes.
fn reserved(bytes: &[u8]) -> Result<Reserved<'_>, &'static str> {
    let scopes = bytes.get(at::MEMORY_SCOPES..).ok_or("a structure about reserved memory is too short")?;
    check_scopes(scopes)?;
    let (start, last) = (long(bytes, at::BASE), long(bytes, at::LIMIT));
    if start >= last || last >= ADDRESS_END {
        return Err("reserved memory is empty, or has no end");
    }
    Ok(Reserved { start: Hpa(start), last: Hpa(last), scopes })
}

fn check_scopes(scopes: &[u8]) -> Result<(), &'static str> {
    Scopes(scopes).try_for_each(|scope| scope.map(|_| ()))
}

/// The list of devices that ends a structure. Each has a path of pairs: device and function on each bus. Ends after the
/// first error.
struct Scopes<'a>(&'a [u8]);

impl<'a> Iterator for Scopes<'a> {
    type Item = Result<&'a [u8], &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let length = self.0.get(at::SCOPE_LENGTH).map_or(0, |length| usize::from(*length));
        let has_path = length > at::PATH && (length - at::PATH).is_multiple_of(2);
        let Some((scope, rest)) = self.0.split_at_checked(length).filter(|_| has_path) else {
            self.0 = &[];
            return Some(Err("a device's length is wrong"));
        };
        self.0 = rest;
        Some(Ok(scope))
    }
}

fn long(bytes: &[u8], offset: usize) -> u64 {
    field(bytes, offset).map_or(0, u64::from_le_bytes)
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use std::string::ToString;
    use std::vec::Vec;

    use super::*;

    /// A table with these structures, and a right checksum.
    fn table(structures: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = [&SIGNATURE[..], &[0; 44]].concat();
        bytes.extend(structures.concat());
        let length = u32::try_from(bytes.len()).expect("tests make small tables");
        bytes[at::TABLE_LENGTH..][..4].copy_from_slice(&length.to_le_bytes());
        let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        bytes[9] = 0u8.wrapping_sub(sum);
        bytes
    }

    fn structure(kind: u16, segment: u16, rest: &[&[u8]]) -> Vec<u8> {
        let rest = rest.concat();
        let length = u16::try_from(8 + rest.len()).expect("tests make small structures");
        [&kind.to_le_bytes()[..], &length.to_le_bytes(), &[0, 0], &segment.to_le_bytes(), &rest].concat()
    }

    fn drhd(base: u64, scopes: &[u8]) -> Vec<u8> {
        structure(DRHD, 0, &[&base.to_le_bytes(), scopes])
    }

    fn rmrr(start: u64, last: u64, scopes: &[u8]) -> Vec<u8> {
        structure(RMRR, 0, &[&start.to_le_bytes(), &last.to_le_bytes(), scopes])
    }

    /// A function, and one behind two bridges.
    const SCOPES: [u8; 20] = [1, 8, 0, 0, 0, 0, 4, 0, 1, 12, 0, 0, 0, 0, 28, 0, 0, 0, 3, 1];

    #[test]
    fn units_and_reserved_memory_are_found_and_other_structures_skipped() {
        let bytes = table(&[
            drhd(0xfed9_0000, &SCOPES),
            structure(2, 0, &[&[1, 2, 3]]),
            rmrr(0x7f00_0000, 0x7f0f_ffff, &SCOPES[..8]),
            structure(0x77, 0, &[]),
            structure(DRHD, 1, &[&0xfed9_1000u64.to_le_bytes()]),
        ]);
        let dmar = Dmar::new(&bytes).expect("well formed");
        let units: Vec<_> = dmar.units().collect();
        let [first, second] = [(0xfed9_0000, 0), (0xfed9_1000, 1)];
        assert_eq!(units, [first, second].map(|(base, segment)| Unit { base: Hpa(base), segment }));
        let reserved: Vec<_> = dmar.reserved().map(|reserved| (reserved.start.0, reserved.last.0)).collect();
        assert_eq!(reserved, [(0x7f00_0000, 0x7f0f_ffff)]);
    }

    #[test]
    fn reserved_memory_is_of_the_functions_that_its_scopes_may_name() {
        let bytes = table(&[rmrr(0x1000, 0x1fff, &SCOPES), rmrr(0x3000, 0x3fff, &[])]);
        let dmar = Dmar::new(&bytes).expect("well formed");
        let of = |function: u16| dmar.reserved().map(|reserved| reserved.may_be_of(function)).collect::<Vec<_>>();
        // 00:04.0, and 03.1 on some bus behind bus 0.
        assert_eq!([of(0x0020), of(0x0519), of(0xff19)], [[true, false]; 3].map(Vec::from));
        for other in [0x0021, 0x0120, 0x0019, 0x0518, 0x0000] {
            assert_eq!(of(other), [false, false], "{other:#x}");
        }
    }

    #[test]
    fn platform_says_whether_it_supports_the_remapping_of_interrupts() {
        let mut bytes = table(&[drhd(0xfed9_0000, &SCOPES)]);
        assert!(!Dmar::new(&bytes).expect("well formed").remaps_interrupts());
        bytes[at::FLAGS] |= REMAPS_INTERRUPTS;
        bytes[9] = bytes[9].wrapping_sub(REMAPS_INTERRUPTS);
        assert!(Dmar::new(&bytes).expect("well formed").remaps_interrupts());
    }

    #[test]
    fn table_that_lies_is_refused_with_the_place_and_the_reason() {
        let good = drhd(0xfed9_0000, &SCOPES);
        let cases: [(Vec<Vec<u8>>, &str); 10] = [
            (Vec::from([Vec::from([0, 0, 0, 0])]), "DMAR, byte 0x30: a structure's length is wrong"),
            (Vec::from([Vec::from([0, 0, 3])]), "DMAR, byte 0x30: a structure's length is wrong"),
            (Vec::from([good.clone(), Vec::from([9, 0, 200, 0])]), "DMAR, byte 0x54: a structure's length is wrong"),
            (Vec::from([structure(DRHD, 0, &[])]), "DMAR, byte 0x30: an IOMMU's structure is too short"),
            (Vec::from([drhd(0, &[])]), "DMAR, byte 0x30: an IOMMU's registers cannot be at this address"),
            (Vec::from([drhd(0xfed9_0800, &[])]), "DMAR, byte 0x30: an IOMMU's registers cannot be at this address"),
            (Vec::from([good.clone(), good.clone()]), "DMAR, byte 0x30: two IOMMUs have the same registers"),
            (Vec::from([drhd(0xfed9_0000, &[1, 0, 0, 0, 0, 0])]), "DMAR, byte 0x30: a device's length is wrong"),
            (Vec::from([drhd(0xfed9_0000, &[1, 7, 0, 0, 0, 0, 4])]), "DMAR, byte 0x30: a device's length is wrong"),
            (Vec::from([rmrr(0x2000, 0x1000, &[])]), "DMAR, byte 0x30: reserved memory is empty, or has no end"),
        ];
        for (structures, why) in cases {
            let bytes = table(&structures);
            assert_eq!(Dmar::new(&bytes).expect_err("refused").to_string(), why);
        }
        let mut bytes = table(&[good]);
        bytes[50] ^= 1;
        assert_eq!(Dmar::new(&bytes).expect_err("refused").to_string(), "DMAR, byte 0x0: the checksum is wrong");
        assert!(Dmar::new(&bytes[..60]).is_err());
    }

    #[test]
    fn no_table_makes_the_reader_panic_or_run_forever() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let count = random.usize(0..4);
            let mut structures = Vec::new();
            for _ in 0..count {
                let mut bytes = match random.u8(0..3) {
                    0 => drhd(random.u64(..) & 0xffff_f000, &SCOPES),
                    1 => rmrr(random.u64(..) >> 20, random.u64(..) >> 20, &SCOPES),
                    _ => structure(random.u16(..), 0, &[&SCOPES]),
                };
                if random.bool() {
                    let at = random.usize(0..bytes.len());
                    bytes[at] = random.u8(..);
                }
                structures.push(bytes);
            }
            let bytes = table(&structures);
            if let Ok(dmar) = Dmar::new(&bytes) {
                assert!(dmar.units().count() + dmar.reserved().count() <= structures.len());
            }
        }
    }
}

//! Converts UEFI firmware's data into [`Handover`] (UEFI Specification 2.10).
//!
//! These are plain functions of bytes; `arch` calls the firmware.

use core::fmt;
use core::mem::offset_of;

use uefi_raw::table::boot::{MemoryAttribute, MemoryDescriptor, MemoryType};

use super::handover::{self, Handover};

/// Why the hypervisor does not start from UEFI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The processor is not at EL2.
    NotAtEl2,
    /// The firmware passes no device tree, or one without a machine.
    NoDeviceTree,
    /// The device tree is damaged, or larger than the boot protocol allows.
    DamagedDeviceTree,
    /// There is no initrd.
    NoPayload,
    /// The initrd is not in memory that can be used.
    PayloadOutside,
    /// The firmware gives pages beyond the address space.
    NoPages,
    /// A service failed: its name in the specification, and its status code.
    Service(&'static str, usize),
    /// The firmware does not let go of the machine.
    NoExit,
    /// The memory map cannot be kept.
    Memory(handover::Refused),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAtEl2 => f.write_str(
                "the firmware runs at EL1, where no guests can be run (on QEMU: `-machine virt,virtualization=on`)",
            ),
            Self::NoDeviceTree => f.write_str(
                "the firmware describes the machine by ACPI and passes no device tree, which is needed here: \
                 choose Device Tree in the firmware's setup (on QEMU: `-machine virt,acpi=off`)",
            ),
            Self::DamagedDeviceTree => f.write_str("the firmware's device tree is damaged"),
            Self::NoPayload => {
                f.write_str("no payload: pass it as the initrd (GRUB: `initrd /boot/payload`, QEMU: `-initrd FILE`)")
            }
            Self::PayloadOutside => f.write_str("the initrd is not in usable memory"),
            Self::NoPages => f.write_str("the firmware allocates no memory"),
            Self::Service(name, status) => write!(f, "the firmware's {name} fails with status {status:#x}"),
            Self::NoExit => f.write_str("the firmware does not end its services (ExitBootServices)"),
            Self::Memory(why) => why.fmt(f),
        }
    }
}

/// A range of the memory map: first byte, end, and E820 type.
type Area = (u64, u64, u32);

/// Copies the memory map of GetMemoryMap, in descriptors of `descriptor_bytes`.
///
/// # Errors
/// There is no room for a range that is not RAM.
pub fn set_memory(handover: &mut Handover, map: &[u8], descriptor_bytes: usize) -> Result<(), Refused> {
    let ranges =
        || Merged { map, descriptor_bytes, last: None }.map(|(start, end, number)| (start, end - start, number));
    handover.set_memory(ranges).map_err(Refused::Memory)
}

/// Ranges in ascending order. Adjacent ranges of one kind are merged: the firmware has more kinds, and a map has more
/// descriptors than there is room for.
struct Merged<'a> {
    map: &'a [u8],
    descriptor_bytes: usize,
    /// The start of the last range, and its index in the map.
    last: Option<(u64, usize)>,
}

impl Merged<'_> {
    /// The descriptor behind this one in the order of addresses, and of places in the map.
    fn after(&self, last: Option<(u64, usize)>) -> Option<((u64, usize), Area)> {
        let descriptors = self.map.chunks_exact(self.descriptor_bytes.max(size_of::<MemoryDescriptor>()));
        let areas = descriptors.enumerate().filter_map(|(at, descriptor)| {
            let area = area(descriptor)?;
            Some(((area.0, at), area))
        });
        areas.filter(|(place, _)| last.is_none_or(|last| *place > last)).min_by_key(|(place, _)| *place)
    }
}

impl Iterator for Merged<'_> {
    type Item = Area;

    fn next(&mut self) -> Option<Area> {
        let (mut last, (start, mut end, number)) = self.after(self.last)?;
        while let Some((place, (_, next_end, _))) =
            self.after(Some(last)).filter(|(_, next)| next.0 == end && next.2 == number)
        {
            (last, end) = (place, next_end);
        }
        self.last = Some(last);
        Some((start, end, number))
    }
}

/// Bytes of a UEFI page, on any processor.
const PAGE_BYTES: u64 = 4096;

/// The range of a descriptor; `None` if it is empty, or ends beyond the address space.
fn area(descriptor: &[u8]) -> Option<Area> {
    let number = |at: usize| Some(u64::from_le_bytes(descriptor.get(at..at + 8)?.try_into().ok()?));
    let [a, b, c, d, ..] = number(offset_of!(MemoryDescriptor, ty))?.to_le_bytes();
    let start = number(offset_of!(MemoryDescriptor, phys_start))?;
    let end = start.checked_add(number(offset_of!(MemoryDescriptor, page_count))?.checked_mul(PAGE_BYTES)?)?;
    let attributes = MemoryAttribute::from_bits_retain(number(offset_of!(MemoryDescriptor, att))?);
    let kind = e820_number(MemoryType(u32::from_le_bytes([a, b, c, d])), attributes);
    (start < end).then_some((start, end, kind))
}

/// E820's number of this kind of memory, once the firmware has ended its boot services (ACPI 6.5, table 15.6).
fn e820_number(kind: MemoryType, attributes: MemoryAttribute) -> u32 {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    const ACPI_TABLES: u32 = 3;
    const ACPI_NVS: u32 = 4;

    match kind {
        MemoryType::LOADER_CODE
        | MemoryType::LOADER_DATA
        | MemoryType::BOOT_SERVICES_CODE
        | MemoryType::BOOT_SERVICES_DATA
        | MemoryType::CONVENTIONAL
            if attributes.contains(MemoryAttribute::WRITE_BACK) =>
        {
            RAM
        }
        MemoryType::ACPI_RECLAIM => ACPI_TABLES,
        MemoryType::ACPI_NON_VOLATILE => ACPI_NVS,
        _ => RESERVED,
    }
}

/// The options that a program was started with, UTF-16 in this machine's byte order, as UTF-8.
pub fn options(utf16: &[u8]) -> impl Iterator<Item = u8> {
    let units = utf16.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    char::decode_utf16(units).flat_map(|character| {
        let mut bytes = [0; 4];
        let length = character.unwrap_or(char::REPLACEMENT_CHARACTER).encode_utf8(&mut bytes).len();
        bytes.into_iter().take(length)
    })
}

/// Length of the device tree with this header (Devicetree Specification 0.4, 5.2); `None` if it is none, or larger than
/// `limit`.
pub fn tree_bytes(header: [u8; 8], limit: usize) -> Option<usize> {
    const MAGIC: [u8; 4] = [0xd0, 0x0d, 0xfe, 0xed];
    let [magic @ .., a, b, c, d] = header;
    let bytes = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    (magic == MAGIC && (header.len()..=limit).contains(&bytes)).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{Handover, MemoryAttribute, MemoryType, Refused, handover, options, set_memory, tree_bytes};
    use addr::{Hpa, HpaRange};

    /// As in firmware: longer than the structure, so that no code relies on its size.
    const DESCRIPTOR_BYTES: usize = 48;
    const WRITE_BACK: u64 = MemoryAttribute::WRITE_BACK.bits();

    /// A map of these kinds of memory, from page to page.
    fn map(areas: &[(MemoryType, u64, u64, u64)]) -> Vec<u8> {
        let descriptor = |&(kind, first, end, attributes): &(MemoryType, u64, u64, u64)| {
            let mut bytes = [0xa5; DESCRIPTOR_BYTES];
            bytes[0..4].copy_from_slice(&kind.0.to_le_bytes());
            for (at, value) in [(8, first * 4096), (16, 0), (24, end - first), (32, attributes)] {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            bytes
        };
        areas.iter().flat_map(descriptor).collect()
    }

    fn pages(first: u64, end: u64) -> HpaRange {
        HpaRange::new(Hpa(first * 4096), (end - first) * 4096).expect("first is before end")
    }

    /// Pages of RAM of such a machine, from and to.
    fn ram(map: &[u8]) -> Vec<(u64, u64)> {
        let mut handover = Handover::new();
        assert_eq!(set_memory(&mut handover, map, DESCRIPTOR_BYTES), Ok(()));
        let ranges = handover.memory.ram();
        let mut all: Vec<_> = ranges.iter().map(|range| (range.start.0 / 4096, range.end().0 / 4096)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn ram_is_what_the_firmware_leaves_and_nothing_else() {
        let left = [
            MemoryType::LOADER_CODE,
            MemoryType::LOADER_DATA,
            MemoryType::BOOT_SERVICES_CODE,
            MemoryType::BOOT_SERVICES_DATA,
            MemoryType::CONVENTIONAL,
        ];
        for kind in (0..20).map(MemoryType) {
            let expected: &[_] = if left.contains(&kind) { &[(16, 32)] } else { &[] };
            assert_eq!(ram(&map(&[(kind, 16, 32, WRITE_BACK)])), expected, "{kind:?}");
            // Memory that cannot be cached is of no use.
            assert_eq!(ram(&map(&[(kind, 16, 32, 1)])), [], "{kind:?}");
        }
    }

    #[test]
    fn neighbours_in_any_order_are_one_range_and_what_lies_between_is_kept_out() {
        let map = map(&[
            (MemoryType::CONVENTIONAL, 40, 50, WRITE_BACK),
            (MemoryType::LOADER_DATA, 10, 20, WRITE_BACK | 1 << 63),
            (MemoryType::BOOT_SERVICES_DATA, 20, 30, WRITE_BACK),
            (MemoryType::RUNTIME_SERVICES_DATA, 30, 40, WRITE_BACK),
            // The map should never call this range RAM elsewhere.
            (MemoryType::RESERVED, 44, 46, 0),
        ]);
        assert_eq!(ram(&map), [(10, 30), (40, 44), (46, 50)]);
        let mut handover = Handover::new();
        assert_eq!(set_memory(&mut handover, &map, DESCRIPTOR_BYTES), Ok(()));
        assert!(handover.memory.is_ram(&pages(18, 22)), "a payload may lie in both");
        assert!(!handover.memory.is_ram(&pages(29, 31)));
    }

    #[test]
    fn map_of_many_descriptors_is_kept_when_they_are_neighbours() {
        let mut areas: Vec<_> = (0..400)
            .map(|page| {
                let kind = if page % 2 == 0 { MemoryType::LOADER_DATA } else { MemoryType::CONVENTIONAL };
                (kind, page, page + 1, WRITE_BACK)
            })
            .collect();
        areas.reverse();
        assert_eq!(ram(&map(&areas)), [(0, 400)]);

        let crumbs: Vec<_> = (0..400).map(|page| (MemoryType::RESERVED, 2 * page, 2 * page + 1, 0)).collect();
        let refused = set_memory(&mut Handover::new(), &map(&crumbs), DESCRIPTOR_BYTES);
        assert_eq!(refused, Err(Refused::Memory(handover::Refused::TooManyRanges)));
    }

    #[test]
    fn impossible_descriptors_are_ignored() {
        let good = (MemoryType::CONVENTIONAL, 1, 2, WRITE_BACK);
        let mut bytes = map(&[(MemoryType::CONVENTIONAL, 3, 3, WRITE_BACK), good, good]);
        // One ends beyond the address space, and half a descriptor follows.
        bytes[2 * DESCRIPTOR_BYTES + 24..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
        bytes.extend([0; DESCRIPTOR_BYTES / 2]);
        assert_eq!(ram(&bytes), [(1, 2)]);
        assert_eq!(ram(&[]), []);
        // A size of zero would never end.
        assert_eq!(set_memory(&mut Handover::new(), &bytes, 0), Ok(()));
    }

    #[test]
    fn options_become_utf8() {
        let of = |units: &[u16]| {
            let bytes: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
            String::from_utf8(options(&bytes).collect()).expect("is UTF-8")
        };
        let text = "log=debug \u{e9}\u{1f600}";
        assert_eq!(of(&text.encode_utf16().collect::<Vec<_>>()), text);
        assert_eq!(of(&[0x61, 0xd800, 0x62]), "a\u{fffd}b", "half a character");
        assert_eq!(options(b"a").count(), 0, "half a unit");
    }

    #[test]
    fn device_tree_is_told_by_its_first_bytes() {
        let header = [0xd0, 0x0d, 0xfe, 0xed, 0, 1, 0, 0];
        assert_eq!(tree_bytes(header, 0x1_0000), Some(0x1_0000));
        assert_eq!(tree_bytes(header, 0xffff), None);
        assert_eq!(tree_bytes([0xd0, 0x0d, 0xfe, 0xed, 0, 0, 0, 7], 0x1_0000), None);
        assert_eq!(tree_bytes([0xed, 0xfe, 0x0d, 0xd0, 0, 1, 0, 0], 0x1_0000), None);
    }

    #[test]
    fn every_refusal_says_what_to_do_about_it() {
        for (why, hint) in [
            (Refused::NotAtEl2, "virtualization=on"),
            (Refused::NoDeviceTree, "acpi=off"),
            (Refused::NoPayload, "initrd /boot/payload"),
            (Refused::Service("AllocatePages", 9), "AllocatePages fails with status 0x9"),
        ] {
            assert!(why.to_string().contains(hint), "{why}");
        }
    }
}

//! ELF kernels with a PVH entry (Xen `docs/misc/pvh.pandoc`, `xen/include/public/arch-x86/hvm/start_info.h`).
//!
//! The segments go to their physical addresses. The note gives the 32-bit entry. `hvm_start_info` in EBX has the
//! addresses of command line, initrd, memory map and ACPI tables. Linux (`vmlinux`, CONFIG_PVH) and small test kernels
//! use this.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange};
use elf::ElfBytes;
use elf::abi::{EM_386, EM_X86_64, PT_LOAD, PT_NOTE};
use elf::endian::LittleEndian;
use elf::note::{Note, NoteIterator};
use elf::parse::ParseError;
use elf::segment::ProgramHeader;

use crate::bytes::{put, u32_at, u64_at};
use crate::layout::{BOOT_GDT, BOOT_INFORMATION, BOOT_INFORMATION_32, CMDLINE, HIGH_RAM, HOLE, RSDP, memory_map};
use crate::{Boot, Error, GuestMemory, Mode, OutsideMemory, checked_range, descriptors};

/// Maximum length of the command line: PVH sets no limit, Linux keeps 2048 bytes with the NUL.
pub(crate) const CMDLINE_LIMIT: usize = 2047;

const NOTE_OWNER: &[u8] = b"Xen\0";
/// XEN_ELFNOTE_PHYS32_ENTRY.
const NOTE_ENTRY: u64 = 18;

/// Start information: magic, version 1, and the offsets of its fields.
mod start_info {
    pub(super) const MAGIC: u32 = 0x336e_c578;
    pub(super) const VERSION: u32 = 1;
    pub(super) const NR_MODULES: usize = 12;
    pub(super) const MODLIST: usize = 16;
    pub(super) const CMDLINE: usize = 24;
    pub(super) const RSDP: usize = 32;
    pub(super) const MEMMAP: usize = 40;
    pub(super) const MEMMAP_ENTRIES: usize = 48;

    /// Our places for the lists, after the structure of 56 bytes.
    pub(super) const OUR_MODLIST: usize = 0x40;
    pub(super) const OUR_MEMMAP: usize = 0x80;
    pub(super) const MEMMAP_ENTRY_BYTES: usize = 24;
    /// Room for 16 entries; a parent with RAM above 4 GiB has 6.
    pub(super) const BYTES: usize = 0x200;
}

/// An ELF whose headers were checked.
pub(crate) struct Image<'a> {
    segments: Vec<Segment<'a>>,
    /// From the lowest to the highest address of a segment.
    range: GpaRange,
    entry: u32,
}

struct Segment<'a> {
    start: Gpa,
    bytes: &'a [u8],
}

impl<'a> Image<'a> {
    /// Checks a file that starts with the ELF magic.
    pub(crate) fn parse(file: &'a [u8]) -> Result<Self, Error> {
        let elf = ElfBytes::<LittleEndian>::minimal_parse(file).map_err(|error| describe(&error, file))?;
        if !matches!(elf.ehdr.e_machine, EM_X86_64 | EM_386) {
            return Err(Error::BadElf("it is for another kind of processor"));
        }
        let headers = elf.segments().ok_or(Error::BadElf("it has no segments"))?;

        let mut segments = Vec::new();
        let mut ranges = Vec::new();
        let mut entry = None;
        for header in headers {
            match header.p_type {
                PT_LOAD if header.p_memsz > 0 => {
                    let (segment, range) = Segment::parse(file, &header)?;
                    segments.push(segment);
                    ranges.push(range);
                }
                PT_NOTE if entry.is_none() => entry = entry_note(file, &header)?,
                _ => {}
            }
        }

        let entry = entry.ok_or(Error::NoPvhNote)?;
        if !ranges.iter().any(|range| range.contains(Gpa(entry))) {
            return Err(Error::EntryOutside { entry });
        }
        let start = ranges.iter().map(|range| range.start.0).min().unwrap_or(HIGH_RAM.0);
        let end = ranges.iter().map(|range| range.end().0).max().unwrap_or(HIGH_RAM.0);
        let range = checked_range(start, end).ok_or(Error::EntryOutside { entry })?;
        let entry = u32::try_from(entry).map_err(|_| Error::EntryOutside { entry })?;
        Ok(Self { segments, range, entry })
    }

    pub(crate) fn range(&self) -> GpaRange {
        self.range
    }

    pub(crate) fn entry(&self) -> Mode {
        Mode::Protected32 { eip: self.entry, ebx: BOOT_INFORMATION_32, esi: 0, gdt: descriptors::gdtr(BOOT_GDT) }
    }

    /// Writes the bytes of the file; the rest is zero already.
    pub(crate) fn load(&self, memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
        self.segments.iter().try_for_each(|segment| memory.write(segment.start, segment.bytes))
    }
}

impl<'a> Segment<'a> {
    fn parse(file: &'a [u8], header: &ProgramHeader) -> Result<(Self, GpaRange), Error> {
        let bytes = file_bytes(file, header)?;
        if header.p_filesz > header.p_memsz {
            return Err(Error::BadElf("a segment is longer in the file than in memory"));
        }
        let (start, length) = (header.p_paddr, header.p_memsz);
        if start < HIGH_RAM.0 {
            return Err(Error::SegmentTooLow { start, bytes: length });
        }
        let range = GpaRange::new(Gpa(start), length)
            .filter(|range| range.end() <= HOLE)
            .ok_or(Error::SegmentOutside { start, bytes: length })?;
        Ok((Self { start: range.start, bytes }, range))
    }
}

/// The segment's part of the file.
fn file_bytes<'a>(file: &'a [u8], header: &ProgramHeader) -> Result<&'a [u8], Error> {
    let needs = header.p_offset.saturating_add(header.p_filesz);
    let truncated = Error::Truncated { needs, has: file.len() as u64 };
    let start = usize::try_from(header.p_offset).map_err(|_| truncated)?;
    let end = usize::try_from(needs).map_err(|_| truncated)?;
    file.get(start..end).ok_or(truncated)
}

/// The PVH entry, if it is among the notes of this segment.
fn entry_note(file: &[u8], header: &ProgramHeader) -> Result<Option<u64>, Error> {
    let notes = file_bytes(file, header)?;
    // Notes are padded to 4 bytes whatever the segment's alignment is, except for 8, which means 8.
    let align = if header.p_align == 8 { 8 } else { 4 };
    let entry = NoteIterator::new(LittleEndian, elf::file::Class::ELF64, align, notes).find_map(|note| match note {
        Note::Unknown(note) if note.n_type == NOTE_ENTRY && note.name == NOTE_OWNER => {
            // The width depends on the linker.
            u64_at(note.desc, 0).or_else(|| u32_at(note.desc, 0).map(u64::from))
        }
        _ => None,
    });
    Ok(entry)
}

fn describe(error: &ParseError, file: &[u8]) -> Error {
    match error {
        ParseError::SliceReadError((_, end)) => Error::Truncated { needs: *end as u64, has: file.len() as u64 },
        ParseError::UnsupportedElfEndianness(_) => Error::BadElf("it is big-endian"),
        ParseError::UnsupportedElfClass(_) => Error::BadElf("it is neither 32-bit nor 64-bit"),
        ParseError::BadEntsize(_) => Error::BadElf("its program or section headers have the wrong size"),
        _ => Error::BadElf("its headers are damaged"),
    }
}

pub(crate) fn write_start_info(
    boot: &Boot<'_>,
    initrd: Option<GpaRange>,
    memory: &mut impl GuestMemory,
) -> Result<(), OutsideMemory> {
    let mut info = [0; start_info::BYTES];
    let address_of = |offset: usize| (BOOT_INFORMATION.0 + offset as u64).to_le_bytes();

    put(&mut info, 0, &start_info::MAGIC.to_le_bytes());
    put(&mut info, 4, &start_info::VERSION.to_le_bytes());
    put(&mut info, start_info::CMDLINE, &CMDLINE.0.to_le_bytes());
    put(&mut info, start_info::RSDP, &RSDP.0.to_le_bytes());

    if let Some(initrd) = initrd {
        put(&mut info, start_info::NR_MODULES, &1_u32.to_le_bytes());
        put(&mut info, start_info::MODLIST, &address_of(start_info::OUR_MODLIST));
        put(&mut info, start_info::OUR_MODLIST, &initrd.start.0.to_le_bytes());
        put(&mut info, start_info::OUR_MODLIST + 8, &initrd.bytes().to_le_bytes());
    }

    let mut entries = 0_u32;
    let mut at = start_info::OUR_MEMMAP;
    for entry in memory_map(boot.memory_bytes, boot.synic_ram()) {
        put(&mut info, at, &entry.range.start.0.to_le_bytes());
        put(&mut info, at + 8, &entry.range.bytes().to_le_bytes());
        put(&mut info, at + 16, &(entry.kind as u32).to_le_bytes());
        at += start_info::MEMMAP_ENTRY_BYTES;
        entries += 1;
    }
    put(&mut info, start_info::MEMMAP, &address_of(start_info::OUR_MEMMAP));
    put(&mut info, start_info::MEMMAP_ENTRIES, &entries.to_le_bytes());

    memory.write(BOOT_INFORMATION, &info)
}

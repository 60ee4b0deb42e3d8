//! Linux bzImage with the 64-bit or the 32-bit boot protocol (Linux `Documentation/arch/x86/boot.rst`).
//!
//! ```text
//! 0                      boot sector, setup header at 0x1f1
//! 512                    real-mode setup code: not used here
//! 512 * (setup_sects+1)  the kernel that unpacks itself: goes to pref_address, entered at +0x200 in long mode,
//!                        or at its first byte in protected mode, when it has no 64-bit entry
//! ```
//!
//! Other programs use the same protocol, such as memtest86+.
//!
//! The kernel unpacks itself around its load address, and needs `init_size` bytes from there. It gets the rest of its
//! information from the zero page: its own setup header, filled in, and the memory map.

use alloc::string::String;

use addr::{Gpa, GpaRange};

use crate::bytes::{array_at, put, u16_at, u32_at, u64_at};
use crate::layout::{
    BOOT_GDT, BOOT_INFORMATION, BOOT_PAGE_TABLES, CMDLINE, CMDLINE_BYTES, HIGH_RAM, HOLE, MAP_LIMIT, MapEntry,
};
use crate::{Boot, Efi, Error, GuestMemory, Mode, OutsideMemory, Screen, descriptors};

/// Offsets of the setup header's fields, the same in the file and in the zero page.
mod header {
    pub(super) const SETUP_SECTS: usize = 0x1f1;
    pub(super) const SYSSIZE: usize = 0x1f4;
    /// Its second byte is the distance from 0x202 to the end of the header.
    pub(super) const JUMP: usize = 0x200;
    pub(super) const MAGIC: usize = 0x202;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const KERNEL_VERSION: usize = 0x20e;
    pub(super) const TYPE_OF_LOADER: usize = 0x210;
    pub(super) const LOADFLAGS: usize = 0x211;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMD_LINE_PTR: usize = 0x228;
    pub(super) const INITRD_ADDR_MAX: usize = 0x22c;
    pub(super) const KERNEL_ALIGNMENT: usize = 0x230;
    pub(super) const RELOCATABLE_KERNEL: usize = 0x234;
    pub(super) const XLOADFLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const PREF_ADDRESS: usize = 0x258;
    pub(super) const INIT_SIZE: usize = 0x260;
    /// End of the last field of protocol 2.12.
    pub(super) const END_2_12: usize = 0x268;
}

/// Offsets of the zero page's own fields (`boot_params`).
mod zero_page {
    pub(super) const ACPI_RSDP_ADDR: usize = 0x70;
    /// `struct efi_info`, eight words of 32 bits.
    pub(super) const EFI_INFO: usize = 0x1c0;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    /// End of the space for the setup header.
    pub(super) const HEADER_END: usize = 0x290;
    pub(super) const E820_TABLE: usize = 0x2d0;
    pub(super) const E820_ENTRY_BYTES: usize = 20;
    pub(super) const BYTES: usize = 4096;
}

/// Offsets in `screen_info` (Linux, `include/uapi/linux/screen_info.h`).
mod screen_info {
    pub(super) const MODE: usize = 0x06;
    pub(super) const COLUMNS: usize = 0x07;
    pub(super) const LINES: usize = 0x0e;
    pub(super) const KIND: usize = 0x0f;
    pub(super) const CHARACTER_HEIGHT: usize = 0x10;
    pub(super) const WIDTH: usize = 0x12;
    pub(super) const HEIGHT: usize = 0x14;
    pub(super) const BITS: usize = 0x16;
    pub(super) const START: usize = 0x18;
    pub(super) const SIZE: usize = 0x1c;
    pub(super) const ROW_BYTES: usize = 0x24;
    /// Bits and position of red, green, blue and the rest.
    pub(super) const COLOURS: usize = 0x26;
    pub(super) const CAPABILITIES: usize = 0x36;
    pub(super) const START_HIGH: usize = 0x3a;
    pub(super) const BYTES: usize = 0x40;

    /// A colour VGA in text mode.
    pub(super) const KIND_VGA: u8 = 1;
    /// A linear framebuffer, as VESA's BIOS extension sets it up.
    pub(super) const KIND_FRAMEBUFFER: u8 = 0x23;
    /// The size counts these.
    pub(super) const SIZE_UNIT: u32 = 64 << 10;
    pub(super) const HAS_START_HIGH: u32 = 1 << 1;
}

const MAGIC: &[u8; 4] = b"HdrS";
const SECTOR: usize = 512;
/// The unit of `syssize`.
const PARAGRAPH: u64 = 16;
/// First protocol with `xloadflags`.
const OLDEST_PROTOCOL: u16 = 0x020c;
const LOADED_HIGH: u8 = 1 << 0;
const XLF_KERNEL_64: u16 = 1 << 0;
/// Distance from the load address to the 64-bit entry.
const ENTRY_64: u64 = 0x200;
/// "Boot loader without a number of its own."
const LOADER_UNKNOWN: u8 = 0xff;

/// Whether `kernel` has the magic of a bzImage.
pub(crate) fn is_one(kernel: &[u8]) -> bool {
    array_at(kernel, header::MAGIC).as_ref() == Some(MAGIC)
}

/// A bzImage whose header was checked.
pub(crate) struct Image<'a> {
    file: &'a [u8],
    /// Offset of the self-unpacking part in the file.
    payload: usize,
    /// Load address, and the bytes that the kernel needs from there on.
    range: GpaRange,
    /// The kernel runs at any multiple of this above its preferred address.
    alignment: Option<u64>,
    width: Width,
    cmdline_size: u32,
    initrd_addr_max: u32,
}

/// The mode of the kernel's entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Bits32,
    Bits64,
}

impl Width {
    /// Distance from the load address to the entry.
    const fn entry(self) -> u64 {
        match self {
            Self::Bits32 => 0,
            Self::Bits64 => ENTRY_64,
        }
    }
}

impl<'a> Image<'a> {
    /// Checks the header of a file for which [`is_one`] holds.
    pub(crate) fn parse(file: &'a [u8]) -> Result<Self, Error> {
        let truncated = |needs: usize| Error::Truncated { needs: needs as u64, has: file.len() as u64 };
        let too_short = truncated(header::END_2_12);

        let version = u16_at(file, header::VERSION).ok_or(too_short)?;
        if version < OLDEST_PROTOCOL {
            return Err(Error::ProtocolTooOld { version });
        }
        // All fields read below are before its end.
        if file.len() < header::END_2_12 {
            return Err(too_short);
        }
        let byte = |offset: usize| file.get(offset).copied().ok_or(too_short);
        if byte(header::LOADFLAGS)? & LOADED_HIGH == 0 {
            return Err(Error::LoadedLow);
        }
        let has_entry_64 = u16_at(file, header::XLOADFLAGS).ok_or(too_short)? & XLF_KERNEL_64 != 0;
        let width = if has_entry_64 { Width::Bits64 } else { Width::Bits32 };

        // A setup_sects of 0 means 4, for kernels older than the protocol.
        let setup_sects = match byte(header::SETUP_SECTS)? {
            0 => 4,
            sectors => usize::from(sectors),
        };
        let payload = (setup_sects + 1) * SECTOR;
        let syssize = u64::from(u32_at(file, header::SYSSIZE).ok_or(too_short)?);
        let has = file.len() as u64;
        // syssize counts paragraphs, so the file may end within the last one. memtest86+ 6.10 does, and boot loaders
        // accept it. Its entry must exist, whatever syssize says.
        let paragraphs = has.saturating_sub(payload as u64).div_ceil(PARAGRAPH);
        let entry_is_there = payload as u64 + width.entry() < has;
        if paragraphs < syssize || !entry_is_there {
            let needs = payload as u64 + (syssize * PARAGRAPH).max(width.entry() + 1);
            return Err(Error::Truncated { needs, has });
        }

        // The file may continue after syssize, for example with a signature. Everything is loaded, and must fit.
        let start = u64_at(file, header::PREF_ADDRESS).ok_or(too_short)?;
        let init_size = u64::from(u32_at(file, header::INIT_SIZE).ok_or(too_short)?);
        let bytes = init_size.max(has - payload as u64);
        let range = GpaRange::new(Gpa(start), bytes)
            .filter(|range| HIGH_RAM <= range.start && range.end() <= HOLE)
            .ok_or(Error::LoadAddress { start, bytes })?;

        let alignment = u64::from(u32_at(file, header::KERNEL_ALIGNMENT).ok_or(too_short)?);
        let is_relocatable = byte(header::RELOCATABLE_KERNEL)? != 0 && alignment.is_power_of_two();

        Ok(Self {
            file,
            payload,
            range,
            alignment: is_relocatable.then_some(alignment),
            width,
            cmdline_size: u32_at(file, header::CMDLINE_SIZE).ok_or(too_short)?,
            initrd_addr_max: u32_at(file, header::INITRD_ADDR_MAX).ok_or(too_short)?,
        })
    }

    /// The version string in the setup code, up to its NUL; `None` if the header's pointer is invalid.
    pub(crate) fn version(&self) -> Option<String> {
        let offset = usize::from(u16_at(self.file, header::KERNEL_VERSION)?).checked_add(SECTOR)?;
        let text = self.file.get(offset..self.payload)?;
        let text = text.split(|byte| *byte == 0).next()?;
        let printable = !text.is_empty() && text.iter().all(|byte| matches!(byte, b' '..=b'~'));
        printable.then(|| text.iter().copied().map(char::from).collect())
    }

    pub(crate) fn range(&self) -> GpaRange {
        self.range
    }

    /// Moves the kernel to its lowest possible address within `ram`. Returns whether there is one.
    pub(crate) fn place(&mut self, ram: impl Iterator<Item = GpaRange>) -> bool {
        let (preferred, bytes) = (self.range.start.0, self.range.bytes());
        let lowest = |ram: GpaRange| {
            let start = ram.start.0.max(preferred).checked_next_multiple_of(self.alignment.unwrap_or(1))?;
            let range = GpaRange::new(Gpa(start), bytes).filter(|range| range.end() <= ram.end())?;
            (self.alignment.is_some() || start == preferred).then_some(range)
        };
        let found = ram.filter_map(lowest).min_by_key(|range| range.start);
        self.range = found.unwrap_or(self.range);
        found.is_some()
    }

    pub(crate) fn cmdline_limit(&self) -> usize {
        usize::try_from(self.cmdline_size).unwrap_or(usize::MAX).min(CMDLINE_BYTES - 1)
    }

    pub(crate) fn initrd_end(&self) -> u64 {
        u64::from(self.initrd_addr_max) + 1
    }

    pub(crate) fn entry(&self, boot: &Boot<'_>) -> Mode {
        let at = self.range.start.0 + self.width.entry();
        let gdt = descriptors::gdtr(boot.place(BOOT_GDT));
        let information = boot.place(BOOT_INFORMATION);
        match self.width {
            Width::Bits64 => Mode::Long64 { rip: Gpa(at), rsi: information, cr3: boot.place(BOOT_PAGE_TABLES), gdt },
            Width::Bits32 => Mode::Protected32 { eip: low(at), ebx: 0, esi: low(information.0), gdt },
        }
    }

    pub(crate) fn load(&self, memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
        memory.write(self.range.start, &self.file[self.payload..])
    }

    pub(crate) fn write_zero_page(
        &self,
        boot: &Boot<'_>,
        initrd: Option<GpaRange>,
        memory: &mut impl GuestMemory,
    ) -> Result<(), OutsideMemory> {
        let mut page = [0; zero_page::BYTES];

        // The header from the file, up to its end.
        let header_end = header::MAGIC + usize::from(self.file[header::JUMP + 1]);
        let header =
            header::SETUP_SECTS..header_end.clamp(header::END_2_12, zero_page::HEADER_END).min(self.file.len());
        put(&mut page, header.start, &self.file[header.clone()]);

        page[header::TYPE_OF_LOADER] = LOADER_UNKNOWN;
        put(&mut page, header::CMD_LINE_PTR, &low(boot.place(CMDLINE).0).to_le_bytes());
        if let Some(initrd) = initrd {
            put(&mut page, header::RAMDISK_IMAGE, &low(initrd.start.0).to_le_bytes());
            put(&mut page, header::RAMDISK_SIZE, &low(initrd.bytes()).to_le_bytes());
        }

        if let Some(screen) = boot.machine.and_then(|machine| machine.screen) {
            put(&mut page, 0, &screen_info(screen));
        }
        put(&mut page, zero_page::ACPI_RSDP_ADDR, &boot.rsdp().0.to_le_bytes());
        if let Some(efi) = boot.machine.and_then(|machine| machine.efi) {
            put(&mut page, zero_page::EFI_INFO, &efi_info(efi));
        }
        let mut entries = 0;
        for entry in boot.memory_map().take(MAP_LIMIT) {
            let MapEntry { range, kind } = entry;
            let at = zero_page::E820_TABLE + usize::from(entries) * zero_page::E820_ENTRY_BYTES;
            put(&mut page, at, &range.start.0.to_le_bytes());
            put(&mut page, at + 8, &range.bytes().to_le_bytes());
            put(&mut page, at + 16, &(kind as u32).to_le_bytes());
            entries += 1;
        }
        page[zero_page::E820_ENTRIES] = entries;

        memory.write(boot.place(BOOT_INFORMATION), &page)
    }
}

/// Linux' `screen_info`, the first bytes of the zero page.
fn screen_info(screen: Screen) -> [u8; screen_info::BYTES] {
    let mut info = [0; screen_info::BYTES];
    match screen {
        Screen::Text => {
            info[screen_info::MODE] = 3;
            info[screen_info::COLUMNS] = 80;
            info[screen_info::LINES] = 25;
            info[screen_info::KIND] = screen_info::KIND_VGA;
            put(&mut info, screen_info::CHARACTER_HEIGHT, &16_u16.to_le_bytes());
        }
        Screen::Pixels { start, width, height, row_bytes, shifts } => {
            info[screen_info::KIND] = screen_info::KIND_FRAMEBUFFER;
            for (at, value) in [
                (screen_info::WIDTH, width),
                (screen_info::HEIGHT, height),
                (screen_info::BITS, 32),
                (screen_info::ROW_BYTES, row_bytes),
            ] {
                put(&mut info, at, &value.to_le_bytes());
            }
            let units = (u32::from(row_bytes) * u32::from(height)).div_ceil(screen_info::SIZE_UNIT);
            put(&mut info, screen_info::SIZE, &units.to_le_bytes());
            let [low, high] = [start.0 & u64::from(u32::MAX), start.0 >> 32];
            for (at, half) in [(screen_info::START, low), (screen_info::START_HIGH, high)] {
                put(&mut info, at, &half.to_le_bytes()[..4]);
            }
            let capabilities = screen_info::HAS_START_HIGH;
            put(&mut info, screen_info::CAPABILITIES, &capabilities.to_le_bytes());
            // The rest of a pixel means nothing.
            let rest = (0..32).step_by(8).find(|shift| !shifts.contains(shift)).unwrap_or(24);
            for (colour, shift) in shifts.into_iter().chain([rest]).enumerate() {
                put(&mut info, screen_info::COLOURS + 2 * colour, &[8, shift]);
            }
        }
    }
    info
}

/// Linux' `efi_info`.
fn efi_info(efi: Efi) -> [u8; 32] {
    const SIGNATURE: u32 = u32::from_le_bytes(*b"EL64");
    const VERSION: u32 = 1;
    let halves = |value: u64| [value & u64::from(u32::MAX), value >> 32].map(low);
    let ([table, table_high], [map, map_high]) = (halves(efi.system_table.0), halves(efi.memory_map.start.0));
    let bytes = low(efi.memory_map.bytes());
    let words = [SIGNATURE, table, efi.descriptor_bytes, VERSION, map, bytes, table_high, map_high];
    let mut info = [0; 32];
    info.chunks_exact_mut(4).zip(words).for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
    info
}

/// An address or length below 4 GiB, as a 32-bit field.
fn low(value: u64) -> u32 {
    u32::try_from(value).expect("boot information, command line, kernel and initrd lie below 4 GiB")
}

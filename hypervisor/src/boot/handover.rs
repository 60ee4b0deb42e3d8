//! The boot loader's data about the machine, in a form that does not depend on the loader.
//!
//! Everything is copied, because the loader's memory may be reused from then on. Only the payload stays in place,
//! outside the pool of free memory.

use core::fmt;

use addr::{Hpa, HpaRange};

use crate::memory_map::{Full, Kind, MemoryMap};

/// Longest command line that is kept, in bytes.
const COMMAND_LINE_LIMIT: usize = 4096;

/// The loader's data.
pub struct Handover {
    /// The RAM, and its reserved parts.
    pub memory: MemoryMap,
    /// The boot module with the VMs to run.
    pub payload: Option<HpaRange>,
    /// Where the ACPI tables begin.
    pub root_table: Option<RootTable>,
    /// Where the loader has set up a screen.
    pub framebuffer: Option<Framebuffer>,
    /// The boot options.
    pub command_line: CommandLine,
}

/// A framebuffer with 32 bits for each pixel, 8 of them for each colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framebuffer {
    /// Its first pixel.
    pub start: Hpa,
    /// Visible width, in pixels.
    pub width: u16,
    /// Visible height, in pixels.
    pub height: u16,
    /// From one row to the next, in pixels.
    pub row_pixels: u32,
    /// Where in a pixel red, green and blue begin, in bits.
    pub shifts: [u8; 3],
}

impl Framebuffer {
    /// The framebuffer at `start`, with rows of `pitch` bytes and `width` pixels of `bits`; for each colour its
    /// position and its number of bits. `None` for another kind, or invalid values.
    pub fn new(start: u64, pitch: u32, size: (u32, u32), bits: u8, colours: [(u8, u8); 3]) -> Option<Self> {
        let (width, height) = (u16::try_from(size.0).ok()?, u16::try_from(size.1).ok()?);
        let is_known = bits == 32 && colours.iter().all(|&(shift, bits)| bits == 8 && shift <= 24);
        let fits = pitch.is_multiple_of(4) && pitch / 4 >= size.0 && start.is_multiple_of(4);
        let framebuffer =
            Self { start: Hpa(start), width, height, row_pixels: pitch / 4, shifts: colours.map(|(shift, _)| shift) };
        let is_there =
            start != 0 && HpaRange::new(Hpa(start), framebuffer.bytes()).is_some_and(|range| range.end().0 < END);
        (is_known && fits && is_there && width != 0 && height != 0).then_some(framebuffer)
    }

    /// Bytes from the first pixel to behind the last row.
    pub const fn bytes(&self) -> u64 {
        self.row_pixels as u64 * 4 * self.height as u64
    }
}

/// No framebuffer is beyond this address (16 TiB).
const END: u64 = 1 << 44;

/// Where ACPI's tables begin (ACPI 5.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootTable {
    /// The root pointer is there.
    Rsdp(Hpa),
    /// A root pointer of this revision names this RSDT (revision 0) or XSDT.
    Sdt {
        /// The root pointer's revision.
        revision: u8,
        /// Where the table is.
        address: Hpa,
    },
}

/// A file that the loader has put into memory.
#[derive(Clone, Copy, Debug)]
pub struct Module<'a> {
    /// Its first byte.
    pub start: Hpa,
    /// Behind its last byte.
    pub end: Hpa,
    /// The text after the file's name in the loader's configuration, as in `module2 /boot/payload payload`.
    pub command_line: &'a str,
}

/// The command line of the module that is the payload begins so.
const PAYLOAD: &str = "payload";

/// The command line.
pub struct CommandLine {
    bytes: [u8; COMMAND_LINE_LIMIT],
    length: usize,
}

/// Why the loader's data is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Neither a PVH start info nor a multiboot2 boot information is where one should be.
    NoLoader,
    /// The data is damaged.
    Damaged,
    /// It passed an address beyond the first 4 GiB, or none.
    OutOfReach(u64),
    /// It has no memory map.
    NoMemoryMap,
    /// The memory map has too many ranges that are not RAM. Without them the map would claim too much RAM.
    TooManyRanges,
    /// Several modules could be the payload.
    SeveralPayloads,
    /// The payload overlaps the image.
    PayloadOverImage(HpaRange),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLoader => {
                f.write_str("the boot loader passed neither a PVH start info nor a multiboot2 boot information")
            }
            Self::Damaged => f.write_str("the boot loader's data is damaged"),
            Self::OutOfReach(address) => write!(f, "the boot loader's data at {address:#x} is out of reach"),
            Self::NoMemoryMap => f.write_str("the boot loader passed no memory map"),
            Self::TooManyRanges => f.write_str("the memory map has too many ranges"),
            Self::SeveralPayloads => {
                f.write_str("several boot modules, but not exactly one is called payload: write `module2 FILE payload`")
            }
            Self::PayloadOverImage(range) => {
                write!(f, "the boot module at {} overlaps the hypervisor's image", range.start)
            }
        }
    }
}

impl Default for Handover {
    fn default() -> Self {
        Self::new()
    }
}

impl Handover {
    /// No data yet.
    pub const fn new() -> Self {
        Self {
            memory: MemoryMap::new(),
            payload: None,
            root_table: None,
            framebuffer: None,
            command_line: CommandLine { bytes: [0; COMMAND_LINE_LIMIT], length: 0 },
        }
    }

    /// Chooses the payload among these modules, for an image at `image`: the module of that name, or the only one.
    ///
    /// # Errors
    /// There are several candidates, or the module ends before it begins, or it overlaps the image.
    pub fn set_payload<'a>(
        &mut self,
        modules: impl Iterator<Item = Module<'a>> + Clone,
        image: &HpaRange,
    ) -> Result<(), Refused> {
        let is_named = |module: &Module<'_>| module.command_line.split_ascii_whitespace().next() == Some(PAYLOAD);
        let (at, module) = match (modules.clone().count(), modules.clone().filter(is_named).count()) {
            (0, _) => return Ok(()),
            (1, _) => modules.clone().enumerate().next(),
            (_, 1) => modules.clone().enumerate().find(|(_, module)| is_named(module)),
            _ => None,
        }
        .ok_or(Refused::SeveralPayloads)?;
        for (_, other) in modules.enumerate().filter(|(other, _)| *other != at) {
            log::warn!("the boot module '{}' is not used", other.command_line);
        }
        let bytes = module.end.0.checked_sub(module.start.0).ok_or(Refused::Damaged)?;
        let range = HpaRange::new(module.start, bytes).ok_or(Refused::Damaged)?;
        if range.start < image.end() && image.start < range.end() {
            return Err(Refused::PayloadOverImage(range));
        }
        self.payload = Some(range);
        Ok(())
    }

    /// Copies the memory map: start and bytes of each range, and its E820 type.
    ///
    /// # Errors
    /// There is no room for a range that is not RAM.
    pub fn set_memory<M: Iterator<Item = (u64, u64, u32)>>(&mut self, ranges: impl Fn() -> M) -> Result<(), Refused> {
        let of_kind = |wants_ram: bool| {
            ranges().filter_map(move |(start, bytes, number)| {
                let kind = Kind::of_e820(number);
                let range = HpaRange::new(Hpa(start), bytes)?;
                ((kind == Kind::Ram) == wants_ram).then_some((range, kind))
            })
        };
        // RAM comes last, because missing RAM does no harm.
        let mut all = of_kind(false).chain(of_kind(true));
        all.try_for_each(|(range, kind)| self.memory.add(range, kind)).map_err(|Full| Refused::TooManyRanges)
    }
}

impl CommandLine {
    /// Copies `bytes` up to a NUL, as far as they fit.
    pub fn set(&mut self, bytes: impl Iterator<Item = u8>) {
        self.length = 0;
        for (slot, byte) in self.bytes.iter_mut().zip(bytes.take_while(|&byte| byte != 0)) {
            *slot = byte;
            self.length += 1;
        }
    }

    /// The command line up to the first byte that is not UTF-8.
    pub fn text(&self) -> &str {
        let bytes = &self.bytes[..self.length];
        match str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{COMMAND_LINE_LIMIT, Framebuffer, Handover, Module, PAYLOAD, Refused};
    use addr::{Hpa, HpaRange};

    const PAGE: u64 = 0x1000;
    const MIB: u64 = 1 << 20;

    /// The chosen payload among modules with these MiB, from and to, and these command lines; the image is at 2 to 5
    /// MiB.
    fn chosen(modules: &[(u64, u64, &str)]) -> Result<Option<HpaRange>, Refused> {
        let module =
            |&(start, end, command_line)| Module { start: Hpa(start * MIB), end: Hpa(end * MIB), command_line };
        let mut handover = Handover::new();
        handover.set_payload(modules.iter().map(module), &range(2, 5))?;
        Ok(handover.payload)
    }

    fn range(start: u64, end: u64) -> HpaRange {
        HpaRange::new(Hpa(start * MIB), (end - start) * MIB).expect("start is before end")
    }

    #[test]
    fn payload_is_the_only_module_or_the_one_called_so() {
        assert_eq!(chosen(&[]), Ok(None));
        for name in ["", "whatever", PAYLOAD] {
            assert_eq!(chosen(&[(16, 18, name)]), Ok(Some(range(16, 18))));
        }
        assert_eq!(chosen(&[(16, 18, "microcode"), (32, 34, PAYLOAD)]), Ok(Some(range(32, 34))));
        assert_eq!(chosen(&[(16, 18, "payload of mine"), (32, 34, "")]), Ok(Some(range(16, 18))));
        assert_eq!(chosen(&[(16, 18, "a"), (32, 34, "b")]), Err(Refused::SeveralPayloads));
        assert_eq!(chosen(&[(16, 18, PAYLOAD), (32, 34, PAYLOAD)]), Err(Refused::SeveralPayloads));
    }

    #[test]
    fn payload_over_the_image_or_with_its_end_first_is_refused() {
        for (start, end, is_over) in
            [(0, 2, false), (1, 3, true), (3, 4, true), (4, 9, true), (1, 9, true), (5, 6, false)]
        {
            let expected =
                if is_over { Err(Refused::PayloadOverImage(range(start, end))) } else { Ok(Some(range(start, end))) };
            assert_eq!(chosen(&[(start, end, "")]), expected);
        }
        assert_eq!(chosen(&[(9, 8, "")]), Err(Refused::Damaged));
    }

    #[test]
    fn command_line_ends_at_nul_at_bad_utf8_and_at_the_limit() {
        let mut handover = Handover::new();
        for (bytes, text) in [(&b"log=debug\0x"[..], "log=debug"), (b"a=b \xff c", "a=b "), (b"", "")] {
            handover.command_line.set(bytes.iter().copied());
            assert_eq!(handover.command_line.text(), text);
        }
        handover.command_line.set(core::iter::repeat(b'x'));
        assert_eq!(handover.command_line.text().len(), COMMAND_LINE_LIMIT);
    }

    #[test]
    fn ram_that_has_no_room_is_left_out_and_what_is_no_ram_is_not() {
        let crumbs = |number: u32| (0..10_000u64).map(move |at| (at * 2 * PAGE, PAGE, number));
        let mut handover = Handover::new();
        assert_eq!(handover.set_memory(|| crumbs(1)), Ok(()));
        assert!(handover.memory.loss().is_some());

        let mut handover = Handover::new();
        assert_eq!(handover.set_memory(|| crumbs(2)), Err(Refused::TooManyRanges));

        // Reserved ranges are kept, though they come last.
        let mut handover = Handover::new();
        let map = || crumbs(1).chain([(0, 20_000 * PAGE, 2)]);
        assert!(handover.set_memory(map).is_ok());
        assert_eq!(handover.memory.ram().iter().count(), 0);
    }

    #[test]
    fn framebuffers_of_other_kinds_and_impossible_ones_are_not_used() {
        let usual = [(16, 8), (8, 8), (0, 8)];
        let new = |start, pitch, size, bits, colours| Framebuffer::new(start, pitch, size, bits, colours);
        let known = new(0xfd00_0000, 4096, (1024, 768), 32, usual).expect("is a framebuffer");
        assert_eq!((known.bytes(), known.row_pixels, known.shifts), (4096 * 768, 1024, [16, 8, 0]));
        for unusable in [
            new(0, 4096, (1024, 768), 32, usual),
            new(0xfd00_0002, 4096, (1024, 768), 32, usual),
            new(0xfd00_0000, 4092, (1024, 768), 32, usual),
            new(0xfd00_0000, 4098, (1024, 768), 32, usual),
            new(0xfd00_0000, 4096, (0, 768), 32, usual),
            new(0xfd00_0000, 4096, (1024, 0), 32, usual),
            new(0xfd00_0000, 4096, (1024, 1 << 16), 32, usual),
            new(0xfd00_0000, 4096, (1024, 768), 24, usual),
            new(0xfd00_0000, 4096, (1024, 768), 32, [(16, 8), (8, 8), (25, 8)]),
            new(0xfd00_0000, 4096, (1024, 768), 32, [(11, 5), (5, 6), (0, 5)]),
            new(u64::MAX - 3, 4096, (1024, 768), 32, usual),
            new(1 << 45, 4096, (1024, 768), 32, usual),
        ] {
            assert_eq!(unusable, None);
        }
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_are_ignored() {
        let mut handover = Handover::new();
        let ranges = [(u64::MAX, 2, 1), (0xfd_0000_0000, 3 << 32, 2), (0x10_0000, 0x10_0000, 1)];
        assert_eq!(handover.set_memory(|| ranges.into_iter()), Ok(()));
        assert_eq!(handover.memory.ram().iter().count(), 1);
    }
}

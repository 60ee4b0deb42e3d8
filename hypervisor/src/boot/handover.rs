//! The boot loader's data about the machine, in a form that does not depend on the loader.
//!
//! Everything is copied, because the loader's memory may be reused from then on. Only the boot modules stay in place,
//! outside the pool of free memory.

use core::fmt;

use addr::{Hpa, HpaRange, PAGE_BYTES};

use super::runtime_services::RuntimeServices;
use crate::memory_map::{Full, Kind, MemoryMap};

/// Longest command line that is kept, in bytes.
const COMMAND_LINE_LIMIT: usize = 4096;

/// The loader's data.
pub struct Handover {
    /// The RAM, and its reserved parts.
    pub memory: MemoryMap,
    /// The boot module with the VMs to run.
    pub payload: Option<HpaRange>,
    /// The other boot modules.
    others: Others,
    /// Where the ACPI tables begin.
    pub root_table: Option<RootTable>,
    /// Where the loader has set up a screen.
    pub framebuffer: Option<Framebuffer>,
    /// What UEFI firmware leaves for an operating system.
    pub runtime_services: RuntimeServices,
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

impl Module<'_> {
    fn range(&self) -> Result<HpaRange, Refused> {
        let bytes = self.end.0.checked_sub(self.start.0).ok_or(Refused::Damaged)?;
        HpaRange::new(self.start, bytes).ok_or(Refused::Damaged)
    }
}

/// The pages that `range` touches, as far as they are below the last page of the address space.
fn pages(range: &HpaRange) -> HpaRange {
    let start = range.start.0 & !(PAGE_BYTES - 1);
    let end = range.end().0.checked_next_multiple_of(PAGE_BYTES).unwrap_or(range.end().0);
    HpaRange::new(Hpa(start), end - start).unwrap_or(*range)
}

/// The command line of the module that is the payload begins so.
const PAYLOAD: &str = "payload";

/// The command line.
pub struct CommandLine {
    bytes: [u8; COMMAND_LINE_LIMIT],
    length: usize,
}

/// Maximum number of modules besides the payload: two for each of several VMs.
const OTHERS_LIMIT: usize = 16;
/// Maximum length of their command lines together, in bytes. Linux on x86 takes 2047 for a kernel.
const OTHERS_TEXT_LIMIT: usize = 8192;

/// The modules besides the payload.
struct Others {
    /// Where each is, and the end of its command line in `text`; it begins where that of the module before it ends.
    modules: [Option<(HpaRange, usize)>; OTHERS_LIMIT],
    text: [u8; OTHERS_TEXT_LIMIT],
}

/// There is no room for a module.
struct NoRoom;

impl Others {
    const fn new() -> Self {
        Self { modules: [None; OTHERS_LIMIT], text: [0; OTHERS_TEXT_LIMIT] }
    }

    fn add(&mut self, range: HpaRange, command_line: &str) -> Result<(), NoRoom> {
        let start = self.modules.iter().flatten().map(|&(_, end)| end).max().unwrap_or(0);
        let end = start + command_line.len();
        let free = self.modules.iter_mut().find(|slot| slot.is_none()).ok_or(NoRoom)?;
        self.text.get_mut(start..end).ok_or(NoRoom)?.copy_from_slice(command_line.as_bytes());
        *free = Some((range, end));
        Ok(())
    }

    fn iter(&self) -> impl Iterator<Item = (&HpaRange, &str)> {
        let mut start = 0;
        self.modules.iter().flatten().map(move |(range, end)| {
            let line = str::from_utf8(&self.text[start..*end]).unwrap_or_default();
            start = *end;
            (range, line)
        })
    }
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
    /// A module overlaps the image.
    ModuleOverImage(HpaRange),
    /// A module has a page of another one.
    ModuleOverModule(HpaRange),
    /// There are too many modules, or their command lines are too long.
    TooManyModules,
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
            Self::ModuleOverImage(range) => {
                write!(f, "the boot module at {} overlaps the hypervisor's image", range.start)
            }
            Self::ModuleOverModule(range) => {
                write!(f, "the boot module at {} shares a page with another one", range.start)
            }
            Self::TooManyModules => write!(
                f,
                "too many boot modules: there is room for a payload, {OTHERS_LIMIT} other modules, and command lines \
                 of {OTHERS_TEXT_LIMIT} bytes"
            ),
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
            others: Others::new(),
            root_table: None,
            framebuffer: None,
            runtime_services: RuntimeServices::none(),
            command_line: CommandLine { bytes: [0; COMMAND_LINE_LIMIT], length: 0 },
        }
    }

    /// Takes the loader's modules, for an image at `image`. The payload is the module of that name, or the only one.
    ///
    /// # Errors
    /// There are several candidates for the payload, or too many modules, or a module ends before it begins, or it
    /// overlaps the image or another module.
    pub fn set_modules<'a>(
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
        let payload = module.range()?;
        if payload.overlaps(image) {
            return Err(Refused::ModuleOverImage(payload));
        }
        self.payload = Some(payload);
        for (_, other) in modules.enumerate().filter(|(other, _)| *other != at) {
            let range = other.range()?;
            if range.overlaps(image) {
                return Err(Refused::ModuleOverImage(range));
            }
            // Modules begin at page boundaries, as our multiboot2 header demands. Pages with two owners could not be
            // given back.
            if self.modules().any(|module| pages(module).overlaps(&pages(&range))) {
                return Err(Refused::ModuleOverModule(range));
            }
            self.others.add(range, other.command_line).map_err(|NoRoom| Refused::TooManyModules)?;
        }
        Ok(())
    }

    /// Where all modules are, the payload first.
    pub fn modules(&self) -> impl Iterator<Item = &HpaRange> {
        self.payload.iter().chain(self.others().map(|(range, _)| range))
    }

    /// The modules besides the payload, with their command lines.
    pub fn others(&self) -> impl Iterator<Item = (&HpaRange, &str)> {
        self.others.iter()
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
        handover.set_modules(modules.iter().map(module), &range(2, 5))?;
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
                if is_over { Err(Refused::ModuleOverImage(range(start, end))) } else { Ok(Some(range(start, end))) };
            assert_eq!(chosen(&[(start, end, "")]), expected);
        }
        assert_eq!(chosen(&[(9, 8, "")]), Err(Refused::Damaged));
    }

    /// The handover's other modules among these modules: their MiB from and to, and their command lines.
    fn others(modules: &[(u64, u64, &str)]) -> Result<Vec<(u64, u64, String)>, Refused> {
        let module =
            |&(start, end, command_line)| Module { start: Hpa(start * MIB), end: Hpa(end * MIB), command_line };
        let mut handover = Handover::new();
        handover.set_modules(modules.iter().map(module), &range(2, 5))?;
        assert_eq!(handover.modules().count(), modules.len());
        let shown = |(range, line): (&HpaRange, &str)| (range.start.0 / MIB, range.end().0 / MIB, line.to_string());
        Ok(handover.others().map(shown).collect())
    }

    #[test]
    fn other_modules_are_kept_with_their_command_lines() {
        let found = others(&[(20, 30, "kernel root=/dev/sda1"), (16, 18, PAYLOAD), (30, 31, ""), (40, 41, "initrd")]);
        let expected = [(20, 30, "kernel root=/dev/sda1"), (30, 31, ""), (40, 41, "initrd")];
        assert_eq!(found, Ok(expected.map(|(start, end, line)| (start, end, line.to_string())).to_vec()));
    }

    #[test]
    fn other_modules_over_the_image_or_another_module_or_without_room_are_refused() {
        let with = |others: &[(u64, u64, &'static str)]| self::others(&[&[(16, 18, PAYLOAD)], others].concat());
        assert_eq!(with(&[(4, 6, "kernel")]), Err(Refused::ModuleOverImage(range(4, 6))));
        assert_eq!(with(&[(17, 20, "kernel")]), Err(Refused::ModuleOverModule(range(17, 20))));
        assert_eq!(with(&[(20, 22, "kernel"), (21, 30, "initrd")]), Err(Refused::ModuleOverModule(range(21, 30))));
        assert_eq!(with(&[(20, 19, "kernel")]), Err(Refused::Damaged));
        let many: Vec<_> = (0..super::OTHERS_LIMIT as u64 + 1).map(|at| (20 + at, 21 + at, "x")).collect();
        assert_eq!(with(&many[1..]).map(|others| others.len()), Ok(super::OTHERS_LIMIT));
        assert_eq!(with(&many), Err(Refused::TooManyModules));
        let long: &'static str = "x".repeat(super::OTHERS_TEXT_LIMIT).leak();
        assert_eq!(with(&[(20, 21, long)]).map(|others| others[0].2.len()), Ok(long.len()));
        assert_eq!(with(&[(20, 21, long), (21, 22, "x")]), Err(Refused::TooManyModules));
    }

    #[test]
    fn modules_that_share_a_page_are_refused() {
        let module = |start, end, command_line| Module { start: Hpa(start), end: Hpa(end), command_line };
        let mut handover = Handover::new();
        let modules = [module(0x10_0000, 0x10_0010, PAYLOAD), module(0x10_0010, 0x10_0020, "kernel")];
        let refused = HpaRange::new(Hpa(0x10_0010), 16).expect("a range");
        let result = handover.set_modules(modules.into_iter(), &range(2, 5));
        assert_eq!(result, Err(Refused::ModuleOverModule(refused)));
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

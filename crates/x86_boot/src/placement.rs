//! Recognizes the kind of kernel, and decides whether and where everything fits. All refusals happen here.

use abi::payload::{ApicMode, MAX_VCPUS};
use addr::{Gpa, GpaRange, PAGE_BYTES};

use crate::layout::{BOOT_AREA_BYTES, HIGH_RAM, HOLE, MapKind, RAM_ABOVE_4G};
use crate::{Boot, Error, Format, KernelInfo, MAX_XAPIC_VCPUS, bzimage, checked_range, pvh};

/// A kernel file whose headers were checked.
pub(crate) enum Image<'a> {
    BzImage(bzimage::Image<'a>),
    Pvh(pvh::Image<'a>),
}

impl<'a> Image<'a> {
    pub(crate) fn parse(kernel: &'a [u8]) -> Result<Self, Error> {
        if kernel.starts_with(&elf::abi::ELFMAGIC) {
            pvh::Image::parse(kernel).map(Self::Pvh)
        } else if bzimage::is_one(kernel) {
            bzimage::Image::parse(kernel).map(Self::BzImage)
        } else {
            let mut first = [0; 4];
            first.iter_mut().zip(kernel).for_each(|(to, from)| *to = *from);
            Err(Error::NotAKernel { first, bytes: kernel.len() })
        }
    }

    pub(crate) fn info(&self) -> KernelInfo {
        let (format, version) = match self {
            Self::BzImage(image) => (Format::BzImage, image.version()),
            Self::Pvh(_) => (Format::PvhElf, None),
        };
        KernelInfo { format, version, memory_bytes: self.range().end().0, cmdline_limit: self.cmdline_limit() }
    }

    /// The kernel's memory until it moves itself; within `HIGH_RAM..HOLE`.
    pub(crate) fn range(&self) -> GpaRange {
        match self {
            Self::BzImage(image) => image.range(),
            Self::Pvh(image) => image.range(),
        }
    }

    fn cmdline_limit(&self) -> usize {
        match self {
            Self::BzImage(image) => image.cmdline_limit(),
            Self::Pvh(_) => pvh::CMDLINE_LIMIT,
        }
    }

    /// First address that the kernel does not accept as part of an initrd.
    fn initrd_end(&self) -> u64 {
        match self {
            Self::BzImage(image) => image.initrd_end(),
            Self::Pvh(_) => HOLE.0,
        }
    }
}

/// A kernel and an initrd with their places in a guest of known size.
pub(crate) struct Placement<'a> {
    pub(crate) image: Image<'a>,
    pub(crate) initrd: Option<(GpaRange, &'a [u8])>,
}

impl<'a> Placement<'a> {
    pub(crate) fn of(boot: &Boot<'a>) -> Result<Self, Error> {
        check_vcpus(boot)?;
        let mut image = Image::parse(boot.kernel)?;
        check_cmdline(boot.cmdline, image.cmdline_limit())?;
        if boot.machine.is_some() {
            let initrd = boot.initrd.filter(|initrd| !initrd.is_empty());
            let initrd = on_own_machine(boot, &mut image, initrd)?;
            return Ok(Self { image, initrd });
        }

        let kernel = image.range();
        let (kept, ram_end) = match boot.synic_ram() {
            None => (0, boot.memory_bytes.min(HOLE.0)),
            Some(kept) => (kept.bytes(), kept.start.0),
        };
        if kernel.end().0 > ram_end {
            return Err(Error::MemoryTooSmall { needs: kernel.end().0 + kept, has: boot.memory_bytes });
        }

        let initrd = match boot.initrd {
            None | Some([]) => None,
            Some(initrd) => {
                let end = ram_end.min(image.initrd_end());
                Some((place_initrd(initrd, kernel.end().0, end)?, initrd))
            }
        };
        Ok(Self { image, initrd })
    }
}

/// Finds places for kernel and initrd in the RAM of a machine whose map is not ours.
fn on_own_machine<'a>(
    boot: &Boot<'a>,
    image: &mut Image<'_>,
    initrd: Option<&'a [u8]>,
) -> Result<Option<(GpaRange, &'a [u8])>, Error> {
    let Image::BzImage(kernel) = image else { return Err(Error::NotRelocatable) };
    let area = checked_range(boot.place(Gpa(0)).0, boot.place(Gpa(BOOT_AREA_BYTES)).0);
    let ram = || {
        let usable = boot.memory_map().filter(|entry| entry.kind == MapKind::Ram).map(|entry| entry.range);
        // All of it must be in the boot page tables, and not below 1 MiB.
        usable
            .flat_map(|range| without(range, area))
            .filter_map(|range| checked_range(range.start.0.max(HIGH_RAM.0), range.end().0.min(RAM_ABOVE_4G.0)))
    };
    let largest = || ram().map(|range| range.end().0 - range.start.0).max().unwrap_or(0);
    if !kernel.place(ram()) {
        return Err(Error::NoRoom { needs: kernel.range().bytes(), has: largest() });
    }
    let Some(initrd) = initrd else { return Ok(None) };
    let (taken, limit) = (kernel.range(), kernel.initrd_end());
    let free = ram().flat_map(|range| without(range, Some(taken)));
    let placed = free.filter_map(|range| place_initrd(initrd, range.start.0, range.end().0.min(limit)).ok());
    let range = placed.max_by_key(|range| range.start);
    let too_large = Error::InitrdTooLarge { bytes: initrd.len() as u64, room: largest() };
    Ok(Some((range.ok_or(too_large)?, initrd)))
}

/// The parts of `range` before and after `taken`.
fn without(range: GpaRange, taken: Option<GpaRange>) -> impl Iterator<Item = GpaRange> {
    let (start, end) = (range.start.0, range.end().0);
    let parts = match taken.filter(|taken| taken.overlaps(&range)) {
        None => [(start, end), (end, end)],
        Some(taken) => [(start, taken.start.0), (taken.end().0, end)],
    };
    let parts = parts.map(|(start, end)| checked_range(start, end).filter(|part| part.bytes() > 0));
    parts.into_iter().flatten()
}

/// As high as possible, so that the kernel has the low memory to itself; at a page's start, as Linux requires.
fn place_initrd(initrd: &[u8], kernel_end: u64, end: u64) -> Result<GpaRange, Error> {
    let bytes = initrd.len() as u64;
    let lowest = kernel_end.next_multiple_of(PAGE_BYTES);
    let room = end.saturating_sub(lowest);
    let too_large = Error::InitrdTooLarge { bytes, room };

    let start = end.checked_sub(bytes).ok_or(too_large)? & !(PAGE_BYTES - 1);
    if start < lowest {
        return Err(too_large);
    }
    checked_range(start, start + bytes).ok_or(too_large)
}

fn check_vcpus(boot: &Boot<'_>) -> Result<(), Error> {
    let limit = match boot.apic {
        ApicMode::X2Apic => MAX_VCPUS,
        ApicMode::XApic => MAX_XAPIC_VCPUS,
    };
    if (1..=limit).contains(&boot.vcpus) { Ok(()) } else { Err(Error::Vcpus { vcpus: boot.vcpus, limit }) }
}

fn check_cmdline(cmdline: &str, limit: usize) -> Result<(), Error> {
    if cmdline.len() > limit {
        return Err(Error::CmdlineTooLong { bytes: cmdline.len(), limit });
    }
    match cmdline.bytes().position(|byte| byte == 0) {
        Some(at) => Err(Error::CmdlineHasNul { at }),
        None => Ok(()),
    }
}

//! The hypervisor's own page tables: four levels, one set for all pCPUs, made once at boot.
//!
//! ```text
//! 0000_0000_0000_0000  nothing: a null pointer, and anything near it, faults
//! ffff_8000_0000_0000  direct map: RAM at hpa + DIRECT_MAP, read-write, never executable; the image is left out
//! ffff_c000_0000_0000  device registers at hpa + MMIO, uncached, mapped on demand
//! ffff_e000_0000_0000  stacks, each between unmapped pages
//! ffff_ffff_8000_0000  the image: text executable and read-only, constants read-only, data read-write
//! ```
//!
//! Addresses are computed, not looked up. Mappings are added (devices, stacks) but never changed or removed, so no pCPU
//! ever needs to flush a host translation.

#![expect(unsafe_code, reason = "page tables are what all other memory safety stands on")]

use core::arch::x86_64::__cpuid;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Hpa, HpaRange, Hva, PAGE_BYTES};
use spin::Mutex;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr3, Cr3Flags};
use x86_64::registers::model_specific::Msr;
use x86_64::structures::paging::mapper::MapToError;
use x86_64::structures::paging::{
    FrameAllocator, Mapper, OffsetPageTable, Page, PageSize, PageTable, PageTableFlags, PhysFrame, Size1GiB, Size2MiB,
    Size4KiB,
};
use x86_64::{PhysAddr, VirtAddr};
use x86_defs::msr;

use super::boot;
use super::processor::leaf;
use crate::arch::mappings::{DIRECT_MAP_END, clamp, whole_pages};
pub(crate) use crate::arch::mappings::{direct_map, direct_map_inverse, is_guard, map_mmio, map_stack};
use crate::arch::ram::LOW_END;
use crate::frames::{Exhausted, Frames};
use crate::memory_map::{MemoryMap, Ranges};

pub(in crate::arch) const DIRECT_MAP: u64 = 0xffff_8000_0000_0000;
pub(in crate::arch) const MMIO: u64 = 0xffff_c000_0000_0000;
pub(in crate::arch) const STACKS: u64 = 0xffff_e000_0000_0000;
/// Virtual minus physical address of the image, as in the linker script.
pub(super) const IMAGE_OFFSET: u64 = 0xffff_ffff_8000_0000;

pub(in crate::arch) const DATA: PageTableFlags =
    PageTableFlags::PRESENT.union(PageTableFlags::WRITABLE).union(PageTableFlags::NO_EXECUTE);
const CONSTANT: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::NO_EXECUTE);
const TEXT: PageTableFlags = PageTableFlags::PRESENT;
/// PCD and PWT choose entry 3 of the PAT, which is "uncacheable" after reset (APM vol. 2, 7.8.2).
pub(in crate::arch) const DEVICE: PageTableFlags =
    DATA.union(PageTableFlags::NO_CACHE).union(PageTableFlags::WRITE_THROUGH);

/// HPA of the top-level table. Read by the other pCPUs on their way up.
pub(super) static ROOT: AtomicU64 = AtomicU64::new(0);

/// Held while mappings are added.
static CHANGES: Mutex<()> = Mutex::new(());

/// Makes the page tables, switches to them, and gives the remaining RAM to the frame pool.
///
/// # Safety
/// Runs once, on the boot page tables, which map the first 4 GiB at their physical addresses. `memory` is true about
/// RAM, and nothing uses RAM above 1 MiB except the image and `modules`.
///
/// # Errors
/// Too little memory. Then nothing has changed.
pub(super) unsafe fn init<'a>(memory: &MemoryMap, modules: impl Iterator<Item = &'a HpaRange>) -> Result<(), NoMemory> {
    let image = image();
    // Below 1 MiB are the loader's data and the start-up code of the other pCPUs.
    let low = HpaRange::new(Hpa(0), LOW_END.0);
    let mut free = memory.ram();
    for taken in low.into_iter().chain([image]).chain(modules.copied()) {
        free.remove(&taken);
    }
    // Tables are taken from the top of the largest part that the boot page tables reach.
    let bytes: u64 = free.iter().map(HpaRange::bytes).sum();
    if bytes < LEAST_BYTES {
        return Err(NoMemory);
    }
    let mut early = EarlyFrames::new(&free).ok_or(NoMemory)?;
    let root = early.allocate_frame().ok_or(NoMemory)?;

    // SAFETY: the frame is free RAM below 4 GiB, mapped at its physical address.
    let table = unsafe { &mut *(root.start_address().as_u64() as *mut PageTable) };
    table.zero();
    // SAFETY: physical = virtual for all tables from `early`.
    let mut mapper = unsafe { OffsetPageTable::new(table, VirtAddr::zero()) };
    let largest = largest_page();
    let mut map = |virt, range: HpaRange, flags| {
        map(&mut mapper, &mut early, virt, range, flags, largest).map_err(|Exhausted| NoMemory)
    };
    let mut mapped = memory.ram_and_acpi();
    mapped.remove(&image);
    let end = DIRECT_MAP_END.min(physical_end());
    for range in mapped.iter().filter(|range| range.start < end) {
        map(direct_map(range.start), clamp(range, end), DATA)?;
    }
    let parts = [(text(), TEXT), (constants(), CONSTANT), (data(), DATA)];
    for (part, flags) in parts {
        map(Hva(part.start.0 + IMAGE_OFFSET), part, flags)?;
    }

    // SAFETY: the new tables map all that is in use: text, data, the boot stack (data), and no more than that.
    unsafe { Cr3::write(root, Cr3Flags::empty()) };
    // SAFETY: read-only means read-only from here on; caches stay on, the FPU accessible.
    unsafe { Cr0::write(CR0) };
    ROOT.store(root.start_address().as_u64(), Ordering::Release);

    let (taken, taken_from) = early.taken();
    for range in free.iter() {
        let bytes = if range.end() == taken_from { range.bytes() - taken } else { range.bytes() };
        if let Some(range) = HpaRange::new(range.start, bytes).filter(|range| range.start < end) {
            // SAFETY: usable RAM, mapped above, without the image and without the tables.
            unsafe { crate::arch::ram::donate(clamp(&range, end)) };
        }
    }
    Ok(())
}

/// First HPA that this processor's page tables cannot name (APM vol. 3, CPUID 8000_0008 EAX, and 8000_001F EBX for the
/// bits that memory encryption takes).
pub(in crate::arch::x86_64) fn physical_end() -> Hpa {
    // Processors without the leaf have 36 bits (APM vol. 2, 5.3).
    let bits = match leaf(0x8000_0008).eax & 0xff {
        0 => 36,
        bits => bits,
    };
    let encryption = leaf(0x8000_001f);
    // SAFETY: the register exists where CPUID reports memory encryption (APM vol. 2, 7.10.1); reading it has no effect.
    let is_encrypting = || unsafe { Msr::new(msr::SYSCFG).read() } & SYSCFG_MEMORY_ENCRYPTION != 0;
    let taken = if encryption.eax & 1 != 0 && is_encrypting() { encryption.ebx >> 6 & 0x3f } else { 0 };
    Hpa(1 << bits.saturating_sub(taken).min(52))
}

/// SYSCFG: memory encryption is on (APM vol. 2, 7.10.1).
const SYSCFG_MEMORY_ENCRYPTION: u64 = 1 << 23;

/// Minimum free memory for the hypervisor without any VM.
const LEAST_BYTES: u64 = 4 << 20;

/// There is less memory than that, or none for page tables.
#[derive(Debug)]
pub(super) struct NoMemory;

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too little memory is left besides the hypervisor and its boot module")
    }
}

/// CR0 of every pCPU: paging, write protection also for ourselves, native FPU errors.
pub(super) const CR0: Cr0Flags = Cr0Flags::PAGING
    .union(Cr0Flags::WRITE_PROTECT)
    .union(Cr0Flags::NUMERIC_ERROR)
    .union(Cr0Flags::EXTENSION_TYPE)
    .union(Cr0Flags::MONITOR_COPROCESSOR)
    .union(Cr0Flags::PROTECTED_MODE_ENABLE);

/// Makes firmware's tables readable in the direct map, wherever firmware has put them. Repeating is harmless.
pub(super) fn map_firmware(start: Hpa, bytes: u64) -> Option<Hva> {
    let range = HpaRange::new(start, bytes).filter(|range| range.end() <= DIRECT_MAP_END.min(physical_end()))?;
    let range = whole_pages(&range);
    try_add(direct_map(range.start), range, CONSTANT).ok()?;
    Some(direct_map(start))
}

/// Whether the byte at `address` is mapped. Takes no lock, so that a panic may ask.
pub(crate) fn is_mapped(address: Hva) -> bool {
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    const PRESENT: u64 = 1;
    const LARGE: u64 = 1 << 7;

    let mut table = Hpa(ROOT.load(Ordering::Acquire));
    if table.0 == 0 {
        return false;
    }
    for shift in [39, 30, 21, 12] {
        let slot = direct_map(table).0 + (address.0 >> shift & 0x1ff) * 8;
        // SAFETY: all tables are in the direct map, and none is ever freed.
        let entry = unsafe { (slot as *const u64).read_volatile() };
        if entry & PRESENT == 0 {
            return false;
        }
        if entry & LARGE != 0 {
            return true;
        }
        table = Hpa(entry & ADDRESS);
    }
    true
}

/// Whether `address` is text of the hypervisor.
pub(super) fn is_text(address: u64) -> bool {
    text().contains(Hpa(address.wrapping_sub(IMAGE_OFFSET)))
}

/// Adds a mapping to the tables in use.
///
/// # Panics
/// When there is no memory for tables.
pub(in crate::arch) fn add(virt: Hva, range: HpaRange, flags: PageTableFlags) {
    try_add(virt, range, flags).expect("memory for page tables");
}

fn try_add(virt: Hva, range: HpaRange, flags: PageTableFlags) -> Result<(), Exhausted> {
    let _changes = CHANGES.lock();
    let root = direct_map(Hpa(ROOT.load(Ordering::Acquire))).0 as *mut PageTable;
    // SAFETY: the root table is in the direct map, and the lock makes this the only reference to it.
    let root = unsafe { &mut *root };
    // SAFETY: all tables are RAM in the direct map.
    let mut mapper = unsafe { OffsetPageTable::new(root, VirtAddr::new(DIRECT_MAP)) };
    map(&mut mapper, &mut PoolFrames, virt, range, flags, Size4KiB::SIZE)
}

/// Maps `range` at `virt` with the largest pages that fit, up to `largest`. Mapped pages do not change.
fn map(
    mapper: &mut OffsetPageTable<'_>,
    tables: &mut impl FrameAllocator<Size4KiB>,
    virt: Hva,
    range: HpaRange,
    flags: PageTableFlags,
    largest: u64,
) -> Result<(), Exhausted> {
    let mut done = 0;
    while done < range.bytes() {
        let (virt, phys, rest) = (virt.0 + done, range.start.0 + done, range.bytes() - done);
        let fits = |size: u64| size <= largest && size <= rest && (virt | phys).is_multiple_of(size);
        done += if fits(Size1GiB::SIZE) {
            map_page::<Size1GiB>(mapper, tables, virt, phys, flags)?
        } else if fits(Size2MiB::SIZE) {
            map_page::<Size2MiB>(mapper, tables, virt, phys, flags)?
        } else {
            map_page::<Size4KiB>(mapper, tables, virt, phys, flags)?
        };
    }
    Ok(())
}

/// Maps one page and gives its size.
fn map_page<'a, S: PageSize>(
    mapper: &mut OffsetPageTable<'a>,
    tables: &mut impl FrameAllocator<Size4KiB>,
    virt: u64,
    phys: u64,
    flags: PageTableFlags,
) -> Result<u64, Exhausted>
where
    OffsetPageTable<'a>: Mapper<S>,
{
    let page = Page::<S>::containing_address(VirtAddr::new(virt));
    let frame = PhysFrame::<S>::containing_address(PhysAddr::new(phys));
    // SAFETY: every address range of the layout above has one use, so a new mapping cannot alias an old one.
    match unsafe { mapper.map_to(page, frame, flags, tables) } {
        // An entry that was not present is not in any TLB (APM vol. 2, 5.5.3).
        Ok(flush) => flush.ignore(),
        Err(MapToError::PageAlreadyMapped(_) | MapToError::ParentEntryHugePage) => {}
        Err(MapToError::FrameAllocationFailed) => return Err(Exhausted),
    }
    Ok(S::SIZE)
}

/// The largest page size that the CPU has for data: 1 GiB (CPUID 8000_0001 EDX 26) or 2 MiB.
fn largest_page() -> u64 {
    if __cpuid(0x8000_0001).edx & (1 << 26) != 0 { Size1GiB::SIZE } else { Size2MiB::SIZE }
}

/// Tables before the pool exists: from the top of a free range.
struct EarlyFrames {
    range: HpaRange,
    taken: u64,
}

impl EarlyFrames {
    /// End of the memory that the boot page tables map.
    const REACH: Hpa = Hpa(boot::REACH);

    /// `None` without RAM that the boot page tables map.
    fn new(free: &Ranges) -> Option<Self> {
        // A range that crosses the reach would need its middle; none does, because devices are below 4 GiB.
        let range = free.iter().filter(|range| range.end() <= Self::REACH).max_by_key(|range| range.bytes())?;
        Some(Self { range: *range, taken: 0 })
    }

    /// Bytes taken, and the end of the range that they were taken from.
    fn taken(&self) -> (u64, Hpa) {
        (self.taken, self.range.end())
    }
}

// SAFETY: every frame is allocated once, from RAM that nothing else uses.
unsafe impl FrameAllocator<Size4KiB> for EarlyFrames {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        if self.taken + PAGE_BYTES > self.range.bytes() {
            return None;
        }
        self.taken += PAGE_BYTES;
        Some(PhysFrame::containing_address(PhysAddr::new(self.range.end().0 - self.taken)))
    }
}

/// Tables from the pool; they are never given back.
struct PoolFrames;

// SAFETY: the pool allocates each frame once.
unsafe impl FrameAllocator<Size4KiB> for PoolFrames {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        let frames = Frames::allocate(PAGE_BYTES, PAGE_BYTES).ok()?;
        let frame = PhysFrame::containing_address(PhysAddr::new(frames.hpa().0));
        core::mem::forget(frames);
        Some(frame)
    }
}

unsafe extern "C" {
    static image_start: u8;
    static text_start: u8;
    static text_end: u8;
    static rodata_end: u8;
    static data_end: u8;
}

/// The whole image, with the code that ran before paging.
pub(in crate::arch::x86_64) fn image() -> HpaRange {
    between((&raw const image_start).addr() as u64, (&raw const data_end).addr() as u64 - IMAGE_OFFSET)
}

fn text() -> HpaRange {
    part(&raw const text_start, &raw const text_end)
}

fn constants() -> HpaRange {
    part(&raw const text_end, &raw const rodata_end)
}

fn data() -> HpaRange {
    part(&raw const rodata_end, &raw const data_end)
}

/// Physical range of a part of the image that is linked for virtual addresses.
fn part(start: *const u8, end: *const u8) -> HpaRange {
    between(start.addr() as u64 - IMAGE_OFFSET, end.addr() as u64 - IMAGE_OFFSET)
}

fn between(start: u64, end: u64) -> HpaRange {
    HpaRange::new(Hpa(start), end - start).expect("the linker script orders its symbols")
}

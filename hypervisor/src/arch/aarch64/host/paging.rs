//! The hypervisor's own page tables (stage 1 of EL2): four levels, one set for all pCPUs, made once at boot.
//!
//! ```text
//! 0000_0000_0000_0000  nothing: a null pointer, and anything near it, faults
//! 0000_4000_0000_0000  direct map: RAM at hpa + DIRECT_MAP, read-write, never executable; the image is left out
//! 0000_8000_0000_0000  device registers at hpa + MMIO, mapped on demand
//! 0000_c000_0000_0000  stacks, each between unmapped pages
//! 0000_ffff_8000_0000  the image: text executable and read-only, constants read-only, data read-write
//! ```
//!
//! Addresses are computed, not looked up. Mappings are added (devices, stacks) but never changed or removed, so no pCPU
//! ever needs to flush a host translation.

#![expect(unsafe_code, reason = "page tables are what all other memory safety stands on")]

use core::arch::asm;
use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use aarch64_defs::registers::{mair, sctlr};
use aarch64_paging::descriptor::{El23Attributes, PhysicalAddress};
use aarch64_paging::paging::{Constraints, El2, MemoryRegion, PageTable, RootTable, Translation};
use addr::{Hpa, HpaRange, Hva, PAGE_BYTES};
use spin::Mutex;

use crate::arch::aarch64::register::{isb, write_register};
use crate::arch::mappings::{DIRECT_MAP_END, clamp};
pub(crate) use crate::arch::mappings::{direct_map, direct_map_inverse, is_guard, map_mmio, map_stack};
use crate::frames::Frames;
use crate::memory_map::MemoryMap;

pub(in crate::arch) const DIRECT_MAP: u64 = 0x4000_0000_0000;
pub(in crate::arch) const MMIO: u64 = 0x8000_0000_0000;
pub(in crate::arch) const STACKS: u64 = 0xc000_0000_0000;
/// Where the image is linked, as in the linker script.
pub(super) const IMAGE: u64 = 0xffff_8000_0000;

const fn normal() -> El23Attributes {
    // With one privilege level the bit that lets user mode in is one.
    El23Attributes::VALID
        .union(El23Attributes::ACCESSED)
        .union(El23Attributes::USER_RES1)
        .union(El23Attributes::INNER_SHAREABLE)
        .union(El23Attributes::ATTRIBUTE_INDEX_0)
}
const TEXT: El23Attributes = normal().union(El23Attributes::READ_ONLY);
const CONSTANT: El23Attributes = TEXT.union(El23Attributes::XN);
pub(in crate::arch) const DATA: El23Attributes = normal().union(El23Attributes::XN);
pub(in crate::arch) const DEVICE: El23Attributes = El23Attributes::VALID
    .union(El23Attributes::ACCESSED)
    .union(El23Attributes::USER_RES1)
    .union(El23Attributes::XN)
    .union(El23Attributes::ATTRIBUTE_INDEX_1);
const _: () = assert!(mair::NORMAL == 0 && mair::DEVICE == 1);

/// HPA of the top-level table. Read by the other pCPUs on their way up.
pub(super) static ROOT: AtomicU64 = AtomicU64::new(0);

/// HPA of the image.
static IMAGE_HPA: AtomicU64 = AtomicU64::new(0);

/// The tables.
static TREE: Mutex<Option<Tree>> = Mutex::new(None);

struct Tree(RootTable<El2, Tables>);

// SAFETY: the tables behind its pointers belong to it alone, whichever pCPU has it.
unsafe impl Send for Tree {}

/// The HPA of an address in the image.
pub(super) fn image_hpa(hva: Hva) -> Hpa {
    Hpa(hva.0.wrapping_sub(IMAGE).wrapping_add(IMAGE_HPA.load(Ordering::Relaxed)))
}

/// Makes the page tables, switches to them, and gives the remaining RAM to the frame pool.
///
/// # Safety
/// Runs once, on the boot tables. `image` is the image's load address. `memory` is true about RAM, and nothing uses RAM
/// except the image and `payload`.
pub(super) unsafe fn init(memory: &MemoryMap, image: Hpa, payload: Option<HpaRange>) {
    IMAGE_HPA.store(image.0, Ordering::Relaxed);
    let whole = whole_image();
    let mut root = RootTable::new(Tables, 0, El2);
    let mut add = |virt: Hva, range: HpaRange, flags| {
        map(&mut root, virt, range, flags, Constraints::NO_CONTIGUOUS_HINT);
    };
    let mut mapped = memory.ram();
    mapped.remove(&whole);
    for range in mapped.iter().filter(|range| range.start < DIRECT_MAP_END) {
        add(direct_map(range.start), clamp(range, DIRECT_MAP_END), DATA);
    }
    let parts = [(text(), TEXT), (constants(), CONSTANT), (data(), DATA)];
    for (part, flags) in parts {
        add(Hva(part.start.0 - image.0 + IMAGE), part, flags);
    }

    ROOT.store(root.to_physical().0 as u64, Ordering::Release);
    *TREE.lock() = Some(Tree(root));
    activate();

    for range in payload.iter() {
        mapped.remove(range);
    }
    for range in mapped.iter().filter(|range| range.start < DIRECT_MAP_END) {
        // SAFETY: usable RAM, mapped above, without the image.
        unsafe { crate::arch::ram::donate(clamp(range, DIRECT_MAP_END)) };
    }
    HAS_POOL.store(true, Ordering::Release);
}

/// Switches this pCPU from the boot tables to the real ones.
pub(super) fn activate() {
    let root = ROOT.load(Ordering::Acquire);
    // SAFETY: the new tables map everything in use: text, data, stacks, and no more. The tables were written before
    // (the barrier), and cached entries of the boot tables are dropped.
    unsafe {
        asm!(
            "dsb ish",
            "msr ttbr0_el2, {root}",
            "isb",
            "tlbi alle2",
            "dsb nsh",
            "isb",
            root = in(reg) root,
            options(nostack, preserves_flags),
        );
    }
    const ON: u64 = sctlr::EL2_RES1 | sctlr::M | sctlr::C | sctlr::I | sctlr::SA | sctlr::WXN;
    // SAFETY: as the boot code has set it, but writable memory is not executable; the tables have no mapping that is
    // both.
    unsafe { write_register!("sctlr_el2", ON) };
    isb();
}

/// Whether the byte at `address` is mapped. Takes no lock, so that a panic may ask.
pub(crate) fn is_mapped(address: Hva) -> bool {
    const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
    const VALID: u64 = 1;
    const TABLE: u64 = 1 << 1;

    let mut table = Hpa(ROOT.load(Ordering::Acquire));
    if table.0 == 0 || address.0 >> 48 != 0 {
        return false;
    }
    for shift in [39, 30, 21, 12] {
        let slot = table_address(table).0 + (address.0 >> shift & 0x1ff) * 8;
        // SAFETY: all tables are in the direct map or in the image, and none is ever freed.
        let entry = unsafe { (slot as *const u64).read_volatile() };
        if entry & VALID == 0 {
            return false;
        }
        if entry & TABLE == 0 {
            return true;
        }
        table = Hpa(entry & ADDRESS);
    }
    true
}

/// Whether `address` is text of the hypervisor.
pub(super) fn is_text(address: u64) -> bool {
    text().contains(image_hpa(Hva(address)))
}

/// Adds a mapping to the tables in use.
pub(in crate::arch) fn add(virt: Hva, range: HpaRange, flags: El23Attributes) {
    let mut tree = TREE.lock();
    let Tree(root) = tree.as_mut().expect("made before anything is added");
    // A later mapping of a part of a block would split it while it is in use.
    map(root, virt, range, flags, Constraints::all());
    // SAFETY: a barrier: the walker of this pCPU sees the entries from here on.
    unsafe { asm!("dsb ishst", "isb", options(nostack, preserves_flags)) };
}

/// # Panics
/// When the address is beyond the tables, which the layout above excludes.
fn map(root: &mut RootTable<El2, Tables>, virt: Hva, range: HpaRange, flags: El23Attributes, constraints: Constraints) {
    let region = MemoryRegion::new(native(virt.0), native(virt.0 + range.bytes()));
    let mapped = root.map_range(&region, PhysicalAddress(native(range.start.0)), flags, constraints);
    assert!(mapped.is_ok(), "the tables cover all that has a place in the layout");
}

/// An address as the target counts them.
#[expect(clippy::cast_possible_truncation, reason = "this architecture has 64 bits")]
const fn native(number: u64) -> usize {
    number as usize
}

/// Allocates tables: from the image until there is a pool, then from the pool. They are never freed.
struct Tables;

/// Tables in the image.
const EARLY: usize = 64;

#[repr(C, align(4096))]
struct EarlyTables(UnsafeCell<[[u64; 512]; EARLY]>);

// SAFETY: each table is handed out once, as a pointer; no reference is ever made.
unsafe impl Sync for EarlyTables {}

static EARLY_TABLES: EarlyTables = EarlyTables(UnsafeCell::new([[0; 512]; EARLY]));
static EARLY_TAKEN: AtomicUsize = AtomicUsize::new(0);
static HAS_POOL: AtomicBool = AtomicBool::new(false);

/// Where the table at `hpa` is mapped.
fn table_address(hpa: Hpa) -> Hva {
    let early = Hva(EARLY_TABLES.0.get() as u64);
    let offset = hpa.0.wrapping_sub(image_hpa(early).0);
    if offset < (EARLY as u64) * PAGE_BYTES { Hva(early.0 + offset) } else { direct_map(hpa) }
}

impl Translation<El23Attributes> for Tables {
    /// # Panics
    /// When there is no memory: tables are only needed at boot.
    fn allocate_table(&mut self) -> (NonNull<PageTable<El23Attributes>>, PhysicalAddress) {
        let hpa = if HAS_POOL.load(Ordering::Acquire) {
            let frames = Frames::allocate(PAGE_BYTES, PAGE_BYTES).expect("memory for page tables");
            frames.zero();
            let hpa = frames.hpa();
            core::mem::forget(frames);
            hpa
        } else {
            let index = EARLY_TAKEN.fetch_add(1, Ordering::Relaxed);
            assert!(index < EARLY, "the memory map is in too many pieces for the tables in the image");
            image_hpa(Hva(EARLY_TABLES.0.get() as u64 + index as u64 * PAGE_BYTES))
        };
        let physical = PhysicalAddress(native(hpa.0));
        (self.physical_to_virtual(physical), physical)
    }

    unsafe fn deallocate_table(&mut self, _: NonNull<PageTable<El23Attributes>>) {}

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<PageTable<El23Attributes>> {
        let address = table_address(Hpa(pa.0 as u64));
        NonNull::new(address.0 as *mut PageTable<El23Attributes>).expect("tables are not at address 0")
    }
}

unsafe extern "C" {
    static image_start: u8;
    static text_end: u8;
    static rodata_end: u8;
    static image_end: u8;
}

/// The image, where it was loaded.
pub(in crate::arch::aarch64) fn whole_image() -> HpaRange {
    between(&raw const image_start, &raw const image_end)
}

fn text() -> HpaRange {
    between(&raw const image_start, &raw const text_end)
}

fn constants() -> HpaRange {
    between(&raw const text_end, &raw const rodata_end)
}

fn data() -> HpaRange {
    between(&raw const rodata_end, &raw const image_end)
}

/// Physical range of a part of the image.
fn between(start: *const u8, end: *const u8) -> HpaRange {
    let bytes = end.addr() - start.addr();
    HpaRange::new(image_hpa(Hva(start.addr() as u64)), bytes as u64).expect("the linker script orders its symbols")
}

//! Pages that experiments map and unmap: 2 MiB of addresses per CPU, mapped by 4 KiB pages.
//!
//! | page of the window | backed by | used for |
//! |---|---|---|
//! | 0 to 7 | a frame each | demand mapping: touched while unmapped, mapped by the page-fault handler |
//! | 8 | a frame | an interrupt stack whose page is missing |
//! | 9 | anything | device pages and addresses without memory, by [`map_physical`] |
//!
//! Each CPU accesses only its own part, so no other CPU's TLB caches it. Pages that all CPUs share are in `remap`.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::boot::{BOOT_ROOT, MAX_CPUS};
use super::tlb::flush_page;
use super::{entries, remap};

/// Pages mapped on demand.
pub(crate) const DEMAND_PAGES: usize = 8;
#[cfg(machine = "pc")]
const STACK_PAGE: usize = DEMAND_PAGES;
const DEVICE_PAGE: usize = DEMAND_PAGES + 1;
/// Frames of each CPU.
pub(super) const FRAMES: usize = DEMAND_PAGES + 1;

/// Root entry 1: 512 GiB.
const BASE: u64 = 1 << 39;
const SPAN: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// A page table, or a page.
#[repr(C, align(4096))]
pub(crate) struct Table([AtomicU64; 512]);

impl Table {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; 512])
    }

    pub(crate) fn address(&self) -> u64 {
        &raw const *self as u64
    }

    pub(crate) fn get(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::SeqCst)
    }

    pub(crate) fn set(&self, index: usize, entry: u64) {
        self.0[index].store(entry, Ordering::SeqCst);
        entries::settle();
    }
}

static POINTERS: Table = Table::new();
static DIRECTORY: Table = Table::new();
static TABLES: [Table; MAX_CPUS] = [const { Table::new() }; MAX_CPUS];
static BACKING: [[Table; FRAMES]; MAX_CPUS] = [const { [const { Table::new() }; FRAMES] }; MAX_CPUS];

/// Whether the page-fault handler maps missing pages of this CPU's window.
static DEMAND: [AtomicBool; MAX_CPUS] = [const { AtomicBool::new(false) }; MAX_CPUS];
/// Pages mapped by the handler.
static MAPPED: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Hangs the window into the page tables that all CPUs share.
pub(super) fn prepare() {
    for (index, table) in TABLES.iter().enumerate() {
        DIRECTORY.set(index, entries::table(table.address()));
    }
    POINTERS.set(0, entries::table(DIRECTORY.address()));
    remap::prepare(&POINTERS);
    BOOT_ROOT.set(1, entries::table(POINTERS.address()));
}

/// Physical address of frame `index` of CPU `cpu`.
pub(crate) fn frame(cpu: usize, index: usize) -> u64 {
    BACKING[cpu][index].address()
}

#[cfg(machine = "pc")]
/// The frame `frames` frames after frame 0 of CPU 0: all of them are one array.
pub(super) fn frame_behind_the_first(frames: usize) -> u64 {
    BACKING[frames / FRAMES][frames % FRAMES].address()
}

#[cfg(machine = "pc")]
/// The entries of 1 GiB below [`BOOT_ROOT`]'s second.
pub(super) fn pointers() -> &'static Table {
    &POINTERS
}

fn page_address(cpu: usize, page: usize) -> u64 {
    BASE + cpu as u64 * SPAN + page as u64 * PAGE
}

/// Address of demand page `page` of CPU `cpu`.
pub(crate) fn demand_page(cpu: usize, page: usize) -> u64 {
    page_address(cpu, page % DEMAND_PAGES)
}

#[cfg(machine = "pc")]
/// Top of the interrupt stack that lies in the window.
pub(super) fn stack_top(cpu: usize) -> u64 {
    page_address(cpu, STACK_PAGE) + PAGE
}

/// Chooses whether the page-fault handler maps missing pages.
pub(crate) fn serve_demand(cpu: usize, on: bool) {
    DEMAND[cpu].store(on, Ordering::SeqCst);
}

/// Number of pages that the handler has mapped on CPU `cpu`.
pub(crate) fn mapped_on_demand(cpu: usize) -> u64 {
    MAPPED[cpu].load(Ordering::SeqCst)
}

/// Removes a demand page of this CPU.
pub(crate) fn unmap(cpu: usize, page: usize) {
    remove(cpu, page % DEMAND_PAGES);
}

#[cfg(machine = "pc")]
/// Removes the page of the interrupt stack of this CPU.
pub(crate) fn unmap_stack(cpu: usize) {
    remove(cpu, STACK_PAGE);
}

/// Maps the page at physical address `at`, uncached, and answers where.
pub(crate) fn map_physical(cpu: usize, at: u64) -> u64 {
    map(cpu, entries::device(at & !(PAGE - 1)));
    page_address(cpu, DEVICE_PAGE) + at % PAGE
}

/// Maps the physical page of `entry` at the same place, and returns the address.
pub(crate) fn map(cpu: usize, entry: u64) -> u64 {
    remove(cpu, DEVICE_PAGE);
    TABLES[cpu].set(DEVICE_PAGE, entry);
    page_address(cpu, DEVICE_PAGE)
}

fn remove(cpu: usize, page: usize) {
    TABLES[cpu].set(page, 0);
    flush_page(page_address(cpu, page));
}

/// The page-fault handler's question: is `address` a missing page of CPU `cpu` that may be mapped now? Maps it.
pub(super) fn resolve(cpu: usize, address: u64) -> bool {
    let Some(offset) = address.checked_sub(page_address(cpu, 0)) else { return false };
    let page = usize::try_from(offset / PAGE).unwrap_or(usize::MAX);
    let (Some(frame), true) = (BACKING[cpu].get(page), DEMAND[cpu].load(Ordering::SeqCst)) else { return false };

    let entry = &TABLES[cpu].0[page];
    if entry.load(Ordering::SeqCst) != 0 {
        return false;
    }
    entry.store(entries::page(frame.address()), Ordering::SeqCst);
    entries::settle();
    MAPPED[cpu].fetch_add(1, Ordering::SeqCst);
    true
}

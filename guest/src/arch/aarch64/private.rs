//! Tables of one CPU: the same addresses, other memory. No CPU ever uses the tables of another. So flush instructions
//! that act on this CPU only are enough.

use super::boot::MAX_CPUS;
use super::registers::{isb, read_register, write_register};
use super::{boot, entries, tlb};
use crate::arch::window::{self, Table};

/// The entry of the root below which the pages are.
const ENTRY: usize = 2;
/// Pages of each CPU.
pub(crate) const PAGES: usize = 8;

/// Tables of one CPU, from the root down.
static TABLES: [[Table; 4]; MAX_CPUS] = [const { [const { Table::new() }; 4] }; MAX_CPUS];

/// Switches CPU `cpu`, the current one, to its own tables. They contain the common mappings, and more.
pub(crate) fn enter(cpu: usize) {
    let [root, rest @ ..] = &TABLES[cpu];
    for index in 0..ENTRY {
        root.set(index, boot::BOOT_ROOT.get(index));
    }
    let [pointers, directory, pages] = rest;
    directory.set(0, entries::table(pages.address()));
    pointers.set(0, entries::table(directory.address()));
    root.set(ENTRY, entries::table(pointers.address()));
    load(root.address());
}

/// Goes back to the common tables.
pub(crate) fn leave() {
    load(boot::BOOT_ROOT.address());
}

fn load(root: u64) {
    // SAFETY: the tables map this kernel at its own addresses.
    unsafe { write_register!("ttbr0_el1", root) };
    isb();
    tlb::flush_all();
    debug_assert_eq!(read_register!("ttbr0_el1"), root);
}

/// Address of a page, the same for all CPUs.
pub(crate) fn address(page: usize) -> u64 {
    ((ENTRY as u64) << 39) + page as u64 * 4096
}

/// Points a page of CPU `cpu` at one of its frames.
pub(crate) fn point(cpu: usize, page: usize, frame: usize) {
    TABLES[cpu][3].set(page, entries::page(window::frame(cpu, frame)));
}

/// Takes a page of CPU `cpu` away.
pub(crate) fn clear(cpu: usize, page: usize) {
    TABLES[cpu][3].set(page, 0);
}

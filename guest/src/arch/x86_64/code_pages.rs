//! Pages for code that is written at run time, and for the data that it accesses: 2 MiB of addresses per CPU, by 4 KiB
//! pages.
//!
//! Experiments write the page-table entries themselves, so they can change the path from an address to its frame at
//! every level. They can change a page's entry ([`point`]) or the entry of its table ([`use_table`]). They can also use
//! a large page instead ([`use_large`]), or another root ([`second_root`]). This module flushes nothing.
//!
//! It lies in root entry 1, two GiB above the window, whose frames it uses. So an experiment can use only one of the
//! two. Experiments write code through the one-to-one mapping of a frame.

use core::sync::atomic::{AtomicU8, Ordering};

use super::boot::{BOOT_ROOT, MAX_CPUS};
use crate::arch::window::{self, Table};

/// Frames that each CPU has, all of them ordinary memory.
pub(crate) const FRAMES: usize = window::FRAMES;
/// Size of a page.
pub(crate) const PAGE: u64 = 4096;
/// Pages of each CPU.
pub(crate) const PAGES: usize = 512;

/// Bits of an entry (APM vol. 2, 5.4).
pub(crate) const PRESENT: u64 = 1;
pub(crate) const WRITABLE: u64 = 2;
pub(crate) const USER: u64 = 4;
pub(crate) const UNCACHED: u64 = 0x18;
const LARGE_LEAF: u64 = 1 << 7;
/// Not for code; reserved unless EFER.NXE is set.
pub(crate) const NO_EXECUTE: u64 = 1 << 63;
/// A page with all permissions.
pub(crate) const ALL: u64 = PRESENT | WRITABLE | USER;

const BASE: u64 = 1 << 39 | 2 << 30;
const SPAN: u64 = 2 << 20;

static DIRECTORY: Table = Table::new();
static TABLES: [Table; MAX_CPUS] = [const { Table::new() }; MAX_CPUS];
/// The other table for the addresses of CPU 0.
static SPARE: Table = Table::new();
static SECOND_ROOT: Table = Table::new();
static SECOND_POINTERS: Table = Table::new();
static SECOND_DIRECTORY: Table = Table::new();

/// Hangs the pages into `pointers`, the table of root entry 1.
pub(super) fn prepare(pointers: &Table) {
    for cpu in 0..MAX_CPUS {
        use_table(cpu, Some(Which::Own), ALL);
    }
    pointers.set(2, DIRECTORY.address() | ALL);
}

/// Address of `page` of CPU `cpu`.
pub(crate) fn address(cpu: usize, page: usize) -> u64 {
    BASE + cpu as u64 * SPAN + page as u64 * PAGE
}

/// Physical address of frame `index` of CPU `cpu`, which is also mapped one to one, below 4 GiB.
pub(crate) fn frame(cpu: usize, index: usize) -> u64 {
    window::frame(cpu, index)
}

/// Sets the entry of `page` of CPU `cpu`.
pub(crate) fn point(cpu: usize, page: usize, entry: u64) {
    TABLES[cpu].set(page, entry);
}

/// The same in the spare table, which [`second_root`] uses for the addresses of CPU 0, as does [`Which::Spare`].
pub(crate) fn point_spare(page: usize, entry: u64) {
    SPARE.set(page, entry);
}

/// Unmaps all pages of CPU `cpu`, and reverts [`use_table`].
pub(crate) fn clear(cpu: usize) {
    use_table(cpu, Some(Which::Own), ALL);
    for page in 0..PAGES {
        point(cpu, page, 0);
        if cpu == 0 {
            point_spare(page, 0);
        }
    }
}

/// A table for the addresses of a CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// The table that [`point`] writes.
    Own,
    /// The table that [`point_spare`] writes.
    Spare,
}

/// Sets the upper entry of CPU `cpu`'s addresses: to a table, with these bits, or to nothing.
pub(crate) fn use_table(cpu: usize, table: Option<Which>, bits: u64) {
    let entry = match table {
        Some(Which::Own) => TABLES[cpu].address() | bits,
        Some(Which::Spare) => SPARE.address() | bits,
        None => 0,
    };
    DIRECTORY.set(cpu, entry);
}

/// Sets an upper entry that no CPU's addresses use, in the same page as those that are used.
pub(crate) fn use_nobodys_table(index: usize, on: bool) {
    let entry = if on { SPARE.address() | PRESENT } else { 0 };
    DIRECTORY.set(MAX_CPUS + index % MAX_CPUS, entry);
}

/// Two frames at the same place in two large pages.
pub(crate) fn large_twins() -> [u64; 2] {
    [0, PAGES].map(window::frame_behind_the_first)
}

/// Maps the large page around `frame` at the addresses of CPU `cpu`; answers the address of the frame.
pub(crate) fn use_large(cpu: usize, frame: u64) -> u64 {
    DIRECTORY.set(cpu, frame & !(SPAN - 1) | ALL | LARGE_LEAF);
    address(cpu, 0) + frame % SPAN
}

/// A second root for CR3. It is the same as the common one, except that the addresses of CPU 0 use the spare table.
pub(crate) fn second_root() -> u64 {
    for index in 0..512 {
        SECOND_ROOT.set(index, BOOT_ROOT.get(index));
        SECOND_POINTERS.set(index, window::pointers().get(index));
        SECOND_DIRECTORY.set(index, DIRECTORY.get(index));
    }
    SECOND_ROOT.set(1, SECOND_POINTERS.address() | ALL);
    SECOND_POINTERS.set(2, SECOND_DIRECTORY.address() | ALL);
    SECOND_DIRECTORY.set(0, SPARE.address() | ALL);
    SECOND_ROOT.address()
}

/// Writes `bytes` at `offset` of a frame, in order, and stops at the end of the page.
pub(crate) fn write(frame: u64, offset: u64, bytes: &[u8]) {
    for (byte, at) in bytes.iter().zip(offset..PAGE) {
        cell(frame, at).store(*byte, Ordering::SeqCst);
    }
}

/// Fills a frame with one byte.
pub(crate) fn fill(frame: u64, byte: u8) {
    (0..PAGE).for_each(|at| cell(frame, at).store(byte, Ordering::Relaxed));
}

/// The 64-bit word at `offset` of a frame.
pub(crate) fn word(frame: u64, offset: u64) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|at| cell(frame, offset + at as u64).load(Ordering::SeqCst)))
}

fn cell(frame: u64, offset: u64) -> &'static AtomicU8 {
    let at = (frame & !(PAGE - 1)) + offset % PAGE;
    // SAFETY: `frame` is one of the window's, static and only ever accessed by atomic operations.
    unsafe { &*(at as *const AtomicU8) }
}

//! Pages that all CPUs map, and that experiments move from frame to frame while the CPUs read them. They test remote
//! flushes.
//!
//! | page | used for |
//! |---|---|
//! | 0 to 127 | the page of each CPU in the stale-translation detector |
//! | [`RANGE`], 64 pages | the range whose flush is timed |
//! | [`WATCHED`] | the page of the conformance cases |
//! | [`USER`] | code at CPL 3 |
//!
//! A large page follows, [`large`]. All of it lies in root entry 1, one GiB above the window, whose frames it uses.
//!
//! This module only moves pages: it flushes nothing.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::boot::{BOOT_ROOT, MAX_CPUS};
use crate::arch::window::{self, Table};

/// The kernel may map another frame at once, and flush afterwards.
pub(crate) const BREAK_FIRST: bool = false;

/// First page of the range whose flush is measured.
pub(crate) const RANGE: usize = 128;
/// The page that watchers read.
pub(crate) const WATCHED: usize = 256;
/// The page that is mapped for CPL 3.
pub(crate) const USER: usize = 300;

const _: () = assert!(MAX_CPUS <= RANGE, "each CPU has a page of its own");

const BASE: u64 = 1 << 39 | 1 << 30;
const LARGE: u64 = BASE + LARGE_BYTES;
/// Size of a large page.
pub(crate) const LARGE_BYTES: u64 = 2 << 20;

const PRESENT_WRITABLE: u64 = 3;
const FOR_USER: u64 = 4;
const LARGE_LEAF: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;

static DIRECTORY: Table = Table::new();
static PAGES: Table = Table::new();
/// A root with the same contents as the common one.
static SECOND_ROOT: Table = Table::new();

/// Which bit a page has beyond present and writable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// None.
    Plain,
    /// Survives a write of CR3.
    Global,
    /// Reached from CPL 3.
    User,
}

/// Hangs the pages into `pointers`, the table of root entry 1.
pub(crate) fn prepare(pointers: &Table) {
    DIRECTORY.set(0, PAGES.address() | PRESENT_WRITABLE | FOR_USER);
    pointers.set(1, DIRECTORY.address() | PRESENT_WRITABLE | FOR_USER);
}

/// Address of `page`.
pub(crate) fn address(page: usize) -> u64 {
    BASE + page as u64 * 4096
}

/// Points `page` at `frame`.
pub(crate) fn point(page: usize, frame: u64, kind: Kind) {
    let kind = match kind {
        Kind::Plain => 0,
        Kind::Global => GLOBAL,
        Kind::User => FOR_USER,
    };
    PAGES.set(page, frame & !0xfff | PRESENT_WRITABLE | kind);
}

/// Takes `page` away.
pub(crate) fn clear(page: usize) {
    PAGES.set(page, 0);
}

/// Points the large page at the 2 MiB around `frame`, and answers where in it the frame's first word is.
pub(crate) fn large(frame: u64) -> u64 {
    DIRECTORY.set(1, frame & !(LARGE_BYTES - 1) | PRESENT_WRITABLE | LARGE_LEAF);
    LARGE + frame % LARGE_BYTES
}

/// A second root with the same contents, for CR3.
pub(crate) fn second_root() -> u64 {
    for index in 0..512 {
        SECOND_ROOT.set(index, BOOT_ROOT.get(index));
    }
    SECOND_ROOT.address()
}

/// Physical address of frame `index` of CPU `cpu`, which is also mapped one to one. The window uses the same frames, so
/// an experiment may use only one of the two.
pub(crate) fn frame(cpu: usize, index: usize) -> u64 {
    window::frame(cpu, index)
}

/// Writes the first word of a frame, through the one-to-one mapping.
pub(crate) fn fill(frame: u64, value: u64) {
    word(frame).store(value, Ordering::SeqCst);
}

/// Copies `code` to the start of a frame.
pub(crate) fn fill_code(frame: u64, code: &[u8; 8]) {
    fill(frame, u64::from_le_bytes(*code));
}

/// Loads the word at `address`, which is mapped. Never merged with another load, never an exit.
pub(crate) fn load(address: u64) -> u64 {
    let value;
    // SAFETY: reads a word of a page that is meant to be read.
    unsafe { asm!("mov {}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)) };
    value
}

fn word(frame: u64) -> &'static AtomicU64 {
    // SAFETY: `frame` is one of the window's frames, static and only ever accessed by atomic operations.
    unsafe { &*(frame as *const AtomicU64) }
}

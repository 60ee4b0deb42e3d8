//! Pages that all CPUs map, and that experiments move from frame to frame while the CPUs read them. They test remote
//! flushes.
//!
//! | page | used for |
//! |---|---|
//! | 0 to 127 | the page of each CPU in the stale-translation detector |
//! | [`RANGE`], 64 pages | the range whose flush is timed |
//! | [`USER`] | code at EL0 |
//!
//! All of it lies in root entry 1, one GiB above the window, whose frames it uses.
//!
//! The architecture requires that a page is unmapped and flushed before it maps another frame ([`BREAK_FIRST`]; Arm
//! ARM, D8.16). A load in between faults and tries again.

use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt;
use super::boot::MAX_CPUS;
use super::entries;
use crate::arch::window::{self, Table};

/// A page is taken away and flushed before it is pointed elsewhere.
pub(crate) const BREAK_FIRST: bool = true;

/// First page of the range whose flush is measured.
pub(crate) const RANGE: usize = 128;
/// The page that is mapped for EL0.
pub(crate) const USER: usize = 300;

const _: () = assert!(MAX_CPUS <= RANGE, "each CPU has a page of its own");

const BASE: u64 = 1 << 39 | 1 << 30;

static DIRECTORY: Table = Table::new();
static PAGES: Table = Table::new();

/// Who may use a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// EL1.
    Plain,
    /// EL0 too.
    User,
}

/// Hangs the pages into `pointers`, the table of root entry 1.
pub(crate) fn prepare(pointers: &Table) {
    DIRECTORY.set(0, entries::table(PAGES.address()));
    pointers.set(1, entries::table(DIRECTORY.address()));
}

/// Address of `page`.
pub(crate) fn address(page: usize) -> u64 {
    BASE + page as u64 * 4096
}

/// Points `page` at `frame`.
pub(crate) fn point(page: usize, frame: u64, kind: Kind) {
    let entry = match kind {
        Kind::Plain => entries::page(frame & !0xfff),
        Kind::User => entries::user_page(frame & !0xfff),
    };
    PAGES.set(page, entry);
}

/// Takes `page` away.
pub(crate) fn clear(page: usize) {
    PAGES.set(page, 0);
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

/// Loads the word at `address`, which is mapped, or will be again soon. Never an exit.
pub(crate) fn load(address: u64) -> u64 {
    loop {
        if let Ok(value) = attempt::load_u64(address) {
            return value;
        }
    }
}

fn word(frame: u64) -> &'static AtomicU64 {
    // SAFETY: `frame` is one of the window's frames, static and only ever accessed by atomic operations.
    unsafe { &*(frame as *const AtomicU64) }
}

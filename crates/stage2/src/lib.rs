//! Second-stage translation tables: from guest physical addresses (GPA) to host physical addresses (HPA).
//!
//! The tables form a radix tree. Each *table* is one page of 512 *entries*; an entry is empty, names the next table, or
//! is a *leaf* that maps one page. *Levels* are counted from 0 at the 4 KiB leaf upwards:
//!
//! ```text
//!  root ──> ┌─────────┐
//!  level 3  │ table ──┼──> ┌─────────┐
//!           │ empty   │    │ leaf 1G │     level 2
//!           │  ...    │    │ table ──┼──> ┌─────────┐
//!           └─────────┘    │ empty   │    │ leaf 2M │     level 1
//!                          └─────────┘    │ table ──┼──> ┌─────────┐
//!                                         │ empty   │    │ leaf 4K │     level 0
//!                                         └─────────┘    │ empty   │
//!                                                        └─────────┘
//! ```
//!
//! The algorithms exist once, in [`Tree`]. What differs between architectures is a [`Format`]: how many levels there
//! are, how an entry is spelled, and how a live one may be replaced. [`Npt`] are the nested page tables of SVM, [`Vmsa`] is
//! stage 2 of Arm. What is beyond the tables is behind two traits: [`Pages`], where tables live, and [`Tlb`].
//!
//! Four rules hold throughout:
//!
//! - **Faults take no lock.** The hardware walks the tree at any time and records in it what was used and written, and
//!   every processor handles faults at once. Each change is one conditional exchange of one entry. Only who maps, unmaps
//!   or collapses does so alone, and has the [`Shape`] of the tree to show for it.
//! - **Prepare may fail, commit may not.** An operation first checks its whole range and takes every table that it will
//!   need from the pool. Only then does it touch the tree. Tables that were not needed, because another processor was
//!   quicker, go back; no other has seen them.
//! - **A flush owed is a value.** Whatever takes a right away returns a [`Stale`]; until that is flushed from every TLB
//!   that may hold it, the guest can still use the old translation.
//! - **A table that was seen is freed late.** An emptied table waits for the next mapping. One that was [collapsed](Tree::collapse)
//!   waits until all who may be in it have left ([`Epochs`]).

#![no_std]
#![forbid(unsafe_code)]

mod collapse;
mod dirty_log;
mod epoch;
mod fault;
mod format;
mod harvest;
mod marks;
mod npt;
mod pace;
mod pages;
mod quiet;
mod range;
mod spare;
mod split;
mod stale;
mod stream;
mod sync;
pub mod tlbi;
mod tree;
mod visit;
mod vmsa;

pub use collapse::Collapse;
pub use dirty_log::{Cleared, Copyable, DirtyLog, Policy, Rounds, Start};
pub use epoch::{Epochs, Limbo, Quiescence, Walker, Walking};
pub use fault::{Attempt, Denial, Fault, Granularity};
pub use format::{Entry, Format, Replace, Source};
pub use marks::MarkWord;
pub use npt::{Npt, NptOf};
pub use pace::Pace;
pub use pages::{Cell, Pages, Tlb};
pub use spare::Spare;
pub use split::BATCH;
pub use stale::{FewPages, Reach, Stale, What};
pub use stream::Stream;
pub use tree::{Shape, Tree};
pub use vmsa::{Vmsa, VmsaOf};

use addr::{Gpa, GpaRange, Hpa};
use core::fmt;

/// Entries in a table, for every format with 4 KiB tables of 64-bit entries.
pub const ENTRIES: usize = 512;

/// What the guest may do with a page, before its own page tables restrict it further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Data reads, and the guest's page-table walks.
    pub read: bool,
    /// Data writes, and Accessed/Dirty updates in the guest's page tables.
    pub write: bool,
    /// Instruction fetches.
    pub execute: bool,
}

impl Access {
    /// Reads only: data in ROM.
    pub const READ: Self = Self { read: true, write: false, execute: false };
    /// Reads and fetches: code in ROM, or RAM that is write-protected for a dirty log.
    pub const READ_EXECUTE: Self = Self { read: true, write: false, execute: true };
    /// Reads and writes.
    pub const READ_WRITE: Self = Self { read: true, write: true, execute: false };
    /// Everything: RAM.
    pub const ALL: Self = Self { read: true, write: true, execute: true };

    /// Whether everything that `other` allows is allowed here too.
    #[must_use]
    pub const fn includes(self, other: Self) -> bool {
        (self.read || !other.read) && (self.write || !other.write) && (self.execute || !other.execute)
    }
}

/// How the hardware may treat accesses to a page, before the guest's own page tables say more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// RAM: cached, in any order, ahead of time.
    Normal,
    /// Device registers: each access once, in order, and none that nobody asked for.
    Device,
}

/// A mapped page as [`Tree::lookup`] finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First byte of the page in host memory; a multiple of `bytes`.
    pub hpa: Hpa,
    /// Level of the entry; 0 is the smallest page.
    pub level: u32,
    /// Length of the page.
    pub bytes: u64,
    /// What the guest may do with it.
    pub access: Access,
}

impl Leaf {
    /// Where `gpa`, an address within this page, lies in host memory.
    #[must_use]
    pub const fn translate(&self, gpa: Gpa) -> Hpa {
        Hpa(self.hpa.0 | gpa.0 & (self.bytes - 1))
    }
}

/// Why something was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The pool has too few tables for this change.
    OutOfTables,
    /// The range reaches this address, the first that the tree cannot translate.
    Beyond(Gpa),
    /// The range in host memory reaches this address, the first that an entry cannot hold.
    BeyondHost(Hpa),
    /// The range does not start and end at a 4 KiB boundary.
    Misaligned(GpaRange),
    /// The host address is not a multiple of 4 KiB.
    MisalignedHost(Hpa),
    /// A part of the range is mapped already, by the page that is named here.
    Overlaps(GpaRange),
    /// The format has no way to say this, such as writable but not readable.
    Inexpressible(Access),
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfTables => write!(f, "no page left for a stage-2 table"),
            Self::Beyond(gpa) => write!(f, "guest address {gpa} is beyond the reach of stage 2"),
            Self::BeyondHost(hpa) => write!(f, "host address {hpa} does not fit into a stage-2 entry"),
            Self::Misaligned(range) => write!(f, "guest range {}..{} is not made of pages", range.start, range.end()),
            Self::MisalignedHost(hpa) => write!(f, "host address {hpa} does not start a page"),
            Self::Overlaps(page) => write!(f, "guest range {}..{} is mapped already", page.start, page.end()),
            Self::Inexpressible(access) => write!(f, "stage 2 cannot express {access:?}"),
        }
    }
}

impl core::error::Error for MapError {}

#[cfg(all(test, not(loom)))]
mod tests;

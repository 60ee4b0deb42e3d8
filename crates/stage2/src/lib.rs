//! Second-stage translation tables: from guest physical addresses (GPA) to host physical addresses (HPA).
//!
//! The tables form a radix tree. Each *table* is one page of 512 *entries*. An entry is empty, or it points to the next
//! table, or it is a *leaf* that maps one page. *Levels* count from 0 at the 4 KiB leaf upwards:
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
//! The algorithms exist once, as operations of a [`Walk`] or [`WalkMut`] of a [`Tree`]. A [`Format`] describes an
//! architecture: the number of levels, the encoding of an entry, and how to replace a live entry. [`Npt`] is the nested
//! page table of SVM, [`Vmsa`] is stage 2 of Arm. Two traits connect the tree to the machine: [`Pages`] holds the
//! tables, [`Tlb`] flushes.
//!
//! Four rules hold everywhere:
//!
//! - **Faults take no lock.** The hardware walks the tree at any time and records accesses and writes in it. Every
//!   processor handles faults at the same time. Each change is one compare-exchange of one entry. Only one processor at
//!   a time maps, unmaps or collapses: the one that holds the tree's [`Shape`].
//! - **Prepare may fail, commit may not.** An operation first checks its whole range and takes all tables that it needs
//!   from the pool. Only then does it change the tree. Tables that another processor made unnecessary go back to the
//!   pool; no other processor has seen them.
//! - **A required flush is a value.** Each operation that takes a right away returns a [`Stale`]. The guest can use the
//!   old translation until the flush has reached every TLB that may hold it.
//! - **A visible table is freed late.** An emptied table waits for the next mapping. A [collapsed](WalkMut::collapse)
//!   table waits until every processor that may walk it has left ([`Epochs`]). So each [`Walk`] needs a proof that its
//!   caller is waited for.

#![no_std]
#![forbid(unsafe_code)]

mod collapse;
mod dirty_log;
mod epoch;
mod ept;
mod fault;
mod format;
mod harvest;
mod marks;
mod npt;
mod pace;
mod pages;
mod populate;
mod protect;
mod quiet;
mod range;
mod spare;
mod split;
mod split_at_fault;
mod stale;
mod stream;
mod sync;
pub mod tlbi;
mod tree;
mod visit;
mod vmsa;
mod walk;

pub use collapse::{Collapse, Search};
pub use dirty_log::{Cleared, Copyable, DirtyLog, Policy, Rounds, Start};
pub use epoch::{Epochs, Limbo, Quiescence, Walker, Walking};
pub use ept::{Ept, EptOf};
pub use fault::{Denial, Fault, Granularity};
pub use format::{Format, PageTableEntry, Replace, Source};
pub use marks::{MarkWord, words_of};
pub use npt::{Iommu, Npt, NptOf};
pub use pace::Pace;
pub use pages::{Cell, Pages, Tlb};
pub use protect::Attempt;
pub use spare::Spare;
pub use split::BATCH;
pub use stale::{FewPages, Scope, Stale, What};
pub use stream::Stream;
pub use tree::{Shape, Tree};
pub use vmsa::{Vmsa, VmsaOf};
pub use walk::{Walk, WalkMut, WalkProof};

use addr::{Gpa, GpaRange, Hpa};
use core::fmt;

/// Entries per table, for every format with 4 KiB tables of 64-bit entries.
pub const ENTRIES: usize = 512;

/// Access rights of a page, before the guest's own page tables restrict them further.
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

/// How the hardware may access a page, before the guest's own page tables restrict it further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// RAM: cached, reordered, speculative.
    Normal,
    /// Device registers: each access once, in order, no speculation.
    Device,
}

/// A mapped page, from [`Walk::lookup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First byte of the page in host memory; a multiple of `bytes`.
    pub hpa: Hpa,
    /// Level of the entry; 0 is the smallest page.
    pub level: u32,
    /// Length of the page.
    pub bytes: u64,
    /// Access rights of the guest.
    pub access: Access,
}

impl Leaf {
    /// The host address of `gpa`, an address within this page.
    #[must_use]
    pub const fn translate(&self, gpa: Gpa) -> Hpa {
        Hpa(self.hpa.0 | gpa.0 & (self.bytes - 1))
    }
}

/// Why an operation failed.
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
    /// Part of the range is already mapped, by this page.
    MisalignedHost(Hpa),
    /// The format cannot encode these rights, such as writable but not readable.
    Overlaps(GpaRange),
    /// The format has no way to say this, such as writable but not readable.
    Inexpressible(Access),
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfTables => write!(f, "no page left for a stage-2 table"),
            Self::Beyond(gpa) => write!(f, "guest address {gpa} is too high for stage 2"),
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

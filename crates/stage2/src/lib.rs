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
//! The algorithm exists once, in [`Tree`]. What differs between architectures is a [`Format`]: how many levels there
//! are and how an entry is spelled. [`Npt`] are the nested page tables of SVM, [`Vmsa`] is stage 2 of Arm.
//!
//! Three rules hold throughout:
//!
//! - **Prepare may fail, commit may not.** An operation first checks its whole range and takes every table that it will
//!   need from the pool. Only then does it touch the tree, and from there on nothing can go wrong. So an error leaves
//!   the tree as it was, and a table that the hardware could have seen never goes back to the pool in a hurry.
//! - **A flush owed is a value.** Whatever takes a right away returns a [`Stale`]; until that is flushed from every TLB
//!   that may hold it, the guest can still use the old translation.
//! - **Tables stay until the tree is destroyed.** The hardware caches pointers to tables as well as leaves. An emptied
//!   table waits for the next mapping; it costs 4 KiB for each 2 MiB that was once mapped in small pages.
//!
//! The hardware walks the tree at any time and may set Accessed and Dirty bits in it, so every entry is an atomic.
//! Changes of ranges need `&mut Tree`, which is how the lock of the guest's memory shows in the types. The rights of a
//! single page ([`Tree::protect_page`]) are changed by any number of processors at once.

#![no_std]
#![forbid(unsafe_code)]

mod format;
mod npt;
mod page;
mod stale;
mod tree;
mod vmsa;

pub use format::{Entry, Format};
pub use npt::Npt;
pub use stale::Stale;
pub use tree::Tree;
pub use vmsa::Vmsa;

use addr::{Gpa, GpaRange, Hpa, PageSize};
use core::fmt;
use core::sync::atomic::AtomicU64;

/// Entries in a table, for every format with 4 KiB tables of 64-bit entries.
pub const ENTRIES: usize = 512;

/// One table.
pub type Table = [AtomicU64; ENTRIES];

/// Where tables come from and how they are reached.
///
/// The hypervisor implements it over its direct map of host memory.
pub trait Pages {
    /// The table at `hpa`, which is a page that [`allocate`](Self::allocate) returned and that was not freed since.
    fn table(&self, hpa: Hpa) -> &Table;

    /// A zeroed page for a table, or `None` when the pool is exhausted.
    fn allocate(&self) -> Option<Hpa>;

    /// `count` zeroed pages for a root that is larger than a page, a power of two up to 16: side by side, the first at a
    /// multiple of their whole size. They are freed one by one.
    fn allocate_root(&self, count: u32) -> Option<Hpa>;

    /// Takes back a page from [`allocate`](Self::allocate). It is no longer part of any tree, but need not be zero.
    fn free(&self, hpa: Hpa);
}

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
    /// First byte of the page in host memory; a multiple of `size`.
    pub hpa: Hpa,
    /// Size of the page.
    pub size: PageSize,
    /// What the guest may do with it.
    pub access: Access,
}

impl Leaf {
    /// Where `gpa`, an address within this page, lies in host memory.
    #[must_use]
    pub const fn translate(&self, gpa: Gpa) -> Hpa {
        Hpa(self.hpa.0 | gpa.offset_in(self.size))
    }
}

/// Why a tree was left as it was.
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

#[cfg(test)]
mod tests;

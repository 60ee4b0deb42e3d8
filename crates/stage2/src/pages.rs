//! The edge to the hardware: where tables live, and the TLBs that remember them.
//!
//! Everything that the algorithms do to a tree passes through these two traits, one entry at a time. The hypervisor
//! implements them over its direct map and its flushes; the tests over a machine that takes every liberty that the
//! manuals leave to it.

use crate::Stale;
use addr::{Hpa, PageSize};

/// The place of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell(Hpa);

/// Bytes of an entry.
const ENTRY_BYTES: usize = size_of::<u64>();

impl Cell {
    /// The entry with this number, below 512, of a table: a page that [`Pages`] gave out and has not had back.
    #[inline]
    #[must_use]
    pub const fn new(table: Hpa, index: usize) -> Self {
        Self(Hpa(table.0 | (index * ENTRY_BYTES) as u64))
    }

    /// Where the entry is.
    #[inline]
    #[must_use]
    pub const fn hpa(self) -> Hpa {
        self.0
    }

    /// The table.
    #[inline]
    #[must_use]
    pub const fn table(self) -> Hpa {
        self.0.page(PageSize::Size4K)
    }

    /// Which of its entries, below 512.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "an offset within a page")]
    pub const fn index(self) -> usize {
        self.0.offset_in(PageSize::Size4K) as usize / ENTRY_BYTES
    }
}

/// Where tables come from and how they are reached.
///
/// Other processors, and the hardware's walkers, read and change entries at any time, so each access is atomic. Reads and
/// exchanges have one order that all processors agree on, over all entries
/// ([`SeqCst`](core::sync::atomic::Ordering::SeqCst), on both architectures the same instructions as for `Acquire` and
/// `AcqRel`): of two who each write one entry and then read the other's, one sees what the other has written.
pub trait Pages {
    /// A zeroed page for a table, or `None` when the pool is exhausted.
    fn allocate(&self) -> Option<Hpa>;

    /// `count` zeroed pages for a root that is larger than a page, a power of two up to 16: side by side, the first at a
    /// multiple of their whole size. They are freed one by one.
    fn allocate_root(&self, count: u32) -> Option<Hpa>;

    /// Takes back a page. It is no longer part of any tree, but need not be zero.
    fn free(&self, hpa: Hpa);

    /// Reads an entry. What was written before the entry is visible after it is read.
    fn load(&self, cell: Cell) -> u64;

    /// Writes `new` if the entry is still `old`, else says what it is. What was written before is visible to whoever reads
    /// the new entry.
    ///
    /// # Errors
    /// With what the entry says when that is not `old`.
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64>;

    /// Writes an entry of a table that is in no tree, so that nobody else reads it.
    fn write_private(&self, cell: Cell, bits: u64);
}

/// The TLBs of all processors that may run the guest.
pub trait Tlb {
    /// Makes all entries that were written so far visible to all walkers, as far as the hardware does not do so itself.
    ///
    /// Without it, a processor may fault again on what was just mapped; nothing worse.
    fn publish(&self);

    /// Pays a debt, which is not empty, at once: on return no processor uses what it names any more.
    ///
    /// Called in the middle of operations that may not go on before: where the format
    /// [breaks before it makes](crate::Replace), and when small pages are collapsed.
    fn flush(&self, stale: Stale);

    /// Lets a moment pass: another processor is about to finish a change of the same entry.
    fn relax(&self);
}

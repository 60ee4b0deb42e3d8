//! The interface to the hardware: the memory of tables, and the TLBs.
//!
//! All accesses of the algorithms to a tree use these two traits, one entry at a time. The hypervisor implements them
//! with its direct map and its flushes. The tests implement them with a machine that reorders and delays as much as the
//! manuals allow.

use crate::Stale;
use addr::{Hpa, PageSize};

/// The place of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell(Hpa);

/// Bytes of an entry.
const ENTRY_BYTES: usize = size_of::<u64>();

impl Cell {
    /// Entry `index`, below 512, of a table: a page that [`Pages`] allocated and that was not freed.
    #[inline]
    #[must_use]
    pub const fn new(table: Hpa, index: usize) -> Self {
        Self(Hpa(table.0 | (index * ENTRY_BYTES) as u64))
    }

    /// Address of the entry.
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

/// Allocates tables and accesses their entries.
///
/// Other processors, and the hardware's walkers, read and change entries at any time, so each access is atomic. All
/// processors see the reads and exchanges of all entries in one order
/// ([`SeqCst`](core::sync::atomic::Ordering::SeqCst), on both architectures the same instructions as `Acquire` and
/// `AcqRel`). So if two processors each write one entry and then read the other's, one of them sees the other's write.
pub trait Pages {
    /// A zeroed page for a table, or `None` when the pool is exhausted.
    fn allocate(&self) -> Option<Hpa>;

    /// `count` adjacent zeroed pages for a root that is larger than a page. `count` is a power of two up to 16; the
    /// first page is aligned to their whole size. They are freed one by one.
    fn allocate_root(&self, count: u32) -> Option<Hpa>;

    /// Frees a page. It is not part of any tree, and need not be zero.
    fn free(&self, hpa: Hpa);

    /// Reads an entry (acquire): writes before the entry's write are visible afterwards.
    fn load(&self, cell: Cell) -> u64;

    /// Writes `new` if the entry is still `old` (release): earlier writes are visible to a processor that reads the new
    /// entry.
    ///
    /// # Errors
    /// The entry's value, if it is not `old`.
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64>;

    /// Writes an entry of a table that is in no tree, so no other processor reads it.
    fn write_private(&self, cell: Cell, bits: u64);

    /// Writes the first `count` entries of such a table: `first`, and each next one larger by `step`. A split does
    /// this, so a pool that looks the table up once makes splits cheaper.
    #[inline]
    fn fill_private(&self, table: Hpa, count: usize, first: u64, step: u64) {
        let mut bits = first;
        for index in 0..count {
            self.write_private(Cell::new(table, index), bits);
            bits += step;
        }
    }
}

/// The TLBs of all processors that may run the guest.
pub trait Tlb {
    /// Makes all entries written so far visible to all walkers, where the hardware does not do so itself.
    ///
    /// Without it a processor may fault again on a new mapping; nothing else goes wrong.
    fn publish(&self);

    /// Flushes `stale`, which is not empty. On return no processor uses the old translations.
    ///
    /// Operations call this in their middle, where the format [breaks before it makes](crate::Replace), and for a
    /// collapse.
    fn flush(&self, stale: Stale);

    /// Pauses: another processor is about to finish a change of the same entry.
    fn relax(&self);

    /// Long work has read this many `entries` since the last call, and goes on. A caller that takes no interrupts
    /// meanwhile may let some in here.
    fn worked(&self, entries: usize) {
        let _ = entries;
    }
}

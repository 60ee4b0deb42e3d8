//! Rights of single pages, changed by several processors at once.
//!
//! Unlike the operations on ranges, these need no exclusive access: each change is one compare-and-swap of one entry. A
//! large leaf on the way is first replaced by a table that says the same, in one compare-and-swap as well; whoever
//! comes second finds the table and goes on below it. Tables stay until the tree is destroyed, so none is ever taken
//! away from under somebody.

use crate::tree::{Tree, update};
use crate::{Access, Entry, Format, MapError, Pages, Stale};
use addr::{Gpa, GpaRange, PAGE_BYTES, PageSize};
use core::sync::atomic::Ordering;

impl<F: Format> Tree<F> {
    /// Gives the 4 KiB page that holds `gpa` the rights `access`, and leaves all others as they are. A page that is
    /// not mapped stays so.
    ///
    /// Rights that grow owe no flush: the guest's first use of them walks the tables again.
    ///
    /// # Errors
    /// When `access` cannot be expressed, or the pool has no table left to split a large leaf with; the page keeps its
    /// rights.
    pub fn protect_page(&self, pages: &impl Pages, gpa: Gpa, access: Access) -> Result<Stale, MapError> {
        self.check_access(access)?;
        if gpa >= self.limit() {
            return Err(MapError::Beyond(gpa));
        }
        loop {
            let slot = self.descend(pages, gpa);
            let Entry::Leaf { access: now, .. } = slot.entry else { return Ok(Stale::EMPTY) };
            if now == access {
                return Ok(Stale::EMPTY);
            }
            if slot.level == 0 {
                update(slot.entry_cell, |bits| self.format.with_access(bits, access));
                let page = GpaRange::new(gpa.page(PageSize::Size4K), PAGE_BYTES).ok_or(MapError::Beyond(gpa))?;
                return Ok(if access.includes(now) { Stale::EMPTY } else { Stale::of(page) });
            }
            self.split_once(pages, gpa)?;
        }
    }

    /// Replaces the large leaf that maps `gpa` by a table of smaller ones, unless somebody else just did.
    fn split_once(&self, pages: &impl Pages, gpa: Gpa) -> Result<(), MapError> {
        let table = pages.allocate().ok_or(MapError::OutOfTables)?;
        loop {
            let slot = self.descend(pages, gpa);
            let bits = slot.entry_cell.load(Ordering::Acquire);
            let is_leaf = matches!(self.format.decode(slot.level, bits), Entry::Leaf { .. });
            let Some(size) = slot.level.checked_sub(1).and_then(PageSize::at_level).filter(|_| is_leaf) else {
                pages.free(table);
                return Ok(());
            };
            for (index, part) in (0..).zip(pages.table(table)) {
                part.store(self.format.part(bits, size, index), Ordering::Relaxed);
            }
            let link = self.format.table(table);
            // When the hardware sets Accessed or Dirty meanwhile, the parts must say so as well: once more.
            if slot.entry_cell.compare_exchange(bits, link, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Ok(());
            }
        }
    }
}

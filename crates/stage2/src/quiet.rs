//! Skips tables whose pages are not written.
//!
//! The entry that points to a table of pages has a bit that the hardware ignores. If it is set the table is *quiet*: no
//! page in it was written, and none can be written without a fault. A round of a dirty log reads this one entry instead
//! of 512. So a round costs one read for each quiet 2 MiB, and more only where pages are dirty.
//!
//! The [cleaner](Walk::clean) makes a table quiet. A fault that makes one of its pages writable clears the bit (*wakes*
//! the table). This is the fault's only write besides the leaf, to an entry that the walk has just read, once per round
//! and 2 MiB. The two run in this order:
//!
//! ```text
//!   cleaner                          fault
//!     entry: quiet                     leaf:  writable
//!     each leaf: is it writable?       entry: is it quiet?
//!       then protect it, or wake         then wake
//! ```
//!
//! All processors see exchanges and reads of entries in one order ([`Pages`]). So the cleaner sees the leaf, or the
//! fault sees the bit, or both.
//!
//! If the hardware records writes, its leaves are writable, and no fault would wake their table. Such a table becomes
//! *idle* after a round without writes, and quiet after a second one: its pages are write-protected. The next write
//! faults, and makes all of them writable for the hardware again.

use crate::tree::entries;
use crate::walk::{Slot, Walk};
use crate::{Cell, Entry, Format, Pages, Source};

impl<F: Format, P: Pages, T> Walk<'_, F, P, T> {
    /// Writes `new` if the leaf or the hole in `slot` is unchanged. If the page is writable now, wakes its table.
    #[inline(always)]
    pub(crate) fn exchange(self, slot: &Slot, new: u64) -> bool {
        let done = slot.exchange(self.pages, new);
        if done && slot.level == 0 && !self.is_still(new) {
            self.wake(slot);
        }
        done
    }

    /// Whether the leaf was not written, and cannot be without a fault.
    #[inline]
    pub(crate) fn is_still(self, bits: u64) -> bool {
        let format = self.format();
        let is_written = |source| format.is_written(bits, source);
        !format.is_writable(bits) && !is_written(Source::WriteProtect) && !is_written(Source::Hardware)
    }

    pub(crate) fn is_quiet(self, table: &Slot) -> bool {
        table.bits & self.format().quiet() != 0
    }

    pub(crate) fn is_idle(self, table: &Slot) -> bool {
        table.bits & self.format().idle() != 0
    }

    /// Wakes the table that holds `leaf`.
    #[inline(always)]
    fn wake(self, leaf: &Slot) {
        if let Some(cell) = leaf.above {
            self.change_table(cell, |bits| bits & !self.format().quiet());
        }
    }

    /// Changes the software bits of an entry, as long as it points to a table.
    ///
    /// It may point to another table than before. The new table was made from the same pages, so to wake it is only
    /// slow.
    #[inline(always)]
    pub(crate) fn change_table(self, cell: Cell, change: impl Fn(u64) -> u64) {
        let mut bits = self.pages.load(cell);
        loop {
            let new = change(bits);
            if new == bits || !matches!(self.format().decode(1, bits), Entry::Table(_)) {
                return;
            }
            match self.pages.compare_exchange(cell, bits, new) {
                Ok(()) => return,
                Err(now) => bits = now,
            }
        }
    }

    /// The guest writes to a write-protected page, and the hardware can record writes: it does so from now on for all
    /// pages of the table.
    #[inline(always)]
    pub(crate) fn open_table(self, slot: Slot) {
        for index in 0..entries::<F>() {
            let cell = Cell::new(slot.cell.table(), index);
            let bits = self.pages.load(cell);
            let entry = self.format().decode(0, bits);
            let is_closed = matches!(entry, Entry::Leaf { access, .. } if access.write) && self.is_still(bits);
            if is_closed {
                // Another processor was faster: it has made the page writable, or uses it otherwise.
                let _ = self.exchange(&Slot { cell, bits, entry, ..slot }, self.format().watched(bits));
            }
        }
    }
}

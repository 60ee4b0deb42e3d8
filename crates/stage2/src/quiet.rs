//! Tables of pages to which nobody writes are passed over.
//!
//! The entry that names a table of pages has a bit that the hardware ignores. Where it is set the table is *quiet*: no page
//! below was written, and none can be without a fault. A round of a dirty log looks at this one entry instead of 512, so that
//! it costs as much as there is dirty, and one look for each 2 MiB that are not.
//!
//! Who [cleans](Tree::clean) makes a table quiet, and the fault that opens a page in it wakes it. That is the only write
//! beside the leaf's, to an entry that the walk has just read, and once in a round for 2 MiB. The two meet in this order:
//!
//! ```text
//!   cleaner                          fault
//!     entry: quiet                     leaf:  open
//!     each leaf: is it open?           entry: is it quiet?
//!       then close it, or wake           then wake
//! ```
//!
//! Entries are exchanged and read in one order that all processors agree on ([`Pages`]). So the cleaner sees the leaf, or
//! the fault sees the bit, or both.
//!
//! Where the hardware records writes, its leaves are open for it, and nobody would wake their table. It becomes quiet when
//! nothing was written between one round and the next, and again none (then it is *idle*): its pages are closed. The next
//! write faults, and opens all of them to the hardware again.

use crate::tree::{Slot, Tree, entries};
use crate::{Cell, Entry, Format, Pages, Source};

impl<F: Format> Tree<F> {
    /// Writes `new` if the leaf or the hole in `slot` is still what it was. A page that can be written now wakes its table.
    #[inline(always)]
    pub(crate) fn exchange(&self, pages: &impl Pages, slot: &Slot, new: u64) -> bool {
        let done = slot.exchange(pages, new);
        if done && slot.level == 0 && !self.is_still(new) {
            self.wake(pages, slot);
        }
        done
    }

    /// Whether the leaf was not written, and will not be without a fault.
    #[inline]
    pub(crate) fn is_still(&self, bits: u64) -> bool {
        let format = &self.format;
        let is_written = |source| format.is_written(bits, source);
        !format.is_writable(bits) && !is_written(Source::WriteProtect) && !is_written(Source::Hardware)
    }

    pub(crate) fn is_quiet(&self, table: &Slot) -> bool {
        table.bits & self.format.quiet() != 0
    }

    pub(crate) fn is_idle(&self, table: &Slot) -> bool {
        table.bits & self.format.idle() != 0
    }

    /// The table of which `leaf` is a page is not quiet any more.
    #[inline(always)]
    fn wake(&self, pages: &impl Pages, leaf: &Slot) {
        if let Some(cell) = leaf.above {
            self.change_table(pages, cell, |bits| bits & !self.format.quiet());
        }
    }

    /// Changes the bits of an entry that are left to us, as long as it names a table.
    ///
    /// It need not be the table that it named before. Then the new one was made of what its pages say, and to wake it is only
    /// slow.
    #[inline(always)]
    pub(crate) fn change_table(&self, pages: &impl Pages, cell: Cell, change: impl Fn(u64) -> u64) {
        let mut bits = pages.load(cell);
        loop {
            let new = change(bits);
            if new == bits || !matches!(self.format.decode(1, bits), Entry::Table(_)) {
                return;
            }
            match pages.compare_exchange(cell, bits, new) {
                Ok(()) => return,
                Err(now) => bits = now,
            }
        }
    }

    /// The guest writes to a page that was closed, and the hardware can record writes: it does so from now on for all pages
    /// of the table.
    #[inline(never)]
    pub(crate) fn open_table(&self, pages: &impl Pages, slot: Slot) {
        for index in 0..entries::<F>() {
            let cell = Cell::new(slot.cell.table(), index);
            let bits = pages.load(cell);
            let entry = self.format.decode(0, bits);
            let is_closed = matches!(entry, Entry::Leaf { access, .. } if access.write) && self.is_still(bits);
            if is_closed {
                // Who was quicker has opened it, or has another use for it.
                let _ = self.exchange(pages, &Slot { cell, bits, entry, ..slot }, self.format.watched(bits));
            }
        }
    }
}

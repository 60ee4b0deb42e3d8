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
//!
//! Hardware that also lists what it records needs none of that ([`Source::Listed`](crate::Source::Listed)). A table
//! becomes quiet as soon as its pages are clean, and they stay writable. The first write to a page goes into its
//! processor's list. When the guest has left, the list is taken, and each address [reported](Walk::report). In the
//! order above, the hardware's write to the leaf is the fault's first step, and the report is its second. So a round
//! may miss a write that is not reported yet, the next one does not, and no guest faults.

use crate::fault::Slot;
use crate::tree::entries;
use crate::{Cell, Format, PageTableEntry, Pages, Tlb, Walk};
use addr::Gpa;

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// The hardware has listed a write to `gpa`, and has recorded it in the leaf before: the next round looks there.
    /// Any number of processors may do this at the same time. Never waits.
    pub fn report(self, gpa: Gpa) {
        if gpa >= self.tree.limit() {
            return;
        }
        let slot = self.descend_to(gpa, 1);
        if let PageTableEntry::Table(_) = slot.entry {
            self.change_table(slot.cell, |bits| bits & !self.format().quiet());
        }
    }
}

impl<F: Format, P: Pages, T> Walk<'_, F, P, T> {
    pub(crate) fn is_quiet(self, table: &Slot) -> bool {
        table.bits & self.format().quiet() != 0
    }

    pub(crate) fn is_idle(self, table: &Slot) -> bool {
        table.bits & self.format().idle() != 0
    }

    /// The guest writes to a write-protected page, and the hardware can record writes: it does so from now on for all
    /// pages of the table.
    #[inline(always)]
    pub(crate) fn open_table(self, slot: Slot) {
        for index in 0..entries::<F>() {
            let cell = Cell::new(slot.cell.table(), index);
            let bits = self.pages.load(cell);
            let entry = self.format().decode(0, bits);
            let is_protected =
                matches!(entry, PageTableEntry::Leaf { access, .. } if access.write) && self.is_still(bits);
            if is_protected {
                // Another processor was faster: it has made the page writable, or uses it otherwise.
                let _ = self.exchange(&Slot { cell, bits, entry, ..slot }, self.format().recorded(bits));
            }
        }
    }
}

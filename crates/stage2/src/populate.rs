//! Maps a page at the guest's first touch.

use crate::fault::Slot;
use crate::tree::span;
use crate::{Access, Format, MapError, Memory, PageTableEntry, Pages, Spare, Tlb, Walk};
use addr::{Gpa, Hpa};

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Maps the page at `level` that holds `gpa` to `hpa`, which is aligned to that page: the guest's first touch. If
    /// another processor is faster, its mapping stays.
    ///
    /// # Errors
    /// A table is missing and there is no spare one, or the page cannot be mapped like this.
    #[inline]
    pub fn populate(self, spare: &mut Spare, gpa: Gpa, hpa: Hpa, level: u32, access: Access) -> Result<(), MapError> {
        let level = level.min(self.format().largest_leaf());
        let bytes = span::<F>(level);
        // Pages and limits are aligned to a page's size: a page that starts below a limit ends below it.
        if gpa >= self.tree.limit() {
            return Err(MapError::Beyond(gpa));
        }
        if hpa >= self.format().host_limit() {
            return Err(MapError::BeyondHost(hpa));
        }
        if hpa.0 & (bytes - 1) != 0 {
            return Err(MapError::MisalignedHost(hpa));
        }
        self.tree.check_access(access)?;

        // Fast path: most pages have a table already and no competitor.
        if self.fill(&self.descend(gpa), First::new::<F>(gpa, hpa, level, access)) {
            return Ok(());
        }
        self.apart(move |walk| walk.populate_without_table(spare, gpa, hpa, level, access))
    }

    #[inline(always)]
    fn populate_without_table(
        self,
        spare: &mut Spare,
        gpa: Gpa,
        hpa: Hpa,
        level: u32,
        access: Access,
    ) -> Result<(), MapError> {
        let first = First::new::<F>(gpa, hpa, level, access);
        loop {
            let slot = self.descend_and_wait(gpa);
            if self.fill(&slot, first) {
                return Ok(());
            }
            if slot.level > first.level && slot.entry == PageTableEntry::Empty {
                let table = spare.take(self.pages).ok_or(MapError::OutOfTables)?;
                if !slot.exchange(self.pages, self.format().table(table, slot.level)) {
                    spare.put_back(self.pages, table, 0);
                }
            }
        }
    }

    /// Maps the page, or the part of it that `slot` decides about, if nothing is mapped there. Returns whether it is
    /// mapped then. It is not if a table is missing or another processor is about to change the entry.
    #[inline(always)]
    fn fill(self, slot: &Slot, page: First) -> bool {
        if slot.entry != PageTableEntry::Empty || slot.level > page.level {
            return matches!(slot.entry, PageTableEntry::Leaf { .. });
        }
        // An earlier mapping may have left a table: then the page is mapped in parts.
        let hpa = Hpa(page.hpa.0 + (slot.start.0 - page.gpa.0));
        let leaf = self.format().leaf(hpa, slot.level, page.access, Memory::Normal);
        let done = self.exchange(slot, leaf);
        if done {
            self.tlb.publish();
        }
        done
    }
}

/// A page at its first touch: its address, its host address, and its attributes.
#[derive(Clone, Copy)]
struct First {
    gpa: Gpa,
    hpa: Hpa,
    level: u32,
    access: Access,
}

impl First {
    /// The page at `level` that holds `gpa`.
    #[inline(always)]
    fn new<F: Format>(gpa: Gpa, hpa: Hpa, level: u32, access: Access) -> Self {
        Self { gpa: Gpa(gpa.0 & !(span::<F>(level) - 1)), hpa, level, access }
    }
}

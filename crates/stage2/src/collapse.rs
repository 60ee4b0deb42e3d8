//! Replaces a table of adjacent, equal leaves by one large leaf.
//!
//! The steps are: break the entry that points to the table, break each entry of the table, flush the range from all
//! TLBs, write the leaf. A processor that wants to change an entry, and has read the table's address before, finds it
//! broken and restarts from the root. A broken entry includes what the hardware has recorded in it. The guest faults in
//! between, and retries; a collapse is never urgent.
//!
//! A processor that only looks a page up finds it all the time, by what the broken entries said. It must not wait: the
//! flush may wait for it.
//!
//! Other processors may still read the table. It waits in a [`Limbo`] until they have left.

use crate::fault::Slot;
use crate::tree::{Tree, entries, span};
use crate::{Cell, Format, Limbo, PageTableEntry, Pages, Quiescence, Stale, Tlb, Walk, WalkMut};
use addr::{Gpa, Hpa};

/// Result of a collapse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapse {
    /// One leaf instead of a table.
    Done,
    /// No table here has entries that form one leaf.
    NotAlike,
    /// The limbo is full: try later.
    Full,
}

/// Result of a search for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// The first address that the table maps.
    Found(Gpa),
    /// There is none up to here.
    Further(Gpa),
    /// There is no further one.
    End,
}

/// A table that is cut off from the tree.
struct Cut {
    /// The entry that pointed to it, before it was broken.
    slot: Slot,
    table: Hpa,
    /// The leaf that equals its entries, which are broken now. `Err` if not all could be; they are unchanged then.
    leaf: Result<u64, ()>,
}

impl<F: Format, P: Pages, T: Tlb> WalkMut<'_, F, P, T> {
    /// Replaces the table that maps the memory around `gpa` by one leaf at `level`. All its entries must be leaves with
    /// equal rights and adjacent in host memory. The table goes to `limbo`.
    ///
    /// All TLBs are flushed on return.
    pub fn collapse<const N: usize>(
        &mut self,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        gpa: Gpa,
        level: u32,
    ) -> Collapse {
        let [outcome] = self.collapse_together(limbo, walkers, [gpa], level);
        outcome
    }

    /// Like [`collapse`](Self::collapse) for several tables, with one flush for all of them.
    pub fn collapse_together<const N: usize, const M: usize>(
        &mut self,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        places: [Gpa; M],
        level: u32,
    ) -> [Collapse; M] {
        let walk = self.walk();
        let mut room = N - limbo.waiting();
        let mut stale = Stale::EMPTY;
        let cut_off = places.map(|gpa| {
            if gpa >= walk.tree.limit() || level == 0 || level > walk.format().largest_leaf() {
                return Err(Collapse::NotAlike);
            }
            if room == 0 {
                return Err(Collapse::Full);
            }
            let cut = walk.cut_off(gpa, level).ok_or(Collapse::NotAlike)?;
            room -= 1;
            stale = stale.merge(Stale::of(cut.slot.page()));
            Ok(cut)
        });
        let is_any = !stale.is_empty();
        stale.pay(walk.tlb);
        let outcomes = cut_off.map(|cut| match cut {
            Ok(cut) => walk.put_together(limbo, walkers, cut),
            Err(outcome) => outcome,
        });
        if is_any {
            walk.tlb.publish();
        }
        outcomes
    }
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Looks for the next table of pages that maps `from` or something behind it, at this number of entries at most.
    #[must_use]
    pub fn next_table(self, from: Gpa, most: u32) -> Search {
        let mut gpa = from;
        for _ in 0..most {
            if gpa >= self.tree.limit() {
                return Search::End;
            }
            let slot = self.descend_to(gpa, 1);
            if let PageTableEntry::Table(_) = slot.entry {
                return Search::Found(slot.page().start);
            }
            gpa = slot.page().end();
        }
        Search::Further(gpa)
    }
}

/// Steps of a collapse, which only [`WalkMut`] takes.
impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Breaks the entry that points to the table around `gpa`, and the entries of the table.
    fn cut_off(self, gpa: Gpa, level: u32) -> Option<Cut> {
        let slot = self.descend_to(gpa, level);
        let PageTableEntry::Table(table) = slot.entry else { return None };
        self.tlb.worked(entries::<F>());
        let alike = (0..entries::<F>()).all(|index| {
            let bits = self.pages.load(Cell::new(table, index));
            self.tree.continues(self.pages.load(Cell::new(table, 0)), bits, index, level - 1)
        });
        if !alike || slot.level != level || !slot.exchange(self.pages, self.format().broken(slot.bits)) {
            return None;
        }
        self.tlb.worked(entries::<F>());
        Some(Cut { table, leaf: self.freeze(table, level - 1), slot })
    }

    /// Writes the entry again, after all TLBs have dropped the old ones.
    fn put_together<const N: usize>(
        self,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        Cut { slot, table, leaf }: Cut,
    ) -> Collapse {
        // If it stays a table, it is not quiet: a fault may have made a page writable while it could not wake the
        // table.
        let bits = leaf.unwrap_or_else(|()| self.format().table(table, slot.level));
        let made = Slot { bits: self.format().broken(slot.bits), ..slot }.exchange(self.pages, bits);
        assert!(made, "who breaks an entry is the only one to make it");
        if leaf.is_err() {
            return Collapse::NotAlike;
        }
        limbo.retire(table, walkers);
        Collapse::Done
    }

    /// Breaks all entries of a table that is cut off, and returns the leaf that equals them. If an entry has changed so
    /// that no such leaf exists, makes them again.
    fn freeze(self, table: Hpa, level: u32) -> Result<u64, ()> {
        let mut first = 0;
        let mut whole = 0;
        for index in 0..entries::<F>() {
            let cell = Cell::new(table, index);
            let taken = loop {
                let bits = self.pages.load(cell);
                let first = if index == 0 { bits } else { first };
                if !self.tree.continues(first, bits, index, level) {
                    break None;
                }
                if self.pages.compare_exchange(cell, bits, self.format().broken(bits)).is_ok() {
                    break Some(bits);
                }
            };
            let Some(bits) = taken else {
                self.thaw(table, index);
                return Err(());
            };
            if index == 0 {
                first = bits;
                whole = self.format().whole(bits, level + 1);
            }
            whole = self.format().gathered(whole, bits);
        }
        Ok(whole)
    }

    /// Makes the first `count` entries again, as they were.
    fn thaw(self, table: Hpa, count: usize) {
        for index in 0..count {
            let cell = Cell::new(table, index);
            let bits = self.pages.load(cell);
            let made = self.pages.compare_exchange(cell, bits, self.format().unbroken(bits)).is_ok();
            assert!(made, "who breaks an entry is the only one to make it");
        }
    }
}

impl<F: Format> Tree<F> {
    /// Whether `bits` is the leaf at `index` of a table that begins with `first`, if that table is one large leaf.
    fn continues(&self, first: u64, bits: u64, index: usize, level: u32) -> bool {
        let leaf = |bits| match self.format.decode(level, bits) {
            PageTableEntry::Leaf { hpa, .. } => Some(hpa.0),
            PageTableEntry::Empty | PageTableEntry::Busy | PageTableEntry::Table(_) => None,
        };
        let (Some(start), Some(here)) = (leaf(first), leaf(bits)) else { return false };
        start & (span::<F>(level + 1) - 1) == 0
            && here == start + index as u64 * span::<F>(level)
            && self.format.attributes(first) == self.format.attributes(bits)
    }
}

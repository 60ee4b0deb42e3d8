//! A table of leaves that belong together becomes one large leaf again.
//!
//! The entry that names the table is broken, then each entry of the table is taken out for good, then all that the TLBs
//! know of the range is flushed, and the leaf is made. A processor that came to the table before it was cut off finds
//! its entry busy and starts again from the root; what the hardware has recorded before its entry was taken is in what
//! was taken. The guest faults in between, and tries again: large pages come back when nobody is in a hurry.
//!
//! The table itself is still being looked at by those who found it before. It waits in a [`Limbo`] until they have left.

use crate::tree::{Slot, Tree, entries, span};
use crate::{Cell, Entry, Format, Limbo, Pages, Quiescence, Shape, Stale, Tlb};
use addr::{Gpa, Hpa};

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapse {
    /// One leaf instead of a table.
    Done,
    /// There is no table here whose entries make one leaf.
    NotAlike,
    /// The limbo is full: later.
    Full,
}

/// A table that nothing leads to any more.
struct Cut {
    /// The entry that named it, which is busy now.
    slot: Slot,
    table: Hpa,
    /// What says the same as its entries did, which are busy now; or they could not all be taken and are as they were.
    leaf: Result<u64, ()>,
}

impl<F: Format> Tree<F> {
    /// Makes one leaf at `level` of the table that maps what is around `gpa`, if all of its entries are leaves with equal
    /// rights that lie side by side in host memory. The table goes to `limbo`.
    ///
    /// Everything is flushed when this returns.
    #[expect(clippy::too_many_arguments, reason = "the tree, those who help to change it, and where")]
    pub fn collapse<const N: usize>(
        &self,
        shape: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        gpa: Gpa,
        level: u32,
    ) -> Collapse {
        let [outcome] = self.collapse_together(shape, pages, tlb, limbo, walkers, [gpa], level);
        outcome
    }

    /// As [`collapse`](Self::collapse) for several places, in different tables, with one flush for all of them.
    #[expect(clippy::too_many_arguments, reason = "as above")]
    pub fn collapse_together<const N: usize, const M: usize>(
        &self,
        _: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        places: [Gpa; M],
        level: u32,
    ) -> [Collapse; M] {
        let mut room = N - limbo.waiting();
        let mut stale = Stale::EMPTY;
        let cut_off = places.map(|gpa| {
            if gpa >= self.limit() || level == 0 || level > self.format.largest_leaf() {
                return Err(Collapse::NotAlike);
            }
            if room == 0 {
                return Err(Collapse::Full);
            }
            let cut = self.cut_off(pages, gpa, level).ok_or(Collapse::NotAlike)?;
            room -= 1;
            stale = stale.merge(Stale::of(cut.slot.page()));
            Ok(cut)
        });
        let is_any = !stale.is_empty();
        stale.pay(tlb);
        let outcomes = cut_off.map(|cut| match cut {
            Ok(cut) => self.put_together(pages, limbo, walkers, cut),
            Err(outcome) => outcome,
        });
        if is_any {
            tlb.publish();
        }
        outcomes
    }

    /// Breaks the entry that names the table around `gpa`, and takes out the entries of the table.
    fn cut_off(&self, pages: &impl Pages, gpa: Gpa, level: u32) -> Option<Cut> {
        let slot = self.descend_to(pages, gpa, level);
        let Entry::Table(table) = slot.entry else { return None };
        let alike = (0..entries::<F>()).all(|index| {
            let bits = pages.load(Cell::new(table, index));
            self.continues(pages.load(Cell::new(table, 0)), bits, index, level - 1)
        });
        if !alike || slot.level != level || !slot.exchange(pages, self.format.busy()) {
            return None;
        }
        Some(Cut { table, leaf: self.freeze(pages, table, level - 1), slot })
    }

    /// Makes the entry again, when no TLB knows anything of what was there.
    fn put_together<const N: usize>(
        &self,
        pages: &impl Pages,
        limbo: &mut Limbo<N>,
        walkers: &impl Quiescence,
        Cut { slot, table, leaf }: Cut,
    ) -> Collapse {
        // Where it stays a table, awake: a page may have been opened that found nobody to wake.
        let bits = leaf.unwrap_or_else(|()| self.format.table(table));
        let made = Slot { bits: self.format.busy(), ..slot }.exchange(pages, bits);
        assert!(made, "who breaks an entry is the only one to make it");
        if leaf.is_err() {
            return Collapse::NotAlike;
        }
        limbo.retire(table, walkers);
        Collapse::Done
    }

    /// Takes all entries out of a table that nothing leads to any more, and returns the leaf that says the same. When
    /// one of them has changed so that there is no such leaf, puts them back.
    fn freeze(&self, pages: &impl Pages, table: Hpa, level: u32) -> Result<u64, ()> {
        let mut first = 0;
        let mut whole = 0;
        for index in 0..entries::<F>() {
            let cell = Cell::new(table, index);
            let taken = loop {
                let bits = pages.load(cell);
                let first = if index == 0 { bits } else { first };
                if !self.continues(first, bits, index, level) {
                    break None;
                }
                if pages.compare_exchange(cell, bits, self.format.busy()).is_ok() {
                    break Some(bits);
                }
            };
            let Some(bits) = taken else {
                self.thaw(pages, table, level, whole, index);
                return Err(());
            };
            if index == 0 {
                first = bits;
                whole = self.format.whole(bits, level + 1);
            }
            whole = self.format.gathered(whole, bits);
        }
        Ok(whole)
    }

    /// Puts the first `count` entries back. What was touched or written in one of them is now so in all.
    fn thaw(&self, pages: &impl Pages, table: Hpa, level: u32, whole: u64, count: usize) {
        for (index, number) in (0..count).zip(0_u64..) {
            let bits = self.format.part(whole, level, number);
            let made = pages.compare_exchange(Cell::new(table, index), self.format.busy(), bits).is_ok();
            assert!(made, "an entry that was taken is changed by nobody else");
        }
    }

    /// Whether `bits` is the leaf at `index` of a table that begins with `first`, if that table is one large leaf.
    fn continues(&self, first: u64, bits: u64, index: usize, level: u32) -> bool {
        let leaf = |bits| match self.format.decode(level, bits) {
            Entry::Leaf { hpa, .. } => Some(hpa.0),
            Entry::Empty | Entry::Busy | Entry::Table(_) => None,
        };
        let (Some(start), Some(here)) = (leaf(first), leaf(bits)) else { return false };
        start & (span::<F>(level + 1) - 1) == 0
            && here == start + index as u64 * span::<F>(level)
            && self.format.attributes(first) == self.format.attributes(bits)
    }
}

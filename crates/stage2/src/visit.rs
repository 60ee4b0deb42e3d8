//! Visits the leaves of a range.
//!
//! Pages are visited table by table: one read of the entry that points to a table tells whether the 512 entries below
//! are worth reading.

use crate::fault::Slot;
use crate::tree::{entries, range_between, span};
use crate::{Cell, Format, PageTableEntry, Pages, Tlb, Walk};
use addr::{Gpa, GpaRange, Hpa};

/// Entries of one table between two calls of [`Tlb::worked`].
const AT_ONCE: usize = 64;

/// Code that visits the leaves of a range.
pub(crate) trait Visitor {
    /// Whether to visit the pages of the table in this slot, from `part` of it.
    fn enters(&mut self, table: &Slot, part: GpaRange) -> bool {
        let _ = (table, part);
        true
    }

    /// Whether to skip the entry for `page` of a table of pages: faster than a call of `leaf`.
    fn passes(&mut self, page: Gpa, bits: u64) -> bool {
        let _ = (page, bits);
        false
    }

    /// A leaf. `false` if another processor was faster, so the entry must be read again.
    fn leaf(&mut self, leaf: &Slot) -> bool;

    /// All pages of the table in this slot were visited.
    fn leaves(&mut self, table: &Slot) {
        let _ = table;
    }
}

/// Enters each table.
pub(crate) struct Each<C>(pub(crate) C);

impl<C: FnMut(&Slot) -> bool> Visitor for Each<C> {
    fn leaf(&mut self, leaf: &Slot) -> bool {
        (self.0)(leaf)
    }
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Calls `visitor` for each leaf that `range` overlaps.
    pub(crate) fn visit(self, range: GpaRange, visitor: &mut impl Visitor) {
        let end = range.end().min(self.tree.limit());
        let mut gpa = range.start;
        let mut beside = None;
        while gpa < end {
            let slot = beside.take().unwrap_or_else(|| self.descend_and_wait_to(gpa, 1));
            match slot.entry {
                PageTableEntry::Table(table) => {
                    if visitor.enters(&slot, slot.piece(gpa, end)) {
                        let rest = slot.piece(gpa, end);
                        if let Err(cut_off) = self.visit_pages(&slot, table, rest, visitor) {
                            gpa = cut_off;
                            self.tlb.relax();
                            continue;
                        }
                        visitor.leaves(&slot);
                    }
                }
                PageTableEntry::Leaf { .. } if !visitor.leaf(&slot) => continue,
                PageTableEntry::Leaf { .. } | PageTableEntry::Empty | PageTableEntry::Busy => {}
            }
            // A large leaf has many pages to tell of.
            self.tlb.worked(8);
            gpa = slot.page().end();
            beside = self.beside(&slot);
        }
    }

    /// Calls `visitor` for the pages in `part` of the table that `above` points to. If the table is cut off meanwhile,
    /// the visit continues from the root at the returned address.
    fn visit_pages(self, above: &Slot, table: Hpa, part: GpaRange, visitor: &mut impl Visitor) -> Result<(), Gpa> {
        let bytes = span::<F>(0);
        let first = (part.start.0 - above.start.0) / bytes;
        let start = Gpa(above.start.0 + first * bytes);
        let numbers = (0..entries::<F>()).skip(usize::try_from(first).expect("entries of one table"));
        for (index, start) in numbers.zip((start.0..part.end().0).step_by(1 << bytes.trailing_zeros()).map(Gpa)) {
            let cell = Cell::new(table, index);
            loop {
                let bits = self.pages.load(cell);
                if !self.format().is_broken(bits) && visitor.passes(start, bits) {
                    break;
                }
                let entry = self.format().decode(0, bits);
                match entry {
                    PageTableEntry::Busy => return Err(start),
                    PageTableEntry::Empty | PageTableEntry::Table(_) => break,
                    PageTableEntry::Leaf { .. } => {}
                }
                if visitor.leaf(&Slot { cell, bits, entry, level: 0, start, bytes, above: Some(above.cell) }) {
                    break;
                }
            }
            if index % AT_ONCE == AT_ONCE - 1 {
                self.tlb.worked(AT_ONCE);
            }
        }
        Ok(())
    }

    /// The entry after `slot` in the same table, if it is to be visited: found without another walk. A table that was
    /// cut off meanwhile has only busy entries.
    fn beside(self, slot: &Slot) -> Option<Slot> {
        let index = slot.cell.index() + 1;
        if index == entries::<F>() {
            return None;
        }
        let cell = Cell::new(slot.cell.table(), index);
        let bits = self.pages.load(cell);
        let entry = self.format().decode(slot.level, bits);
        let decides = match entry {
            PageTableEntry::Leaf { .. } | PageTableEntry::Empty => true,
            PageTableEntry::Table(_) => slot.level == 1,
            PageTableEntry::Busy => false,
        };
        decides.then_some(Slot { cell, bits, entry, start: slot.page().end(), ..*slot })
    }

    /// Whether `holds` is true for all entries of a table of pages.
    pub(crate) fn all_below(self, table: Hpa, holds: impl Fn(u64) -> bool) -> bool {
        (0..entries::<F>()).all(|index| holds(self.pages.load(Cell::new(table, index))))
    }
}

/// The part of `page` that is in `range`.
pub(crate) fn within(page: GpaRange, range: GpaRange) -> GpaRange {
    range_between(page.start.max(range.start), page.end().min(range.end()))
}

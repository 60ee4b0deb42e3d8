//! The leaves themselves are the dirty log: each says whether its page was written since it was last cleaned.
//!
//! So the path on which the guest writes changes nothing but the leaf, which it must change anyway, or which the hardware
//! changes for us. To read the log is to look at the leaves; to clear it is to clean them, one conditional exchange each.
//! Neither stops a fault.

use crate::split::{Dress, Split};
use crate::tree::{Slot, Tree};
use crate::{Entry, Format, MapError, Pages, Source, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange};

impl<F: Format> Tree<F> {
    /// Calls `found` with each part of `range` that was written, or may have been, since it was last clean. A large
    /// leaf counts as a whole.
    pub fn written(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        source: Source,
        mut found: impl FnMut(GpaRange),
    ) {
        self.each_leaf(pages, tlb, range, |slot| {
            if self.format.is_written(slot.bits, source) {
                found(slot.piece(slot.page().start.max(range.start), range.end()));
            }
            true
        });
    }

    /// Makes clean all leaves in `range` of which `picked` holds for a part, as far as they were written: a page at level 0
    /// as `source` has it, a larger one so that the next write to it faults.
    ///
    /// Of a large leaf the pages that are not picked lose what the leaf said of them as well; `spill` is called with the
    /// leaf before that happens.
    ///
    /// The guest may write by what a TLB remembers until the debt is paid: a page is copied after that, never before.
    pub(crate) fn clean(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        source: Source,
        picked: impl Fn(GpaRange) -> bool,
        mut spill: impl FnMut(GpaRange),
    ) -> Stale {
        let mut stale = Stale::EMPTY;
        self.each_leaf(pages, tlb, range, |slot| {
            let page = slot.page();
            let piece = slot.piece(page.start.max(range.start), range.end());
            if !self.format.is_written(slot.bits, source) || !picked(piece) {
                return true;
            }
            if slot.level > 0 {
                spill(page);
            }
            let done = slot.exchange(pages, self.cleaned(slot, source));
            if done {
                stale = stale.merge(self.owed_for(page, slot.level));
            }
            done
        });
        stale
    }

    /// Makes all leaves in `range` clean, whatever they say.
    pub(crate) fn clean_all(&self, pages: &impl Pages, tlb: &impl Tlb, range: GpaRange, source: Source) -> Stale {
        let mut stale = Stale::EMPTY;
        self.each_leaf(pages, tlb, range, |slot| {
            let bits = self.cleaned(slot, source);
            let done = bits == slot.bits || slot.exchange(pages, bits);
            if done && self.format.is_writable(slot.bits) {
                stale = stale.merge(self.owed_for(slot.page(), slot.level));
            }
            done
        });
        stale
    }

    /// The leaf, clean: a page as `source` has it, a larger one so that its next write faults.
    fn cleaned(&self, slot: &Slot, source: Source) -> u64 {
        if slot.level == 0 && source == Source::Hardware {
            self.format.watched(slot.bits)
        } else {
            self.format.closed(slot.bits)
        }
    }

    /// Gives all leaves in `range` back the rights that a log has taken. Rights only grow, so nothing is owed.
    pub(crate) fn release(&self, pages: &impl Pages, tlb: &impl Tlb, range: GpaRange) {
        self.each_leaf(pages, tlb, range, |slot| {
            let bits = self.format.released(slot.bits);
            bits == slot.bits || slot.exchange(pages, bits)
        });
        tlb.publish();
    }

    /// Splits large leaves in `range` as far as one batch and the spare tables go. Parts of closed leaves are watched
    /// if the hardware does that, else closed. Returns where to go on.
    pub(crate) fn split_ahead(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        source: Source,
        spare: &mut Spare,
    ) -> (Stale, Gpa) {
        self.split_batch(pages, tlb, range, spare, |_, _| true, &Ahead(source))
    }

    /// Splits large leaves that reach over `border`.
    ///
    /// # Errors
    /// When a table is missing; what is split stays so, and is flushed.
    pub(crate) fn split_at(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        border: Gpa,
        spare: &mut Spare,
    ) -> Result<(), MapError> {
        while border < self.limit() {
            let slot = self.settle(pages, tlb, border);
            if slot.page().start == border || slot.access().is_none() {
                break;
            }
            spare.fill(pages, 1)?;
            if let Split::Done(stale) = self.split(pages, tlb, slot, spare, &crate::split::AsBefore)? {
                stale.pay(tlb);
            }
        }
        Ok(())
    }

    /// Forgets that pages in `range` were touched, and calls `found` with those that were.
    ///
    /// Nothing is owed: a processor that remembers a page may use it without touching it again, so the answer is late,
    /// not wrong.
    pub fn age(&self, pages: &impl Pages, tlb: &impl Tlb, range: GpaRange, mut found: impl FnMut(GpaRange)) {
        self.each_leaf(pages, tlb, range, |slot| {
            if !self.format.is_touched(slot.bits) {
                return true;
            }
            let done = slot.exchange(pages, self.format.aged(slot.bits));
            if done {
                found(slot.page());
            }
            done
        });
    }

    /// Calls `change` for each leaf that `range` touches, again while it says that another processor was quicker.
    fn each_leaf(&self, pages: &impl Pages, tlb: &impl Tlb, range: GpaRange, mut change: impl FnMut(&Slot) -> bool) {
        let end = range.end().min(self.limit());
        let mut gpa = range.start;
        let mut beside = None;
        while gpa < end {
            let slot = beside.unwrap_or_else(|| self.settle(pages, tlb, gpa));
            if !matches!(slot.entry, Entry::Leaf { .. }) || change(&slot) {
                gpa = slot.page().end();
                beside = self.beside(pages, &slot);
            } else {
                beside = None;
            }
        }
    }
}

/// The parts of leaves that are split before the guest writes.
struct Ahead(Source);

impl Dress for Ahead {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // What was written stays written: watching it would forget that.
        if self.0 == Source::Hardware && level == 0 && !format.is_written(bits, self.0) {
            format.watched(bits)
        } else {
            bits
        }
    }
}

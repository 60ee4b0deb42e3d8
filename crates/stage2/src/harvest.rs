//! The leaves are the dirty log: each tells whether its page was written since it was last cleaned.
//!
//! So a guest's write changes only the leaf, which must change anyway, or which the hardware changes. To read the log
//! is to read the leaves. To clear it is to clean them, one compare-exchange each. Neither stops a fault. Tables
//! without writes are skipped: they are [quiet](crate::quiet).

use crate::fault::Slot;
use crate::split::{Dress, Split};
use crate::tree::{range_between, span};
use crate::visit::{Each, Visitor, within};
use crate::{Format, MapError, PageTableEntry, Pages, Source, Spare, Stale, Tlb, Walk};
use addr::{Gpa, GpaRange};

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Calls `found` with each part of `range` that was, or may have been, written since it was last clean. A large
    /// leaf counts as a whole.
    pub fn written(self, range: GpaRange, source: Source, found: impl FnMut(GpaRange)) {
        self.visit(range, &mut Finder { walk: self, range, source, found });
    }

    /// Cleans the written leaves in `range` that overlap a `picked` part: a page at level 0 as `source` requires, a
    /// larger one by write protection.
    ///
    /// The pages of a large leaf that are not picked lose their state too; `spill` is called with the leaf before that.
    ///
    /// Until the returned flush is done the guest may still write through a TLB. So copy a page after the flush, never
    /// before.
    pub(crate) fn clean(
        self,
        range: GpaRange,
        source: Source,
        picked: impl Fn(GpaRange) -> bool,
        spill: impl FnMut(GpaRange),
    ) -> Stale {
        let stale = Stale::EMPTY;
        let mode = Mode::Leave;
        let mut cleaner = Cleaner { walk: self, range, source, picked, spill, stale, mode, found: false, left: false };
        self.visit(range, &mut cleaner);
        cleaner.stale
    }

    /// Cleans all leaves in `range`, whatever their state.
    pub(crate) fn clean_all(self, range: GpaRange, source: Source) -> Stale {
        let mut stale = Stale::EMPTY;
        let clean = |slot: &Slot| {
            let bits = self.format().cleaned(slot.level, slot.bits, source);
            let done = bits == slot.bits || self.exchange(slot, bits);
            if done && self.format().is_writable(slot.bits) {
                stale = stale.merge(self.tree.owed_for(slot.page(), slot.level));
            }
            done
        };
        self.visit(range, &mut Each(clean));
        stale
    }

    /// Returns all rights that a log has taken to the leaves in `range`. Rights only grow, so no flush is needed.
    pub(crate) fn release(self, range: GpaRange) {
        let release = |slot: &Slot| {
            let bits = self.format().released(slot.bits);
            bits == slot.bits || self.exchange(slot, bits)
        };
        self.visit(range, &mut Each(release));
        self.tlb.publish();
    }

    /// Splits large leaves in `range`, up to one batch and the number of spare tables. Parts of write-protected leaves
    /// become `recorded` if the hardware records writes, else they stay write-protected. Returns the address to
    /// continue from.
    pub(crate) fn split_ahead(self, range: GpaRange, source: Source, spare: &mut Spare) -> (Stale, Gpa) {
        self.split_batch(range, spare, |_, _| true, &Ahead(source))
    }

    /// Splits large leaves that cross `border`.
    ///
    /// # Errors
    /// A table is missing; split leaves stay so, and are flushed.
    pub(crate) fn split_at(self, border: Gpa, spare: &mut Spare) -> Result<(), MapError> {
        while border < self.tree.limit() {
            let slot = self.descend_and_wait(border);
            if slot.page().start == border || slot.access().is_none() {
                break;
            }
            spare.fill(self.pages, 1)?;
            if let Split::Done(stale) = self.split(slot, spare, &crate::split::AsBefore)? {
                stale.pay(self.tlb);
            }
        }
        Ok(())
    }

    /// The hypervisor writes to the page that holds `gpa`, and marks its leaf as a write of the guest does. The caller
    /// keeps its announcement until the write is done, and whoever cleans the leaf [waits](crate::Cleared::flush) for
    /// it. Returns whether a page is there. A large leaf counts as written as a whole.
    ///
    /// While another processor replaces the leaf, none is there: collapse no tree whose writers use this.
    pub fn mark_written(self, gpa: Gpa) -> bool {
        loop {
            let slot = self.descend(gpa);
            if slot.access().is_none() {
                return false;
            }
            let is_written = self.format().is_written(slot.bits, Source::Hardware);
            if is_written || self.exchange(&slot, self.format().writable(slot.bits)) {
                return true;
            }
        }
    }

    /// Calls `found` with the pages in `range` that were accessed since their state was last cleared: in as few pieces
    /// as possible.
    pub fn accessed(self, range: GpaRange, found: impl FnMut(GpaRange)) {
        let mut touched = Touched { walk: self, range, start: range.start, end: range.start, found };
        self.visit(range, &mut touched);
        touched.tell();
    }

    /// Sets the accessed state of the pages in `range`.
    pub fn touch(self, range: GpaRange) {
        let touch = |slot: &Slot| {
            let bits = self.format().touched(slot.bits);
            bits == slot.bits || self.exchange(slot, bits)
        };
        self.visit(range, &mut Each(touch));
    }

    /// Clears the accessed state of pages in `range`, and calls `found` with those that were accessed.
    ///
    /// Needs no flush: a processor may use a cached page without setting the bit again, so the answer is late, not
    /// wrong.
    pub fn age(self, range: GpaRange, mut found: impl FnMut(GpaRange)) {
        let age = |slot: &Slot| {
            if !self.format().is_touched(slot.bits) {
                return true;
            }
            let done = self.exchange(slot, self.format().aged(slot.bits));
            if done {
                found(slot.page());
            }
            done
        };
        self.visit(range, &mut Each(age));
    }
}

/// Finds leaves that were written.
struct Finder<'a, F, P, T, C> {
    walk: Walk<'a, F, P, T>,
    range: GpaRange,
    source: Source,
    found: C,
}

impl<F: Format, P: Pages, T: Tlb, C: FnMut(GpaRange)> Visitor for Finder<'_, F, P, T, C> {
    fn enters(&mut self, table: &Slot, _: GpaRange) -> bool {
        !self.walk.is_quiet(table)
    }

    #[inline]
    fn passes(&mut self, _: Gpa, bits: u64) -> bool {
        !self.walk.format().is_written(bits, self.source)
    }

    fn leaf(&mut self, leaf: &Slot) -> bool {
        if self.walk.format().is_written(leaf.bits, self.source) {
            (self.found)(within(leaf.page(), self.range));
        }
        true
    }
}

/// Finds leaves that were accessed. Most leaves are, so neighbours are told as one piece.
struct Touched<'a, F, P, T, C> {
    walk: Walk<'a, F, P, T>,
    range: GpaRange,
    /// Found from here to there, and not told yet.
    start: Gpa,
    end: Gpa,
    found: C,
}

impl<F: Format, P: Pages, T: Tlb, C: FnMut(GpaRange)> Touched<'_, F, P, T, C> {
    #[inline]
    fn add(&mut self, start: Gpa, end: Gpa) {
        if start != self.end {
            self.tell();
            self.start = start;
        }
        self.end = end;
    }

    fn tell(&mut self) {
        if self.start < self.end {
            (self.found)(within(range_between(self.start, self.end), self.range));
        }
    }
}

impl<F: Format, P: Pages, T: Tlb, C: FnMut(GpaRange)> Visitor for Touched<'_, F, P, T, C> {
    #[inline]
    fn passes(&mut self, page: Gpa, bits: u64) -> bool {
        let format = self.walk.format();
        if matches!(format.decode(0, bits), PageTableEntry::Leaf { .. }) && format.is_touched(bits) {
            self.add(page, Gpa(page.0 + span::<F>(0)));
        }
        true
    }

    fn leaf(&mut self, leaf: &Slot) -> bool {
        if self.walk.format().is_touched(leaf.bits) {
            self.add(leaf.page().start, leaf.page().end());
        }
        true
    }
}

/// What to do with the table of pages that is being visited.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// It stays awake.
    Leave,
    /// Make it quiet if all of its pages are write-protected.
    Hush,
    /// The same, and write-protect its pages for that.
    Protect,
}

/// Cleans leaves.
struct Cleaner<'a, F, P, T, Picked, Spill> {
    walk: Walk<'a, F, P, T>,
    range: GpaRange,
    source: Source,
    picked: Picked,
    spill: Spill,
    stale: Stale,
    mode: Mode,
    /// A page of this table was written.
    found: bool,
    /// A page of this table stays writable or written.
    left: bool,
}

impl<F: Format, P: Pages, T, Picked, Spill> Cleaner<'_, F, P, T, Picked, Spill> {
    /// Whether the page with this leaf lets its table be quiet: it was not written, and wakes the table when it is.
    #[inline]
    fn is_quiet(&self, bits: u64) -> bool {
        match self.source {
            Source::Listed => !self.walk.format().is_written(bits, self.source),
            Source::WriteProtect | Source::Hardware => self.walk.is_still(bits),
        }
    }
}

impl<F: Format, P: Pages, T: Tlb, Picked: Fn(GpaRange) -> bool, Spill: FnMut(GpaRange)> Visitor
    for Cleaner<'_, F, P, T, Picked, Spill>
{
    fn enters(&mut self, table: &Slot, part: GpaRange) -> bool {
        let PageTableEntry::Table(pages) = table.entry else { return true };
        if self.walk.is_quiet(table) {
            return false;
        }
        let written = |bits| self.walk.format().is_written(bits, self.source);
        self.mode = match self.source {
            // The state of pages that are not visited is unknown.
            _ if part != table.page() => Mode::Leave,
            Source::WriteProtect | Source::Listed => Mode::Hush,
            Source::Hardware if !self.walk.is_idle(table) => Mode::Leave,
            Source::Hardware if self.walk.all_below(pages, |bits| !written(bits)) => Mode::Protect,
            Source::Hardware => Mode::Leave,
        };
        (self.found, self.left) = (false, false);
        if self.mode != Mode::Leave {
            // Before the first page is read: a fault that makes a page writable later, or a report, will see it.
            self.walk.change_table(table.cell, |bits| bits | self.walk.format().quiet());
        }
        true
    }

    #[inline]
    fn passes(&mut self, _: Gpa, bits: u64) -> bool {
        let passes = self.mode != Mode::Protect && !self.walk.format().is_written(bits, self.source);
        self.left |= passes && !self.is_quiet(bits);
        passes
    }

    fn leaf(&mut self, leaf: &Slot) -> bool {
        let page = leaf.page();
        let is_written = self.walk.format().is_written(leaf.bits, self.source);
        let is_meant = is_written && (self.picked)(within(page, self.range));
        self.found |= is_written;
        let mode = if leaf.level > 0 { Mode::Leave } else { self.mode };
        let bits = match (is_meant, mode) {
            (true, _) if mode == Mode::Leave || self.source == Source::Listed => {
                self.walk.format().cleaned(leaf.level, leaf.bits, self.source)
            }
            (true, _) => self.walk.format().write_protected(leaf.bits),
            (false, Mode::Protect) if !is_written => self.walk.format().write_protected(leaf.bits),
            (false, _) => leaf.bits,
        };
        if is_meant && leaf.level > 0 {
            (self.spill)(page);
        }
        if bits != leaf.bits {
            // A page that becomes quiet wakes nothing: a report that came in between would be forgotten with it.
            let wakes = !(self.is_quiet(bits) && mode == Mode::Hush);
            let done = if wakes { self.walk.exchange(leaf, bits) } else { leaf.exchange(self.walk.pages, bits) };
            if !done {
                return false;
            }
            self.stale.add(self.walk.tree.owed_for(page, leaf.level));
        }
        self.left |= !self.is_quiet(bits);
        true
    }

    fn leaves(&mut self, table: &Slot) {
        let format = self.walk.format();
        let (quiet, idle) = (format.quiet(), format.idle());
        let change = |bits: u64| match (self.mode, self.found) {
            (Mode::Leave, _) if self.source != Source::Hardware => bits,
            (Mode::Leave, true) => bits & !idle,
            (Mode::Leave, false) => bits | idle,
            (Mode::Hush | Mode::Protect, _) if self.left => bits & !(quiet | idle),
            (Mode::Hush | Mode::Protect, _) => bits & !idle,
        };
        self.walk.change_table(table.cell, change);
        self.mode = Mode::Leave;
    }
}

/// The parts of leaves that are split before the guest writes.
struct Ahead(Source);

impl Dress for Ahead {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // A written leaf stays written: `recorded` would lose that.
        if self.0.is_hardware() && level == 0 && !format.is_written(bits, self.0) {
            format.recorded(bits)
        } else {
            bits
        }
    }
}

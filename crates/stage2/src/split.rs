//! Splits a large leaf into a table of smaller ones, while the guest runs.
//!
//! Each way of replacing an entry has up to three steps (Arm ARM, D8.16; [`Replace`]):
//!
//! ```text
//!              begin                flush      finish
//!  BreakFirst  leaf -> busy         yes        busy -> table          the guest may fault in between, and retries
//!  Uncached    leaf -> leaf, nT     yes        leaf, nT -> table      and needs a later flush
//!  OneStore                                    leaf -> table          and needs a later flush
//!  Freely                                      leaf -> table
//! ```
//!
//! Many leaves begin together, are flushed by one broadcast, and finish together. Each exchange is conditional: the
//! hardware may record a write in the leaf at any time, and another processor may be faster.

use crate::fault::Slot;
use crate::tree::{entries, span};
use crate::{Cell, Format, MapError, PageTableEntry, Pages, Replace, Spare, Stale, Tlb, Walk};
use addr::{Gpa, GpaRange};

/// Leaves that are broken together and share one broadcast.
pub const BATCH: usize = 64;

/// Result of a split.
pub(crate) enum Split {
    /// The entry is a table now.
    Done(Stale),
    /// Another processor has changed the entry: read it again.
    Lost,
}

/// A leaf between the two steps.
#[derive(Clone, Copy)]
struct Begun {
    cell: Cell,
    /// The leaf that the second step must find; if it is broken, the leaf before that.
    bits: u64,
    level: u32,
    page: GpaRange,
}

/// Makes the parts of a split leaf: they grant at least what the leaf granted.
pub(crate) trait Dress {
    /// The part at `level`, made from a part that equals the leaf.
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64;
}

/// The parts equal the leaf.
pub(crate) struct AsBefore;

impl Dress for AsBefore {
    fn part<F: Format>(&self, _: &F, _: u32, bits: u64) -> u64 {
        bits
    }
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Replaces the leaf in `slot`, which is above level 0.
    ///
    /// # Errors
    /// No spare table.
    pub(crate) fn split(self, slot: Slot, spare: &mut Spare, dress: &impl Dress) -> Result<Split, MapError> {
        if spare.count() == 0 {
            return Err(MapError::OutOfTables);
        }
        let Some(begun) = self.begin(&slot) else { return Ok(Split::Lost) };
        if self.flushes_between() {
            self.broken(&begun).pay(self.tlb);
        }
        let split = self.finish(&begun, spare, dress);
        self.tlb.publish();
        Ok(split)
    }

    /// Splits the large leaves in `range` that `wanted` selects: at most [`BATCH`], and at most as many as there are
    /// spare tables. Returns the address to continue from, which is the end of the range when all is done.
    ///
    /// Skips a leaf that another processor changes at the same time. If the parts of a leaf are large themselves, the
    /// next call splits these.
    pub(crate) fn split_batch(
        self,
        range: GpaRange,
        spare: &mut Spare,
        wanted: impl Fn(&F, u64) -> bool,
        dress: &impl Dress,
    ) -> (Stale, Gpa) {
        let mut batch = [None; BATCH];
        let mut owed = Stale::EMPTY;
        let mut used = 0;
        let mut gpa = range.start;
        while gpa < range.end() && used < BATCH && (used as u64) < spare.count() {
            let slot = self.descend(gpa);
            let is_meant = slot.level > 0 && slot.access().is_some() && wanted(self.format(), slot.bits);
            if let Some(begun) = is_meant.then(|| self.begin(&slot)).flatten() {
                owed = owed.merge(self.broken(&begun));
                batch[used] = Some(begun);
                used += 1;
                if slot.level > 1 {
                    break;
                }
            }
            // Small leaves fill their table, so the next large leaf is behind the table.
            gpa = if slot.level == 0 { Gpa((gpa.0 | (span::<F>(1) - 1)).saturating_add(1)) } else { slot.page().end() };
        }

        if self.flushes_between() {
            owed.pay(self.tlb);
        }
        let mut stale = Stale::EMPTY;
        for begun in batch.iter().flatten() {
            if let Split::Done(owed) = self.finish(begun, spare, dress) {
                stale = stale.merge(owed);
            }
        }
        self.tlb.publish();
        (stale, gpa.min(range.end()))
    }

    /// Whether a leaf must be flushed between the two steps.
    fn flushes_between(self) -> bool {
        matches!(self.format().replace(), Replace::BreakFirst | Replace::Uncached(_))
    }

    /// What all TLBs must have dropped before the second step.
    fn broken(self, begun: &Begun) -> Stale {
        Stale::leaf(begun.page, begun.level)
    }

    /// The first step. `None` when the entry has changed.
    fn begin(self, slot: &Slot) -> Option<Begun> {
        let bits = match self.format().replace() {
            Replace::Freely | Replace::OneStore => slot.bits,
            Replace::BreakFirst => slot.exchange(self.pages, self.format().broken(slot.bits)).then_some(slot.bits)?,
            Replace::Uncached(bit) => {
                let bits = slot.bits | bit;
                // Another processor may have set the bit and not flushed yet: flush in any case.
                (bits == slot.bits || slot.exchange(self.pages, bits)).then_some(bits)?
            }
        };
        Some(Begun { cell: slot.cell, bits, level: slot.level, page: slot.page() })
    }

    /// The second step.
    fn finish(self, begun: &Begun, spare: &mut Spare, dress: &impl Dress) -> Split {
        let table = spare.take(self.pages).expect("who begins a split has counted the spare tables");
        let link = self.format().table(table, begun.level);
        let part_level = begun.level - 1;
        let build = |bits| {
            let first = dress.part(self.format(), part_level, self.format().part(bits, part_level, 0));
            // Parts are adjacent and differ in nothing else.
            self.pages.fill_private(table, entries::<F>(), first, span::<F>(part_level));
        };

        let mut bits = begun.bits;
        loop {
            build(bits);
            let (expected, owed) = match self.format().replace() {
                Replace::BreakFirst => (self.format().broken(begun.bits), Stale::EMPTY),
                Replace::Freely => (bits, Stale::EMPTY),
                Replace::OneStore | Replace::Uncached(_) => (bits, Stale::of(begun.page)),
            };
            match self.pages.compare_exchange(begun.cell, expected, link) {
                Ok(()) => return Split::Done(owed),
                // The hardware has recorded something, or another processor has changed rights: the parts must include
                // this.
                Err(now) if self.may_finish(begun, now) => bits = now,
                Err(_) => {
                    spare.put_back(self.pages, table, entries::<F>());
                    return Split::Lost;
                }
            }
        }
    }

    /// Whether an entry that has changed since the first step is still a replaceable leaf.
    fn may_finish(self, begun: &Begun, bits: u64) -> bool {
        let is_leaf = matches!(self.format().decode(begun.level, bits), PageTableEntry::Leaf { .. });
        match self.format().replace() {
            Replace::BreakFirst => unreachable!("who breaks an entry is the only one to make it"),
            // Without the bit it is another leaf, made after this one was removed.
            Replace::Uncached(bit) => is_leaf && bits & bit != 0,
            Replace::Freely | Replace::OneStore => is_leaf,
        }
    }
}

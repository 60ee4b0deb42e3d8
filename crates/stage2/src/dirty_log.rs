//! Which pages of a slot of guest memory were written, round after round, so that a copy of it can follow.
//!
//! ```text
//!   get    which pages are dirty: written by the guest (the leaves say so), or marked
//!   clear  some of them, just before they are copied:   sent += pages;  marks -= pages;  leaves cleaned
//!   flush  what clearing owes: until then the guest may still write by what its TLBs remember, and the hypervisor by
//!          marks that it has found
//!   copy   and when the receiver has all of the round:  acknowledge: sent = {}
//!                or when it is lost:                    cancel: marks += sent
//! ```
//!
//! At any moment a page whose copy differs is written in its leaf, marked, or sent and not acknowledged. So nothing is
//! lost whichever step a failure comes between. The order is kept by types: only [`Cleared`], when it is flushed, hands out
//! the pages to copy.
//!
//! What is mapped while a log runs counts as written. Who unmaps [marks](DirtyLog::mark) the range: its leaves, and what
//! they knew, are gone.
//!
//! Large leaves are not split because somebody logs. They are closed, and what is never written stays large. The first
//! write to a closed one faults; what happens then is the [`Policy`].

use core::ops::Range;

use crate::marks::{MarkWord, words_of};
use crate::sync::{Ordering, fence};
use crate::{Format, Granularity, MapError, Pages, Quiescence, Source, Spare, Stale, Tlb, Tree, Walking};
use addr::{Gpa, GpaRange, PAGE_BYTES, PageSize};

/// When large leaves are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// At the first write to one; then each of its pages faults at its own first write.
    Lazy,
    /// Before anything is written, by whoever calls [`DirtyLog::split_ahead`]; what comes earlier, as with `Adaptive`.
    Eager,
    /// At the first write to one, and the hardware records the writes to its pages from then on: one fault for each
    /// written leaf, or for some of them that are written one after the other ([`Stream`](crate::Stream)). Without hardware
    /// that does so this is `Lazy`.
    Adaptive,
}

/// What counts as dirty when a log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Everything, since nothing was copied yet. Costs nothing: leaves are closed when they are cleared.
    AllDirty,
    /// Nothing. All leaves are made clean.
    Clean,
}

/// The log of one slot. `W` is storage for marks, a word for every 64 pages.
#[derive(Debug)]
pub struct DirtyLog<W> {
    slot: GpaRange,
    source: Source,
    policy: Policy,
    marks: W,
}

impl<W: AsRef<[MarkWord]>> DirtyLog<W> {
    /// A log of `slot`, in which `marks` are all clear. `None` when the slot is not made of pages, or there are too few marks.
    ///
    /// `source` is who records writes to pages; the hardware only if the tree's [format](Format::records_writes) says so.
    pub fn new(slot: GpaRange, source: Source, policy: Policy, marks: W) -> Option<Self> {
        let pages = slot.bytes() / PAGE_BYTES;
        let is_good = slot.start.is_aligned(PageSize::Size4K)
            && slot.end().is_aligned(PageSize::Size4K)
            && marks.as_ref().len() as u64 >= pages.div_ceil(64);
        is_good.then_some(Self { slot, source, policy, marks })
    }

    /// The memory that is logged.
    #[must_use]
    pub fn slot(&self) -> GpaRange {
        self.slot
    }

    /// How [`Tree::fault`] treats closed leaves of this slot.
    #[must_use]
    pub fn granularity(&self) -> Granularity {
        match (self.policy, self.source) {
            (Policy::Lazy, _) | (_, Source::WriteProtect) => Granularity::Closed,
            (Policy::Eager | Policy::Adaptive, Source::Hardware) => Granularity::Watched,
        }
    }

    /// Begins. Faults in the slot must know of the log before, and what is owed must be paid before anything counts as clean.
    ///
    /// # Errors
    /// When a leaf reaches over a border of the slot and there is no table to split it with.
    pub fn start<F: Format>(
        &self,
        tree: &Tree<F>,
        pages: &impl Pages,
        tlb: &impl Tlb,
        from: Start,
        spare: &mut Spare,
    ) -> Result<Stale, MapError> {
        tree.split_at(pages, tlb, self.slot.start, spare)?;
        tree.split_at(pages, tlb, self.slot.end(), spare)?;
        Ok(match from {
            Start::Clean => tree.clean_all(pages, tlb, self.slot, self.source),
            Start::AllDirty => {
                self.mark(self.slot);
                Stale::EMPTY
            }
        })
    }

    /// Splits leaves that are still large, from `from` on, as far as one batch and the spare tables go. Returns where to
    /// go on; the end of the slot when none is left. To be called as often as the pace of [`Policy::Eager`] allows.
    pub fn split_ahead<F: Format>(
        &self,
        tree: &Tree<F>,
        pages: &impl Pages,
        tlb: &impl Tlb,
        from: Gpa,
        spare: &mut Spare,
    ) -> (Stale, Gpa) {
        let from = from.clamp(self.slot.start, self.slot.end());
        let rest = crate::tree::range_between(from, self.slot.end());
        tree.split_ahead(pages, tlb, rest, self.source, spare)
    }

    /// Ends: the guest writes freely again. Leaves that were split stay so until they are [collapsed](Tree::collapse).
    pub fn stop<F: Format>(&self, tree: &Tree<F>, pages: &impl Pages, tlb: &impl Tlb) {
        tree.release(pages, tlb, self.slot);
    }

    /// Carries out a write by the hypervisor or a device to `range`. All of them come through here or through
    /// [`write_as_walker`](Self::write_as_walker): they meet no stage 2.
    ///
    /// The pages are dirty once the write is done. Before the last round whoever writes must have come back from here.
    pub fn write_as_host<R>(&self, range: GpaRange, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.mark(range);
        result
    }

    /// The same by a walker that senders [wait](Cleared::flush) for, as who has looked up the page in the tree is one: at a
    /// fraction of the cost.
    #[inline]
    pub fn write_as_walker<R>(&self, _: &Walking<'_>, range: GpaRange, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.mark_after_fence(range);
        result
    }

    /// Marks what was written in the part of `range` that lies in the slot.
    pub fn mark(&self, range: GpaRange) {
        // The writes are visible, or who takes a mark that we find has not taken it yet.
        fence(Ordering::SeqCst);
        self.mark_after_fence(range);
    }

    #[inline]
    fn mark_after_fence(&self, range: GpaRange) {
        for (word, bits) in words_of(self.pages_of(range)) {
            if let Some(marks) = self.marks.as_ref().get(word) {
                marks.set_after_fence(bits);
            }
        }
    }

    /// Which of the `words.len() * 64` pages from word `first_word` on are dirty. Changes nothing.
    pub fn get<F: Format>(
        &self,
        tree: &Tree<F>,
        pages: &impl Pages,
        tlb: &impl Tlb,
        first_word: usize,
        words: &mut [u64],
    ) {
        let marks = self.marks.as_ref().iter().skip(first_word);
        words.fill(0);
        words.iter_mut().zip(marks).for_each(|(word, marks)| *word = marks.get());
        tree.written(pages, tlb, self.chunk(first_word, words.len()), self.source, |leaf| {
            for (word, bits) in words_of(self.pages_of(leaf)) {
                if let Some(word) = word.checked_sub(first_word).and_then(|at| words.get_mut(at)) {
                    *word |= bits;
                }
            }
        });
    }

    /// The memory of `count` words of pages from word `first` on, as far as it is in the slot.
    fn chunk(&self, first: usize, count: usize) -> GpaRange {
        let place = |word: usize| {
            let offset = (word as u64).saturating_mul(64 * PAGE_BYTES).min(self.slot.bytes());
            Gpa(self.slot.start.0 + offset)
        };
        crate::tree::range_between(place(first), place(first.saturating_add(count)))
    }

    /// Which bits of a word stand for pages of the slot.
    fn existing(&self, word: usize) -> u64 {
        let first = (word as u64).saturating_mul(64);
        match (self.slot.bytes() / PAGE_BYTES).saturating_sub(first) {
            0 => 0,
            count => u64::MAX >> 64_u64.saturating_sub(count),
        }
    }

    /// Numbers of the pages of `range` that are in the slot, from its start on.
    fn pages_of(&self, range: GpaRange) -> Range<u64> {
        let clamp = |gpa: Gpa| gpa.clamp(self.slot.start, self.slot.end()).0 - self.slot.start.0;
        clamp(range.start) / PAGE_BYTES..clamp(range.end()).div_ceil(PAGE_BYTES)
    }
}

/// What was sent of a log and is not acknowledged yet. One sender has it. `S` is storage, a bit for each page.
#[derive(Debug)]
pub struct Rounds<S> {
    sent: S,
}

impl<S: AsMut<[u64]>> Rounds<S> {
    /// Nothing was sent. `None` when there are fewer bits than `log` has pages.
    pub fn new<W: AsRef<[MarkWord]>>(log: &DirtyLog<W>, mut sent: S) -> Option<Self> {
        let words = sent.as_mut();
        words.fill(0);
        let is_enough = words.len() as u64 >= (log.slot.bytes() / PAGE_BYTES).div_ceil(64);
        is_enough.then_some(Self { sent })
    }

    /// Makes the `wanted` pages clean, bit by bit from word `first_word` on, since they are about to be copied.
    pub fn clear<'w, F: Format, W: AsRef<[MarkWord]>>(
        &mut self,
        log: &DirtyLog<W>,
        tree: &Tree<F>,
        pages: &impl Pages,
        tlb: &impl Tlb,
        first_word: usize,
        wanted: &'w [u64],
    ) -> Cleared<'w> {
        // In this order: what is no longer in one place is already in the one before it.
        let sent = self.sent.as_mut().iter_mut().zip(0..).skip(first_word);
        sent.zip(wanted).for_each(|((sent, word), wanted)| *sent |= wanted & log.existing(word));
        for (marks, wanted) in log.marks.as_ref().iter().skip(first_word).zip(wanted) {
            let _ = marks.take_before_fence(*wanted);
        }
        fence(Ordering::SeqCst);
        let wanted_in = |word: usize| word.checked_sub(first_word).and_then(|at| wanted.get(at)).copied().unwrap_or(0);
        let picked = |piece| words_of(log.pages_of(piece)).any(|(word, bits)| wanted_in(word) & bits != 0);
        let spill = |leaf| {
            for (word, bits) in words_of(log.pages_of(leaf)) {
                if let Some(marks) = log.marks.as_ref().get(word) {
                    marks.set(bits & !wanted_in(word));
                }
            }
        };
        let stale = tree.clean(pages, tlb, log.chunk(first_word, wanted.len()), log.source, picked, spill);
        Cleared { stale, pages: Copyable { first_word, wanted, count: log.slot.bytes() / PAGE_BYTES } }
    }

    /// The receiver has all that was sent.
    pub fn acknowledge(&mut self) {
        self.sent.as_mut().fill(0);
    }

    /// The receiver may have nothing of what was sent: it is dirty again.
    pub fn cancel<W: AsRef<[MarkWord]>>(&mut self, log: &DirtyLog<W>) {
        for (sent, marks) in self.sent.as_mut().iter_mut().zip(log.marks.as_ref()) {
            marks.set(*sent);
            *sent = 0;
        }
    }
}

/// Pages that are clean in the tables, but perhaps not yet to a processor that writes to them.
#[derive(Debug)]
#[must_use = "the pages may still be written unnoticed until this is flushed"]
pub struct Cleared<'w> {
    stale: Stale,
    pages: Copyable<'w>,
}

impl<'w> Cleared<'w> {
    /// Flushes what was cleared, and waits for `walkers` who may have found marks that are taken. What is written from now
    /// on is logged again.
    ///
    /// `walkers` are all who [write as such](DirtyLog::write_as_walker). The caller must not be one at this time: it
    /// would wait for itself.
    pub fn flush(self, tlb: &impl Tlb, walkers: &impl Quiescence) -> Copyable<'w> {
        self.stale.pay(tlb);
        walkers.wait(|| tlb.relax());
        self.pages
    }
}

/// Pages that may be copied: a write that the copy misses is logged.
#[derive(Debug)]
#[must_use = "these pages count as sent"]
pub struct Copyable<'w> {
    first_word: usize,
    wanted: &'w [u64],
    /// Pages of the slot.
    count: u64,
}

impl Copyable<'_> {
    /// Numbers of the pages, from the start of the slot. What was wanted beyond its end is not among them.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        let first = (self.first_word as u64).saturating_mul(64);
        let words = self.wanted.iter().zip((0_u64..).step_by(64));
        let set = move |(bits, ahead): (&u64, u64)| {
            let bits = *bits;
            (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| first.saturating_add(ahead + bit))
        };
        words.flat_map(set).filter(|page| *page < self.count)
    }
}

//! Records which pages of a slot of guest memory were written, round after round, so that a copy can follow.
//!
//! ```text
//!   get    which pages are dirty: the guest has written them (the leaves say so), or they are marked
//!   clear  some of them, just before they are copied:   sent += pages;  marks -= pages;  leaves cleaned
//!   flush  what clear requires: until then the guest may still write through cached translations, and the hypervisor
//!          by marks that it has found set
//!   copy   and when the receiver has the whole round:   acknowledge: sent = {}
//!          or when it is lost:                          cancel: marks += sent
//! ```
//!
//! At any time, a page that differs from its copy is dirty in its leaf, or marked, or sent and not acknowledged. So no
//! write is lost, whatever step fails. Types enforce the order: only a flushed [`Cleared`] returns the pages to copy.
//!
//! A page that is mapped while a log is active counts as written. A caller that unmaps must [mark](DirtyLog::mark) the
//! range, because the leaves and their state are gone.
//!
//! The start of a log splits no large leaf. The log write-protects leaves; memory that is never written
//! stays large. The first write to a write-protected leaf faults, and the [`Policy`] decides what happens then.

use core::ops::Range;

use crate::marks::{MarkWord, words_of};
use crate::sync::{Ordering, fence};
use crate::{Format, Granularity, MapError, Pages, Quiescence, Source, Spare, Stale, Tlb, Walk, Walking};
use addr::{Gpa, GpaRange, PAGE_BYTES, PageSize};

/// When to split large leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// At the first write. Each of its pages then faults at its own first write.
    Lazy,
    /// Before the guest writes, by calls of [`DirtyLog::split_ahead`]. An earlier write is handled as with `Adaptive`.
    Eager,
    /// At the first write. The hardware then records the writes to its pages, so each written leaf costs one fault.
    /// Several consecutive leaves may share one fault ([`Stream`](crate::Stream)). Without such hardware this is
    /// `Lazy`.
    Adaptive,
}

/// Words of marks between two calls of [`Tlb::worked`].
const WORDS_AT_ONCE: usize = 256;

/// Which pages count as dirty when a log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// All, because nothing was copied yet. Costs nothing: the first clear write-protects the leaves.
    AllDirty,
    /// None. All leaves are cleaned.
    Clean,
}

/// The log of one slot. `W` stores the marks, one word for 64 pages.
#[derive(Debug)]
pub struct DirtyLog<W> {
    slot: GpaRange,
    source: Source,
    policy: Policy,
    marks: W,
}

impl<W: AsRef<[MarkWord]>> DirtyLog<W> {
    /// A log of `slot`, whose `marks` are all clear. `None` if the slot is not aligned to pages or has too few marks.
    ///
    /// `source` says what records writes to pages; `Hardware` and `Listed` only if the tree's
    /// [format](Format::records_writes) supports it.
    pub fn new(slot: GpaRange, source: Source, policy: Policy, marks: W) -> Option<Self> {
        let pages = slot.bytes() / PAGE_BYTES;
        let is_good = slot.start.is_aligned(PageSize::Size4K)
            && slot.end().is_aligned(PageSize::Size4K)
            && marks.as_ref().len() as u64 >= pages.div_ceil(64);
        is_good.then_some(Self { slot, source, policy, marks })
    }

    /// The logged memory.
    #[must_use]
    pub fn slot(&self) -> GpaRange {
        self.slot
    }

    /// How [`Walk::fault`] treats write-protected leaves of this slot.
    #[must_use]
    pub fn granularity(&self) -> Granularity {
        match (self.policy, self.source) {
            (Policy::Lazy, _) | (_, Source::WriteProtect) => Granularity::WriteProtected,
            (Policy::Eager | Policy::Adaptive, Source::Hardware | Source::Listed) => Granularity::Recorded,
        }
    }

    /// Starts the log. Faults in the slot must know of the log before. The returned flush must be done before any page
    /// counts as clean.
    ///
    /// # Errors
    /// A leaf crosses an end of the slot and there is no table to split it.
    pub fn start<F: Format, P: Pages, T: Tlb>(
        &self,
        walk: Walk<'_, F, P, T>,
        from: Start,
        spare: &mut Spare,
    ) -> Result<Stale, MapError> {
        walk.split_at(self.slot.start, spare)?;
        walk.split_at(self.slot.end(), spare)?;
        Ok(match from {
            Start::Clean => walk.clean_all(self.slot, self.source),
            Start::AllDirty => {
                for first in (0..self.marks.as_ref().len()).step_by(WORDS_AT_ONCE) {
                    self.mark(self.chunk(first, WORDS_AT_ONCE));
                    walk.tlb.worked(WORDS_AT_ONCE);
                }
                Stale::EMPTY
            }
        })
    }

    /// Splits leaves that are still large, from `from` on, up to one batch and the number of spare tables. Returns the
    /// address to continue from; the end of the slot if none is left. The pace of [`Policy::Eager`] decides how often
    /// to call it.
    pub fn split_ahead<F: Format, P: Pages, T: Tlb>(
        &self,
        walk: Walk<'_, F, P, T>,
        from: Gpa,
        spare: &mut Spare,
    ) -> (Stale, Gpa) {
        let from = from.clamp(self.slot.start, self.slot.end());
        let rest = crate::tree::range_between(from, self.slot.end());
        walk.split_ahead(rest, self.source, spare)
    }

    /// Ends the log: pages are writable again. Split leaves stay so until they are
    /// [collapsed](crate::WalkMut::collapse).
    pub fn stop<F: Format, P: Pages, T: Tlb>(&self, walk: Walk<'_, F, P, T>) {
        walk.release(self.slot);
    }

    /// Does a write by the hypervisor or a device to `range`. All such writes use this function or
    /// [`write_as_walker`](Self::write_as_walker), because they do not use stage 2.
    ///
    /// The pages are dirty when the write is done. All writers must have returned before the last round.
    pub fn write_as_host<R>(&self, range: GpaRange, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.mark(range);
        result
    }

    /// The same for a walker, at a fraction of the cost: senders [wait](Cleared::flush) for walkers. A caller that has
    /// looked up the page in the tree is one.
    #[inline]
    pub fn write_as_walker<R>(&self, _: &Walking<'_>, range: GpaRange, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.mark_after_fence(range);
        result
    }

    /// Marks the pages of `range` that are in the slot.
    pub fn mark(&self, range: GpaRange) {
        // Either the writes are visible, or a sender has not yet taken the mark that is found here.
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
    pub fn get<F: Format, P: Pages, T: Tlb>(&self, walk: Walk<'_, F, P, T>, first_word: usize, words: &mut [u64]) {
        let marks = self.marks.as_ref().iter().skip(first_word);
        words.fill(0);
        words.iter_mut().zip(marks).for_each(|(word, marks)| *word = marks.get());
        walk.written(self.chunk(first_word, words.len()), self.source, |leaf| {
            self.each_word(leaf, |word, bits| {
                if let Some(word) = word.checked_sub(first_word).and_then(|at| words.get_mut(at)) {
                    *word |= bits;
                }
            });
        });
    }

    /// Cleans the `wanted` pages, one bit each from word `first_word` on, for a sender that never loses a page: a round
    /// that may be lost is [`Rounds`].
    pub fn clear<'w, F: Format, P: Pages, T: Tlb>(
        &self,
        walk: Walk<'_, F, P, T>,
        first_word: usize,
        wanted: &'w [u64],
    ) -> Cleared<'w> {
        let marks = self.marks.as_ref().get(first_word..).unwrap_or_default();
        for (marks, wanted) in marks.chunks(WORDS_AT_ONCE).zip(wanted.chunks(WORDS_AT_ONCE)) {
            for (marks, wanted) in marks.iter().zip(wanted) {
                let _ = marks.take_before_fence(*wanted);
            }
            walk.tlb.worked(WORDS_AT_ONCE);
        }
        fence(Ordering::SeqCst);
        let wanted_in = |word: usize| word.checked_sub(first_word).and_then(|at| wanted.get(at)).copied().unwrap_or(0);
        let picked = |piece| {
            let mut is_any = false;
            self.each_word(piece, |word, bits| is_any |= wanted_in(word) & bits != 0);
            is_any
        };
        let spill = |leaf| {
            for (word, bits) in words_of(self.pages_of(leaf)) {
                if let Some(marks) = self.marks.as_ref().get(word) {
                    marks.set(bits & !wanted_in(word));
                }
            }
        };
        let stale = walk.clean(self.chunk(first_word, wanted.len()), self.source, picked, spill);
        Cleared { stale, pages: Copyable { first_word, wanted, count: self.slot.bytes() / PAGE_BYTES } }
    }

    /// The memory of `count` words of pages from word `first` on, within the slot.
    fn chunk(&self, first: usize, count: usize) -> GpaRange {
        let place = |word: usize| {
            let offset = (word as u64).saturating_mul(64 * PAGE_BYTES).min(self.slot.bytes());
            Gpa(self.slot.start.0 + offset)
        };
        crate::tree::range_between(place(first), place(first.saturating_add(count)))
    }

    /// Which bits of a word are pages of the slot.
    fn existing(&self, word: usize) -> u64 {
        let first = (word as u64).saturating_mul(64);
        match (self.slot.bytes() / PAGE_BYTES).saturating_sub(first) {
            0 => 0,
            count => u64::MAX >> 64_u64.saturating_sub(count),
        }
    }

    /// Calls `look` with each word that has pages of `range`, and their bits.
    #[inline]
    fn each_word(&self, range: GpaRange, mut look: impl FnMut(usize, u64)) {
        let offset = range.start.0.wrapping_sub(self.slot.start.0);
        // By far the most often it is one page of the slot.
        if range.bytes() == PAGE_BYTES && offset < self.slot.bytes() && offset.is_multiple_of(PAGE_BYTES) {
            let page = offset / PAGE_BYTES;
            return look(usize::try_from(page / 64).unwrap_or(usize::MAX), 1 << (page % 64));
        }
        words_of(self.pages_of(range)).for_each(|(word, bits)| look(word, bits));
    }

    /// Numbers of the pages of `range` that are in the slot, counted from its start.
    fn pages_of(&self, range: GpaRange) -> Range<u64> {
        let clamp = |gpa: Gpa| gpa.clamp(self.slot.start, self.slot.end()).0 - self.slot.start.0;
        clamp(range.start) / PAGE_BYTES..clamp(range.end()).div_ceil(PAGE_BYTES)
    }
}

/// The pages of a log that were sent and not acknowledged. One sender owns it. `S` stores one bit per page.
#[derive(Debug)]
pub struct Rounds<S> {
    sent: S,
}

impl<S: AsMut<[u64]>> Rounds<S> {
    /// Nothing was sent. `None` if there are fewer bits than `log` has pages.
    /// `in_between` is called now and then.
    pub fn new<W: AsRef<[MarkWord]>>(log: &DirtyLog<W>, mut sent: S, mut in_between: impl FnMut()) -> Option<Self> {
        let words = sent.as_mut();
        for part in words.chunks_mut(WORDS_AT_ONCE) {
            part.fill(0);
            in_between();
        }
        let is_enough = words.len() as u64 >= (log.slot.bytes() / PAGE_BYTES).div_ceil(64);
        is_enough.then_some(Self { sent })
    }

    /// Cleans the `wanted` pages, one bit each from word `first_word` on, because they are about to be copied.
    pub fn clear<'w, F: Format, P: Pages, T: Tlb, W: AsRef<[MarkWord]>>(
        &mut self,
        log: &DirtyLog<W>,
        walk: Walk<'_, F, P, T>,
        first_word: usize,
        wanted: &'w [u64],
    ) -> Cleared<'w> {
        // In this order: a page is in its new place before it leaves the old one.
        let sent = self.sent.as_mut().get_mut(first_word..).unwrap_or_default();
        let firsts = (first_word..).step_by(WORDS_AT_ONCE);
        for ((sent, wanted), first) in sent.chunks_mut(WORDS_AT_ONCE).zip(wanted.chunks(WORDS_AT_ONCE)).zip(firsts) {
            let words = sent.iter_mut().zip(wanted).zip(first..);
            words.for_each(|((sent, wanted), word)| *sent |= wanted & log.existing(word));
            walk.tlb.worked(WORDS_AT_ONCE);
        }
        log.clear(walk, first_word, wanted)
    }

    /// The receiver has everything that was sent. `in_between` is called now and then.
    pub fn acknowledge(&mut self, mut in_between: impl FnMut()) {
        for part in self.sent.as_mut().chunks_mut(WORDS_AT_ONCE) {
            part.fill(0);
            in_between();
        }
    }

    /// The receiver may have lost everything that was sent: these pages are dirty again. `in_between` is called now and
    /// then.
    pub fn cancel<W: AsRef<[MarkWord]>>(&mut self, log: &DirtyLog<W>, mut in_between: impl FnMut()) {
        let marks = log.marks.as_ref().chunks(WORDS_AT_ONCE);
        for (sent, marks) in self.sent.as_mut().chunks_mut(WORDS_AT_ONCE).zip(marks) {
            for (sent, marks) in sent.iter_mut().zip(marks) {
                marks.set(*sent);
                *sent = 0;
            }
            in_between();
        }
    }
}

/// Pages that are clean in the tables, but a processor may still write to them without a trace.
#[derive(Debug)]
#[must_use = "the pages may still be written unnoticed until this is flushed"]
pub struct Cleared<'w> {
    stale: Stale,
    pages: Copyable<'w>,
}

impl<'w> Cleared<'w> {
    /// Flushes the cleared pages, and waits for `walkers` that may have found a mark that is taken now. Later writes
    /// are logged again.
    ///
    /// `walkers` are all callers of [`write_as_walker`](DirtyLog::write_as_walker). `me` is the caller's own
    /// announcement, which ends before the caller [waits](Quiescence::wait):
    ///
    /// ```compile_fail,E0505
    /// # use {addr::Gpa, stage2::*};
    /// # fn send<F: Format>(
    /// #     (tree, pool, tlbs, epochs): (&Tree<F>, &impl Pages, &impl Tlb, &Epochs<[Walker; 1]>),
    /// #     (log, mut rounds): (&DirtyLog<[MarkWord; 1]>, Rounds<[u64; 1]>),
    /// # ) -> Option<()> {
    /// let me = epochs.enter(0)?;
    /// let walk = tree.walk(pool, tlbs, &me);
    /// let cleared = rounds.clear(log, walk, 0, &[1]);
    /// let pages = cleared.flush(tlbs, me, epochs);
    /// let still_walking = walk.lookup(Gpa(0)); // correct without this line
    /// # Some(drop((pages.pages(), still_walking))) }
    /// ```
    pub fn flush(self, tlb: &impl Tlb, me: Walking<'_>, walkers: &impl Quiescence) -> Copyable<'w> {
        self.stale.pay(tlb);
        walkers.wait(me, || tlb.relax());
        self.pages
    }
}

/// Pages that may be copied: the log records a write that the copy misses.
#[derive(Debug)]
#[must_use = "these pages count as sent"]
pub struct Copyable<'w> {
    first_word: usize,
    wanted: &'w [u64],
    /// Pages of the slot.
    count: u64,
}

impl Copyable<'_> {
    /// Numbers of the pages, from the start of the slot. Wanted pages beyond its end are left out.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.words().flatten()
    }

    /// The same, in groups of up to 64, some of which may be empty: one for each word.
    pub fn words(&self) -> impl Iterator<Item = impl Iterator<Item = u64>> {
        let first = (self.first_word as u64).saturating_mul(64);
        let count = self.count;
        let set = move |(bits, ahead): (&u64, u64)| {
            let bits = *bits;
            let all = 0..if bits == 0 { 0 } else { 64 };
            let set = all.filter(move |bit| bits >> bit & 1 != 0).map(move |bit| first.saturating_add(ahead + bit));
            set.filter(move |page| *page < count)
        };
        self.wanted.iter().zip((0_u64..).step_by(64)).map(set)
    }
}

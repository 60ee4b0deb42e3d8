//! Pages that are known to be written although their leaves do not say so.
//!
//! The hypervisor and its devices write to guest memory without meeting stage 2, so each such write is marked here, after
//! it is done. So are pages of which a leaf knew more than it can keep, and those that were sent in vain.
//!
//! Most pages that are written were written before, so a mark is tested before it is set: many readers of one cache line
//! cost little, where many writers would take it from each other (13 cycles alone and over 80 contended). But a mark that
//! is found may be about to be taken, by a sender that has not seen the write yet. Two ways keep that write from being lost:
//!
//! - Who is on no list has a fence between the write and the test, as the sender has one between taking and copying
//!   ([`MarkWord::write`], 20 to 30 cycles).
//! - A [walker](crate::Epochs::enter) has announced itself, with a fence, before it looked for the page. It only tests
//!   ([`MarkWord::write_as_walker`], under 5 cycles), and the sender [waits](crate::Cleared::flush) before it copies until all who
//!   walked when it took the marks have left.

use crate::Walking;
use crate::sync::{AtomicU64, Ordering, fence};
use core::ops::Range;

/// One word of marks, for 64 pages.
#[derive(Debug)]
pub struct MarkWord(AtomicU64);

impl MarkWord {
    /// No page is marked.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Carries out a write to pages of this word, and marks them.
    ///
    /// Marked after the write, since whoever takes the mark then copies the page: a mark that is taken before the write
    /// would be a copy from before. And no write goes unmarked because the mark that it found was being taken: who takes
    /// it reads the page only after a fence, and so sees the write.
    pub fn write<R>(&self, pages: u64, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.set(pages);
        result
    }

    /// The same by somebody who walks, for whom senders wait.
    #[inline]
    pub fn write_as_walker<R>(&self, _: &Walking<'_>, pages: u64, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.set_after_fence(pages);
        result
    }

    /// Marks pages that were written before.
    pub(crate) fn set(&self, pages: u64) {
        fence(Ordering::SeqCst);
        self.set_after_fence(pages);
    }

    /// The same, where a fence, or a sender that waits, keeps the write from being missed.
    #[inline]
    pub(crate) fn set_after_fence(&self, pages: u64) {
        if self.0.load(Ordering::Relaxed) & pages != pages {
            self.0.fetch_or(pages, Ordering::Relaxed);
        }
    }

    /// The pages that are marked.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes marks away. The pages are to be copied, or closed and then copied, after this returns and walkers have left.
    pub fn take(&self, pages: u64) -> u64 {
        let taken = self.take_before_fence(pages);
        fence(Ordering::SeqCst);
        taken
    }

    /// The same for many words, with one fence behind them all.
    pub(crate) fn take_before_fence(&self, pages: u64) -> u64 {
        if self.0.load(Ordering::Relaxed) & pages == 0 {
            0
        } else {
            self.0.fetch_and(!pages, Ordering::Relaxed) & pages
        }
    }
}

impl Default for MarkWord {
    fn default() -> Self {
        Self::new()
    }
}

/// The words that hold pages `range`, and in each of them the bits.
pub(crate) fn words_of(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    (range.start / 64..range.end.div_ceil(64)).filter_map(move |word| {
        let first = range.start.max(word * 64) - word * 64;
        let end = range.end.min(word * 64 + 64) - word * 64;
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some((usize::try_from(word).ok()?, (u64::MAX >> (64 - count)) << first))
    })
}

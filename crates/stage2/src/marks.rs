//! Pages that are known to be written although their leaves do not say so.
//!
//! The hypervisor and its devices write to guest memory without meeting stage 2, so each such write is marked here, after
//! it is done. So are pages of which a leaf knew more than it can keep, and those that were sent in vain.
//!
//! Most pages that are written were written before, so a mark is tested before it is set: many readers of one cache line
//! cost little, where many writers would take it from each other (13 cycles alone and over 80 contended, against 3).

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

    /// Marks pages that were written before.
    pub(crate) fn set(&self, pages: u64) {
        fence(Ordering::SeqCst);
        if self.0.load(Ordering::Relaxed) & pages != pages {
            self.0.fetch_or(pages, Ordering::Relaxed);
        }
    }

    /// The pages that are marked.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes marks away. The pages are to be copied, or closed and then copied, after this returns.
    pub fn take(&self, pages: u64) -> u64 {
        let taken = if self.0.load(Ordering::Relaxed) & pages == 0 {
            0
        } else {
            self.0.fetch_and(!pages, Ordering::Relaxed) & pages
        };
        fence(Ordering::SeqCst);
        taken
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

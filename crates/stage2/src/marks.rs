//! Marks of pages that were written although their leaves do not show it.
//!
//! Writes of the hypervisor and its devices to guest memory do not use stage 2. So each is marked here, after the
//! write. A mark also replaces what a leaf cannot hold any more, and marks pages whose copy was lost.
//!
//! Most written pages were written before, so a mark is tested before it is set. Many readers of one cache line cost
//! little, while many writers take it from each other (13 cycles alone, over 80 contended). But a sender may be about
//! to take the mark that is found, and may not have seen the write yet. Two ways keep that write from being lost:
//!
//! - A writer on no list has a fence between the write and the test. The sender has one between taking and copying
//!   ([`MarkWord::write`], 20 to 30 cycles).
//! - A [walker](crate::Epochs::enter) has announced itself, with a fence, before it looked up the page. It only tests
//!   ([`MarkWord::write_as_walker`], under 5 cycles). Before the sender copies, it [waits](crate::Cleared::flush) until
//!   all walkers that were active when it took the marks have left.

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

    /// These pages are marked.
    #[must_use]
    pub fn of(pages: u64) -> Self {
        Self(AtomicU64::new(pages))
    }

    /// Does a write to pages of this word, and marks them.
    ///
    /// The mark comes after the write, because a sender that takes a mark copies the page: with an earlier mark it
    /// could copy the old content. If the mark is found while a sender takes it, the write is not lost either: the
    /// sender reads the page only after a fence, and so sees the write.
    pub fn write<R>(&self, pages: u64, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.set(pages);
        result
    }

    /// The same for a walker, which senders wait for.
    #[inline]
    pub fn write_as_walker<R>(&self, _: &Walking<'_>, pages: u64, write: impl FnOnce() -> R) -> R {
        let result = write();
        self.set_after_fence(pages);
        result
    }

    /// Marks pages that were already written.
    pub(crate) fn set(&self, pages: u64) {
        fence(Ordering::SeqCst);
        self.set_after_fence(pages);
    }

    /// The same, where a fence or a waiting sender keeps the write from being missed.
    #[inline]
    pub(crate) fn set_after_fence(&self, pages: u64) {
        if self.0.load(Ordering::Relaxed) & pages != pages {
            self.0.fetch_or(pages, Ordering::Relaxed);
        }
    }

    /// The marked pages.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes marks. Copy the pages, or write-protect and then copy them, after this returns and walkers have left.
    pub fn take(&self, pages: u64) -> u64 {
        let taken = self.take_before_fence(pages);
        fence(Ordering::SeqCst);
        taken
    }

    /// The same for many words, with one fence after them all.
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

/// The words that hold pages `range`, and the bits in each of them.
pub fn words_of(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    (range.start / 64..range.end.div_ceil(64)).filter_map(move |word| {
        let first = range.start.max(word * 64) - word * 64;
        let end = range.end.min(word * 64 + 64) - word * 64;
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some((usize::try_from(word).ok()?, (u64::MAX >> (64 - count)) << first))
    })
}

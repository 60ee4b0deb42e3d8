//! The flush requests of a vCPU.

use crate::sync::{AtomicU64, Ordering};

/// Words per vCPU: with its mailbox and its presence they fill a cache line of 64 bytes.
pub(crate) const WORDS: usize = 6;

/// A few words next to a vCPU's mailbox. Each is empty or holds one request. Any pCPU adds requests; the vCPU takes
/// all.
///
/// The words are independent, so there is no order and no lock to get wrong. A sender writes its request into any empty
/// word, by compare-and-swap. The vCPU swaps each word for an empty one. If no word is empty, the vCPU is so far behind
/// that it flushes everything.
#[derive(Debug)]
pub struct Requests {
    words: [AtomicU64; WORDS],
}

/// One flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// A run of pages.
    Pages(Pages),
    /// Everything.
    Whole,
}

/// A run of 4-KiB pages of a guest's linear addresses (GVA).
///
/// In memory it is a TLFS "GVA range": bits 63:12 are the first page's number, bits 11:0 the number of further pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages(u64);

/// Maximum number of pages of one run.
const LONGEST: u64 = 4096;
const FURTHER: u64 = LONGEST - 1;

impl Pages {
    /// `count` pages from the page of `first` on; at least one, at most 4096.
    #[must_use]
    pub fn new(first: u64, count: u64) -> Self {
        Self(first & !FURTHER | (count.clamp(1, LONGEST) - 1))
    }

    /// GVA of the first page.
    #[must_use]
    #[inline]
    pub fn first(self) -> u64 {
        self.0 & !FURTHER
    }

    /// Number of pages; at least one.
    #[must_use]
    #[inline]
    pub fn count(self) -> u64 {
        (self.0 & FURTHER) + 1
    }

    /// The word for this run. Page 0 alone is 0 in the TLFS's format, like an empty word, so runs are stored inverted.
    /// The inverted format cannot express runs of 4095 or 4096 pages from the last page on. Only their first page is in
    /// any address space; they become a flush of everything.
    fn to_word(self) -> u64 {
        match !self.0 {
            EMPTY | WHOLE => WHOLE,
            word => word,
        }
    }
}

const EMPTY: u64 = 0;
/// Inverted, this would be a run of 4095 pages from the last page on.
const WHOLE: u64 = 1;

impl Requests {
    /// No requests.
    #[must_use]
    pub fn new() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(EMPTY)) }
    }

    /// Adds a request, which a later [`Requests::take`] returns. After this call, the caller must tell the vCPU by
    /// other means that there is a request.
    #[inline]
    pub fn ask(&self, flush: Flush) {
        let wanted = match flush {
            Flush::Whole => WHOLE,
            Flush::Pages(pages) => pages.to_word(),
        };
        if wanted != WHOLE && self.words.iter().any(|word| join(word, wanted)) {
            return;
        }
        // Only the first word is ever WHOLE. Pages in that word are part of everything.
        self.words[0].swap(WHOLE, Ordering::AcqRel);
    }

    /// Takes all requests. The vCPU must clear its work bit first and take then. In the other order it would miss a
    /// request that comes in between.
    pub fn take(&self) -> Taken {
        let words = core::array::from_fn(|at| match self.words[at].load(Ordering::Acquire) {
            EMPTY => EMPTY,
            _ => self.words[at].swap(EMPTY, Ordering::AcqRel),
        });
        Taken { words, at: 0 }
    }
}

/// Puts a request into an empty word, or merges it with the word. Returns whether the word covers it now.
fn join(word: &AtomicU64, wanted: u64) -> bool {
    match word.compare_exchange(EMPTY, wanted, Ordering::AcqRel, Ordering::Relaxed) {
        Ok(_) => true,
        // It is there already, and is still written again: the release half publishes this caller's change of the page
        // tables to the vCPU that flushes. Otherwise the vCPU could flush for the earlier caller only, refill its TLB
        // from the old tables, and find nothing when it is told again.
        Err(found) if found == wanted || found == WHOLE => {
            word.compare_exchange(found, found, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }
        Err(_) => false,
    }
}

impl Default for Requests {
    fn default() -> Self {
        Self::new()
    }
}

/// Requests that were taken. The iterator returns the runs of pages.
#[derive(Clone, Debug)]
#[must_use]
pub struct Taken {
    words: [u64; WORDS],
    at: usize,
}

impl Taken {
    /// Whether to flush everything.
    #[must_use]
    pub fn whole(&self) -> bool {
        self.words.contains(&WHOLE)
    }
}

impl Iterator for Taken {
    type Item = Pages;

    fn next(&mut self) -> Option<Pages> {
        loop {
            let word = *self.words.get(self.at)?;
            self.at += 1;
            if word != EMPTY && word != WHOLE {
                return Some(Pages(!word));
            }
        }
    }
}

//! What a vCPU was asked to flush.

use crate::sync::{AtomicU64, Ordering};

/// Words per vCPU: with its mailbox and its presence they fill a cache line of 64 bytes.
pub(crate) const WORDS: usize = 6;

/// A few words beside a vCPU's mailbox, each empty or one request. Anybody adds, the vCPU takes all.
///
/// Words are independent of each other, so there is no order and no lock to get wrong: a sender puts its request into
/// any word that is empty, by compare-and-swap; the vCPU swaps each for nothing. When no word is empty the vCPU is
/// that far behind that everything may as well go.
#[derive(Debug)]
pub struct Requests {
    words: [AtomicU64; WORDS],
}

/// What to flush.
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

/// Most pages of one run.
const LONGEST: u64 = 4096;
const FURTHER: u64 = LONGEST - 1;

impl Pages {
    /// `count` pages from the one that has `first` in it; at least one, at most 4096.
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

    /// How many pages; at least one.
    #[must_use]
    #[inline]
    pub fn count(self) -> u64 {
        (self.0 & FURTHER) + 1
    }

    /// The word that says this. Page 0 alone is 0 in the TLFS's form and could not be told from an empty word, so a
    /// run is kept inverted. What cannot be said then are the runs of 4095 or 4096 pages from the last page of all
    /// on. They lie outside of any address space but for their first page, and what cannot be said is everything.
    fn to_word(self) -> u64 {
        match !self.0 {
            EMPTY | WHOLE => WHOLE,
            word => word,
        }
    }
}

const EMPTY: u64 = 0;
/// Inverted, this would be a run of 4095 pages from the last page of all on.
const WHOLE: u64 = 1;

impl Requests {
    /// Nothing.
    #[must_use]
    pub fn new() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(EMPTY)) }
    }

    /// Adds a request. The vCPU finds it in the next [`Requests::take`] that happens after; it has to be told by other
    /// means, and after this, that there is something to take.
    pub fn ask(&self, flush: Flush) {
        let wanted = match flush {
            Flush::Whole => WHOLE,
            Flush::Pages(pages) => pages.to_word(),
        };
        if wanted != WHOLE && self.words.iter().any(|word| join(word, wanted)) {
            return;
        }
        // Only the first word is ever WHOLE. Pages that stood there are part of everything.
        self.words[0].swap(WHOLE, Ordering::AcqRel);
    }

    /// Takes everything that was asked for. Whoever was told that there is something acknowledges that first and
    /// takes then: the other way round, a request that comes in between would wait for nobody.
    pub fn take(&self) -> Taken {
        let words = core::array::from_fn(|at| match self.words[at].load(Ordering::Acquire) {
            EMPTY => EMPTY,
            _ => self.words[at].swap(EMPTY, Ordering::AcqRel),
        });
        Taken { words, at: 0 }
    }
}

/// Puts a request into a word that is empty, or joins it to what is there. Says whether the word covers it now.
fn join(word: &AtomicU64, wanted: u64) -> bool {
    match word.compare_exchange(EMPTY, wanted, Ordering::AcqRel, Ordering::Relaxed) {
        Ok(_) => true,
        // It is there already, and is written once more all the same: the release half is what makes this caller's
        // change of the page tables visible to whoever flushes for it. Otherwise the vCPU could flush for the earlier
        // caller alone, fill its TLB from the tables as they were, and find nothing to take when it is told for the
        // second time.
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

/// Requests that were taken. As an iterator, the runs of pages among them.
#[derive(Clone, Debug)]
#[must_use]
pub struct Taken {
    words: [u64; WORDS],
    at: usize,
}

impl Taken {
    /// Whether everything is to be flushed.
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

//! Senders that have something for a vCPU: any pCPU adds to the set, only the pCPU that runs the vCPU takes from it.
//!
//! A parent VM's vCPU gets messages about many children, all in slot 0. Each child's vCPU has at most one message under
//! way, because it is suspended until the parent resumes it. So a queue of messages is not needed: a set of senders is
//! enough. It never allocates and is never full.
//!
//! Two orders matter:
//!
//! * The owner takes a sender *before* it writes the message. As soon as the message is in the slot, the parent may
//!   resume the child, and the child may post again. A bit that the owner cleared after that would be lost.
//! * The owner clears a word's bit in the summary *before* it looks whether the word is empty. Otherwise a sender that
//!   posts in between finds the bit set, and the owner clears it.

use crate::sync::{AtomicU64, Ordering};

const WORD_BITS: usize = u64::BITS as usize;

/// A set of senders, numbered from 0. `WORDS` is at most 64.
#[derive(Debug)]
pub struct Posted<const WORDS: usize> {
    /// Bit n: word n may have a sender.
    summary: AtomicU64,
    words: [AtomicU64; WORDS],
    /// The word at which the owner looks first, so that no sender waits for ever. Only the owner uses it.
    next: AtomicU64,
}

/// A set of 4096 senders, in 528 bytes.
pub type Senders = Posted<WORD_BITS>;

impl<const WORDS: usize> Default for Posted<WORDS> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const WORDS: usize> Posted<WORDS> {
    /// Numbers are below this one.
    pub const LIMIT: usize = WORDS * WORD_BITS;

    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        const { assert!(0 < WORDS && WORDS <= WORD_BITS, "the summary has a bit for each word") };
        Self { summary: AtomicU64::new(0), words: core::array::from_fn(|_| AtomicU64::new(0)), next: AtomicU64::new(0) }
    }

    /// Adds a sender. The owner must be notified afterwards. A number that is too large is ignored.
    pub fn post(&self, sender: usize) {
        let (word, bit) = place(sender);
        let Some(bits) = self.words.get(word) else { return };
        bits.fetch_or(bit, Ordering::Release);
        self.summary.fetch_or(1 << word, Ordering::Release);
    }

    /// Removes a sender that ends. The owner may have taken it already.
    pub fn withdraw(&self, sender: usize) {
        let (word, bit) = place(sender);
        if let Some(bits) = self.words.get(word) {
            bits.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Whether a sender may be there. A sender that is posted now may be missed; its notification comes.
    #[must_use]
    pub fn has_some(&self) -> bool {
        let mut left = self.summary.load(Ordering::Acquire);
        while let Some(word) = lowest(left) {
            if self.words.get(word).is_some_and(|bits| bits.load(Ordering::Acquire) != 0) {
                return true;
            }
            left &= left - 1;
        }
        false
    }

    /// Takes a sender, for the owner. Words take turns: between two turns of a word, each other word has one.
    pub fn take(&self) -> Option<usize> {
        #[expect(clippy::cast_possible_truncation, reason = "the number of a word, stored below")]
        let first = self.next.load(Ordering::Relaxed) as usize;
        let summary = self.summary.load(Ordering::Acquire);
        let earlier = (1 << first) - 1;
        for mut left in [summary & !earlier, summary & earlier] {
            while let Some(word) = lowest(left) {
                if let Some(bit) = self.take_from(word) {
                    self.next.store((word as u64 + 1) % WORDS as u64, Ordering::Relaxed);
                    return Some(word * WORD_BITS + bit);
                }
                left &= left - 1;
            }
        }
        None
    }

    /// Takes the first sender of a word, and clears the word's bit in the summary if none is left.
    fn take_from(&self, word: usize) -> Option<usize> {
        let bits = self.words.get(word)?;
        let bit = bits.load(Ordering::Acquire).trailing_zeros();
        let had_one = bit < u64::BITS && bits.fetch_and(!(1 << bit), Ordering::Acquire) >> bit & 1 != 0;
        if bits.load(Ordering::Acquire) == 0 {
            self.summary.fetch_and(!(1 << word), Ordering::AcqRel);
            // A sender that posted since the last look may have set the bit before it was cleared.
            if bits.load(Ordering::Acquire) != 0 {
                self.summary.fetch_or(1 << word, Ordering::Relaxed);
            }
        }
        had_one.then_some(bit as usize)
    }
}

/// The number of the lowest bit that is set.
fn lowest(bits: u64) -> Option<usize> {
    (bits != 0).then_some(bits.trailing_zeros() as usize)
}

fn place(sender: usize) -> (usize, u64) {
    (sender / WORD_BITS, 1 << (sender % WORD_BITS))
}

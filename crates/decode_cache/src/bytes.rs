//! Caches decoded instructions by their bytes and mode. Needs no coherence.
//!
//! Decoding is a pure function of bytes and mode. So an entry found by them is correct, whatever has happened to
//! memory, page tables or address spaces. The cache belongs to one vCPU, which uses it without locks and atomics.
//!
//! An entry has the instruction's own bytes and a mask of its length. A lookup does not compare the bytes after an
//! instruction; they only select the entry. The last byte of the second word, which no instruction reaches, holds the
//! mode. So two masked comparisons check everything except one point: the instruction must not end after the fetched
//! bytes.

use crate::{Bytes, Decoded, InsertOutcome, ModeNumber, Refusal, fetched};

/// Decoded instructions by bytes and mode, for one vCPU: direct-mapped, `N` entries of one cache line each.
pub struct ByBytes<D, const N: usize = 64> {
    entries: [Entry<D>; N],
}

/// Everything that a lookup reads.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Entry<D> {
    /// The instruction's bytes, zero after its end, with the mode on top.
    words: [u64; 2],
    /// Mask of the bits of `words` that count.
    masks: [u64; 2],
    /// `None` in an entry that was never filled, so that its words match nothing.
    decoded: Option<D>,
}

impl<D: Decoded, const N: usize> ByBytes<D, N> {
    /// An empty cache.
    #[must_use]
    pub const fn new() -> Self {
        const { assert!(N.is_power_of_two(), "an index is some bits of a hash") };
        // A decoded instruction may take 32 bytes, including the mark for `None`: an enum or a bool in it provides this
        // mark for free.
        const { assert!(size_of::<Option<D>>() > 32 || size_of::<Entry<D>>() == 64, "an entry is one cache line") };
        Self { entries: [Entry { words: [0; 2], masks: [0; 2], decoded: None }; N] }
    }

    /// The instruction at the start of `bytes` in this mode, if it is cached.
    #[inline]
    #[must_use]
    pub fn find(&self, mode: ModeNumber, bytes: &Bytes) -> Option<&D> {
        let words = keyed(mode, bytes);
        let entry = &self.entries[Self::index(words)];
        let first = (words[0] ^ entry.words[0]) & entry.masks[0];
        let second = (words[1] ^ entry.words[1]) & entry.masks[1];
        if first | second != 0 {
            return None;
        }
        // Zeros after the fetched bytes must not match an instruction's last bytes.
        entry.decoded.as_ref().filter(|decoded| decoded.length() <= bytes.length())
    }

    /// Caches that `bytes` begin with this instruction in this mode. An instruction that ends after them is not cached.
    pub fn insert(&mut self, mode: ModeNumber, bytes: &Bytes, decoded: D) -> InsertOutcome {
        let length = decoded.length();
        if length == 0 || length > bytes.length() {
            return InsertOutcome::Refused(Refusal::Crosses);
        }
        let entry = &mut self.entries[Self::index(keyed(mode, bytes))];
        let words = keyed(mode, &bytes.prefix(length));
        let [first, second] = fetched::masks(length);
        let masks = [first, second | MODE_MASK];

        let other = entry.decoded.is_some() && (entry.words != words || entry.masks != masks);
        *entry = Entry { words, masks, decoded: Some(decoded) };
        if other { InsertOutcome::Replaced } else { InsertOutcome::Stored }
    }

    /// From all of the first eight bytes, and the mode: the product's top bits depend on each of them.
    #[inline]
    fn index(words: [u64; 2]) -> usize {
        let hash = (words[0] ^ (words[1] >> MODE_SHIFT)).wrapping_mul(MULTIPLIER);
        // In two steps, because N may be 1. The result has as many bits as an index.
        (hash >> 1 >> (63 - N.trailing_zeros())) as usize
    }
}

impl<D: Decoded, const N: usize> Default for ByBytes<D, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// 2^64 divided by the golden ratio: it spreads close values far apart (Knuth, vol. 3, 6.4).
pub(crate) const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The last byte of the second word: no instruction has a sixteenth.
const MODE_SHIFT: u32 = 56;
const MODE_MASK: u64 = 0xff << MODE_SHIFT;

/// Bytes and mode in two words.
#[inline]
fn keyed(ModeNumber(mode): ModeNumber, bytes: &Bytes) -> [u64; 2] {
    let [first, second] = bytes.words();
    [first, second | u64::from(mode) << MODE_SHIFT]
}

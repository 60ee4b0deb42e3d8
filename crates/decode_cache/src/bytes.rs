//! The design that needs no coherence: decoded instructions by their bytes and mode.
//!
//! Decoding is a pure function of bytes and mode, so an entry that is found by them is right whatever has happened to
//! memory, page tables or address spaces meanwhile. Nobody else can see it: it belongs to one vCPU, and is used without
//! locks and atomics.
//!
//! An entry keeps the instruction's own bytes and a mask of its length. The bytes that follow an instruction are not part
//! of it and are not compared; they only help to choose the entry. The last byte of the second word, which no instruction
//! reaches, is the mode's, so two comparisons under masks say all but one thing: that the instruction does not end beyond
//! the bytes that were fetched.

use crate::{Bytes, Decoded, Mode, Outcome, Refusal, fetched};

/// Decoded instructions by bytes and mode, for one vCPU: direct-mapped, `N` entries of one cache line each.
pub struct ByBytes<D, const N: usize = 64> {
    entries: [Entry<D>; N],
}

/// All that a lookup reads.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Entry<D> {
    /// The instruction's bytes, zero beyond its length, and the mode on top.
    words: [u64; 2],
    /// Ones where `words` counts.
    masks: [u64; 2],
    /// Nothing is found in an entry that was never filled, whatever its words.
    decoded: Option<D>,
}

impl<D: Decoded, const N: usize> ByBytes<D, N> {
    /// One that remembers nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        const { assert!(N.is_power_of_two(), "an index is some bits of a hash") };
        // 32 bytes is what a decoded instruction may take, with the mark of an entry that is none: an enum or a bool in it
        // holds that mark for nothing.
        const { assert!(size_of::<Option<D>>() > 32 || size_of::<Entry<D>>() == 64, "an entry is one cache line") };
        Self { entries: [Entry { words: [0; 2], masks: [0; 2], decoded: None }; N] }
    }

    /// The instruction that these bytes begin with in this mode, if it is remembered.
    #[inline]
    #[must_use]
    pub fn find(&self, mode: Mode, bytes: &Bytes) -> Option<&D> {
        let words = keyed(mode, bytes);
        let entry = &self.entries[Self::index(words)];
        let first = (words[0] ^ entry.words[0]) & entry.masks[0];
        let second = (words[1] ^ entry.words[1]) & entry.masks[1];
        if first | second != 0 {
            return None;
        }
        // Zeros beyond what was fetched must not pass for an instruction's last bytes.
        entry.decoded.as_ref().filter(|decoded| decoded.length() <= bytes.length())
    }

    /// Remembers that these bytes begin with this instruction in this mode. One that ends beyond them is not remembered.
    pub fn insert(&mut self, mode: Mode, bytes: &Bytes, decoded: D) -> Outcome {
        let length = decoded.length();
        if length == 0 || length > bytes.length() {
            return Outcome::Refused(Refusal::Crosses);
        }
        let entry = &mut self.entries[Self::index(keyed(mode, bytes))];
        let words = keyed(mode, &bytes.prefix(length));
        let [first, second] = fetched::masks(length);
        let masks = [first, second | MODE_MASK];

        let other = entry.decoded.is_some() && (entry.words != words || entry.masks != masks);
        *entry = Entry { words, masks, decoded: Some(decoded) };
        if other { Outcome::Replaced } else { Outcome::Stored }
    }

    /// By all of the first eight bytes, and the mode: the top bits of the product depend on each of them.
    #[inline]
    fn index(words: [u64; 2]) -> usize {
        let hash = (words[0] ^ (words[1] >> MODE_SHIFT)).wrapping_mul(MULTIPLIER);
        // In two steps, as N may be 1. No more bits are left than an index has.
        (hash >> 1 >> (63 - N.trailing_zeros())) as usize
    }
}

impl<D: Decoded, const N: usize> Default for ByBytes<D, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// 2^64 divided by the golden ratio: neighbours come out far apart (Knuth, vol. 3, 6.4).
pub(crate) const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The last byte of the second word: no instruction has a sixteenth.
const MODE_SHIFT: u32 = 56;
const MODE_MASK: u64 = 0xff << MODE_SHIFT;

/// Bytes and mode in two words.
#[inline]
fn keyed(Mode(mode): Mode, bytes: &Bytes) -> [u64; 2] {
    let [first, second] = bytes.words();
    [first, second | u64::from(mode) << MODE_SHIFT]
}

//! The bytes at RIP, as two words.

use crate::MAX_LENGTH;

/// Up to 15 bytes at RIP, from one page. They are in two words: the first byte is the lowest, bytes after the end are
/// zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    words: [u64; 2],
    length: u8,
}

impl Bytes {
    /// No bytes: for a caller that did not fetch.
    pub const NONE: Self = Self { words: [0; 2], length: 0 };

    /// The first 15 of these, or all.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut all = [0; 16];
        let length = bytes.len().min(MAX_LENGTH);
        for (to, from) in all.iter_mut().zip(&bytes[..length]) {
            *to = *from;
        }
        Self::from_words(split(u128::from_le_bytes(all)), u8::try_from(length).unwrap_or(0))
    }

    /// The first `length` bytes of these words, at most 15.
    #[must_use]
    pub const fn from_words(words: [u64; 2], length: u8) -> Self {
        let length = if length as usize > MAX_LENGTH { 15 } else { length };
        let masks = masks(length);
        Self { words: [words[0] & masks[0], words[1] & masks[1]], length }
    }

    /// Like [`from_words`](Self::from_words), but the words must already be zero after `length`, which is at most 15.
    /// Other words only cause more misses.
    #[inline]
    #[must_use]
    pub const fn from_zero_padded(words: [u64; 2], length: u8) -> Self {
        Self { words, length }
    }

    /// The bytes, the first lowest in the first word; zero beyond the length.
    #[must_use]
    pub const fn words(&self) -> [u64; 2] {
        self.words
    }

    /// Number of bytes, at most 15.
    #[must_use]
    pub const fn length(&self) -> u8 {
        self.length
    }

    /// The first `length` of them, or all.
    #[must_use]
    pub const fn prefix(&self, length: u8) -> Self {
        Self::from_words(self.words, if length < self.length { length } else { self.length })
    }
}

/// Mask of the first `length` bytes; `length` is at most 15.
pub(crate) const fn masks(length: u8) -> [u64; 2] {
    split((1 << (8 * length as u32)) - 1)
}

#[expect(clippy::cast_possible_truncation, reason = "takes a number apart into its halves")]
const fn split(all: u128) -> [u64; 2] {
    [all as u64, (all >> 64) as u64]
}

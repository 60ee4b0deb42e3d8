//! An input as 64-bit words: all inputs of hypercalls consist of them, from memory or from registers.

use crate::table::WORD_BYTES;

/// A run of 64-bit words as a guest wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Words<'a>(pub(crate) &'a [[u8; WORD_BYTES]]);

impl<'a> Words<'a> {
    /// The whole words in `bytes`.
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        Self(bytes.as_chunks().0)
    }

    /// The word at `index`; zero after the end. Lengths are checked before, so this never happens.
    pub(crate) fn get(self, index: usize) -> u64 {
        self.0.get(index).map_or(0, |word| u64::from_le_bytes(*word))
    }

    /// The words from `index` on.
    pub(crate) fn skip(self, index: usize) -> Self {
        Self(self.0.get(index..).unwrap_or_default())
    }

    /// The first `count` words, or as many as there are.
    pub(crate) fn take(self, count: usize) -> Self {
        Self(self.0.get(..count).unwrap_or(self.0))
    }

    pub(crate) fn len(self) -> usize {
        self.0.len()
    }
}

//! The fuzzer's bytes as a source of decisions. When they run out, what follows is pseudorandom, and the same each
//! time.

use fastrand::Rng;

use crate::random::Source;

pub(crate) struct Input<'a> {
    bytes: &'a [u8],
    then: Rng,
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, then: Rng::with_seed(bytes.len() as u64) }
    }

    /// The next 20 bytes, zero where there are no more.
    pub(crate) fn code(&mut self) -> [u8; 20] {
        let (taken, rest) = self.bytes.split_at(self.bytes.len().min(20));
        self.bytes = rest;
        core::array::from_fn(|at| taken.get(at).copied().unwrap_or(0))
    }
}

impl Source for Input<'_> {
    fn word(&mut self) -> u64 {
        match self.bytes.split_first_chunk() {
            Some((&word, rest)) => {
                self.bytes = rest;
                u64::from_le_bytes(word)
            }
            None => self.then.word(),
        }
    }
}

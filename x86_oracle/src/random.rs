//! Pseudorandom numbers, the same in each run.

use fastrand::Rng;

/// A generator, and the choices that cases are made of.
#[derive(Clone, Debug)]
pub(crate) struct Random(Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Rng::with_seed(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// True in one of `times` cases.
    pub(crate) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.0.u8(..)
    }

    /// One of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.usize(..choices.len())]
    }

    /// A value at which arithmetic may go wrong, or any.
    pub(crate) fn corner(&mut self) -> u64 {
        let bit = 8_u32 << self.below(4);
        let sign = 1_u64 << (bit - 1);
        match self.below(10) {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => sign,
            4 => sign - 1,
            5 => u64::MAX >> (64 - bit),
            6 => self.below(256),
            7 => 1 << self.below(64),
            _ => self.next(),
        }
    }
}

//! Random numbers that repeat from their seed: fastrand's, with a stream for each CPU.

use fastrand::Rng;

/// One stream of numbers.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// A generator for `stream` (a CPU's index, say) of `seed`. Streams of one seed differ from the first number on.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(Rng::with_seed(Rng::with_seed(seed).u64(..) ^ stream))
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.0.u64(..bound) }
    }

    /// An index below `bound`; zero if `bound` is zero.
    pub fn index(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { self.0.usize(..bound) }
    }

    /// The next 32 random bits.
    pub fn bits_u32(&mut self) -> u32 {
        self.0.u32(..)
    }
}

//! Numbers that steer a test: pseudorandom ones here, the fuzzer's bytes in `fuzzed.rs`.

use fastrand::Rng;

/// A supply of numbers.
pub(crate) trait Source {
    /// The next 64 bits.
    fn word(&mut self) -> u64;

    /// The next 32 bits.
    fn half(&mut self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "takes the lower half")]
        let half = self.word() as u32;
        half
    }

    /// A number below `bound`, which is small.
    fn below(&mut self, bound: usize) -> usize {
        self.half() as usize % bound
    }

    /// One of `choices`.
    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// True once in `of` times.
    fn rarely(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// 20 random bytes.
    fn bytes(&mut self) -> [u8; 20] {
        let words = [self.word(), self.word(), self.word()].map(u64::to_le_bytes);
        core::array::from_fn(|at| words[at / 8][at % 8])
    }
}

impl Source for Rng {
    fn word(&mut self) -> u64 {
        self.u64(..)
    }
}

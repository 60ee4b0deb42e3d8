//! Numbers that steer a test: pseudorandom ones here, the fuzzer's bytes in `fuzz/`.

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

/// A generator of 64 bits of state whose outputs are well mixed (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Source for Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

//! A small random generator (xorshift64*). It repeats from its seed, and is good enough to choose the next action.

/// The generator's state: one word, never zero.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for `stream` (a CPU's index, say) of `seed`. Streams of one seed differ from the first number on.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        // The finisher of splitmix64 spreads neighbouring seeds over the whole range.
        let mut state = seed ^ stream.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((state ^ (state >> 31)) | 1)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.bits() >> 16).checked_rem(bound).unwrap_or(0)
    }

    /// An index below `bound`; zero if `bound` is zero.
    pub fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap_or(0)
    }

    /// The next 32 random bits.
    pub fn bits_u32(&mut self) -> u32 {
        (self.bits() >> 32) as u32
    }
}

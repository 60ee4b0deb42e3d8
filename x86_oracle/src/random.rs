//! Pseudorandom numbers, the same in each run.

/// SplitMix64: a counter, and a function that scatters it.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Below `end`, which is small.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 32) % end
    }

    /// True in one of `times` cases.
    pub(crate) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    /// One of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        let place = usize::try_from(self.below(choices.len() as u64)).expect("an index");
        choices[place]
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

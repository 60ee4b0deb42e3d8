//! The fuzzer's bytes as a source of decisions. A few bytes decide much, so that the fuzzer finds its way.

/// Bytes that are taken one after the other. Behind the last one all is zero.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    /// All of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Whether there are no more bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// What was not taken yet.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// At most `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(count.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// The next bytes, with zeros behind the last one.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.bytes(N);
        std::array::from_fn(|at| taken.get(at).copied().unwrap_or(0))
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, from one byte if that is enough.
    pub fn below(&mut self, bound: usize) -> usize {
        let word = if bound <= 256 { self.byte().into() } else { self.u32() as usize };
        word % bound.max(1)
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

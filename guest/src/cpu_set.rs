//! A set of CPUs, by index.

/// Indices that a set has room for.
pub const ROOM: usize = 256;
const WORDS: usize = ROOM / 64;

/// A set of indices below [`ROOM`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSet([u64; WORDS]);

impl CpuSet {
    /// No CPU.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// The CPUs `0..count`.
    #[must_use]
    pub fn first(count: usize) -> Self {
        (0..count.min(ROOM)).collect()
    }

    /// Puts `index` in. Answers whether there is room for such an index.
    pub fn insert(&mut self, index: usize) -> bool {
        self.0.get_mut(index / 64).map(|word| *word |= 1 << (index % 64)).is_some()
    }

    /// The set without `index`.
    #[must_use]
    pub fn without(mut self, index: usize) -> Self {
        if let Some(word) = self.0.get_mut(index / 64) {
            *word &= !(1 << (index % 64));
        }
        self
    }

    /// Whether `index` is in.
    #[must_use]
    pub fn contains(&self, index: usize) -> bool {
        self.0.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 != 0)
    }

    /// Number of CPUs in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// The CPUs of the set, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(at, &word)| {
            let mut rest = word;
            core::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest.wrapping_sub(1);
                (bit < 64).then_some(at * 64 + bit)
            })
        })
    }

    /// The set as words of 64, lowest first, up to the last that is not zero.
    #[must_use]
    pub fn banks(&self) -> &[u64] {
        let used = self.0.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        &self.0[..used]
    }
}

impl FromIterator<usize> for CpuSet {
    /// Indices beyond [`ROOM`] are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        let mut set = Self::EMPTY;
        for index in indices {
            set.insert(index);
        }
        set
    }
}

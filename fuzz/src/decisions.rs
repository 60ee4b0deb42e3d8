//! Numbers that steer a test against a model: pseudorandom ones from a seed, or the fuzzer's bytes. With them a model
//! test becomes a target.

use std::ops::{Bound, RangeBounds};

/// A supply of numbers in ranges.
#[derive(Clone, Debug)]
pub struct Decisions {
    from: From,
}

#[derive(Clone, Debug)]
enum From {
    Seed(fastrand::Rng),
    /// Those that are left, in reverse.
    Bytes(Vec<u8>),
}

impl Decisions {
    /// Numbers without end.
    #[must_use]
    pub fn of_seed(seed: u64) -> Self {
        Self { from: From::Seed(fastrand::Rng::with_seed(seed)) }
    }

    /// Numbers of these bytes. Behind the last one each is the first of its range.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self { from: From::Bytes(bytes.iter().rev().copied().collect()) }
    }

    /// Whether the bytes are used up.
    #[must_use]
    pub fn are_over(&self) -> bool {
        matches!(&self.from, From::Bytes(left) if left.is_empty())
    }

    /// Heads or tails.
    pub fn bool(&mut self) -> bool {
        self.within(0, 1) != 0
    }

    /// One of `choices`, if there are some.
    pub fn choice<'a, T>(&mut self, choices: &'a [T]) -> Option<&'a T> {
        choices.len().checked_sub(1).and_then(|last| choices.get(self.usize(..=last)))
    }

    /// A number from `first` to `last`.
    fn within(&mut self, first: u64, last: u64) -> u64 {
        assert!(first <= last, "an empty range");
        let left = match &mut self.from {
            From::Seed(random) => return random.u64(first..=last),
            From::Bytes(left) => left,
        };
        // As few bytes as the range needs.
        let mut word = 0_u64;
        for _ in 0..(u64::BITS - (last - first).leading_zeros()).div_ceil(8) {
            word = word << 8 | u64::from(left.pop().unwrap_or(0));
        }
        match (last - first).checked_add(1) {
            Some(count) => first + word % count,
            None => word,
        }
    }
}

macro_rules! integers {
    ($($name:ident)*) => {
        impl Decisions {
            $(
                /// A number of a range, which must not be empty.
                pub fn $name(&mut self, range: impl RangeBounds<$name>) -> $name {
                    let first = match range.start_bound() {
                        Bound::Included(first) => *first,
                        Bound::Excluded(before) => before + 1,
                        Bound::Unbounded => 0,
                    };
                    let last = match range.end_bound() {
                        Bound::Included(last) => *last,
                        Bound::Excluded(behind) => behind - 1,
                        Bound::Unbounded => $name::MAX,
                    };
                    let wide = |number: $name| u64::try_from(number).expect("64 bits hold it");
                    $name::try_from(self.within(wide(first), wide(last))).expect("it is at most `last`")
                }
            )*
        }
    };
}
integers! { u8 u16 u32 u64 usize }

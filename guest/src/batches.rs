//! Repeated measurements of the same thing, reduced to the two numbers that the guest reports.

/// How often each measurement is repeated. Odd, so that the median is one of the values.
pub const BATCHES: usize = 9;

/// Ticks that one batch of a loop took, for each of the batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches([u64; BATCHES]);

impl Batches {
    /// Runs `batch` once to warm up and drops that result, then runs it once per batch.
    pub fn measure(mut batch: impl FnMut() -> u64) -> Self {
        batch();
        Self(core::array::from_fn(|_| batch())).sorted()
    }

    fn sorted(mut self) -> Self {
        self.0.sort_unstable();
        self
    }

    /// The middle value.
    #[must_use]
    pub fn median(&self) -> u64 {
        self.0[BATCHES / 2]
    }

    /// The smallest value, of the batch with the least disturbance.
    #[must_use]
    pub fn min(&self) -> u64 {
        self.0[0]
    }

    /// The largest value.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.0[BATCHES - 1]
    }
}

/// `total` less the loop that carried it, per iteration, rounded to the nearest.
#[must_use]
pub fn per_iteration(total: u64, empty: u64, iterations: u64) -> u64 {
    let iterations = iterations.max(1);
    (total.saturating_sub(empty)).saturating_add(iterations / 2) / iterations
}

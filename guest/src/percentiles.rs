//! Many measurements of the same thing, reduced to mean and percentiles.

/// The summary of a series, in the unit of its values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of values.
    pub count: u64,
    /// Arithmetic mean, rounded down.
    pub mean: u64,
    /// Half of the values are at most this.
    pub p50: u64,
    /// 99 of 100.
    pub p99: u64,
    /// 999 of 1000.
    pub p999: u64,
    /// The largest.
    pub max: u64,
}

impl Summary {
    /// Sorts `values` and sums them up. All zero for no values.
    pub fn of(values: &mut [u64]) -> Self {
        values.sort_unstable();
        let count = values.len() as u64;
        let Some(&max) = values.last() else { return Self::default() };
        let sum: u128 = values.iter().map(|value| u128::from(*value)).sum();
        let mean = u64::try_from(sum / u128::from(count)).unwrap_or(u64::MAX);
        let at = |per_mille| values[rank(values.len(), per_mille)];
        Self { count, mean, p50: at(500), p99: at(990), p999: at(999), max }
    }

    /// The same with every value but the count through `convert`.
    #[must_use]
    pub fn map(self, convert: impl Fn(u64) -> u64) -> Self {
        Self {
            count: self.count,
            mean: convert(self.mean),
            p50: convert(self.p50),
            p99: convert(self.p99),
            p999: convert(self.p999),
            max: convert(self.max),
        }
    }
}

/// Index of the nearest rank: among `count` sorted values, the smallest value that at least `per_mille` of 1000 values
/// do not exceed.
fn rank(count: usize, per_mille: usize) -> usize {
    (count * per_mille).div_ceil(1000).clamp(1, count) - 1
}

/// The part of a measured time in which its CPU was running.
///
/// `seen` ticks passed on the clock. In that time the CPU's run time advanced by `ran` ticks, including `overhead`
/// ticks for reading the run time. In the remaining time the CPU was not running.
#[must_use]
pub fn net_of_absence(seen: u64, ran: u64, overhead: u64) -> u64 {
    let away = seen.saturating_add(overhead).saturating_sub(ran);
    seen.saturating_sub(away)
}

/// Ticks as nanoseconds.
#[must_use]
pub fn nanoseconds(ticks: u64, khz: u64) -> u64 {
    scaled(ticks, 1_000_000, khz)
}

/// `value * numerator / denominator` without overflow in between; the largest number if the result is too large.
#[must_use]
pub fn scaled(value: u64, numerator: u64, denominator: u64) -> u64 {
    let exact = u128::from(value) * u128::from(numerator) / u128::from(denominator.max(1));
    u64::try_from(exact).unwrap_or(u64::MAX)
}

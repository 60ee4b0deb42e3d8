//! Limits how fast large leaves are split.
//!
//! Splitting ahead of the guest costs it time, all at once without a limit. A pace allows a number of splits per time.
//! Unused splits are kept for one period only. Each pace has one owner: the code that splits ahead has one, and each
//! vCPU may have one for splits by its own faults, so no vCPU waits for another one's. A vCPU whose pace allows nothing
//! takes no spare table, and its fault [makes the whole leaf writable](crate::Walk::fault).

/// A number of splits per time.
#[derive(Clone, Debug)]
pub struct Pace {
    splits: u64,
    period: u64,
    /// Splits allowed now, times the period: exact, however often it is queried.
    credit: u128,
    /// Credit includes the time up to here.
    since: u64,
}

impl Pace {
    /// `splits` in each `period`, in ticks of any clock. A whole period's splits are allowed at once from `now` on. A
    /// period of zero counts as one tick.
    #[must_use]
    pub const fn new(splits: u64, period: u64, now: u64) -> Self {
        let period = if period == 0 { 1 } else { period };
        Self { splits, period, credit: splits as u128 * period as u128, since: now }
    }

    /// How many splits are allowed at `now`: at most those of one period.
    pub fn allowed(&mut self, now: u64) -> u64 {
        let full = u128::from(self.splits) * u128::from(self.period);
        let elapsed = now.saturating_sub(self.since).min(self.period);
        let earned = u128::from(elapsed) * u128::from(self.splits);
        self.credit = self.credit.saturating_add(earned).min(full);
        self.since = self.since.max(now);
        u64::try_from(self.credit / u128::from(self.period)).unwrap_or(self.splits)
    }

    /// Records that this many splits were done.
    pub fn spend(&mut self, splits: u64) {
        self.credit = self.credit.saturating_sub(u128::from(splits) * u128::from(self.period));
    }
}

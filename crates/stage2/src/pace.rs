//! How fast large leaves are split.
//!
//! Splitting ahead of the guest costs it time, all at once if nobody holds back. A pace lets a number of splits happen per
//! time, and what was not used is kept for a while, but not for ever. It belongs to one: who splits ahead has one, and each
//! vCPU may have one for what its own faults split, so that no vCPU waits for another's. A vCPU whose pace allows nothing
//! takes no spare table, and its fault [opens the leaf whole](crate::Tree::fault) instead.

/// A number of splits per time.
#[derive(Clone, Debug)]
pub struct Pace {
    splits: u64,
    period: u64,
    /// Splits that may happen now, times the period: exact, however often somebody asks.
    credit: u128,
    /// Up to when time has been turned into credit.
    since: u64,
}

impl Pace {
    /// `splits` in each `period`, in ticks of whatever clock; so many may happen at once from `now` on. A period of zero
    /// is taken for one tick.
    #[must_use]
    pub const fn new(splits: u64, period: u64, now: u64) -> Self {
        let period = if period == 0 { 1 } else { period };
        Self { splits, period, credit: splits as u128 * period as u128, since: now }
    }

    /// How many splits may happen at `now`: never more than those of one period.
    pub fn allowed(&mut self, now: u64) -> u64 {
        let full = u128::from(self.splits) * u128::from(self.period);
        let elapsed = now.saturating_sub(self.since).min(self.period);
        let earned = u128::from(elapsed) * u128::from(self.splits);
        self.credit = self.credit.saturating_add(earned).min(full);
        self.since = self.since.max(now);
        u64::try_from(self.credit / u128::from(self.period)).unwrap_or(self.splits)
    }

    /// So many have happened.
    pub fn spend(&mut self, splits: u64) {
        self.credit = self.credit.saturating_sub(u128::from(splits) * u128::from(self.period));
    }
}

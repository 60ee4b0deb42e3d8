//! The local APIC's timer, without its interrupt.
//!
//! The guest sees a counter that steps down at a fixed rate, but nothing counts here. The state is the tick at which
//! the counter reaches zero; a read computes the counter from it. So a running timer costs nothing, it does not drift
//! however late it is read, and a masked timer needs no host timer.
//!
//! Ticks are those of the time-stamp counter. The owner calls [`Timer::take_due`] when [`Timer::expiry`] has come, and
//! before any change, so that events stay in order.

use super::TSC_TICKS_PER_TIMER_TICK;

/// What happens when the counter reaches zero (bits 17 and 18 of the timer's LVT entry).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The counter stays at zero.
    OneShot,
    /// The counter starts again from the initial count.
    Periodic,
    /// There is no counter; the guest writes the tick of the next expiry.
    Deadline,
    /// A reserved setting: the timer never runs.
    Reserved,
}

impl Mode {
    pub(super) const fn from_lvt(entry: u32) -> Self {
        match entry >> 17 & 3 {
            0 => Self::OneShot,
            1 => Self::Periodic,
            2 => Self::Deadline,
            _ => Self::Reserved,
        }
    }

    const fn counts(self) -> bool {
        matches!(self, Self::OneShot | Self::Periodic)
    }
}

#[derive(Debug)]
pub(super) struct Timer {
    /// Tick of the next expiry; `None` while stopped.
    expiry: Option<u64>,
    mode: Mode,
    initial_count: u32,
    divide: u32,
    shortest_period: u64,
    /// A deadline that came from outside before the mode for it.
    early_deadline: Option<u64>,
}

/// The registers of a timer that was saved.
pub(super) struct Saved {
    pub(super) mode: Mode,
    pub(super) initial_count: u32,
    pub(super) current_count: u32,
    pub(super) divide: u32,
}

impl Timer {
    /// A stopped one-shot timer. Periods have at least `shortest_period` ticks.
    pub(super) const fn new(shortest_period: u64) -> Self {
        Self { expiry: None, mode: Mode::OneShot, initial_count: 0, divide: 0, shortest_period, early_deadline: None }
    }

    /// When [`Timer::take_due`] will next have something to say.
    #[inline]
    pub(super) const fn expiry(&self) -> Option<u64> {
        self.expiry
    }

    /// Whether the timer expired at or before `now` since the last call. Several missed periods are one expiry.
    #[inline]
    pub(super) fn take_due(&mut self, now: u64) -> bool {
        let Some(expiry) = self.expiry.filter(|&expiry| expiry <= now) else {
            return false;
        };
        self.expiry = match self.mode {
            Mode::Periodic => Some(self.first_boundary_after(expiry, now)),
            _ => None,
        };
        true
    }

    /// Keeps the grid of periods through `expiry`, so a late call does not shift later periods.
    fn first_boundary_after(&self, expiry: u64, now: u64) -> u64 {
        let period = self.period();
        let missed = (now - expiry) / period;
        expiry.saturating_add(period.saturating_mul(missed + 1))
    }

    /// Changes the mode. Between counting and deadline mode the timer is disarmed (SDM vol. 3, "TSC-Deadline Mode").
    pub(super) fn set_mode(&mut self, mode: Mode) {
        if self.mode.counts() != mode.counts() || mode == Mode::Reserved {
            self.expiry = None;
            self.initial_count = 0;
        }
        self.mode = mode;
    }

    pub(super) const fn initial_count(&self) -> u32 {
        self.initial_count
    }

    /// Starts counting down from `count`; zero stops. No effect in deadline mode.
    pub(super) fn start(&mut self, count: u32, now: u64) {
        if !self.mode.counts() {
            return;
        }
        self.initial_count = count;
        self.expiry = match (count, self.mode) {
            (0, _) => None,
            (_, Mode::Periodic) => Some(now.saturating_add(self.period())),
            _ => Some(now.saturating_add(self.ticks(count))),
        };
    }

    /// Value of the counter; zero when stopped and in deadline mode.
    pub(super) fn current_count(&self, now: u64) -> u32 {
        let Some(expiry) = self.expiry.filter(|_| self.mode.counts()) else {
            return 0;
        };
        let left = match expiry.checked_sub(now) {
            Some(left) => left,
            // Due, but not handled: a masked timer wraps without a call.
            None if self.mode == Mode::Periodic => self.first_boundary_after(expiry, now) - now,
            None => 0,
        };
        // A stretched period counts from more than the guest requested; the guest sees the count stand still at first.
        u32::try_from(left.div_ceil(self.ticks(1))).unwrap_or(u32::MAX).min(self.initial_count)
    }

    pub(super) const fn divide(&self) -> u32 {
        self.divide
    }

    /// Changes the divider; the count continues at the new rate.
    pub(super) fn set_divide(&mut self, divide: u32, now: u64) {
        let count = self.current_count(now);
        self.divide = divide;
        if self.expiry.is_some() && self.mode.counts() {
            self.expiry = Some(now.saturating_add(self.ticks(count)));
        }
    }

    pub(super) fn is_in_deadline_mode(&self) -> bool {
        self.mode == Mode::Deadline
    }

    /// The tick that the guest last wrote; zero once it has come, and in other modes.
    pub(super) fn deadline(&self, now: u64) -> u64 {
        self.expiry.filter(|&expiry| self.is_in_deadline_mode() && expiry > now).unwrap_or(0)
    }

    /// Arms the timer for the tick `deadline`; zero disarms. No effect in other modes.
    #[inline]
    pub(super) fn set_deadline(&mut self, deadline: u64) {
        if self.is_in_deadline_mode() {
            self.expiry = (deadline != 0).then_some(deadline);
        }
    }

    /// Goes on where another timer was. A deadline that is armed, or has come early, stays if the mode is its own.
    pub(super) fn restore(&mut self, saved: Saved, now: u64) {
        let deadline = self.early_deadline.take().or(self.expiry.filter(|_| self.is_in_deadline_mode()));
        (self.mode, self.divide) = (saved.mode, saved.divide);
        self.initial_count = if saved.mode.counts() { saved.initial_count } else { 0 };
        let left = self.ticks(saved.current_count.min(saved.initial_count));
        self.expiry = match saved.mode {
            Mode::Deadline => deadline,
            Mode::Periodic if saved.initial_count != 0 && left == 0 => Some(now.saturating_add(self.period())),
            Mode::OneShot | Mode::Periodic if left != 0 => Some(now.saturating_add(left)),
            _ => None,
        };
    }

    /// As [`Self::set_deadline`], but in another mode it is kept until the mode is [restored](Self::restore).
    pub(super) fn place_deadline(&mut self, deadline: u64) {
        if self.is_in_deadline_mode() {
            self.set_deadline(deadline);
        } else {
            self.early_deadline = (deadline != 0).then_some(deadline);
        }
    }

    /// A deadline, also an early one, comes by this many ticks later.
    pub(super) fn move_deadline(&mut self, later: i64) {
        let is_deadline = self.is_in_deadline_mode();
        for deadline in
            [self.expiry.as_mut().filter(|_| is_deadline), self.early_deadline.as_mut()].into_iter().flatten()
        {
            *deadline = deadline.saturating_add_signed(later);
        }
    }

    /// The counter reaches zero by this many ticks later.
    pub(super) fn move_count(&mut self, later: u64) {
        if self.mode.counts() {
            self.expiry = self.expiry.map(|expiry| expiry.saturating_add(later));
        }
    }

    fn period(&self) -> u64 {
        self.ticks(self.initial_count).max(self.shortest_period).max(1)
    }

    /// `count` steps of the counter, in ticks. At most 2^32 * 4 * 128, so it cannot overflow.
    const fn ticks(&self, count: u32) -> u64 {
        (count as u64 * TSC_TICKS_PER_TIMER_TICK) << self.divide_shift()
    }

    /// The divider's register holds log2 of the divisor less one, modulo 8, in bits 3, 1 and 0 (APM vol. 2, 16.4.1).
    const fn divide_shift(&self) -> u32 {
        ((self.divide >> 1 & 4 | self.divide & 3) + 1) & 7
    }
}

//! A timer of the architecture (Arm ARM, D11.2, "The AArch64 view of the Generic Timer"): a compare value, a control
//! register, a level.
//!
//! Guests have two. The virtual one is the processor's. This file emulates the physical one of EL1, which guests rarely
//! use: its registers trap.

use serde::{Deserialize, Serialize};

/// The registers of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// CNTP_TVAL_EL0: counts from now on, 32 bits with a sign.
    Value,
    /// CNTP_CTL_EL0.
    Control,
    /// CNTP_CVAL_EL0: the count at which the condition begins to hold.
    Compare,
}

/// CNTP_CTL_EL0: the timer is on.
const ENABLE: u64 = 1 << 0;
/// Its interrupt is masked.
const IMASK: u64 = 1 << 1;
/// Its condition holds. Read-only.
const ISTATUS: u64 = 1 << 2;

/// What a file keeps of a timer. Its guest's counter stands still meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    control: u64,
    compare: u64,
    is_asserted: bool,
}

/// One timer. Times are counts of the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenericTimer {
    /// ENABLE and IMASK.
    control: u64,
    compare: u64,
    /// The last reported level of its interrupt.
    is_asserted: bool,
}

impl GenericTimer {
    /// Its state.
    #[must_use]
    pub const fn state(&self) -> State {
        let Self { control, compare, is_asserted } = *self;
        State { control, compare, is_asserted }
    }

    /// One that goes on from a state. Bits that no timer has are ignored.
    #[must_use]
    pub const fn with_state(state: &State) -> Self {
        let State { control, compare, is_asserted } = *state;
        Self { control: control & (ENABLE | IMASK), compare, is_asserted }
    }

    /// The level of its interrupt, as it was last reported.
    #[must_use]
    pub const fn is_asserted(&self) -> bool {
        self.is_asserted
    }

    /// The guest's read at the count `now`.
    pub fn read(&self, register: Register, now: u64) -> u64 {
        match register {
            Register::Value => self.compare.wrapping_sub(now) & 0xffff_ffff,
            Register::Control => self.control | if self.holds(now) { ISTATUS } else { 0 },
            Register::Compare => self.compare,
        }
    }

    /// The guest writes at the count `now`. Then [`GenericTimer::settle`] is due.
    pub fn write(&mut self, register: Register, value: u64, now: u64) {
        match register {
            Register::Value => {
                let [a, b, c, d, ..] = value.to_le_bytes();
                self.compare = now.wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into());
            }
            Register::Control => self.control = value & (ENABLE | IMASK),
            Register::Compare => self.compare = value,
        }
    }

    /// The level of the interrupt at the count `now`, if it differs from the last report.
    pub fn settle(&mut self, now: u64) -> Option<bool> {
        let level = self.holds(now) && self.control & IMASK == 0;
        (core::mem::replace(&mut self.is_asserted, level) != level).then_some(level)
    }

    /// When the level will rise by itself: the count at which to call [`GenericTimer::settle`].
    #[inline]
    pub fn deadline(&self) -> Option<u64> {
        (self.interrupts() && !self.is_asserted).then_some(self.compare)
    }

    /// Whether it is on, and its interrupt not masked.
    #[inline]
    pub fn interrupts(&self) -> bool {
        self.control & (ENABLE | IMASK) == ENABLE
    }

    /// Whether the condition holds: counts are unsigned.
    fn holds(&self, now: u64) -> bool {
        self.control & ENABLE != 0 && now >= self.compare
    }
}

#[cfg(test)]
mod tests;

//! How far a run is on its way to its end.
//!
//! ```text
//! Running <-> Over -> Ending -.
//!    '---------'---------'----+-> Cutting -> Cut
//! ```
//!
//! A run ends when QEMU ends, whatever the phase, or when it is cut.

use std::time::{Duration, Instant};

use super::LAST_WORDS;

/// Time limit for the counters of VMs that are cut off.
const LAST_COUNTERS: Duration = Duration::from_secs(1);

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// VMs run, or the host is not up yet.
    Running,
    /// All VMs have ended; the host ends when their last counters have arrived, or are overdue.
    Over { since: Instant },
    /// The host was told to end.
    Ending { since: Instant },
    /// The run is cut when the last counters have arrived, or are overdue. `is_told`: the host was told to end.
    Cutting { why: Cut, since: Instant, is_told: bool },
    /// The loop ends before QEMU does.
    Cut(Cut),
}

/// Why the loop ended before QEMU did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    TimeLimit,
    Signal(i32),
    /// The control port was closed while QEMU ran.
    Closed,
    /// QEMU did not end although it was told to.
    Stuck,
}

impl Phase {
    /// Why the run was cut, if it was.
    pub(super) const fn cut(self) -> Option<Cut> {
        match self {
            Self::Cut(why) => Some(why),
            _ => None,
        }
    }

    /// Whether the host was told to end.
    pub(super) const fn is_told(self) -> bool {
        matches!(self, Self::Ending { .. } | Self::Cutting { is_told: true, .. })
    }

    /// Whether the time limit still matters.
    pub(super) const fn has_limit(self) -> bool {
        !matches!(self, Self::Cutting { .. } | Self::Cut(_))
    }

    /// Begins to cut the run. Returns whether this is news.
    pub(super) fn cut_soon(&mut self, why: Cut, now: Instant) -> bool {
        let is_news = self.has_limit();
        if is_news {
            *self = Self::Cutting { why, since: now, is_told: self.is_told() };
        }
        is_news
    }

    /// A signal: the first cuts the run soon, a second at once. Returns whether it is the first.
    pub(super) fn signal(&mut self, signal: i32, now: Instant) -> bool {
        if matches!(self, Self::Cutting { .. }) {
            *self = Self::Cut(Cut::Signal(signal));
        }
        self.cut_soon(Cut::Signal(signal), now)
    }

    /// A VM runs again.
    pub(super) fn go_on(&mut self) {
        if matches!(self, Self::Over { .. }) {
            *self = Self::Running;
        }
    }

    /// All VMs have ended. Returns whether to tell the host to end: `is_counted`, no counters are missing, or they are
    /// overdue.
    pub(super) fn over(&mut self, is_counted: bool, now: Instant) -> bool {
        if *self == Self::Running {
            *self = Self::Over { since: now };
        }
        matches!(*self, Self::Over { since } if is_counted || now > since + LAST_WORDS)
    }

    /// The host is told to end. Returns whether this is news.
    pub(super) fn tell(&mut self, now: Instant) -> bool {
        match self {
            Self::Running | Self::Over { .. } => *self = Self::Ending { since: now },
            Self::Cutting { is_told, .. } if !*is_told => *is_told = true,
            _ => return false,
        }
        true
    }

    /// Cuts the run if that is due. `is_counted`: no counters are missing; `closed`: when the control port was closed.
    pub(super) fn look(&mut self, is_counted: bool, closed: Option<Instant>, now: Instant) {
        let why = match *self {
            Self::Cut(_) => return,
            Self::Cutting { why, since, .. } if is_counted || now > since + LAST_COUNTERS => why,
            _ if closed.is_some_and(|since| now > since + LAST_WORDS) => Cut::Closed,
            Self::Ending { since } if now > since + LAST_WORDS => Cut::Stuck,
            _ => return,
        };
        *self = Self::Cut(why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(6);

    #[test]
    fn host_is_told_once_when_the_last_counters_are_here_or_overdue() {
        let now = Instant::now();
        let mut phase = Phase::Running;
        assert!(!phase.over(false, now) && !phase.over(false, now + LAST_COUNTERS));
        assert!(phase.over(false, now + LONG) && phase.over(true, now));
        assert!(phase.tell(now) && phase.is_told());
        assert!(!phase.over(true, now) && !phase.tell(now));
    }

    #[test]
    fn a_vm_that_starts_again_keeps_the_host_up() {
        let now = Instant::now();
        let mut phase = Phase::Running;
        phase.over(false, now);
        phase.go_on();
        assert_eq!(phase, Phase::Running);
        assert!(!phase.over(false, now + LONG), "the counters of its new end are not overdue yet");
    }

    #[test]
    fn first_signal_waits_for_counters_and_the_second_for_nothing() {
        let now = Instant::now();
        let mut phase = Phase::Running;
        assert!(phase.signal(2, now));
        phase.look(false, None, now + LAST_COUNTERS);
        assert_eq!(phase.cut(), None);
        assert!(!phase.signal(15, now));
        assert_eq!(phase.cut(), Some(Cut::Signal(15)));
        assert!(!phase.signal(1, now));
        assert_eq!(phase.cut(), Some(Cut::Signal(15)), "the first reason stays");
    }

    #[test]
    fn cut_comes_with_the_counters_or_without_them_a_second_later() {
        let now = Instant::now();
        for (is_counted, later) in [(true, Duration::ZERO), (false, LAST_COUNTERS + LAST_COUNTERS)] {
            let mut phase = Phase::Running;
            assert!(phase.cut_soon(Cut::TimeLimit, now) && !phase.cut_soon(Cut::TimeLimit, now));
            phase.look(is_counted, None, now + later);
            assert_eq!(phase.cut(), Some(Cut::TimeLimit));
        }
    }

    #[test]
    fn host_that_was_told_may_still_be_cut_and_one_that_is_cut_may_still_be_told() {
        let now = Instant::now();
        let mut phase = Phase::Running;
        assert!(phase.tell(now) && phase.cut_soon(Cut::TimeLimit, now) && phase.is_told());
        let mut phase = Phase::Running;
        assert!(phase.cut_soon(Cut::TimeLimit, now) && phase.tell(now) && phase.is_told());
        assert!(!phase.tell(now));
    }

    #[test]
    fn host_that_hangs_or_is_silent_is_cut() {
        let now = Instant::now();
        let mut phase = Phase::Running;
        phase.tell(now);
        phase.look(true, None, now + LAST_COUNTERS);
        assert_eq!(phase.cut(), None);
        phase.look(true, None, now + LONG);
        assert_eq!(phase.cut(), Some(Cut::Stuck));

        let mut phase = Phase::Running;
        phase.look(true, Some(now), now + LAST_COUNTERS);
        assert_eq!(phase.cut(), None);
        phase.look(true, Some(now), now + LONG);
        assert_eq!(phase.cut(), Some(Cut::Closed));
    }
}

//! The remaining time: the expected time of the remaining steps, at the pace of the finished ones.

/// Limits of the pace of a computer: measured time divided by expected time.
const PACES: (f64, f64) = (0.25, 8.0);
/// A step that takes longer than expected is never quite done.
const ALMOST: f64 = 0.97;

/// Seconds that steps are expected to take, and those that they took.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Of all steps.
    expected: Vec<f64>,
    /// Of those that are done.
    took: Vec<f64>,
}

impl Estimate {
    /// `expected` are the expected durations of the steps.
    pub(super) fn new(expected: Vec<f64>) -> Self {
        Self { expected, took: Vec::new() }
    }

    /// Records the duration of the next step.
    pub(super) fn done(&mut self, seconds: f64) {
        self.took.push(seconds);
    }

    /// Seconds until the end of the last step, if the current step has run for `elapsed` seconds.
    pub(super) fn remaining(&self, elapsed: f64) -> f64 {
        let pace = self.pace();
        let mut to_come = self.expected.iter().skip(self.took.len()).map(|seconds| seconds * pace);
        let of_this = to_come.next().unwrap_or(0.0);
        to_come.sum::<f64>() + (of_this - elapsed).max(of_this * (1.0 - ALMOST))
    }

    /// How much is done, from 0 to 1.
    pub(super) fn share(&self, elapsed: f64) -> f64 {
        let all: f64 = self.expected.iter().sum();
        let done: f64 = self.expected.iter().take(self.took.len()).sum();
        let of_this = self.expected.get(self.took.len()).copied().unwrap_or(0.0);
        let part = if of_this > 0.0 { (elapsed / (of_this * self.pace())).min(ALMOST) } else { 0.0 };
        if all > 0.0 { (done + of_this * part) / all } else { 1.0 }
    }

    /// Measured time of the finished steps, divided by their expected time.
    fn pace(&self) -> f64 {
        let expected: f64 = self.expected.iter().take(self.took.len()).sum();
        let took: f64 = self.took.iter().sum();
        if expected > 0.0 { (took / expected).clamp(PACES.0, PACES.1) } else { 1.0 }
    }
}

/// A duration as text.
pub(super) fn in_words(seconds: f64) -> String {
    match seconds {
        ..10.0 => "a few seconds".to_string(),
        10.0..90.0 => format!("{:.0} s", (seconds / 10.0).round() * 10.0),
        _ => format!("{:.0} min", (seconds / 60.0).ceil()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_come_is_expected_at_the_pace_of_what_is_done() {
        let mut estimate = Estimate::new(vec![10.0, 20.0, 30.0]);
        assert_eq!((estimate.remaining(0.0), estimate.share(0.0)), (60.0, 0.0));
        assert_eq!((estimate.remaining(5.0), estimate.share(5.0)), (55.0, 5.0 / 60.0));
        estimate.done(20.0);
        // Half as fast: 40 and 60 are left.
        assert_eq!((estimate.remaining(10.0), estimate.share(10.0)), (90.0, 15.0 / 60.0));
        estimate.done(40.0);
        estimate.done(60.0);
        assert_eq!((estimate.remaining(0.0), estimate.share(0.0)), (0.0, 1.0));
    }

    #[test]
    fn step_that_takes_longer_than_expected_is_never_quite_done() {
        let estimate = Estimate::new(vec![10.0, 10.0]);
        assert!(estimate.remaining(1000.0) > 10.0);
        assert!(estimate.share(1000.0) < 0.5);
    }

    #[test]
    fn one_step_that_took_no_time_does_not_promise_that_the_rest_will() {
        let mut estimate = Estimate::new(vec![10.0, 100.0]);
        estimate.done(0.0);
        assert_eq!(estimate.remaining(0.0), 25.0);
    }

    #[test]
    fn nothing_to_do_is_done() {
        let estimate = Estimate::new(Vec::new());
        assert_eq!((estimate.remaining(3.0), estimate.share(3.0)), (0.0, 1.0));
    }

    #[test]
    fn times_are_said_roughly() {
        assert_eq!([3.0, 44.0, 89.0, 91.0, 600.0].map(in_words), ["a few seconds", "40 s", "90 s", "2 min", "10 min"]);
    }
}

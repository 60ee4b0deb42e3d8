//! A histogram of call times, to three digits, for any number of calls.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;

/// An hour, in nanoseconds. Longer times count as this.
const LONGEST: u64 = 3_600_000_000_000;

/// Times of calls.
#[derive(Debug)]
pub(crate) struct Latencies {
    nanoseconds: Histogram<u64>,
}

impl Latencies {
    pub(crate) fn new() -> Self {
        Self { nanoseconds: Histogram::new(3).expect("three digits are within the five that a histogram can have") }
    }

    /// Takes the time of one call.
    pub(crate) fn record(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(LONGEST).min(LONGEST);
        self.nanoseconds.record(nanoseconds).expect("a histogram of this kind grows up to far more than an hour");
    }

    /// Takes all that `other` has taken.
    pub(crate) fn add(&mut self, other: &Self) {
        self.nanoseconds.add(&other.nanoseconds).expect("a histogram of this kind grows as it needs to");
    }

    /// Calls so far.
    pub(crate) fn count(&self) -> u64 {
        self.nanoseconds.len()
    }
}

/// The part of a result line that is about times, in nanoseconds.
impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = &self.nanoseconds;
        write!(f, "mean_ns={:.0}", times.mean())?;
        for (name, quantile) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
            write!(f, " {name}_ns={}", times.value_at_quantile(quantile))?;
        }
        write!(f, " max_ns={}", times.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_the_mean_and_the_tail_to_three_digits() {
        let mut latencies = Latencies::new();
        let mut others = Latencies::new();
        (1..=500).for_each(|time| latencies.record(Duration::from_nanos(time)));
        (501..=1000).for_each(|time| others.record(Duration::from_nanos(time)));
        latencies.add(&others);
        assert_eq!(latencies.count(), 1000);
        assert_eq!(latencies.to_string(), "mean_ns=500 p50_ns=500 p99_ns=990 p999_ns=999 max_ns=1000");
    }

    #[test]
    fn very_long_calls_are_as_long_as_an_hour_and_do_not_spoil_the_short_ones() {
        let mut latencies = Latencies::new();
        let mut others = Latencies::new();
        (0..99).for_each(|_| latencies.record(Duration::from_micros(5)));
        others.record(Duration::MAX);
        latencies.add(&others);
        let line = latencies.to_string();
        assert!(line.contains("p50_ns=500") && line.contains("p99_ns=500"), "{line}");
        let longest = line.rsplit('=').next().and_then(|number| number.parse::<u64>().ok()).expect("is a number");
        assert!(longest.abs_diff(LONGEST) < LONGEST / 1000, "{line}");
    }

    #[test]
    fn no_call_gives_a_line_of_zeros() {
        assert_eq!(Latencies::new().to_string(), "mean_ns=0 p50_ns=0 p99_ns=0 p999_ns=0 max_ns=0");
    }
}

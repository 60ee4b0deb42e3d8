//! Whether two threads have two cores for themselves, measured by how two cores affect each other.
//!
//! Two counts in one cache line must slow each other down; otherwise the threads ran on one core, or on two halves of
//! one. Two computations that share nothing must not; otherwise other work ran on one of the cores.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_utils::CachePadded;
use serde_json::{Value, json};

use super::{alone, beside, in_turns};
use crate::bench::{Spread, progress};

/// Minimum slowdown of two cores that count in one line; otherwise they are not two cores.
const LEAST_LOSS: f64 = 2.0;
/// Maximum slowdown of a core next to another one that computes; otherwise it is not free.
const MOST_BESIDE: f64 = 1.05;
const OPERATIONS: u32 = 512;
/// Words between two separate counters: 256 bytes.
const APART: usize = 32;

/// Number of attempts: to wait for free cores, and to repeat measurements from times without them; and the duration of
/// each wait.
const TRIES: usize = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// The effect of two cores on each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::bench) struct Calibration {
    /// Counters in one line, compared with separate counters.
    neighbours: Option<Spread>,
    /// Computing side by side, compared with alone.
    apart: Option<Spread>,
}

impl Calibration {
    /// As it is now; takes about half a second.
    pub(in crate::bench) fn now() -> Self {
        let counts = |apart| {
            let words = words();
            beside(&mut counting(&words, 0), &mut counting(&words, apart), OPERATIONS).map(mean)
        };
        let turns = in_turns(|_| {
            let neighbours = counts(1)? / counts(APART)?;
            let both = beside(&mut working, &mut working, OPERATIONS).map(mean)?;
            Some((neighbours, both / alone(&mut working, OPERATIONS)?))
        });
        let (neighbours, apart): (Vec<f64>, Vec<f64>) = turns.unwrap_or_default().into_iter().unzip();
        Self { neighbours: Spread::of(&neighbours), apart: Spread::of(&apart) }
    }

    /// Measures when two cores are free, or after all attempts.
    pub(in crate::bench) fn patient() -> Self {
        let mut calibration = Self::now();
        for _ in 1..TRIES {
            if calibration.are_free() {
                break;
            }
            progress(&format!("waiting for two free cores: {calibration}"));
            thread::sleep(PAUSE);
            calibration = Self::now();
        }
        calibration
    }

    /// Whether there are two free cores.
    pub(in crate::bench) fn are_free(&self) -> bool {
        self.neighbours.is_some_and(|found| found.median >= LEAST_LOSS)
            && self.apart.is_some_and(|found| found.median <= MOST_BESIDE)
    }

    pub(in crate::bench) fn json(&self) -> Value {
        let ratio = |spread: Option<Spread>| spread.map(|spread| spread.json());
        json!({ "part": "calibration", "emulated": false, "neighbours_to_apart": ratio(self.neighbours),
            "beside_to_alone": ratio(self.apart), "two_free_cores": self.are_free() })
    }
}

impl std::fmt::Display for Calibration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some((neighbours, apart)) = self.neighbours.zip(self.apart) else {
            return f.write_str("two threads hardly ever ran at the same time");
        };
        write!(
            f,
            "counts in one line take {neighbours} times as long as apart, computing beside each other takes {apart} times as long as alone"
        )
    }
}

/// Measures until two cores were free at the time. Returns the last measurement, and whether they were.
///
/// Only the state of the cores decides which measurements are dropped, never the results.
pub(in crate::bench) fn judge_on_free_cores<T>(what: &str, measure: impl FnMut() -> Option<T>) -> (Option<T>, bool) {
    retry(what, measure, || Calibration::now().are_free(), PAUSE)
}

fn retry<T>(
    what: &str,
    mut measure: impl FnMut() -> Option<T>,
    mut are_free: impl FnMut() -> bool,
    pause: Duration,
) -> (Option<T>, bool) {
    let mut last = None;
    for attempt in 1..=TRIES {
        let measured = measure();
        // Check afterwards: the state before the measurement says less about it.
        let is_good = measured.is_some() && are_free();
        last = measured.or(last);
        if is_good {
            return (last, true);
        }
        if attempt < TRIES {
            progress(&format!("{what}: two cores were not free, again"));
            thread::sleep(pause);
        }
    }
    (last, false)
}

type Words = Arc<CachePadded<[AtomicU64; 2 * APART]>>;

fn words() -> Words {
    Arc::new(CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0))))
}

/// Counts by locked additions in one of the words.
fn counting(words: &Words, at: usize) -> impl FnMut(u32) + Send + use<> {
    let words = Arc::clone(words);
    move |times| {
        for _ in 0..times {
            words[at].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Computes, and touches no memory but its own stack.
fn working(times: u32) {
    let mut value = black_box(1_u64);
    for _ in 0..times {
        value = black_box(value.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
    }
}

fn mean([first, second]: [f64; 2]) -> f64 {
    f64::midpoint(first, second)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calibration(neighbours: f64, apart: f64) -> Calibration {
        Calibration { neighbours: Spread::of(&[neighbours]), apart: Spread::of(&[apart]) }
    }

    #[test]
    fn cores_are_free_if_only_neighbours_are_in_each_others_way() {
        assert!(calibration(7.0, 1.01).are_free());
        assert!(!calibration(1.0, 1.0).are_free(), "one core for both");
        assert!(!calibration(7.0, 1.5).are_free(), "somebody else on one of them");
        assert!(!Calibration { neighbours: None, apart: None }.are_free());
    }

    #[test]
    fn what_was_measured_while_cores_were_taken_is_measured_again_whatever_came_out() {
        let mut results = [Some(1), None, Some(3), Some(4)].into_iter();
        let mut free = [false, true, true].into_iter();
        let judged = retry("x", || results.next().flatten(), || free.next().unwrap_or(true), Duration::ZERO);
        assert_eq!(judged, (Some(3), true));
    }

    #[test]
    fn patience_ends_and_the_last_figures_are_not_judged() {
        let mut count = 0;
        let measure = || {
            count += 1;
            Some(count)
        };
        assert_eq!(retry("x", measure, || false, Duration::ZERO), (Some(TRIES), false));
        assert_eq!(retry::<u32>("x", || None, || true, Duration::ZERO), (None, false));
    }
}

//! The cost for two CPUs that count in two words, by the distance of the words.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use crate::bench::cycle::nanos_per_cycle;
use crate::bench::pair::{beside, in_turns, judge_on_free_cores};
use crate::bench::report::Report;
use crate::bench::{Spread, progress};
use crate::records::{Class, Figure};

/// Bytes from one word to the other.
const DISTANCES: [usize; 8] = [8, 16, 32, 56, 64, 128, 256, 512];
const OPERATIONS: u32 = 512;

/// Words; the first one begins a cache line.
#[repr(align(4096))]
struct Page([AtomicU64; 512]);

pub(super) fn run(report: &Report<'_>) {
    report.say("\nTwo CPUs count in two words at this distance in bytes: cycles of a locked addition\n");
    progress("words at growing distances");
    let (turns, is_judged) = judge_on_free_cores("distances", measure);
    let Some(turns) = turns else {
        report.say(super::NOT_FREE);
        return report.unmeasured("cycles by distance in bytes", super::NOT_FREE);
    };
    for (at, distance) in DISTANCES.into_iter().enumerate() {
        let cycles: Vec<f64> = turns.iter().map(|turn| turn[at]).collect();
        let Some(spread) = Spread::of(&cycles) else { continue };
        let mark = if is_judged { "" } else { "  cores were not free" };
        report.say(&format!("{distance:>5} bytes {:>22}{mark}", spread.to_string()));
        report.json(json!({ "part": "distance", "emulated": false, "bytes": distance, "judged": is_judged,
            "cycles": spread.json() }));
        let figure = Figure::new("addition, by distance of the words", Class::Time, "cycles", cycles);
        report.native(figure.at("bytes", distance).at("judged", is_judged));
    }
}

/// Cycles by distance, turn by turn.
fn measure() -> Option<Vec<[f64; DISTANCES.len()]>> {
    let page = Arc::new(Page([const { AtomicU64::new(0) }; 512]));
    in_turns(|turn| {
        let cycle = nanos_per_cycle();
        let mut figures = [0.0; DISTANCES.len()];
        let forth = DISTANCES.into_iter().enumerate();
        let order: Vec<_> = if turn % 2 == 0 { forth.collect() } else { forth.rev().collect() };
        for (at, distance) in order {
            let [one, other] = beside(&mut counting(&page, 0), &mut counting(&page, distance), OPERATIONS)?;
            figures[at] = f64::midpoint(one, other) / cycle;
        }
        Some(figures)
    })
}

/// Counts in the word at this offset.
fn counting(page: &Arc<Page>, offset: usize) -> impl FnMut(u32) + Send + use<> {
    let (page, word) = (Arc::clone(page), offset / size_of::<AtomicU64>());
    move |times| {
        for _ in 0..times {
            page.0[word].fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_as_far_apart_as_it_says() {
        let page = Arc::new(Page([const { AtomicU64::new(0) }; 512]));
        for distance in DISTANCES {
            counting(&page, distance)(3);
            assert_eq!(page.0[distance / 8].load(Ordering::Relaxed), 3, "{distance}");
        }
        assert_eq!(std::ptr::from_ref(&page.0[0]).addr() % 4096, 0);
    }

    #[test]
    fn some_distances_are_within_a_line_and_some_beyond_two() {
        assert!(DISTANCES.iter().any(|&distance| distance < 64) && DISTANCES.iter().any(|&distance| distance > 128));
    }
}

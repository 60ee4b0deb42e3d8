//! Records of runs: their results, and their speed over time.

use std::collections::BTreeMap;

use super::curve::Curve;
use super::instructions::Pass;
use super::measure::{Outcome, Setting};
use crate::bench::report::Report;
use crate::records::{Class, Course, Figure};

/// Length of a recorded step: shorter than an evaluated piece, longer than the guest's windows, of which there are
/// thousands.
const STEP_NS: u64 = 25_000_000;

/// Records one run.
pub(super) fn run(setting: &Setting, outcome: &Outcome, report: &Report<'_>) {
    let figure = |quantity: &str, class, unit, sample: f64| {
        report.emulated(setting.on(Figure::new(quantity, class, unit, [sample])).others(outcome.others));
    };
    let shape = &outcome.shape;
    for (quantity, share) in [
        ("worst 100 ms without a log", shape.worst_before),
        ("worst 100 ms while the log runs", shape.worst),
        ("speed while the log runs", shape.mean),
        ("speed after the log", shape.after),
    ] {
        figure(quantity, Class::Ratio, "% of the speed before", 100.0 * share);
    }
    figure("speed before the log", Class::Time, "pages/s", shape.before.round());
    if let Some(ns) = shape.back_after_ns {
        figure("time until it is back at 90 %", Class::Time, "s", ns as f64 / 1e9);
    }
    for (quantity, unit, count) in [
        ("faults of the log", "faults", outcome.counters.dirty_faults),
        ("large pages split in faults", "pages", outcome.counters.dirty_splits),
        ("large pages split ahead", "pages", outcome.splits_ahead),
        ("broadcasts by vCPUs", "broadcasts", outcome.counters.stage2_broadcasts),
        ("flushes of all vCPUs by the host", "flushes", outcome.flushes),
        ("most memory in tables", "bytes", outcome.tables),
        ("memory in tables before", "bytes", outcome.tables_before),
        ("large pages that came back", "pages", outcome.collapses),
        ("pages harvested", "pages", outcome.rounds.iter().map(|round| round.pages).sum()),
    ] {
        figure(quantity, Class::Count, unit, count as f64);
    }
    figure("time that vCPUs were held up", Class::Time, "s", outcome.stall());
    if let Some(course) = course(setting, outcome) {
        report.course(course);
    }
}

/// The speed over time, in seconds from the start of the log.
fn course(setting: &Setting, outcome: &Outcome) -> Option<Course> {
    let Outcome { curve, moments, shape, others, .. } = outcome;
    let Curve { begin_ns, window_ns, accesses } = curve;
    let end = begin_ns + window_ns * accesses.len() as u64;
    let begins: Vec<u64> = (*begin_ns..=end.checked_sub(STEP_NS)?).step_by(usize::try_from(STEP_NS).ok()?).collect();
    if begins.is_empty() {
        return None;
    }
    let share = |at: &u64| 100.0 * curve.speed(*at, at + STEP_NS).unwrap_or(0.0) / shape.before;
    let seconds = |ns: u64| (ns as f64 - moments.started_ns as f64) / 1e9;
    let moments_of = BTreeMap::from([
        ("started".to_string(), vec![0.0]),
        ("round".to_string(), moments.rounds_ns.iter().copied().map(seconds).collect()),
        ("stopped".to_string(), vec![seconds(moments.stopped_ns)]),
    ]);
    Some(Course {
        quantity: "speed".to_string(),
        settings: setting.settings(),
        unit: "% of the speed before".to_string(),
        class: Class::Ratio,
        from: seconds(*begin_ns),
        step: STEP_NS as f64 / 1e9,
        samples: begins.iter().map(share).collect(),
        middles: Vec::new(),
        moments: moments_of,
        counts: BTreeMap::new(),
        others_share: *others,
    })
}

/// Records the result of a pass on this CPU.
pub(super) fn pass(pass: &Pass, cpu: Option<&String>, report: &Report<'_>) {
    let of = |quantity: &str, class, unit, sample: f64| {
        let figure = Figure::new(quantity, class, unit, [sample]).at("pass", pass.what.as_str());
        let figure = figure.at("vcpus", 1).at("pcpus", 1).at("pages", pass.pages);
        report.emulated(match cpu {
            Some(cpu) => figure.at("cpu", cpu.as_str()),
            None => figure,
        });
    };
    let each = if pass.faults == 0 { "instructions of a write without a fault" } else { "instructions of one fault" };
    of(each, Class::Exact, "instructions", pass.each);
    of("faults of a pass", Class::Exact, "faults", pass.faults as f64);
}

#[cfg(test)]
mod tests {
    use abi::counters::VcpuCounters;
    use abi::payload::{DirtySource, Split};
    use serde_json::{Value, json};

    use super::super::measure::Moments;
    use super::*;
    use crate::records::{Content, Log, read};

    fn setting() -> Setting {
        Setting {
            arch: crate::config::Arch::X86_64,
            cpu: None,
            vcpus: 2,
            memory: 64,
            regions: 100,
            split: Split::Adaptive,
            source: DirtySource::Hardware,
            rate: None,
        }
    }

    fn outcome() -> Outcome {
        let accesses = [vec![1000; 200], vec![500; 200], vec![1000; 201]].concat();
        let curve = Curve { begin_ns: 7_000_000_000, window_ns: 5_000_000, accesses };
        let moments = Moments { started_ns: 8_000_000_000, rounds_ns: vec![8_500_000_000], stopped_ns: 9_000_000_000 };
        let shape = curve.shape(&moments).expect("is long enough");
        Outcome {
            curve,
            moments,
            shape,
            rounds: Vec::new(),
            counters: VcpuCounters { dirty_faults: 9, ..VcpuCounters::default() },
            splits_ahead: 0,
            flushes: 0,
            tables: 0,
            tables_before: 0,
            collapses: 0,
            clock_hz: 0,
            others: Some(0.5),
            run: Value::Null,
        }
    }

    #[test]
    fn speed_is_told_in_seconds_from_the_start_of_the_log() {
        let course = course(&setting(), &outcome()).expect("is long enough");
        assert_eq!((course.from, course.step, course.samples.len()), (-1.0, 0.025, 120));
        assert_eq!((course.samples[39], course.samples[40], course.samples[80]), (100.0, 50.0, 100.0));
        assert_eq!((&course.moments["round"], &course.moments["stopped"]), (&vec![0.5], &vec![1.0]));
        assert_eq!(course.settings["source"], json!("hardware"));
    }

    #[test]
    fn run_that_was_too_short_for_a_part_has_no_course() {
        let mut short = outcome();
        short.curve.accesses.truncate(4);
        assert!(course(&setting(), &short).is_none());
    }

    #[test]
    fn all_that_a_run_came_to_is_written_and_can_be_read() {
        let file = tempfile::NamedTempFile::new().expect("can be made");
        let log = Log::open("dirty", Some(file.path())).expect("can be written");
        run(&setting(), &outcome(), &Report::new("dirty", true, &log));
        let read = read(file.path()).expect("is there");
        assert!(read.bad.is_empty(), "{:?}", read.bad);
        let value = |wanted: &str| {
            read.records.iter().find_map(|record| match &record.content {
                Content::Figure { quantity, samples, .. } if quantity == wanted => samples.first().copied(),
                _ => None,
            })
        };
        assert_eq!((value("worst 100 ms while the log runs"), value("faults of the log")), (Some(50.0), Some(9.0)));
        assert!(read.records.iter().any(|record| matches!(record.content, Content::Course(_))));
    }
}

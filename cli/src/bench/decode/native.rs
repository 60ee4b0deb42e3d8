//! The cost of the emulator's own code on this computer, natively.
//!
//! Each round measures all figures in turn, so that other work on the computer affects all of them alike. The results
//! are medians over many rounds, minus the loop around them, in cycles of the same round ([`nanos_per_cycle`]).
//!
//! [`machine`] is the emulated machine, [`emulator`] the emulator, [`subjects`] has the timed operations, and
//! [`threads`] runs them on two threads at once.

mod emulator;
mod machine;
mod subjects;
mod threads;

use std::fmt;
use std::time::Instant;

use serde_json::{Value, json};

use super::Report;
use crate::bench::cycle::nanos_per_cycle;
use crate::bench::target::Target;
use crate::bench::{Spread, progress};
use crate::records::{self, Class};
use subjects::{Kind, Subject};
use threads::Scaling;

/// One figure: cycles per operation beyond the empty loop.
#[derive(Clone, Debug, PartialEq)]
struct Figure {
    name: String,
    kind: Kind,
    cycles: Spread,
    rounds: Vec<f64>,
}

const ROUNDS: usize = 31;
const OPERATIONS: u32 = 20_000;

/// The targets.
const MOST_CYCLES_OF_A_HIT: f64 = 10.0;
const MOST_CYCLES_OF_AN_EMULATION: f64 = 300.0;
const MOST_TIMES_AS_LONG: f64 = 1.1;

/// The message if the two threads did not have two cores.
const NOT_FREE: &str = "two cores were not free for long enough; try again when the computer has less to do";

/// Published cycles of other systems.
const PUBLISHED: [(&str, &str); 4] = [
    ("KVM, one emulated instruction (2014, Sandy Bridge)", "720-1100"),
    ("bhyve, by which a hit shortened an access (2015), ticks", "3800"),
    ("cache behind a read-write lock, one core (our machine)", "41"),
    ("the same on two cores at once", "350-410"),
];

pub(super) fn run(report: &mut Report<'_>) -> Vec<Target> {
    progress("timing the emulator's code on this computer");
    let figures = all();
    report.say("\nThe emulator's code on this computer, natively: cycles above an empty loop, median of 31 rounds\n");
    report.say(&format!("{:70}{:>9}   least-greatest", "operation", "cycles"));
    for figure in &figures {
        report.say(&figure.to_string());
        report.json(figure.json());
        let record = records::Figure::new("emulator's code", Class::Time, "cycles", figure.rounds.as_slice());
        report.native(record.at("operation", figure.name.trim()));
    }

    progress("the same on two threads at once");
    let all = threads::all();
    let measured = all.len();
    let scalings: Vec<Scaling> = all.into_iter().flatten().collect();
    report.say("\nWhole emulation of a read, cycles of one thread: alone, and while another one does the same\n");
    report.say(&Scaling::columns());
    for scaling in &scalings {
        report.say(&scaling.to_string());
        report.json(scaling.json());
        scaling.figures().into_iter().for_each(|figure| report.native(figure));
    }
    if scalings.len() < measured || scalings.iter().any(|scaling| !scaling.is_judged) {
        report.say(NOT_FREE);
        eprintln!("two threads: {NOT_FREE}");
    }

    report.say("\nPublished, or measured elsewhere (another CPU: shapes compare, cycles do not)\n");
    for (name, cycles) in PUBLISHED {
        report.say(&format!("{name:70}{cycles:>9}"));
    }
    // A missing value might have been the worst.
    let complete = if scalings.len() < measured { &[] } else { scalings.as_slice() };
    targets(&figures, complete)
}

/// Measures everything on one thread; takes some seconds.
fn all() -> Vec<Figure> {
    let mut subjects = subjects::all();
    let mut rounds: Vec<Vec<f64>> = (0..subjects.len()).map(|_| Vec::new()).collect();
    for round in 0..=ROUNDS {
        let cycle = nanos_per_cycle();
        for (Subject { operation, empty, .. }, results) in subjects.iter_mut().zip(&mut rounds) {
            let result = (nanos(operation) - nanos(empty)) / cycle;
            // The first round warms up.
            if round > 0 {
                results.push(result);
            }
        }
    }
    let figures = subjects.into_iter().zip(rounds);
    figures
        .filter_map(|(Subject { name, kind, .. }, rounds)| {
            Some(Figure { name, kind, cycles: Spread::of(&rounds)?, rounds })
        })
        .collect()
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spread { median, least, greatest } = self.cycles;
        write!(f, "{:70}{median:>9.1}   {least:.1}-{greatest:.1}", self.name)
    }
}

impl Figure {
    fn json(&self) -> Value {
        let Spread { median, least, greatest } = self.cycles;
        json!({ "part": "native", "emulated": false, "name": self.name, "cycles": median, "min": least,
            "max": greatest })
    }
}

/// The targets of the measured figures; each is judged by its worst figure.
fn targets(figures: &[Figure], scalings: &[Scaling]) -> Vec<Target> {
    let longest = |kind, what, most: f64| {
        let longest = figures
            .iter()
            .filter(|figure| figure.kind == kind)
            .max_by(|one, other| one.cycles.median.total_cmp(&other.cycles.median))?;
        let median = longest.cycles.median;
        Some(Target::new(what, format!("{median:.1} cycles, {}", longest.name.trim()), median <= most))
    };
    [
        longest(Kind::Hit, "a hit with bytes takes at most 10 cycles beyond the fetch, most", MOST_CYCLES_OF_A_HIT),
        longest(
            Kind::Emulation,
            "whole emulation of a known form with bytes takes at most 300 cycles, most",
            MOST_CYCLES_OF_AN_EMULATION,
        ),
        undisturbed(scalings),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The promise about two threads, if both were measured.
fn undisturbed(scalings: &[Scaling]) -> Option<Target> {
    let what = "a vCPU beside another one is at most 10 % slower than alone, most";
    if scalings.iter().any(|scaling| !scaling.is_judged) || !scalings.iter().any(|scaling| scaling.is_promised) {
        return Some(Target::not_judged(what, NOT_FREE));
    }
    let promised = scalings.iter().filter(|scaling| scaling.is_promised);
    let worst = promised.max_by(|one, other| one.ratio.median.total_cmp(&other.ratio.median))?;
    let apart = scalings.iter().rfind(|scaling| !scaling.is_promised).map(|apart| apart.ratio.median);
    let apart = apart.map_or(String::new(), |apart| format!("; {apart:.2}x with nothing shared"));
    let figures = format!("{:.2}x, {}{apart}", worst.ratio.median, worst.name);
    Some(Target::new(what, figures, worst.ratio.median <= MOST_TIMES_AS_LONG))
}

/// A timed operation.
type Operation = Box<dyn FnMut() + Send>;

/// Nanoseconds per operation.
fn nanos(operation: &mut Operation) -> f64 {
    let start = Instant::now();
    for _ in 0..OPERATIONS {
        operation();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS)
}

#[cfg(test)]
mod tests;

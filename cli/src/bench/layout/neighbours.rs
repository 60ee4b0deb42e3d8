//! Packed against laid out, on two cores.
//!
//! Each comparison is made in turns: both at once packed and laid out, and each of them with one vCPU alone, then all again
//! in the other order. Shown are the median of the turns and their least and greatest.

use serde_json::{Value, json};

use super::NOT_FREE;
use super::structures::{Case, Work, cases};
use crate::args::LayoutBenchArgs;
use crate::bench::cycle::nanos_per_cycle;
use crate::bench::pair::{alone, beside, in_turns, judge_on_free_cores};
use crate::bench::report::Report;
use crate::bench::target::Target;
use crate::bench::{Spread, progress};
use crate::records::{Class, Figure};

/// What a vCPU that is laid out may be slower beside another one than alone.
const MOST_BESIDE: f64 = 1.05;

/// What is promised of the kernels of this name: how much longer packed takes.
const PROMISES: [(&str, &str, f64); 3] = [
    ("run loop", "run loop of two vCPUs: packed takes at least 2 times as long, least", 2.0),
    ("plain", "plain read, add, write: packed takes at least 3 times as long, least", 3.0),
    ("locked", "locked addition: packed takes at least 5 times as long, least", 5.0),
];
const BESIDE: &str = "laid out, a vCPU beside another one is at most 5 % slower than alone, most";

/// A comparison, in cycles per operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Compared {
    kernel: &'static str,
    structure: &'static str,
    /// Whether the vCPUs have nothing to say to each other.
    is_quiet: bool,
    /// Whether two cores were free meanwhile.
    is_judged: bool,
    packed: Spread,
    laid_out: Spread,
    packed_alone: Spread,
    laid_out_alone: Spread,
    /// How much longer packed takes.
    ratio: Spread,
    /// How much longer laid out takes beside another vCPU than alone.
    beside: Spread,
    /// Cycles packed and laid out, beside and alone, turn by turn.
    turns: Vec<[f64; 4]>,
}

/// All comparisons, and the kernels of those that had no figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Results {
    compared: Vec<Compared>,
    missing: Vec<&'static str>,
}

pub(super) fn run(args: &LayoutBenchArgs, report: &Report<'_>) -> Results {
    let cases: Vec<_> = cases().into_iter().filter(|case| args.wants(case.kernel)).collect();
    if cases.is_empty() {
        return Results::default();
    }
    report.say("\nTwo vCPUs on two cores, natively: cycles of one operation, median of 25 turns (least-greatest)\n");
    report.say(&format!(
        "{:27}{:22}{:>22}{:>22}{:>22}   {}",
        "what is done", "to what", "packed", "laid out", "packed/laid out", "laid out, beside/alone"
    ));
    let mut results = Results::default();
    for mut case in cases {
        let what = format!("{}, {}", case.kernel, case.structure);
        progress(&what);
        let (compared, is_judged) = judge_on_free_cores(&what, || compare(&mut case));
        match compared.map(|compared| Compared { is_judged, ..compared }) {
            Some(compared) => {
                report.say(&compared.row());
                report.json(compared.json());
                compared.figures().into_iter().for_each(|figure| report.native(figure));
                results.compared.push(compared);
            }
            None => {
                report.say(&format!("{:27}{:22}  {NOT_FREE}", case.kernel, case.structure));
                report.unmeasured(&what, NOT_FREE);
                results.missing.push(case.kernel);
            }
        }
    }
    results
}

fn compare(case: &mut Case) -> Option<Compared> {
    /// What each turn measures; beside another vCPU, and alone.
    const PARTS: [(bool, bool); 4] = [(true, true), (false, true), (true, false), (false, false)];
    let turns: Vec<[f64; 4]> = in_turns(|turn| {
        let cycle = nanos_per_cycle();
        let mut figures = [None; 4];
        let forth = PARTS.into_iter().enumerate();
        let order: Vec<_> = if turn % 2 == 0 { forth.collect() } else { forth.rev().collect() };
        for (at, (is_packed, is_beside)) in order {
            let Work([first, second]) = if is_packed { &mut case.packed } else { &mut case.laid_out };
            let nanos = if is_beside {
                beside(first, second, case.operations).map(|[one, other]| f64::midpoint(one, other))
            } else {
                alone(first, case.operations)
            };
            figures[at] = nanos.map(|nanos| nanos / cycle);
        }
        let [packed, laid_out, packed_alone, laid_out_alone] = figures;
        Some([packed?, laid_out?, packed_alone?, laid_out_alone?])
    })?;
    let spread = |value: &dyn Fn(&[f64; 4]) -> f64| Spread::of(&turns.iter().map(value).collect::<Vec<_>>());
    Some(Compared {
        kernel: case.kernel,
        structure: case.structure,
        is_quiet: case.is_quiet,
        is_judged: false,
        packed: spread(&|turn| turn[0])?,
        laid_out: spread(&|turn| turn[1])?,
        packed_alone: spread(&|turn| turn[2])?,
        laid_out_alone: spread(&|turn| turn[3])?,
        ratio: spread(&|turn| turn[0] / turn[1])?,
        beside: spread(&|turn| turn[1] / turn[3])?,
        turns,
    })
}

impl Compared {
    fn row(&self) -> String {
        let Self { kernel, structure, packed, laid_out, ratio, beside, .. } = self;
        let [packed, laid_out, ratio, beside] = [packed, laid_out, ratio, beside].map(ToString::to_string);
        let mark = if self.is_judged { "" } else { "  cores were not free" };
        format!("{kernel:27}{structure:22}{packed:>22}{laid_out:>22}{ratio:>22}   {beside}{mark}")
    }

    fn figures(&self) -> [Figure; 4] {
        let figure = |quantity: &str, class, unit, value: fn(&[f64; 4]) -> f64| {
            let samples: Vec<f64> = self.turns.iter().map(value).collect();
            let figure = Figure::new(quantity, class, unit, samples).at("kernel", self.kernel);
            figure.at("structure", self.structure).at("judged", self.is_judged)
        };
        [
            figure("packed, beside another vCPU", Class::Time, "cycles", |turn| turn[0]),
            figure("laid out, beside another vCPU", Class::Time, "cycles", |turn| turn[1]),
            figure("packed to laid out", Class::Ratio, "ratio", |turn| turn[0] / turn[1]),
            figure("laid out, beside to alone", Class::Ratio, "ratio", |turn| turn[1] / turn[3]),
        ]
    }

    fn json(&self) -> Value {
        let Self {
            kernel,
            structure,
            is_quiet,
            is_judged,
            packed,
            laid_out,
            packed_alone,
            laid_out_alone,
            ratio,
            beside,
            turns: _,
        } = self;
        json!({
            "part": "neighbours", "emulated": false, "kernel": kernel, "structure": structure, "quiet": is_quiet,
            "judged": is_judged, "packed_cycles": packed.json(), "laid_out_cycles": laid_out.json(),
            "packed_alone_cycles": packed_alone.json(), "laid_out_alone_cycles": laid_out_alone.json(),
            "packed_to_laid_out": ratio.json(), "beside_to_alone": beside.json(),
        })
    }
}

/// The promises, each judged by the comparison that is furthest from it.
pub(super) fn targets(Results { compared, missing }: &Results) -> Vec<Target> {
    let ratios = PROMISES.iter().map(|&(kernel, what, least)| {
        let of_kernel: Vec<_> = compared.iter().filter(|compared| compared.kernel == kernel).collect();
        judge(what, &of_kernel, !missing.contains(&kernel), |all| {
            let worst = all.iter().min_by(|one, other| one.ratio.median.total_cmp(&other.ratio.median))?;
            Some((format!("{}, {}", worst.ratio, worst.structure), worst.ratio.median >= least))
        })
    });
    let quiet: Vec<_> = compared.iter().filter(|compared| compared.is_quiet).collect();
    let beside = judge(BESIDE, &quiet, missing.is_empty(), |all| {
        let worst = all.iter().max_by(|one, other| one.beside.median.total_cmp(&other.beside.median))?;
        let figures = format!("{}, {}, {}", worst.beside, worst.kernel, worst.structure);
        Some((figures, worst.beside.median <= MOST_BESIDE))
    });
    ratios.chain([beside]).collect()
}

fn judge(
    what: &'static str,
    all: &[&Compared],
    is_complete: bool,
    verdict: impl FnOnce(&[&Compared]) -> Option<(String, bool)>,
) -> Target {
    if !is_complete || all.iter().any(|compared| !compared.is_judged) {
        return Target::not_judged(what, NOT_FREE);
    }
    match verdict(all) {
        Some((figures, met)) => Target::new(what, figures, met),
        None => Target::not_judged(what, "was not measured"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(kernel: &'static str, ratio: f64, beside: f64) -> Compared {
        let one = |value| Spread::of(&[value]).expect("has a value");
        Compared {
            kernel,
            structure: "x",
            is_quiet: true,
            is_judged: true,
            packed: one(ratio * 10.0),
            laid_out: one(10.0),
            packed_alone: one(10.0),
            laid_out_alone: one(10.0 / beside),
            ratio: one(ratio),
            beside: one(beside),
            turns: Vec::new(),
        }
    }

    fn met(all: &[Compared]) -> Vec<Option<bool>> {
        let results = Results { compared: all.to_vec(), missing: Vec::new() };
        targets(&results).into_iter().map(|target| target.met).collect()
    }

    #[test]
    fn each_promise_is_judged_by_the_worst_of_its_kernel() {
        let mut all = vec![
            compared("run loop", 2.0, 1.05),
            compared("plain", 3.0, 1.0),
            compared("plain", 9.0, 1.0),
            compared("locked", 5.0, 1.0),
        ];
        assert_eq!(met(&all), [Some(true); 4]);
        all.push(compared("plain", 2.99, 1.0));
        all.push(compared("locked", 7.0, 1.06));
        assert_eq!(met(&all), [Some(true), Some(false), Some(true), Some(false)]);
    }

    #[test]
    fn vcpus_that_speak_to_each_other_may_be_slower_than_alone() {
        let talking = Compared { is_quiet: false, ..compared("run loop, posting", 2.0, 3.0) };
        assert_eq!(met(&[talking, compared("run loop", 2.0, 1.0)])[3], Some(true));
    }

    #[test]
    fn what_is_missing_might_have_been_the_worst() {
        let compared = vec![compared("plain", 9.0, 1.0), compared("locked", 9.0, 1.0)];
        let results = Results { compared, missing: vec!["plain"] };
        let met: Vec<_> = targets(&results).into_iter().map(|target| target.met).collect();
        assert_eq!(met, [None, None, Some(true), None]);
    }

    #[test]
    fn what_was_measured_without_two_cores_or_not_at_all_is_not_judged() {
        assert_eq!(met(&[]), [None; 4]);
        let disturbed = Compared { is_judged: false, ..compared("plain", 1.0, 4.0) };
        assert_eq!(met(&[disturbed, compared("locked", 4.0, 1.0)]), [None, None, Some(false), None]);
    }
}

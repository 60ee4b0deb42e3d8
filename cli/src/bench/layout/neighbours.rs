//! Packed data compared with laid-out data, on two cores.
//!
//! Each comparison is made in turns: both vCPUs with packed and with laid-out data, and one vCPU alone with each, then
//! all again in the opposite order. The results are the median of the turns, with minimum and maximum.
//!
//! The same turns measure a control that shares no data ([`control`]). Laid-out vCPUs must not slow each other down;
//! this is judged net of the control. It is not judged if the control itself is slowed down: two threads of one core
//! share more than cache lines.

use serde_json::{Value, json};

use super::NOT_FREE;
use super::structures::{Case, Work, cases};
use crate::args::LayoutBenchArgs;
use crate::bench::cycle::nanos_per_cycle;
use crate::bench::pair::{alone, beside, control, in_turns, judge_on_free_cores};
use crate::bench::report::Report;
use crate::bench::target::Target;
use crate::bench::{Spread, progress};
use crate::records::{Class, Figure};

/// Maximum slowdown of a laid-out vCPU next to another one, net of the control's slowdown.
const MOST_BESIDE: f64 = 1.05;
/// Maximum slowdown of arithmetic in registers; above it, the effect does not come from cache lines.
const MOST_CONTROL: f64 = 1.05;

/// The targets for the kernels with these names: how much longer packed data must take.
const PROMISES: [(&str, &str, f64); 3] = [
    ("run loop", "run loop of two vCPUs: packed takes at least 2 times as long, least", 2.0),
    ("plain", "plain read, add, write: packed takes at least 3 times as long, least", 3.0),
    ("locked", "locked addition: packed takes at least 5 times as long, least", 5.0),
];
const BESIDE: &str =
    "laid out, a vCPU beside another one is at most 5 % slower than alone, net of arithmetic in registers, most";

/// A comparison, in cycles per operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Compared {
    kernel: &'static str,
    structure: &'static str,
    /// Whether the vCPUs have nothing to say to each other.
    is_quiet: bool,
    /// Whether two cores were free at the time.
    is_judged: bool,
    packed: Spread,
    laid_out: Spread,
    packed_alone: Spread,
    laid_out_alone: Spread,
    /// How much longer packed takes.
    ratio: Spread,
    /// Slowdown of laid-out data next to another vCPU, compared with alone.
    beside: Spread,
    /// Slowdown of arithmetic in registers next to another thread, compared with alone.
    control: Spread,
    /// The former by the latter, turn by turn.
    net: Spread,
    /// A lower bound of the median of `net`.
    net_at_least: f64,
    turns: Vec<Turn>,
}

/// The measurements of one turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Turn {
    /// Cycles next to the other vCPU.
    packed: f64,
    laid_out: f64,
    /// Cycles alone.
    packed_alone: f64,
    laid_out_alone: f64,
    /// See [`Compared::control`].
    control: f64,
}

impl Turn {
    fn ratio(&self) -> f64 {
        self.packed / self.laid_out
    }

    fn beside(&self) -> f64 {
        self.laid_out / self.laid_out_alone
    }

    fn net(&self) -> f64 {
        self.beside() / self.control
    }
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
        "{:27}{:22}{:>22}{:>22}{:>22}{:>24}{:>18}   {}",
        "what is done",
        "to what",
        "packed",
        "laid out",
        "packed/laid out",
        "laid out, beside/alone",
        "arithmetic",
        "net of that"
    ));
    let mut results = Results::default();
    for mut case in cases {
        let what = format!("{}, {}", case.kernel, case.structure);
        progress(&what);
        let (compared, is_judged) = until_quiet(|| judge_on_free_cores(&what, || compare(&mut case)));
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

/// Repeats the comparison if the control was slowed down. Only the control decides which comparisons are dropped, never
/// the results.
fn until_quiet(mut compare: impl FnMut() -> (Option<Compared>, bool)) -> (Option<Compared>, bool) {
    const TRIES: usize = 3;
    let mut last = compare();
    for _ in 1..TRIES {
        if last.0.as_ref().is_none_or(Compared::has_quiet_control) {
            break;
        }
        last = compare();
    }
    last
}

fn compare(case: &mut Case) -> Option<Compared> {
    /// The measurements of a turn: next to another vCPU, and alone.
    const PARTS: [(bool, bool); 4] = [(true, true), (false, true), (true, false), (false, false)];
    let turns = in_turns(|turn| {
        let cycle = nanos_per_cycle();
        let mut figures = [None; 4];
        let mut controls = [None; 2];
        let forth = PARTS.into_iter().enumerate();
        let order: Vec<_> = if turn % 2 == 0 { forth.collect() } else { forth.rev().collect() };
        // Before and after the measurements that are compared with it.
        controls[0] = control();
        for (at, (is_packed, is_beside)) in order {
            let Work([first, second]) = if is_packed { &mut case.packed } else { &mut case.laid_out };
            let nanos = if is_beside {
                beside(first, second, case.operations).map(|[one, other]| f64::midpoint(one, other))
            } else {
                alone(first, case.operations)
            };
            figures[at] = nanos.map(|nanos| nanos / cycle);
        }
        controls[1] = control();
        let [packed, laid_out, packed_alone, laid_out_alone] = figures;
        Some(Turn {
            packed: packed?,
            laid_out: laid_out?,
            packed_alone: packed_alone?,
            laid_out_alone: laid_out_alone?,
            control: f64::midpoint(controls[0]?, controls[1]?),
        })
    })?;
    Compared::of(case.kernel, case.structure, case.is_quiet, turns)
}

impl Compared {
    /// From at least one turn. Until set otherwise, the cores count as not free.
    fn of(kernel: &'static str, structure: &'static str, is_quiet: bool, turns: Vec<Turn>) -> Option<Self> {
        let all = |value: fn(&Turn) -> f64| turns.iter().map(value).collect::<Vec<_>>();
        let spread = |value| Spread::of(&all(value));
        Some(Self {
            kernel,
            structure,
            is_quiet,
            is_judged: false,
            packed: spread(|turn| turn.packed)?,
            laid_out: spread(|turn| turn.laid_out)?,
            packed_alone: spread(|turn| turn.packed_alone)?,
            laid_out_alone: spread(|turn| turn.laid_out_alone)?,
            ratio: spread(Turn::ratio)?,
            beside: spread(Turn::beside)?,
            control: spread(|turn| turn.control)?,
            net: spread(Turn::net)?,
            net_at_least: Spread::median_at_least(&all(Turn::net))?,
            turns,
        })
    }

    /// Whether the cores themselves left each other alone.
    fn has_quiet_control(&self) -> bool {
        self.control.median <= MOST_CONTROL
    }

    /// Whether the net figure misses the target with certainty, not only by the spread of the turns.
    fn surely_disturbs(&self) -> bool {
        self.net.median > MOST_BESIDE && self.net_at_least > MOST_BESIDE
    }

    fn row(&self) -> String {
        let Self { kernel, structure, packed, laid_out, ratio, beside, control, net, .. } = self;
        let [packed, laid_out, ratio, beside] = [packed, laid_out, ratio, beside].map(ToString::to_string);
        let control = control.to_string();
        let mark = if self.is_judged { "" } else { "  cores were not free" };
        format!("{kernel:27}{structure:22}{packed:>22}{laid_out:>22}{ratio:>22}{beside:>24}{control:>18}   {net}{mark}")
    }

    fn figures(&self) -> [Figure; 6] {
        let figure = |quantity: &str, class, unit, value: fn(&Turn) -> f64| {
            let samples: Vec<f64> = self.turns.iter().map(value).collect();
            let figure = Figure::new(quantity, class, unit, samples).at("kernel", self.kernel);
            figure.at("structure", self.structure).at("judged", self.is_judged)
        };
        [
            figure("packed, beside another vCPU", Class::Time, "cycles", |turn| turn.packed),
            figure("laid out, beside another vCPU", Class::Time, "cycles", |turn| turn.laid_out),
            figure("packed to laid out", Class::Ratio, "ratio", Turn::ratio),
            figure("laid out, beside to alone", Class::Ratio, "ratio", Turn::beside),
            figure("arithmetic, beside to alone", Class::Ratio, "ratio", |turn| turn.control),
            figure("laid out, beside to alone, net of arithmetic", Class::Ratio, "ratio", Turn::net),
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
            control,
            net,
            net_at_least,
            turns: _,
        } = self;
        json!({
            "part": "neighbours", "emulated": false, "kernel": kernel, "structure": structure, "quiet": is_quiet,
            "judged": is_judged, "packed_cycles": packed.json(), "laid_out_cycles": laid_out.json(),
            "packed_alone_cycles": packed_alone.json(), "laid_out_alone_cycles": laid_out_alone.json(),
            "packed_to_laid_out": ratio.json(), "beside_to_alone": beside.json(),
            "arithmetic_beside_to_alone": control.json(), "net_beside_to_alone": net.json(),
            "net_beside_to_alone_at_least": net_at_least,
        })
    }
}

/// The targets, each judged by its worst comparison.
pub(super) fn targets(Results { compared, missing }: &Results) -> Vec<Target> {
    let ratios = PROMISES.iter().map(|&(kernel, what, least)| {
        let of_kernel: Vec<_> = compared.iter().filter(|compared| compared.kernel == kernel).collect();
        judge(what, &of_kernel, !missing.contains(&kernel), |all| {
            let worst = all.iter().min_by(|one, other| one.ratio.median.total_cmp(&other.ratio.median))?;
            Some((format!("{}, {}", worst.ratio, worst.structure), Some(worst.ratio.median >= least)))
        })
    });
    ratios.chain([judge_beside(compared, missing.is_empty())]).collect()
}

/// Whether vCPUs that have nothing to say to each other leave each other alone.
fn judge_beside(compared: &[Compared], is_complete: bool) -> Target {
    let quiet: Vec<_> = compared.iter().filter(|compared| compared.is_quiet).collect();
    let figures = |of: &Compared| format!("{}, arithmetic {}, {}, {}", of.net, of.control, of.kernel, of.structure);
    let greatest = |those: &mut dyn Iterator<Item = &Compared>, value: fn(&Compared) -> f64| {
        those.max_by(|one, other| value(one).total_cmp(&value(other))).cloned()
    };
    if let Some(shared) =
        greatest(&mut quiet.iter().copied().filter(|one| one.is_judged && !one.has_quiet_control()), |one| {
            one.control.median
        })
    {
        let why = "arithmetic that shares nothing is slower itself, as on two threads of one core";
        return Target::not_judged(
            BESIDE,
            format!("{why}: {}, {}, {}", shared.control, shared.kernel, shared.structure),
        );
    }
    judge(BESIDE, &quiet, is_complete, |all| {
        let worst = greatest(&mut all.iter().copied(), |one| one.net.median)?;
        if let Some(sure) = greatest(&mut all.iter().copied().filter(|one| one.surely_disturbs()), |one| one.net.median)
        {
            return Some((figures(&sure), Some(false)));
        }
        Some(if worst.net.median > MOST_BESIDE {
            (format!("turns scatter too much, {}", figures(&worst)), None)
        } else {
            (figures(&worst), Some(true))
        })
    })
}

fn judge(
    what: &'static str,
    all: &[&Compared],
    is_complete: bool,
    verdict: impl FnOnce(&[&Compared]) -> Option<(String, Option<bool>)>,
) -> Target {
    if !is_complete || all.iter().any(|compared| !compared.is_judged) {
        return Target::not_judged(what, NOT_FREE);
    }
    match verdict(all) {
        Some((figures, Some(met))) => Target::new(what, figures, met),
        Some((why, None)) => Target::not_judged(what, why),
        None => Target::not_judged(what, "was not measured"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(kernel: &'static str, ratio: f64, beside: f64) -> Compared {
        with_turns(kernel, ratio, &[(beside, 1.0); 25])
    }

    /// With these turns: slowdown of laid-out data, and of arithmetic.
    fn with_turns(kernel: &'static str, ratio: f64, turns: &[(f64, f64)]) -> Compared {
        let turn = |&(beside, control): &(f64, f64)| Turn {
            packed: ratio * 10.0,
            laid_out: 10.0,
            packed_alone: 10.0,
            laid_out_alone: 10.0 / beside,
            control,
        };
        let compared = Compared::of(kernel, "x", true, turns.iter().map(turn).collect()).expect("has turns");
        Compared { is_judged: true, ..compared }
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

    /// The verdict on laid-out vCPUs side by side, with the reason.
    fn beside_of(all: &[Compared]) -> (Option<bool>, String) {
        let target = judge_beside(all, true);
        (target.met, target.to_string())
    }

    #[test]
    fn what_slows_down_arithmetic_as_well_is_not_blamed_on_lines() {
        // 4 % of 8 % come from the cores: the rest is within the target.
        assert_eq!(beside_of(&[with_turns("plain", 9.0, &[(1.08, 1.04); 25])]).0, Some(true));
        assert_eq!(beside_of(&[with_turns("plain", 9.0, &[(1.10, 1.04); 25])]).0, Some(false));
    }

    #[test]
    fn nothing_is_judged_where_arithmetic_itself_is_slower() {
        let threads_of_one_core = with_turns("locked", 9.0, &[(1.41, 1.9); 25]);
        let (met, text) = beside_of(&[compared("plain", 9.0, 1.0), threads_of_one_core.clone()]);
        assert_eq!(met, None);
        assert!(text.contains("not judged") && text.contains("1.90 (1.90-1.90), locked"), "{text}");
        // Even if cache lines alone would explain it: this cannot be decided.
        assert_eq!(beside_of(&[with_turns("plain", 9.0, &[(1.9, 1.9); 25])]).0, None);
        let disturbed = Compared { is_judged: false, ..threads_of_one_core };
        assert!(beside_of(&[disturbed]).1.contains(NOT_FREE));
    }

    #[test]
    fn what_had_no_quiet_control_is_compared_again_whatever_came_out() {
        let mut made = 0;
        let mut of_controls = |controls: [f64; 4]| {
            made = 0;
            let (last, _) = until_quiet(|| {
                made += 1;
                (Some(with_turns("plain", 9.0, &[(9.0, controls[made - 1]); 25])), true)
            });
            (made, last.expect("was compared").control.median)
        };
        assert_eq!(of_controls([1.0, 1.0, 1.0, 1.0]), (1, 1.0));
        assert_eq!(of_controls([1.2, 1.1, 1.0, 1.0]), (3, 1.0));
        assert_eq!(of_controls([1.4, 1.3, 1.2, 1.0]), (3, 1.2), "patience ends");
    }

    #[test]
    fn turns_that_scatter_around_the_promise_are_no_miss() {
        let half: Vec<_> = (0..25).map(|turn| (if turn < 12 { 0.95 } else { 1.07 }, 1.0)).collect();
        let (met, text) = beside_of(&[with_turns("plain", 9.0, &half)]);
        assert_eq!(met, None);
        assert!(text.contains("scatter") && text.contains("1.07 (0.95-1.07)"), "{text}");
        let most: Vec<_> = (0..25).map(|turn| (if turn < 7 { 0.95 } else { 1.07 }, 1.0)).collect();
        assert_eq!(beside_of(&[with_turns("plain", 9.0, &most)]).0, Some(false));
        // A certain miss counts, even if other figures are uncertain.
        assert_eq!(beside_of(&[with_turns("plain", 9.0, &half), compared("locked", 9.0, 1.06)]).0, Some(false));
    }
}

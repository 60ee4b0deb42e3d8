//! The targets for dirty logs, and whether they were met.

use abi::payload::{DirtySource, Split};

use super::Series;
use super::instructions::{Kind, Pass};
use super::measure::{Outcome, Setting};
use crate::bench::target::Target;

/// Maximum number of instructions of a fault.
const MOST_INSTRUCTIONS: f64 = 400.0;
/// The worst 100 ms must keep at least this share of the speed before the log.
const LEAST_WORST: f64 = 0.5;
const MOST_ROUNDS: u32 = 2;
/// With writes to a tenth of the memory, adaptive may need at most this share of eager's tables and splits.
const MOST_SPARSE: f64 = 0.15;
/// Splits that share a broadcast, where the processor lets them.
const SPLITS_PER_BROADCAST: u64 = 64;

pub(super) fn targets(curves: &[Series], passes: &[Pass], sparse: &[Series]) -> Vec<Target> {
    let mut all = Vec::new();
    all.extend(instructions(passes, Kind::AfterRound, "instructions of a write-protect fault, at most 400"));
    all.extend(instructions(passes, Kind::FirstTouch, "instructions of a first touch, at most 400"));
    all.extend(no_exit(passes));
    all.extend(worst(curves));
    all.extend(recovery(curves));
    all.extend(broadcasts(curves));
    all.extend(less_than_eager(sparse));
    all
}

fn instructions(passes: &[Pass], kind: Kind, what: &'static str) -> Option<Target> {
    let counted = passes.iter().filter(|pass| pass.kind == kind && pass.faults > 0);
    let worst = counted.max_by(|a, b| a.each.total_cmp(&b.each))?;
    Some(Target::new(what, format!("{:.1} ({})", worst.each, worst.what), worst.each <= MOST_INSTRUCTIONS))
}

fn no_exit(passes: &[Pass]) -> Option<Target> {
    const WHAT: &str = "no fault on what is split, where the hardware records writes";
    let hardware = passes.iter().filter(|pass| pass.kind == Kind::AfterRound && pass.what.contains("hardware"));
    let worst = hardware.max_by_key(|pass| pass.faults)?;
    Some(Target::new(
        WHAT,
        format!("{} faults in {} pages ({})", worst.faults, worst.pages, worst.what),
        worst.faults == 0,
    ))
}

/// The setting that VMs get unless they ask for another: adaptive, the hardware if it can.
fn by_default(curves: &[Series]) -> Vec<&Series> {
    let is_split = |series: &&Series| series.setting.split == Split::Adaptive;
    let adaptive: Vec<&Series> = curves.iter().filter(is_split).collect();
    let with_hardware = |machine: &Setting| {
        let of = |series: &&&Series| series.setting.machine() == machine.machine();
        adaptive.iter().filter(of).any(|series| series.setting.source == DirtySource::Hardware)
    };
    let is_default =
        |series: &&&Series| series.setting.source == DirtySource::Hardware || !with_hardware(&series.setting);
    adaptive.iter().filter(is_default).copied().collect()
}

fn median(series: &Series, of: impl Fn(&Outcome) -> f64) -> f64 {
    series.spread(of).map_or(0.0, |spread| spread.median)
}

/// Whether it stops for long even without a log. Then the log is not the cause.
fn is_unsteady(series: &Series) -> bool {
    median(series, |run| run.shape.worst_before) < LEAST_WORST
}

fn worst(curves: &[Series]) -> Option<Target> {
    const WHAT: &str = "worst 100 ms of the default setting keeps half of the speed before";
    let share = |series: &&Series| median(series, |run| run.shape.worst);
    let worst = by_default(curves).into_iter().min_by(|a, b| share(a).total_cmp(&share(b)))?;
    let before = median(worst, |run| run.shape.worst_before);
    let figures = format!("{:.0} % ({}; {:.0} % without a log)", share(&worst) * 100.0, worst.name(), before * 100.0);
    if is_unsteady(worst) {
        return Some(Target::not_judged(WHAT, format!("{figures}: too unsteady a computer")));
    }
    Some(Target::new(WHAT, figures, share(&worst) >= LEAST_WORST))
}

fn recovery(curves: &[Series]) -> Option<Target> {
    const WHAT: &str = "the default setting recovers within two rounds";
    let rounds = |series: &&Series| series.typical().and_then(|run| run.shape.back_after_rounds).unwrap_or(u32::MAX);
    let slowest = by_default(curves).into_iter().max_by_key(rounds)?;
    let found = rounds(&slowest);
    let figures = if found == u32::MAX { "never".to_string() } else { found.to_string() };
    let figures = format!("{figures} ({})", slowest.name());
    if is_unsteady(slowest) {
        return Some(Target::not_judged(WHAT, format!("{figures}: too unsteady a computer")));
    }
    Some(Target::new(WHAT, figures, found <= MOST_ROUNDS))
}

fn broadcasts(curves: &[Series]) -> Option<Target> {
    const WHAT: &str = "splits in faults share broadcasts, 64 at least, where the processor allows it";
    // Level 2 of FEAT_BBM, which the usual model has; x86 needs no broadcast for a split at all.
    let allowed = |series: &&Series| series.setting.cpu.as_deref().is_none_or(|cpu| cpu.starts_with("max"));
    let runs = by_default(curves).into_iter().filter(allowed).filter_map(|series| Some((series, series.typical()?)));
    let share = |run: &Outcome| run.counters.stage2_broadcasts.saturating_mul(SPLITS_PER_BROADCAST);
    let (series, run) = runs.max_by_key(|(_, run)| share(run).saturating_sub(run.counters.dirty_splits))?;
    let (broadcasts, splits) = (run.counters.stage2_broadcasts, run.counters.dirty_splits);
    // The last batch may not be full.
    let met = broadcasts <= splits.div_ceil(SPLITS_PER_BROADCAST) + u64::from(series.setting.vcpus);
    Some(Target::new(WHAT, format!("{broadcasts} broadcasts, {splits} splits ({})", series.name()), met))
}

fn less_than_eager(sparse: &[Series]) -> Option<Target> {
    const WHAT: &str = "tables and splits of adaptive at most 15 % of eager, with writes to 10 % of the memory";
    let with = |split| sparse.iter().filter(move |series: &&Series| series.setting.split == split);
    let mut found: Vec<(f64, f64, String)> = Vec::new();
    for adaptive in with(Split::Adaptive) {
        let same = |eager: &&Series| {
            (eager.setting.source, &eager.setting.cpu) == (adaptive.setting.source, &adaptive.setting.cpu)
        };
        let (Some(few), Some(all)) = (adaptive.typical(), with(Split::Eager).find(same).and_then(Series::typical))
        else {
            continue;
        };
        let part = |few: u64, all: u64| few as f64 / all.max(1) as f64;
        let grown = |run: &Outcome| run.tables.saturating_sub(run.tables_before);
        found.push((part(grown(few), grown(all)), part(few.splits(), all.splits()), adaptive.name()));
    }
    let (tables, splits, name) = found.into_iter().max_by(|a, b| a.0.max(a.1).total_cmp(&b.0.max(b.1)))?;
    let figures = format!("tables {:.0} %, splits {:.0} % ({name})", tables * 100.0, splits * 100.0);
    Some(Target::new(WHAT, figures, tables.max(splits) <= MOST_SPARSE))
}

//! `dunlin bench compare`: compares two files of results figure by figure, with a verdict where the data allows one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::json;

use super::Spread;
use crate::args::CompareArgs;
use crate::failure::{FAILED, Failure};
use crate::records::{Class, Content, Ground, Key, Records, Series, pool, read};

/// By how much an exact count may differ, in per cent, and still be called the same.
const TOLERANCE_PERCENT: f64 = 1.0;
/// Fewer runs than these have no spread to speak of.
const LEAST_RUNS: usize = 3;
/// The factor by which the range of a few runs is widened before medians are compared with it. Two sets of 3 equal
/// measurements are further apart than the wider of their ranges in 6 % of cases, and further than three such ranges in
/// 0.1 %. With 5 runs it is 0.3 % without a factor (by simulation, for normal and for skewed samples).
const fn widened(runs: usize) -> f64 {
    match runs {
        0..=3 => 3.0,
        4 => 1.5,
        _ => 1.0,
    }
}
/// Above this share by other processes, a measurement is not judged.
const MOST_OTHERS: f64 = 0.25;

pub(super) fn run(args: &CompareArgs) -> Result<u8, Failure> {
    let files = [read(&args.before)?, read(&args.after)?];
    for bad in files.iter().flat_map(|file| &file.bad) {
        eprintln!("{bad}");
    }
    let pooled = [&files[0], &files[1]].map(|file| pool(&file.records));
    if let Some(at) = pooled.iter().position(BTreeMap::is_empty) {
        return Err(Failure::bad_input(format!("{}: has no figures", files[at].path.display())));
    }
    let compared = compare(&pooled[0], &pooled[1]);
    if args.json {
        compared.iter().for_each(|one| println!("{}", one.json()));
    } else {
        describe(&files);
        print(&compared, args.verbose);
        absent(&pooled, &files);
        println!("\n{}", summary(&compared));
    }
    Ok(if compared.iter().any(|one| one.verdict.is_difference()) { FAILED } else { 0 })
}

/// One figure in both files.
#[derive(Clone, Debug, PartialEq)]
struct Compared<'a> {
    key: &'a Key,
    before: Spread,
    after: Spread,
    samples: [usize; 2],
    verdict: Verdict,
}

/// The verdict on a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    /// Equal to the last digit.
    Identical,
    /// An exact count, by not more than [`TOLERANCE_PERCENT`].
    AsGoodAsIdentical,
    /// The medians are no further apart than the samples of one file, widened if they are few.
    WithinSpread,
    /// The difference in per cent; negative for a decrease.
    Differs(f64),
    /// Nothing, and why.
    NotJudged(&'static str),
}

impl Verdict {
    const fn is_difference(self) -> bool {
        matches!(self, Self::Differs(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identical => f.write_str("identical"),
            Self::AsGoodAsIdentical => write!(f, "within {TOLERANCE_PERCENT:.0} %"),
            Self::WithinSpread => f.write_str("within the spread"),
            Self::Differs(percent) => write!(f, "DIFFERS: {percent:+.1} %"),
            Self::NotJudged(why) => write!(f, "not judged: {why}"),
        }
    }
}

fn compare<'a>(before: &'a BTreeMap<Key, Series>, after: &BTreeMap<Key, Series>) -> Vec<Compared<'a>> {
    let both = before.iter().filter_map(|(key, old)| {
        let new = after.get(key)?;
        let (before, after) = (old.spread()?, new.spread()?);
        let samples = [old.samples.len(), new.samples.len()];
        Some(Compared { key, before, after, samples, verdict: judge(key, [old, new], before, after) })
    });
    both.collect()
}

fn judge(key: &Key, series: [&Series; 2], before: Spread, after: Spread) -> Verdict {
    let percent = percent(before.median, after.median);
    let widest = width(before).max(width(after));
    if key.class == Class::Exact && widest <= before.median.abs() * TOLERANCE_PERCENT / 100.0 {
        return match percent {
            _ if before.median == after.median => Verdict::Identical,
            percent if percent.abs() <= TOLERANCE_PERCENT => Verdict::AsGoodAsIdentical,
            percent => Verdict::Differs(percent),
        };
    }
    if key.class == Class::Time && key.ground == Ground::Emulated {
        return Verdict::NotJudged("emulated time");
    }
    if key.settings.get("judged").is_some_and(|judged| judged == "false") {
        return Verdict::NotJudged("the cores were not free");
    }
    if before == after && widest == 0.0 {
        return Verdict::Identical;
    }
    if series.iter().any(|series| series.runs < LEAST_RUNS) {
        return Verdict::NotJudged("fewer than 3 runs");
    }
    if series.iter().any(|series| series.others_share.is_some_and(|share| share > MOST_OTHERS)) {
        return Verdict::NotJudged("others used more than a quarter of the computer");
    }
    let runs = series.iter().map(|series| series.runs).min().unwrap_or(0);
    let apart = (after.median - before.median).abs();
    if apart <= widest * widened(runs) { Verdict::WithinSpread } else { Verdict::Differs(percent) }
}

/// From the minimum to the maximum.
fn width(spread: Spread) -> f64 {
    spread.greatest - spread.least
}

/// The increase from `before` to `after` in per cent.
fn percent(before: f64, after: f64) -> f64 {
    match before {
        0.0 if after == 0.0 => 0.0,
        0.0 => f64::INFINITY.copysign(after),
        _ => 100.0 * (after - before) / before.abs(),
    }
}

impl Compared<'_> {
    fn json(&self) -> serde_json::Value {
        let Self { key, before, after, samples, verdict } = self;
        let difference = if let Verdict::Differs(percent) = verdict { json!(percent) } else { json!(null) };
        json!({ "experiment": key.experiment, "quantity": key.quantity, "settings": key.settings, "unit": key.unit,
            "class": key.class, "ground": key.ground, "arch": key.arch, "before": before.json(), "after": after.json(),
            "samples": samples, "verdict": verdict.to_string(), "difference_percent": difference })
    }
}

/// Describes the files, and warns of differences that make them hard to compare.
fn describe(files: &[Records; 2]) {
    let of = |file: &Records, what: fn(&crate::records::Record) -> String| {
        file.records.iter().map(what).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ")
    };
    for (name, file) in ["A", "B"].into_iter().zip(files) {
        let commits = of(file, |record| record.circumstances.commit.clone());
        println!("{name}: {}, commit {commits}", file.path.display());
        if commits.contains(',') {
            println!("   The results are of several commits, and are taken together.");
        }
    }
    let machines = [&files[0], &files[1]].map(|file| of(file, |record| record.circumstances.machine.to_string()));
    if machines[0] != machines[1] {
        println!("The computers differ: {} and {}. Only exact counts can be compared.", machines[0], machines[1]);
    }
    let emulator =
        |record: &crate::records::Record| record.circumstances.qemu.as_ref().map_or(String::new(), ToString::to_string);
    let qemus = [&files[0], &files[1]].map(|file| of(file, emulator));
    if qemus[0] != qemus[1] {
        println!("QEMU differs: {} and {}. Counts of instructions are those of one QEMU.", qemus[0], qemus[1]);
    }
}

fn print(compared: &[Compared<'_>], verbose: bool) {
    let shown = |one: &&Compared<'_>| verbose || one.verdict.is_difference();
    let mut experiment = "";
    for one in compared.iter().filter(shown) {
        if one.key.experiment != experiment {
            experiment = &one.key.experiment;
            println!("\n{experiment}");
        }
        let settings: Vec<_> = one.key.settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        println!("  {} [{}; {}, {}]", one.key.quantity, one.key.unit, one.key.ground, one.key.class.words());
        println!("    {}", settings.join(" "));
        let side = |spread: &Spread, count: usize| format!("{spread} of {count}");
        let (before, after) = (side(&one.before, one.samples[0]), side(&one.after, one.samples[1]));
        println!("    A {before:36} B {after:36} {}", one.verdict);
    }
}

/// Lists figures that only one of the files has.
fn absent(pooled: &[BTreeMap<Key, Series>; 2], files: &[Records; 2]) {
    for (name, has, other) in [("A", 0, 1), ("B", 1, 0)] {
        let only: Vec<&Key> = pooled[has].keys().filter(|key| !pooled[other].contains_key(*key)).collect();
        let experiments: BTreeSet<&str> = only.iter().map(|key| key.experiment.as_str()).collect();
        if !only.is_empty() {
            let experiments = experiments.into_iter().collect::<Vec<_>>().join(", ");
            println!("\nOnly {name} has {} figures of: {experiments}", only.len());
        }
        for record in &files[has].records {
            if let Content::Failure { what, why } | Content::Unmeasured { what, why } = &record.content {
                println!("{name}: {}: {what}: {}", record.experiment, first_line(why));
            }
        }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn summary(compared: &[Compared<'_>]) -> String {
    let mut lines = vec![format!("{} figures are in both.", compared.len())];
    for class in [Class::Exact, Class::Count, Class::Ratio, Class::Time] {
        let of: Vec<_> = compared.iter().filter(|one| one.key.class == class).collect();
        let count = |is: fn(Verdict) -> bool| of.iter().filter(|one| is(one.verdict)).count();
        if of.is_empty() {
            continue;
        }
        lines.push(format!(
            "{:20}{:>5}: {} identical, {} within {TOLERANCE_PERCENT:.0} %, {} within the spread, {} differ, {} not judged",
            class.words(),
            of.len(),
            count(|it| it == Verdict::Identical),
            count(|it| it == Verdict::AsGoodAsIdentical),
            count(|it| it == Verdict::WithinSpread),
            count(Verdict::is_difference),
            count(|it| matches!(it, Verdict::NotJudged(_))),
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(class: Class, ground: Ground) -> Key {
        Key {
            experiment: "x".to_string(),
            quantity: "y".to_string(),
            settings: BTreeMap::new(),
            unit: "z".to_string(),
            ground,
            arch: "a".to_string(),
            class,
        }
    }

    fn judged(class: Class, ground: Ground, before: &[f64], after: &[f64]) -> Verdict {
        judged_as(&key(class, ground), [&runs(before), &runs(after)])
    }

    /// Each sample of a run of its own.
    fn runs(samples: &[f64]) -> Series {
        Series { samples: samples.to_vec(), runs: samples.len(), ..Series::default() }
    }

    fn judged_as(key: &Key, series: [&Series; 2]) -> Verdict {
        let [before, after] = series.map(|series| series.spread().expect("has samples"));
        judge(key, series, before, after)
    }

    #[test]
    fn exact_counts_are_judged_by_one_sample_and_one_per_cent() {
        let exact = |before: &[f64], after: &[f64]| judged(Class::Exact, Ground::Emulated, before, after);
        assert_eq!(exact(&[195.0], &[195.0, 195.0]), Verdict::Identical);
        assert_eq!(exact(&[200.0], &[202.0]), Verdict::AsGoodAsIdentical);
        assert_eq!(exact(&[200.0], &[203.0]), Verdict::Differs(1.5));
        assert_eq!(exact(&[200.0], &[150.0]), Verdict::Differs(-25.0));
        assert_eq!(exact(&[0.0], &[0.0]), Verdict::Identical);
        assert!(exact(&[0.0], &[1.0]).is_difference());
    }

    #[test]
    fn exact_count_that_was_not_the_same_each_time_is_judged_by_its_spread() {
        let exact = |before: &[f64], after: &[f64]| judged(Class::Exact, Ground::Emulated, before, after);
        assert_eq!(exact(&[100.0, 150.0, 160.0], &[170.0, 171.0, 172.0]), Verdict::WithinSpread);
        assert_eq!(exact(&[100.0, 150.0], &[170.0]), Verdict::NotJudged("fewer than 3 runs"));
    }

    #[test]
    fn others_differ_only_when_the_medians_are_further_apart_than_the_samples_of_either() {
        let ratio = |before: &[f64], after: &[f64]| judged(Class::Ratio, Ground::Emulated, before, after);
        assert_eq!(ratio(&[1.0, 1.1, 1.4], &[1.2, 1.5, 1.5]), Verdict::WithinSpread);
        assert_eq!(ratio(&[1.0, 1.0, 1.1], &[1.4, 1.5, 1.5]), Verdict::Differs(50.0));
        assert_eq!(ratio(&[1.0, 1.0], &[9.0, 9.0, 9.0]), Verdict::NotJudged("fewer than 3 runs"));
    }

    #[test]
    fn few_samples_are_believed_to_spread_wider_than_they_do() {
        let ratio = |before: &[f64], after: &[f64]| judged(Class::Ratio, Ground::Emulated, before, after);
        assert_eq!(ratio(&[1.0, 1.0, 1.1], &[1.2, 1.2, 1.3]), Verdict::WithinSpread);
        assert!(ratio(&[1.0, 1.0, 1.0, 1.1], &[1.2, 1.2, 1.2, 1.3]).is_difference());
        assert_eq!(ratio(&[1.0, 1.0, 1.1], &[1.2, 1.2, 1.2, 1.2, 1.3]), Verdict::WithinSpread);
    }

    #[test]
    fn emulated_times_are_never_judged_and_native_ones_are() {
        let time = |ground| judged(Class::Time, ground, &[1.0, 1.0, 1.0], &[9.0, 9.0, 9.0]);
        assert_eq!(time(Ground::Emulated), Verdict::NotJudged("emulated time"));
        assert_eq!(time(Ground::Native), Verdict::Differs(800.0));
    }

    #[test]
    fn what_was_measured_without_free_cores_is_not_judged() {
        let mut key = key(Class::Time, Ground::Native);
        key.settings.insert("judged".to_string(), "false".to_string());
        let verdict = judged_as(&key, [&runs(&[1.0; 3]), &runs(&[9.0; 3])]);
        assert_eq!(verdict, Verdict::NotJudged("the cores were not free"));
    }

    #[test]
    fn samples_of_one_process_say_nothing_of_how_processes_differ() {
        let key = key(Class::Ratio, Ground::Native);
        let one = |sample| Series { runs: 1, ..runs(&[sample; 25]) };
        assert_eq!(judged_as(&key, [&one(3.4), &one(1.0)]), Verdict::NotJudged("fewer than 3 runs"));
        assert!(judged_as(&key, [&runs(&[3.4; 3]), &runs(&[1.0; 3])]).is_difference());
    }

    #[test]
    fn what_was_measured_while_others_were_at_work_is_not_judged_but_exact_counts_are() {
        let busy = |samples: &[f64]| Series { others_share: Some(0.3), ..runs(samples) };
        let judged = |class| judged_as(&key(class, Ground::Emulated), [&busy(&[1.0; 3]), &runs(&[9.0; 3])]);
        assert_eq!(judged(Class::Ratio), Verdict::NotJudged("others used more than a quarter of the computer"));
        assert!(judged(Class::Exact).is_difference());
    }

    #[test]
    fn summary_counts_every_figure_once() {
        let (exact, ratio) = (key(Class::Exact, Ground::Emulated), key(Class::Ratio, Ground::Emulated));
        let series = runs;
        let before = BTreeMap::from([(exact.clone(), series(&[5.0])), (ratio.clone(), series(&[1.0]))]);
        let after = BTreeMap::from([(exact, series(&[5.0])), (ratio, series(&[2.0]))]);
        let compared = compare(&before, &after);
        let text = summary(&compared);
        assert!(text.starts_with("2 figures are in both."), "{text}");
        assert!(text.contains("    1: 1 identical, 0 within 1 %"), "{text}");
        assert!(text.contains("0 differ, 1 not judged"), "{text}");
    }
}

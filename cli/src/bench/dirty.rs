//! The cost of a dirty log for a guest, in the worst case: every vCPU writes all the time.
//!
//! * [`measure`]: one run, on a host of our own ([`host`]). [`curve`] evaluates the speed over time, [`picture`] draws
//!   it, and [`records`] keeps both.
//! * [`instructions`]: the exact cost of a fault.
//!
//! All settings run in turn, several times. The results are medians, with their spread.

mod curve;
mod host;
mod instructions;
mod measure;
mod picture;
mod records;
mod verdict;

use std::fs;
use std::time::Duration;

use abi::payload::{DirtySource, Split};
use serde_json::json;

use super::report::Report;
use super::{Spread, progress};
use crate::args::{DirtyBenchArgs, DirtyPart};
use crate::config::Arch;
use crate::failure::Failure;
use crate::quantity::{MIB, parse_size, parse_time, show_count, show_size};
use crate::records::Log;
use instructions::Pass;
use measure::{Measured, Outcome, Setting, Times};

/// Before the log is started, and after it was stopped.
const ASIDE: Duration = Duration::from_millis(1500);
const MEMORY: u64 = 256;
const FULL_MEMORY: u64 = 1024;
const FULL_VCPUS: [u32; 4] = [1, 2, 8, 48];
const FULL_RATES: [u32; 2] = [0, 1000];

/// All runs of one setting.
struct Series {
    setting: Setting,
    runs: Vec<Outcome>,
}

pub(super) fn run(args: &DirtyBenchArgs, log: &Log) -> Result<u8, Failure> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let interval =
        parse_time(&args.interval).map_err(|what| Failure::bad_input(format!("option '--interval': {what}")))?;
    let times = Times { aside: ASIDE, interval, rounds: args.rounds };
    let settings = settings(args)?;
    let mut report = Report::new("dirty", args.json, log);
    report.say("A guest whose vCPUs all write, to one page after the other, while a dirty log runs.");

    let mut curves = Vec::new();
    if wanted(DirtyPart::Curve) {
        curves = series(&settings, times, args.runs, &mut report);
        for series in &curves {
            show(series, &report);
        }
        if let Some(path) = &args.picture {
            let runs: Vec<(String, &Outcome)> =
                curves.iter().filter_map(|series| Some((series.name(), series.typical()?))).collect();
            fs::write(path, picture::svg(&runs))
                .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        }
    }
    let mut passes = Vec::new();
    if wanted(DirtyPart::Instructions) {
        for cpu in cpus(args) {
            passes.extend(count_instructions(args.arch, cpu.as_ref(), &mut report));
        }
    }
    let mut sparse = Vec::new();
    if wanted(DirtyPart::Sparse) {
        sparse = series(&sparse_settings(args, &settings), times, 1, &mut report);
        report.say("\nWrites to 10 % of the large pages");
        for series in &sparse {
            show_sparse(series, &report);
        }
    }

    let targets = verdict::targets(&curves, &passes, &sparse);
    let status = report.judge(&targets);
    report.say("Emulated (TCG): compare speeds within this run only. Counts are real.");
    Ok(status)
}

fn cpus(args: &DirtyBenchArgs) -> Vec<Option<String>> {
    if args.cpu.is_empty() { vec![None] } else { args.cpu.iter().cloned().map(Some).collect() }
}

/// All that is run.
fn settings(args: &DirtyBenchArgs) -> Result<Vec<Setting>, Failure> {
    let memory = match &args.memory {
        None if args.full => FULL_MEMORY,
        None => MEMORY,
        Some(text) => match parse_size(text) {
            Ok(bytes) if bytes >= 2 * MIB => bytes / MIB,
            Ok(_) => return Err(Failure::bad_input("option '--memory': a large page has 2 MiB").help("at least 2M")),
            Err(what) => return Err(Failure::bad_input(format!("option '--memory': {what}"))),
        },
    };
    let or = |given: &[u32], usual: &[u32], full: &[u32]| match (given, args.full) {
        ([], true) => full.to_vec(),
        ([], false) => usual.to_vec(),
        (given, _) => given.to_vec(),
    };
    let splits =
        if args.split.is_empty() { vec![Split::Adaptive, Split::Eager, Split::Lazy] } else { args.split.clone() };
    let mut all = Vec::new();
    for cpu in cpus(args) {
        for vcpus in or(&args.vcpus, &[1, 2], &FULL_VCPUS) {
            for &split in &splits {
                for source in sources(args, split) {
                    // The rate is that of the host's own splitting.
                    let rates = if split == Split::Eager { or(&args.rate, &[0], &FULL_RATES) } else { vec![0] };
                    all.extend(rates.into_iter().map(|rate| Setting {
                        arch: args.arch,
                        cpu: cpu.clone(),
                        vcpus,
                        memory,
                        regions: 100,
                        split,
                        source,
                        rate: Some(rate).filter(|&rate| rate > 0),
                    }));
                }
            }
        }
    }
    Ok(all)
}

fn sources(args: &DirtyBenchArgs, split: Split) -> Vec<DirtySource> {
    match split {
        _ if !args.source.is_empty() => args.source.clone(),
        Split::Lazy if !args.full => vec![DirtySource::WriteProtect],
        _ => vec![DirtySource::Hardware, DirtySource::WriteProtect],
    }
}

/// Adaptive and eager, on one vCPU, with each CPU and each source.
fn sparse_settings(args: &DirtyBenchArgs, settings: &[Setting]) -> Vec<Setting> {
    let Some(first) = settings.first() else { return Vec::new() };
    let mut all = Vec::new();
    for cpu in cpus(args) {
        for source in sources(args, Split::Adaptive) {
            for split in [Split::Adaptive, Split::Eager] {
                all.push(Setting {
                    cpu: cpu.clone(),
                    vcpus: 1,
                    regions: 10,
                    split,
                    source,
                    rate: None,
                    ..first.clone()
                });
            }
        }
    }
    all
}

/// Runs all of them in turn, `runs` times.
fn series(settings: &[Setting], times: Times, runs: u32, report: &mut Report<'_>) -> Vec<Series> {
    let mut all: Vec<Series> =
        settings.iter().map(|setting| Series { setting: setting.clone(), runs: Vec::new() }).collect();
    for turn in 1..=runs {
        for series in &mut all {
            let what = series.name();
            progress(&format!("run {turn} of {runs}: {what}"));
            match measure::measure(&series.setting, times) {
                Ok(Measured::NoHardware) => progress(&format!("{what}: the machine cannot record writes; left out")),
                Ok(Measured::Outcome(outcome)) => {
                    let run = outcome.run.clone();
                    if let Some(outcome) = report.of(&what, Ok((*outcome, run))) {
                        report.json(outcome.json(&series.setting));
                        records::run(&series.setting, &outcome, report);
                        series.runs.push(outcome);
                    }
                }
                Err(failure) => {
                    let _: Option<()> = report.of(&what, Err(failure));
                }
            }
        }
    }
    all.retain(|series| !series.runs.is_empty());
    all
}

fn count_instructions(arch: Arch, cpu: Option<&String>, report: &mut Report<'_>) -> Vec<Pass> {
    let of = cpu.map_or(arch.to_string(), |cpu| format!("{arch} {cpu}"));
    progress(&format!("instructions of one fault, {of}"));
    let passes = report.of("instructions", instructions::count(arch, cpu)).unwrap_or_default();
    report.say(&format!("\nInstructions of one fault, {of}: 1 vCPU, counted exactly (-icount)\n{}", Pass::HEAD));
    for pass in &passes {
        report.say(&pass.line());
        report.json(pass.json(arch, cpu));
        records::pass(pass, cpu, report);
    }
    passes
}

impl Series {
    fn name(&self) -> String {
        format!("{}, {}", self.setting.machine(), self.setting.name())
    }

    fn spread(&self, of: impl Fn(&Outcome) -> f64) -> Option<Spread> {
        Spread::of(&self.runs.iter().map(of).collect::<Vec<_>>())
    }

    /// The run with the median of the worst moments.
    fn typical(&self) -> Option<&Outcome> {
        let mut runs: Vec<&Outcome> = self.runs.iter().collect();
        runs.sort_by(|a, b| a.shape.worst.total_cmp(&b.shape.worst));
        runs.get(runs.len() / 2).copied()
    }
}

fn show(series: &Series, report: &Report<'_>) {
    let Some(typical) = series.typical() else { return };
    let percent = |of: fn(&Outcome) -> f64| {
        series.spread(of).map_or(String::new(), |spread| {
            let Spread { median, least, greatest } = spread;
            format!("{:.0} % ({:.0}-{:.0})", median * 100.0, least * 100.0, greatest * 100.0)
        })
    };
    report.say(&format!("\n{}, {} MiB, {} runs", series.name(), series.setting.memory, series.runs.len()));
    report.say(&picture::text(typical));
    report.say(&format!(
        "    worst 100 ms {} (before: {}), mean {}, after {}",
        percent(|run| run.shape.worst),
        percent(|run| run.shape.worst_before),
        percent(|run| run.shape.mean),
        percent(|run| run.shape.after)
    ));
    let back = match (typical.shape.back_after_ns, typical.shape.back_after_rounds) {
        (Some(ns), Some(rounds)) => format!("recovered after {} ms, {rounds} rounds", ns / 1_000_000),
        _ => "not recovered".to_string(),
    };
    let counters = &typical.counters;
    let others = typical.others.map_or("?".to_string(), |share| format!("{:.0} %", share * 100.0));
    report.say(&format!(
        "    {back}; {} pages/s before, others took {others} of the computer; {} rounds: {} faults, {} splits ({} ahead), {} broadcasts ({} by the host), {} local",
        show_count(rounded(typical.shape.before)),
        typical.rounds.len(),
        show_count(counters.dirty_faults),
        show_count(typical.splits()),
        show_count(typical.splits_ahead),
        show_count(counters.stage2_broadcasts),
        show_count(typical.flushes),
        show_count(counters.stage2_local_flushes)
    ));
    report.say(&format!(
        "    tables {} (before: {}); held up {:.3} s of vCPU time; {} large pages came back",
        show_size(typical.tables),
        show_size(typical.tables_before),
        typical.stall(),
        show_count(typical.collapses)
    ));
    report.json(json!({ "part": "summary", "setting": series.setting.json(), "runs": series.runs.len(),
        "worst": series.spread(|run| run.shape.worst).map(Spread::json),
        "worst_before": series.spread(|run| run.shape.worst_before).map(Spread::json),
        "mean": series.spread(|run| run.shape.mean).map(Spread::json),
        "after": series.spread(|run| run.shape.after).map(Spread::json) }));
}

fn show_sparse(series: &Series, report: &Report<'_>) {
    let Some(run) = series.typical() else { return };
    report.say(&format!(
        "  {:50} {} splits, tables {} (before: {})",
        series.name(),
        show_count(run.splits()),
        show_size(run.tables),
        show_size(run.tables_before)
    ));
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a speed for people; never negative")]
fn rounded(speed: f64) -> u64 {
    speed as u64
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DirtyBenchArgs,
    }

    fn chosen(options: &[&str]) -> Result<Vec<Setting>, Failure> {
        settings(&Line::try_parse_from([&["x"], options].concat()).expect("options are known").args)
    }

    #[test]
    fn usual_settings_have_each_way_to_split_and_lazy_as_it_used_to_be() {
        let all = chosen(&[]).expect("is good");
        assert_eq!(all.len(), 2 * 5);
        let lazy: Vec<_> = all.iter().filter(|setting| setting.split == Split::Lazy).collect();
        assert!(lazy.len() == 2 && lazy.iter().all(|setting| setting.source == DirtySource::WriteProtect));
        assert!(all.iter().all(|setting| setting.memory == 256 && setting.rate.is_none()));
    }

    #[test]
    fn rates_are_tried_where_the_host_splits() {
        let all = chosen(&["--rate=0,50", "--vcpus=1", "--source=hardware", "--memory=64M"]).expect("is good");
        let rates: Vec<_> = all.iter().map(|setting| (setting.split, setting.rate)).collect();
        let expected = [(Split::Adaptive, None), (Split::Eager, None), (Split::Eager, Some(50)), (Split::Lazy, None)];
        assert_eq!(rates, expected);
        assert_eq!(chosen(&["--full"]).expect("is good").len(), 4 * (2 + 4 + 2));
    }

    #[test]
    fn each_model_of_a_cpu_is_tried_and_too_little_memory_refused() {
        let all = chosen(&["--arch=aarch64", "--cpu=max,neoverse-n1", "--vcpus=2", "--split=lazy"]).expect("is good");
        let machines: Vec<_> = all.iter().map(Setting::machine).collect();
        assert_eq!(machines, ["aarch64 max, 2 vCPUs", "aarch64 neoverse-n1, 2 vCPUs"]);
        assert!(chosen(&["--memory=1M"]).is_err() && chosen(&["--memory=lots"]).is_err());
    }
}

//! An unmodified kernel with a memory-mapped local APIC, running programs: counters of the cache, and the duration of
//! the load.
//!
//! The VM's setting `apic = "xapic"` forces the kernel into xAPIC mode, like `nox2apic`. Counters are those of the load
//! alone: the last values minus those at the time when user space was reached.

use abi::payload::DecodeCache;
use serde_json::{Value, json};

use super::counts::Counts;
use super::verdict;
use super::{Report, keys};
use crate::args::{DecodeArgs, SETTINGS};
use crate::assets::Assets;
use crate::bench::circumstances::Watch;
use crate::bench::record::Record;
use crate::bench::target::Target;
use crate::bench::{Spread, dunlin_run_vms, only_vm, progress};
use crate::config::{Initrd, Place};
use crate::failure::Failure;
use crate::records::{Class, Figure};

const VCPUS: u32 = 4;
const PCPUS: u32 = 2;

/// Work in the guest.
struct Work {
    /// First word of the line with its result.
    name: &'static str,
    /// A description.
    what: &'static str,
    /// The initial RAM disk, and its name as the key `initrd`.
    initrd: (Initrd, &'static str),
    /// The key `memory`.
    memory: &'static str,
    /// The command for the guest's shell.
    command: &'static str,
    /// How long a run may take, in seconds.
    limit: u32,
}

/// The shell uses the kernel's uptime as its clock; its first number has two decimals.
const SHELL: Work = Work {
    name: "shell",
    what: "shell loop: 500 times /bin/true",
    initrd: (Initrd::Dunlin, "dunlin"),
    memory: "512M",
    command: "read start rest </proc/uptime; i=0; while [ $i -lt 500 ]; do /bin/true || exit 1; i=$((i+1)); done; \
              read end rest </proc/uptime; echo shell programs=$i start=$start end=$end",
    limit: 300,
};

const COMPILE: Work = Work {
    name: "compile",
    what: "parallel compile: 60 C files, as many at a time as there are vCPUs",
    initrd: (Initrd::Compile, "compile"),
    memory: "1G",
    command: "/dunlin/workloads compile --files 60",
    limit: 1200,
};

/// Published figures of bhyve's cache (Carabas, Natu, 2015).
const PUBLISHED: [(&str, &str); 2] = [
    ("shell", "hits 98.5 % in a shell loop"),
    ("compile", "buildworld: one insertion for two hits, 13,938 s without and 13,900 s with the cache"),
];

/// One run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    setting: DecodeCache,
    counts: Counts,
    seconds: f64,
}

/// Runs all loads. Returns whether `bytes` had to drop an entry.
pub(super) fn run(args: &DecodeArgs, report: &mut Report<'_>) -> Option<Target> {
    report.say(&format!(
        "Debian's kernel, its local APIC in memory, {VCPUS} vCPUs on {PCPUS} pCPUs, settings in turn: {} rounds.\n\
         Counts are of the work alone, one line per run.",
        args.rounds()
    ));
    let mut with_bytes = Vec::new();
    for work in [&SHELL, &COMPILE] {
        if let Err(missing) = Assets::locate().initrd(&work.initrd.0, &Place::Option("--macro")) {
            report.say(&format!("\n{}: left out: {missing}", work.what));
            eprintln!("{} is left out: {missing}", work.name);
            continue;
        }
        report.say(&format!("\n{}\n{:22}{:>9}{:>8}{}", work.what, "", "seconds", "others", Counts::columns()));
        let runs = in_turn(work, args, report);
        summarize(work, &runs, report);
        with_bytes
            .extend(runs.iter().filter(|run| run.setting == DecodeCache::Bytes).map(|run| (work.name, run.counts)));
    }
    report.say(
        "\nothers: share of this computer that other processes used. Seconds of one round say little: what came first, and\n\
         whatever else the computer did, is in them.",
    );
    verdict::nothing_forgotten("Debian at work: bytes forgets nothing and watches nothing, most", &with_bytes)
}

fn in_turn(work: &Work, args: &DecodeArgs, report: &mut Report<'_>) -> Vec<Run> {
    let mut runs = Vec::new();
    for round in 1..=args.rounds() {
        for setting in super::rotated(&args.settings(), round) {
            let what = format!("{}, {} (round {round} of {})", work.name, setting.name(), args.rounds());
            progress(&what);
            let watch = Watch::start();
            let Some(run) = report.of(&what, one(work, setting)) else { continue };
            let others = watch.others();
            let share = others.map_or("?".to_string(), |share| format!("{:.0} %", 100.0 * share));
            report.say(&format!("{:22}{:>9.2}{share:>8}{}", setting.name(), run.seconds, run.counts.row()));
            report.json(json!({ "part": "debian", "work": work.name, "decode_cache": setting.name(), "round": round,
                "vcpus": VCPUS, "pcpus": PCPUS, "seconds": run.seconds, "counts": run.counts.json(),
                "others_share": others }));
            let seconds = Figure::new("Debian: work", Class::Time, "s", [run.seconds]).others(others);
            for figure in run.counts.figures().into_iter().chain([seconds]) {
                let figure = figure.at("work", work.name).at("decode_cache", setting.name());
                report.emulated(figure.at("vcpus", VCPUS).at("pcpus", PCPUS));
            }
            runs.push(run);
        }
    }
    runs
}

fn summarize(work: &Work, runs: &[Run], report: &Report<'_>) {
    for setting in SETTINGS {
        let seconds: Vec<f64> = runs.iter().filter(|run| run.setting == setting).map(|run| run.seconds).collect();
        if let Some(spread) = Spread::of(&seconds) {
            report.say(&format!("  {:20} {spread} s", setting.name()));
        }
    }
    for (_, text) in PUBLISHED.iter().filter(|(name, _)| *name == work.name) {
        report.say(&format!("  bhyve, 2015: {text}"));
    }
}

fn one(work: &Work, setting: DecodeCache) -> Result<(Run, Value), Failure> {
    let Work { name, initrd: (_, initrd), memory, command, limit, .. } = work;
    let toml = format!(
        "[host]\npcpus = {PCPUS}\n[[vm]]\nname = \"debian\"\nvcpus = {VCPUS}\nmemory = \"{memory}\"\n\
         kernel = \"debian-cloud\"\ninitrd = \"{initrd}\"\n{}",
        keys(setting)
    );
    let run = dunlin_run_vms(&toml, &["--accel=tcg", &format!("--time-limit={limit}s"), &format!("--exec={command}")])?;
    let vm = only_vm(&run);
    let output = vm["output"].as_str().unwrap_or_default();
    let failed = |why: &str| Failure::failed(format!("{name}: {why}:\n{output}"));
    let seconds = seconds(output, name).ok_or_else(|| failed("no result"))?;
    let counts = Counts::read(&vm["counters"]).zip(Counts::read(&vm["counters_at_hello"]));
    let (end, start) = counts.ok_or_else(|| failed("emulated instructions were not counted"))?;
    Ok((Run { setting, counts: end.since(start), seconds }, run))
}

/// How long the work took, by the guest's clock. Progress starts with the same word, and does not say it.
fn seconds(output: &str, name: &str) -> Option<f64> {
    let of = |record: Record| {
        let between = || Some(record.number::<f64>("end")? - record.number::<f64>("start")?);
        record.number::<f64>("seconds").or_else(between)
    };
    Record::all(output, name).filter_map(of).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_said_by_the_work_or_are_between_two_readings_of_a_clock() {
        assert_eq!(seconds("shell programs=500 start=1.25 end=4.75\r\n", "shell"), Some(3.5));
        let output = "compile 50 of 60 files\ncompile jobs=4 files=60 seconds=41.5 tlb_before=1 tlb_after=2\n";
        assert_eq!(seconds(output, "compile"), Some(41.5));
        assert_eq!(seconds("compile 50 of 60 files\n", "compile"), None);
        assert_eq!(seconds("shell programs=500 start=1.25\n", "shell"), None);
    }

    #[test]
    fn every_work_has_something_published_beside_it() {
        for work in [&SHELL, &COMPILE] {
            assert!(PUBLISHED.iter().any(|(name, _)| *name == work.name), "{}", work.name);
            assert!(work.command.contains(work.name), "{}", work.name);
        }
    }
}

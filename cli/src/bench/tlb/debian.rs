//! An unmodified kernel under load that needs flushes; it flushes by IPI and by hypercall in turn.
//!
//! The programs are those of `workloads/`, in Debian's kernel with our initrd. The kernel's own count of flushes by
//! IPI, the line TLB of `/proc/interrupts`, shows before and after whether the kernel used the wanted way.

use abi::payload::RemoteFlush;
use serde_json::{Value, json};

use super::APPROACHES;
use super::{Report, matrix::Point, verdict};
use crate::args::TlbArgs;
use crate::assets::Assets;
use crate::bench::circumstances::Watch;
use crate::bench::record::Record;
use crate::bench::{Spread, dunlin_run_vms, only_vm, progress};
use crate::config::{Initrd, Place};
use crate::failure::Failure;
use crate::records::{self, Class, Log};

/// A program in the guest, and its report.
struct Workload {
    /// First word of its command and of its line.
    name: &'static str,
    /// The key `initrd`.
    initrd: &'static str,
    /// The key `memory`.
    memory: &'static str,
    /// The options of its command.
    options: &'static str,
    /// How long a run may take, in seconds.
    limit: u32,
    /// Figures: key in the line, description, unit in the line, and whether higher is better.
    figures: &'static [Figure],
}

struct Figure {
    key: &'static str,
    what: &'static str,
    unit: f64,
    /// The name of that unit.
    name: &'static str,
    more_is_better: bool,
}

const fn micros(key: &'static str, what: &'static str) -> Figure {
    Figure { key, what, unit: 1e3, name: "µs", more_is_better: false }
}

const STORM: Workload = Workload {
    name: "storm",
    initrd: "workloads",
    memory: "512M",
    options: "--seconds 10",
    limit: 300,
    figures: &[
        Figure { key: "ops_per_second", what: "calls/s", unit: 1.0, name: "calls/s", more_is_better: true },
        micros("mean_ns", "mean, µs"),
        micros("p99_ns", "p99, µs"),
    ],
};

const LATENCY: Workload = Workload {
    name: "latency",
    initrd: "workloads",
    memory: "512M",
    options: "--calls 200",
    limit: 300,
    figures: &[micros("mean_ns", "mean, µs"), micros("p50_ns", "p50, µs"), micros("p99_ns", "p99, µs")],
};

const COMPILE: Workload = Workload {
    name: "compile",
    initrd: "compile",
    memory: "1G",
    options: "--files 60",
    limit: 1200,
    figures: &[Figure { key: "seconds", what: "seconds", unit: 1.0, name: "s", more_is_better: false }],
};

const AT_FOUR: [Point; 1] = [Point { vcpus: 4, overcommit: 2 }];
/// The sizes at which KVM was measured.
const LIKE_KVM: [Point; 3] = [Point { vcpus: 2, overcommit: 1 }, AT_FOUR[0], Point { vcpus: 8, overcommit: 4 }];

/// One run.
#[derive(Clone, Debug)]
struct Run {
    approach: RemoteFlush,
    record: Record,
    /// Hypercalls that flushed, as counted by the hypervisor.
    flush_calls: u64,
    others: Option<f64>,
}

pub(super) fn run(args: &TlbArgs, log: &Log) -> Result<u8, Failure> {
    let points = Point::asked_for(args)?;
    let mut report = Report::new(args, log);
    report.say(&format!(
        "Debian's kernel under load, flush = \"ipi\" and \"hypercall\" in turn: median (least-greatest) of {}\n\
         TLB is the line of /proc/interrupts, all CPUs, after less before: flushes by IPI. Calls: flushes by hypercall.\n",
        args.pairs
    ));
    if !args.json {
        print_head();
    }
    for (workload, usual) in [(&STORM, &AT_FOUR[..]), (&LATENCY, &LIKE_KVM), (&COMPILE, &AT_FOUR)] {
        if let Some(missing) = missing(workload) {
            report.say(&format!("{:8} left out: {missing}", workload.name));
            eprintln!("{} is left out: {missing}", workload.name);
            continue;
        }
        for &point in if points.is_empty() { usual } else { &points } {
            let runs = in_turn(workload, point, &mut report);
            if !args.json {
                print(workload, point, &runs);
            }
        }
    }
    report.say("\nothers: share of this computer that other processes used (least-greatest).");
    report.say("Emulated (TCG): compare times within a row only.");
    Ok(u8::from(report.failed))
}

/// The missing requirement of the load, if there is one.
fn missing(workload: &Workload) -> Option<Failure> {
    let initrd = if workload.initrd == "compile" { Initrd::Compile } else { Initrd::Workloads };
    Assets::locate().initrd(&initrd, &Place::Option("--macro")).err()
}

/// All pairs of runs of one workload at one size.
fn in_turn(workload: &Workload, point: Point, report: &mut Report<'_>) -> Vec<Run> {
    let mut runs = Vec::new();
    for pair in 1..=report.args.pairs {
        for approach in APPROACHES {
            let what = format!(
                "{} with {} vCPUs on {} pCPUs, {} (pair {pair})",
                workload.name,
                point.vcpus,
                point.pcpus(),
                approach.name()
            );
            progress(&what);
            let Some(run) = report.of(&what, one(workload, point, approach)) else { continue };
            report.json(run.json(workload, point, pair));
            run.figures(workload, point).into_iter().for_each(|figure| report.record(figure));
            runs.push(run);
        }
    }
    runs
}

fn one(workload: &Workload, point: Point, approach: RemoteFlush) -> Result<(Run, Value), Failure> {
    let Workload { name, initrd, memory, options, limit, .. } = workload;
    let toml = format!(
        "[host]\npcpus = {}\n[[vm]]\nname = \"debian\"\nvcpus = {}\nmemory = \"{memory}\"\nkernel = \"debian-cloud\"\n\
         initrd = \"{initrd}\"\nflush = \"{}\"\n",
        point.pcpus(),
        point.vcpus,
        approach.name()
    );
    let watch = Watch::start();
    let command = format!("--exec=/dunlin/workloads {name} {options}");
    let run = dunlin_run_vms(&toml, &["--accel=tcg", &format!("--time-limit={limit}s"), &command])?;
    let vm = only_vm(&run);
    let output = vm["output"].as_str().unwrap_or_default();
    let record = result(output, name);
    let record = record.ok_or_else(|| Failure::failed(format!("{name} has no result:\n{output}")))?;
    let flush_calls = vm["counters"]["flush_calls"].as_u64().unwrap_or(0);
    Ok((Run { approach, record, flush_calls, others: watch.others() }, run))
}

/// The line with the result. Progress starts with the same word, and does not have all fields.
fn result(output: &str, name: &str) -> Option<Record> {
    Record::all(output, name).filter(|record| record.text("tlb_after").is_some()).last()
}

impl Run {
    fn figure(&self, figure: &Figure) -> Option<f64> {
        Some(self.record.number::<f64>(figure.key)? / figure.unit)
    }

    /// Flushes by IPI, as the guest's kernel counted them.
    fn tlb(&self) -> Option<u64> {
        self.record.number::<u64>("tlb_after")?.checked_sub(self.record.number("tlb_before")?)
    }

    fn figures(&self, workload: &Workload, point: Point) -> Vec<records::Figure> {
        let settings = |figure: records::Figure| {
            let figure = figure.at("workload", workload.name).at("approach", self.approach.name()).others(self.others);
            figure.at("vcpus", point.vcpus).at("pcpus", point.pcpus()).at("overcommit", point.overcommit)
        };
        let measured = workload.figures.iter().filter_map(|figure| {
            let value = self.figure(figure)?;
            Some(settings(records::Figure::new(format!("Debian: {}", figure.key), Class::Time, figure.name, [value])))
        });
        let tlb = self.tlb().map(|count| {
            settings(records::Figure::new("Debian: flushes by IPI", Class::Count, "flushes", [count as f64]))
        });
        measured.chain(tlb).collect()
    }

    fn json(&self, workload: &Workload, point: Point, pair: u32) -> Value {
        let figures: serde_json::Map<_, _> = self
            .record
            .fields()
            .filter_map(|(key, value)| Some((key.to_string(), json!(value.parse::<f64>().ok()?))))
            .collect();
        json!({ "bench": "tlb", "part": "debian", "workload": workload.name, "vcpus": point.vcpus,
            "pcpus": point.pcpus(), "overcommit": point.overcommit, "cramped": point.is_cramped(),
            "flush": self.approach.name(), "pair": pair, "figures": figures, "flush_calls": self.flush_calls,
            "others_share": self.others })
    }
}

fn print_head() {
    println!(
        "{:8} {:>5} {:>5}  {:9} {:>25} {:>25} {:>7} {:>9} {:>9} {:>9}",
        "", "vCPUs", "pCPUs", "", "ipi", "hypercall", "gain", "TLB, ipi", "TLB, hc", "calls, hc"
    );
}

/// A line for each figure of the workload, its witnesses in the first.
fn print(workload: &Workload, point: Point, runs: &[Run]) {
    let by = |approach| runs.iter().filter(move |run| run.approach == approach);
    for (at, figure) in workload.figures.iter().enumerate() {
        let spread = |approach| {
            let values: Vec<f64> = by(approach).filter_map(|run| run.figure(figure)).collect();
            Spread::of(&values)
        };
        let (ipi, hypercall) = (spread(RemoteFlush::Ipi), spread(RemoteFlush::Hypercall));
        let gain = ipi.zip(hypercall).map(|(ipi, hypercall)| {
            let (better, worse) = if figure.more_is_better { (hypercall, ipi) } else { (ipi, hypercall) };
            better.median / worse.median
        });
        let median = |approach, count: fn(&Run) -> Option<u64>| {
            let mut counts: Vec<u64> = by(approach).filter_map(count).collect();
            counts.sort_unstable();
            counts.get(counts.len() / 2).map_or("-".to_string(), u64::to_string)
        };
        print!(
            "{:8} {:>5} {:>5}{:1} {:9} {:>25} {:>25} {:>7}",
            workload.name,
            point.vcpus,
            point.pcpus(),
            if point.is_cramped() { "*" } else { "" },
            figure.what,
            shown(ipi),
            shown(hypercall),
            gain.map_or("-".to_string(), |gain| format!("{gain:.2}x")),
        );
        if at > 0 {
            println!();
            continue;
        }
        let others: Vec<f64> = runs.iter().filter_map(|run| run.others).map(|share| 100.0 * share).collect();
        let others =
            Spread::of(&others).map_or(String::new(), |it| format!("  others {:.0}-{:.0}%", it.least, it.greatest));
        println!(
            " {:>9} {:>9} {:>9}{others}",
            median(RemoteFlush::Ipi, Run::tlb),
            median(RemoteFlush::Hypercall, Run::tlb),
            median(RemoteFlush::Hypercall, |run| Some(run.flush_calls)),
        );
    }
    if workload.name == LATENCY.name && point.pcpus() == 2 {
        verdict::print_kvm_for(point.vcpus);
    }
}

fn shown(spread: Option<Spread>) -> String {
    let number = |value: f64| if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    spread.map_or("-".to_string(), |it| format!("{} ({}-{})", number(it.median), number(it.least), number(it.greatest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "before: TLB: 20 11 TLB shootdowns\nstorm 5 s: ops=61 stale_or_wrong=0\nstorm threads=4 \
        seconds=10.0 ops=12345 ops_per_second=1234 stale=0 mean_ns=2500 p50_ns=7 p99_ns=90 p999_ns=9 max_ns=9 wrong=0 \
        reads=1 remaps=2 tlb_before=31 tlb_after=41 cal_before=5 cal_after=6\n";

    fn a_run() -> Run {
        let record = result(OUTPUT, "storm").expect("is there");
        Run { approach: RemoteFlush::Ipi, record, flush_calls: 3, others: None }
    }

    #[test]
    fn result_is_told_from_progress() {
        let run = a_run();
        assert_eq!(
            STORM.figures.iter().map(|figure| run.figure(figure)).collect::<Vec<_>>(),
            [Some(1234.0), Some(2.5), Some(0.09)]
        );
        assert_eq!(run.tlb(), Some(10));
        assert!(result("storm 5 s: ops=61\n", "storm").is_none());
        assert!(result(OUTPUT, "compile").is_none());
    }

    #[test]
    fn json_has_every_number_of_the_line() {
        let json = a_run().json(&STORM, AT_FOUR[0], 2);
        assert_eq!((&json["figures"]["ops"], &json["figures"]["cal_after"]), (&json!(12345.0), &json!(6.0)));
        assert_eq!((&json["flush"], &json["pair"], &json["pcpus"]), (&json!("ipi"), &json!(2), &json!(2)));
    }

    #[test]
    fn figures_are_shown_with_their_spread() {
        assert_eq!(shown(Spread::of(&[1.0, 250.0, 3.0])), "3.0 (1.0-250)");
        assert_eq!(shown(None), "-");
    }
}

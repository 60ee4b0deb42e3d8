//! Remote TLB flushes, by IPI and by hypercall: their duration and their other costs.
//!
//! The measuring guest alternates between both ways within one run (`guest/src/experiments/shootdown.rs`), so other
//! load on the computer affects both alike. [`latency`] has the times, [`cost`] exits and instructions, [`verdict`] the
//! conclusions; [`debian`] measures an unmodified kernel instead.

mod cost;
mod debian;
mod latency;
mod matrix;
mod verdict;

use abi::payload::RemoteFlush;
use serde_json::{Value, json};

use super::circumstances::{emulator, host_cores, machine};
use super::progress;
use crate::args::{Part, TlbArgs};
use crate::failure::Failure;
use crate::records::{Figure, Ground, Log};
use cost::{Exits, Instructions};
use latency::Row;
use matrix::Matrix;

/// The ways to flush the TLBs of other vCPUs: the usual one first, then what is compared with it.
const APPROACHES: [RemoteFlush; 2] = [RemoteFlush::Ipi, RemoteFlush::Hypercall];

pub(super) fn run(args: &TlbArgs, log: &Log) -> Result<u8, Failure> {
    if args.debian {
        return debian::run(args, log);
    }
    let matrix = Matrix::of(args)?;
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut report = Report::new(args, log);
    report.say("Remote TLB flush of all vCPUs of a VM, by interrupts of the guest's own (ipi) and by hypercall.");
    let cores = host_cores();
    report.say(&format!(
        "This computer has {cores} cores. * more pCPUs than cores, which take turns: 1x is not 1x there."
    ));

    let mut rows = Vec::new();
    if wanted(Part::Latency) {
        rows = latencies(args, &matrix, &mut report);
    }
    let mut exits = Vec::new();
    if wanted(Part::Exits) {
        exits = exits_per_shootdown(&matrix, &mut report);
    }
    if wanted(Part::Instructions) {
        instructions_per_shootdown(&matrix, &mut report);
    }

    let targets = verdict::targets(&rows, &exits);
    if !args.json {
        verdict::print_paper(&exits, args.exit_ns);
        verdict::print_kvm(&rows);
        println!("\nTargets (times depend on what else this computer does; see the column \"others\"):");
        targets.iter().for_each(verdict::Target::print);
        println!("Emulated (TCG): compare times within this run only. Counts are real.");
    }
    for target in &targets {
        report.json(target.json());
        log.write(Ground::Emulated, None, target.record());
    }
    Ok(u8::from(report.failed || targets.iter().any(|target| !target.met)))
}

fn latencies(args: &TlbArgs, matrix: &Matrix, report: &mut Report<'_>) -> Vec<Row> {
    report.say("\nLatency of one shootdown");
    if !args.json {
        latency::print_head();
    }
    let mut all = Vec::new();
    for (at, &(point, targets)) in matrix.latency.iter().enumerate() {
        let what = format!("{} vCPUs on {} pCPUs, {} targets", point.vcpus, point.pcpus(), targets.name());
        progress(&format!("latency {} of {}: {what}", at + 1, matrix.latency.len()));
        let Some(rows) = report.of(&what, latency::measure(args, point, targets)) else { continue };
        if !args.json {
            latency::print(&rows);
        }
        for row in &rows {
            report.json(row.json());
        }
        latency::figures(&rows).into_iter().for_each(|figure| report.record(figure));
        all.extend(rows);
    }
    all
}

fn exits_per_shootdown(matrix: &Matrix, report: &mut Report<'_>) -> Vec<Exits> {
    report.say(
        "\nExits, kicks and injections per shootdown: 1 page, busy targets, sums over all vCPUs (difference of two runs;\n\
         without the ports of the guest's report and its two RDMSR per shootdown; at overcommit with the ends of slices)",
    );
    if !report.args.json {
        cost::print_exits_head();
    }
    let mut all: Vec<Exits> = Vec::new();
    for (at, &point) in matrix.exits.iter().enumerate() {
        for approach in APPROACHES {
            let what = format!("{} vCPUs on {} pCPUs, {}", point.vcpus, point.pcpus(), approach.name());
            progress(&format!("exits {} of {}: {what}", at + 1, matrix.exits.len()));
            let Some(row) = report.of(&what, cost::exits(point, approach)) else { continue };
            if !report.args.json {
                let ipi = all.iter().find(|ipi| ipi.point == point && approach == RemoteFlush::Hypercall);
                cost::print_exits(&row, ipi);
            }
            report.json(row.json());
            row.figures().into_iter().for_each(|figure| report.record(figure));
            all.push(row);
        }
    }
    all
}

fn instructions_per_shootdown(matrix: &Matrix, report: &mut Report<'_>) {
    report.say(
        "\nInstructions per shootdown: 1 page, all vCPUs on one pCPU, counted exactly (-icount). Whole machine: until the\n\
         shootdown returns, with what busy targets do in their slices before they answer an IPI. Hypervisor: from exit to\n\
         entry, with two RDMSR exits by which the guest reads its run time",
    );
    if !report.args.json {
        cost::print_instructions_head();
    }
    let mut all: Vec<Instructions> = Vec::new();
    for (at, &(vcpus, targets)) in matrix.instructions.iter().enumerate() {
        for approach in APPROACHES {
            let what = format!("{vcpus} vCPUs on one pCPU, {} targets, {}", targets.name(), approach.name());
            progress(&format!("instructions {} of {}: {what}", at + 1, matrix.instructions.len()));
            let Some(row) = report.of(&what, cost::instructions(vcpus, targets, approach)) else { continue };
            if !report.args.json {
                let same = |ipi: &&Instructions| (ipi.vcpus, ipi.targets) == (vcpus, targets);
                cost::print_instructions(&row, all.iter().filter(same).find(|_| approach == RemoteFlush::Hypercall));
            }
            report.json(row.json());
            row.figures().into_iter().for_each(|figure| report.record(figure));
            all.push(row);
        }
    }
}

/// Where results go, and whether all was well.
struct Report<'a> {
    args: &'a TlbArgs,
    log: &'a Log,
    machine: Value,
    /// The description of QEMU in the last run.
    run: Value,
    failed: bool,
}

impl<'a> Report<'a> {
    fn new(args: &'a TlbArgs, log: &'a Log) -> Self {
        Self { args, log, machine: Value::Null, run: Value::Null, failed: false }
    }

    /// Text for people.
    fn say(&self, text: &str) {
        if !self.args.json {
            println!("{text}");
        }
    }

    /// Prints the failure of a measurement, and returns the result of a success. The benchmark continues in both cases.
    fn of<T>(&mut self, what: &str, measured: Result<(T, Value), Failure>) -> Option<T> {
        match measured {
            Ok((figures, run)) => {
                self.machine = machine(&run);
                self.run = emulator(&run);
                Some(figures)
            }
            Err(failure) => {
                self.failed = true;
                self.say(&format!("{what}: FAILED, see standard error"));
                self.json(json!({ "bench": "tlb", "part": "failure", "what": what, "why": failure.to_string() }));
                self.log.failure(what, &failure.to_string());
                eprintln!("{what}: {failure}");
                None
            }
        }
    }

    /// Records a figure of the last run.
    fn record(&self, figure: Figure) {
        self.log.emulated(&self.run, figure);
    }

    /// With --json, prints a line with the figures and their circumstances.
    fn json(&self, mut figures: Value) {
        if !self.args.json {
            return;
        }
        if let Some(object) = figures.as_object_mut() {
            let settings = json!({ "iterations": self.args.iterations, "seconds": self.args.seconds,
                "exit_ns": self.args.exit_ns });
            object.insert("settings".to_string(), settings);
            object.insert("machine".to_string(), self.machine.clone());
            object.insert("commit".to_string(), json!(env!("DUNLIN_COMMIT")));
            object.insert("emulated".to_string(), json!(true));
        }
        println!("{figures}");
    }
}

//! The cost of one shootdown besides time: exits, kicks, interrupts, instructions.
//!
//! Each figure is a difference: the same run with N shootdowns and with 2N, whose counters are subtracted and divided.
//! Other costs of a run (start, report, end) are the same in both and cancel out.

use serde_json::{Value, json};

use abi::payload::RemoteFlush;

use super::matrix::Point;
use crate::args::Targets;
use crate::bench::guest::{MeasuringGuest, output};
use crate::bench::only_vm;
use crate::bench::record::Record;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure};

/// Shootdowns of the shorter run, for exits.
const FEW: u64 = 100;
/// The same for instructions, where every run is alike.
const FEW_EXACT: u64 = 10;

/// Exits that are not the shootdown's: the guest writes its report to ports, and reads its run time from an MSR before
/// and after each shootdown. (Neither way to shoot down reads MSRs or uses ports.)
const NOT_COUNTED: [&str; 2] = ["io_exits", "msr_read_exits"];

/// Exits of one shootdown, on all pCPUs together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exits {
    pub(super) point: Point,
    pub(super) approach: RemoteFlush,
    /// Shootdowns that were counted.
    count: u64,
    /// All exits that belong to the shootdown.
    pub(super) all: f64,
    by_reason: Vec<(String, f64)>,
    kicks: f64,
    injections: f64,
    entries: f64,
}

/// Counts the exits of one shootdown of one page, with busy targets. With the run's JSON.
pub(super) fn exits(point: Point, approach: RemoteFlush) -> Result<(Exits, Value), Failure> {
    let [few, many] = [FEW, 2 * FEW].map(|shootdowns| {
        MeasuringGuest {
            arch: Arch::X86_64,
            vcpus: point.vcpus,
            pcpus: point.pcpus(),
            keys: "",
            cmdline: &format!(
                "experiments=shootdown approach={} pages=1 targets=busy iterations={shootdowns} seconds=200",
                approach.name()
            ),
            limit: 300,
            exact: false,
        }
        .run()
    });
    let (few, many) = (few?, many?);
    let exits = Exits::between(point, approach, &few, &many);
    let exits =
        exits.ok_or_else(|| Failure::failed(format!("no figures in the guest's output:\n{}", output(&many))))?;
    Ok((exits, many))
}

impl Exits {
    /// The increase from `few` to `many`, per shootdown.
    fn between(point: Point, approach: RemoteFlush, few: &Value, many: &Value) -> Option<Self> {
        let count = shootdowns(many)?.checked_sub(shootdowns(few)?).filter(|&count| count > 0)?;
        let [few, many] = [few, many].map(|run| &only_vm(run)["counters"]);
        let per_shootdown = |few: &Value, many: &Value| Some((many.as_f64()? - few.as_f64()?) / count as f64);
        let named = |name: &str| per_shootdown(&few[name], &many[name]);

        let mut by_reason = Vec::new();
        for (name, count) in many["exits"].as_object()? {
            if !NOT_COUNTED.contains(&name.as_str()) {
                by_reason.push((name.clone(), per_shootdown(&few["exits"][name], count)?));
            }
        }
        Some(Self {
            point,
            approach,
            count,
            all: by_reason.iter().map(|(_, count)| count).sum(),
            by_reason,
            kicks: named("flush_kicks")?,
            injections: named("irq_injections")?,
            entries: named("entries")?,
        })
    }

    fn reason(&self, name: &str) -> f64 {
        self.by_reason.iter().find(|(reason, _)| reason == name).map_or(0.0, |(_, count)| *count)
    }

    /// As figures: all exits, kicks, and exits by reason.
    pub(super) fn figures(&self) -> Vec<Figure> {
        let figure = |quantity: &str, unit, sample: f64| {
            let figure = Figure::new(quantity, Class::Count, unit, [sample]).observations(self.count);
            let figure = figure.at("vcpus", self.point.vcpus).at("pcpus", self.point.pcpus());
            figure.at("overcommit", self.point.overcommit).at("approach", self.approach.name())
        };
        let mut figures = vec![
            figure("exits of one shootdown", "exits", self.all),
            figure("kicks of one shootdown", "kicks", self.kicks),
        ];
        // Zero is a figure as well, so that two runs have the same figures.
        for (reason, count) in &self.by_reason {
            figures.push(figure("exits of one shootdown, by reason", "exits", *count).at("reason", reason.as_str()));
        }
        figures
    }

    pub(super) fn json(&self) -> Value {
        let by_reason: serde_json::Map<_, _> =
            self.by_reason.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
        json!({ "bench": "tlb", "part": "exits", "vcpus": self.point.vcpus, "pcpus": self.point.pcpus(),
            "overcommit": self.point.overcommit, "targets": "busy", "pages": "1", "approach": self.approach.name(),
            "shootdowns": self.count, "exits": self.all, "exits_by_reason": by_reason, "kicks": self.kicks,
            "irq_injections": self.injections, "entries": self.entries })
    }
}

/// The number of shootdowns that a run reports.
fn shootdowns(run: &Value) -> Option<u64> {
    shootdown_record(run)?.number("count")
}

fn shootdown_record(run: &Value) -> Option<Record> {
    Record::all(output(run), "record").find(|record| record.text("experiment") == Some("shootdown"))
}

/// Columns of the table: exit reasons by name.
const COLUMNS: [(&str, &str); 5] = [
    ("interrupt", "irq_exits"),
    ("WRMSR", "msr_write_exits"),
    ("hypercall", "hypercalls"),
    ("PAUSE", "pause_exits"),
    ("HLT", "halt_exits"),
];

pub(super) fn print_exits_head() {
    print!("{:>5} {:>5}  {:>4} {:9} {:>8}", "vCPUs", "pCPUs", "over", "by", "exits");
    for (title, _) in COLUMNS {
        print!(" {title:>9}");
    }
    println!(" {:>7} {:>7} {:>8} {:>8}", "others", "kicks", "injected", "IPI/HC");
}

/// One row; `ipi` is the same by IPI, for the ratio.
pub(super) fn print_exits(row: &Exits, ipi: Option<&Exits>) {
    print!(
        "{:>5} {:>5}{:1} {:>3}x {:9} {:>8}",
        row.point.vcpus,
        row.point.pcpus(),
        if row.point.is_cramped() { "*" } else { "" },
        row.point.overcommit,
        row.approach.name(),
        tenths(row.all)
    );
    let mut others = row.all;
    for (_, reason) in COLUMNS {
        print!(" {:>9}", tenths(row.reason(reason)));
        others -= row.reason(reason);
    }
    let ratio = ipi.filter(|_| row.all > 0.0).map_or(String::new(), |ipi| format!("{:.2}x", ipi.all / row.all));
    println!(" {:>7} {:>7} {:>8} {ratio:>8}", tenths(others), tenths(row.kicks), tenths(row.injections));
}

/// With one decimal, and no negative zero.
fn tenths(value: f64) -> String {
    format!("{:.1}", if value.abs() < 0.05 { 0.0 } else { value })
}

/// Instructions of one shootdown, vCPUs on one pCPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Instructions {
    pub(super) vcpus: u32,
    pub(super) targets: Targets,
    pub(super) approach: RemoteFlush,
    /// Instructions of the whole machine until the shootdown returned: the caller, its targets, and the hypervisor.
    machine: u64,
    /// Of the hypervisor, between the exits and the next entries of this VM's vCPUs, that are due to one shootdown.
    hypervisor: f64,
}

/// Counts the instructions of one shootdown of one page. With the run's JSON.
pub(super) fn instructions(
    vcpus: u32,
    targets: Targets,
    approach: RemoteFlush,
) -> Result<(Instructions, Value), Failure> {
    let [few, many] = [FEW_EXACT, 2 * FEW_EXACT].map(|shootdowns| {
        MeasuringGuest {
            arch: Arch::X86_64,
            vcpus,
            pcpus: 1,
            keys: "",
            // With one instruction per nanosecond, the TSC runs at 1 GHz.
            cmdline: &format!(
                "experiments=shootdown approach={} pages=1 targets={} iterations={shootdowns} seconds=200 \
                 tsc_khz=1000000",
                approach.name(),
                targets.name()
            ),
            limit: 300,
            exact: true,
        }
        .run()
    });
    let (few, many) = (few?, many?);
    let figures = Instructions::between(vcpus, targets, approach, &few, &many);
    let figures =
        figures.ok_or_else(|| Failure::failed(format!("no figures in the guest's output:\n{}", output(&many))))?;
    Ok((figures, many))
}

impl Instructions {
    fn between(vcpus: u32, targets: Targets, approach: RemoteFlush, few: &Value, many: &Value) -> Option<Self> {
        let count = shootdowns(many)?.checked_sub(shootdowns(few)?).filter(|&count| count > 0)?;
        let ticks =
            |run: &Value| Some(only_vm(run)["counters"]["host_seconds"].as_f64()? * run["host"]["tsc_hz"].as_f64()?);
        let machine = shootdown_record(many)?.number("mean_ns")?;
        Some(Self { vcpus, targets, approach, machine, hypervisor: (ticks(many)? - ticks(few)?) / count as f64 })
    }

    /// As figures: of the whole machine, and of the hypervisor alone.
    pub(super) fn figures(&self) -> [Figure; 2] {
        [
            ("instructions of one shootdown, whole machine", self.machine as f64),
            ("instructions of one shootdown, hypervisor", self.hypervisor.round()),
        ]
        .map(|(quantity, sample)| {
            let figure = Figure::new(quantity, Class::Exact, "instructions", [sample]).at("vcpus", self.vcpus);
            figure.at("pcpus", 1).at("targets", self.targets.name()).at("approach", self.approach.name())
        })
    }

    pub(super) fn json(&self) -> Value {
        json!({ "bench": "tlb", "part": "instructions", "vcpus": self.vcpus, "pcpus": 1,
            "targets": self.targets.name(), "pages": "1", "approach": self.approach.name(),
            "machine_instructions": self.machine, "hypervisor_instructions": self.hypervisor.round() })
    }
}

pub(super) fn print_instructions_head() {
    println!(
        "{:>5} {:>5}  {:4} {:9} {:>16} {:>8} {:>16} {:>8}",
        "vCPUs", "pCPUs", "", "by", "whole machine", "IPI/HC", "hypervisor", "IPI/HC"
    );
}

/// One row; `ipi` is the same by IPI, for the ratios.
pub(super) fn print_instructions(row: &Instructions, ipi: Option<&Instructions>) {
    let ratio = |long: f64, short: f64| if short > 0.0 { format!("{:.1}x", long / short) } else { "-".to_string() };
    let (machine, hypervisor) = ipi.map_or((String::new(), String::new()), |ipi| {
        (ratio(ipi.machine as f64, row.machine as f64), ratio(ipi.hypervisor, row.hypervisor))
    });
    println!(
        "{:>5} {:>5}  {:4} {:9} {:>16} {machine:>8} {:>16.0} {hypervisor:>8}",
        row.vcpus,
        1,
        row.targets.name(),
        row.approach.name(),
        row.machine,
        row.hypervisor
    );
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const POINT: Point = Point { vcpus: 8, overcommit: 1 };

    fn run(count: u64, irq: u64, ports: u64) -> Value {
        let output = format!("hello guest=x\r\nrecord experiment=shootdown count={count} mean_ns=2122\r\ndone\r\n");
        json!({ "host": { "tsc_hz": 1000 }, "vms": [{ "output": output, "counters": {
            "exits": { "irq_exits": irq, "msr_write_exits": 50, "hypercalls": count, "io_exits": ports,
                "msr_read_exits": 200 + 2 * count },
            "entries": 700 + irq, "irq_injections": 10, "flush_kicks": 7 * count, "host_seconds": irq as f64 } }] })
    }

    #[test]
    fn figures_are_differences_without_ports_and_msr_reads() {
        let exits = Exits::between(POINT, RemoteFlush::Hypercall, &run(100, 300, 9), &run(200, 1000, 99));
        let exits = exits.expect("all is there");
        assert_eq!((exits.count, exits.all, exits.kicks, exits.injections), (100, 8.0, 7.0, 0.0));
        assert_eq!((exits.reason("irq_exits"), exits.reason("io_exits")), (7.0, 0.0));
        assert_eq!(exits.json()["exits_by_reason"]["hypercalls"], json!(1.0));
    }

    #[test]
    fn runs_that_counted_alike_have_no_difference() {
        assert_eq!(Exits::between(POINT, RemoteFlush::Ipi, &run(100, 300, 9), &run(100, 300, 9)), None);
        assert_eq!(Exits::between(POINT, RemoteFlush::Ipi, &run(100, 300, 9), &json!({})), None);
        let instructions = Instructions::between(8, Targets::Idle, RemoteFlush::Ipi, &json!({}), &run(1, 1, 1));
        assert_eq!(instructions, None);
    }

    #[test]
    fn instructions_are_ticks_of_the_counters_and_of_the_callers_clock() {
        let row = Instructions::between(8, Targets::Idle, RemoteFlush::Ipi, &run(10, 20, 9), &run(20, 25, 9));
        let row = row.expect("all is there");
        assert_eq!((row.machine, row.hypervisor), (2122, 500.0));
    }

    #[test]
    fn noise_around_nothing_is_nothing() {
        assert_eq!([-0.01, 0.04, -0.3, 1.25].map(tenths), ["0.0", "0.0", "-0.3", "1.2"]);
    }

    pub(in crate::bench::tlb) fn exits_row(vcpus: u32, approach: RemoteFlush, all: f64) -> Exits {
        let point = Point { vcpus, overcommit: 1 };
        Exits { point, approach, count: 1, all, by_reason: Vec::new(), kicks: 0.0, injections: 0.0, entries: 0.0 }
    }
}

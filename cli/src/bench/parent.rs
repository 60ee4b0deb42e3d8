//! Dunlin beside KVM, as hosts of the same QEMU with the same guests, in the same emulated machine.
//!
//! Each figure comes from a host of its own, which runs `parent-bench` (`parent/files/bin`) once. Dunlin and KVM take
//! turns, so that other load on the computer affects both alike.

mod access;
mod host;

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::target::{Goal, Target};
use super::{Spread, only_vm};
use crate::args::{ParentBenchArgs, ParentPart};
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};
use access::Accesses;
pub(super) use host::Host;
use host::{Outcome, Way, tell};

/// A quantity that is measured on both hosts.
struct Row {
    part: ParentPart,
    what: &'static str,
    unit: &'static str,
    class: Class,
    /// What the project wants of it.
    goal: Goal,
    dunlin: Vec<f64>,
    kvm: Vec<f64>,
    /// KVM with a Hyper-V interface for its guest.
    kvm_with_hyperv: Vec<f64>,
}

impl Row {
    const fn new(part: ParentPart, what: &'static str, unit: &'static str, class: Class, goal: Goal) -> Self {
        Self { part, what, unit, class, goal, dunlin: Vec::new(), kvm: Vec::new(), kvm_with_hyperv: Vec::new() }
    }

    fn of(&mut self, host: Host) -> &mut Vec<f64> {
        match host {
            Host::Dunlin => &mut self.dunlin,
            Host::Kvm => &mut self.kvm,
        }
    }

    /// Dunlin's median by KVM's.
    fn ratio(&self) -> Option<f64> {
        Some(Spread::of(&self.dunlin)?.median / Spread::of(&self.kvm)?.median)
    }

    fn target(&self) -> Target {
        match self.ratio() {
            Some(ratio) => {
                Target::new(self.what, format!("{ratio:.3} of KVM's, {} wanted", self.goal), self.goal.is_met_by(ratio))
            }
            None => Target::not_judged(self.what, "not measured on both"),
        }
    }

    fn json(&self) -> Value {
        let spread = |values: &[f64]| Spread::of(values).map(Spread::json);
        json!({ "part": "row", "emulated": true, "what": self.what, "unit": self.unit, "dunlin": spread(&self.dunlin),
            "kvm": spread(&self.kvm), "kvm_with_hyperv": spread(&self.kvm_with_hyperv), "ratio": self.ratio(),
            "goal": self.goal.to_string(), "met": self.ratio().map(|ratio| self.goal.is_met_by(ratio)) })
    }

    fn line(&self) -> String {
        let shown = |values: &[f64]| {
            Spread::of(values).map_or("-".to_string(), |spread| match self.class {
                Class::Exact => format!("{:.0}", spread.median),
                Class::Count => format!("{:.0} ({:.0}-{:.0})", spread.median, spread.least, spread.greatest),
                _ => spread.to_string(),
            })
        };
        let ratio = self.ratio().map_or("-".to_string(), |ratio| format!("{ratio:.3}"));
        let hyperv = if self.kvm_with_hyperv.is_empty() {
            String::new()
        } else {
            format!("  KVM, hv-tlbflush: {}", shown(&self.kvm_with_hyperv))
        };
        format!("{:44} {:>26} {:>26} {ratio:>7}  emulated{hyperv}", self.what, shown(&self.dunlin), shown(&self.kvm))
    }
}

const PORT: &str = "port exit to QEMU and back, instructions";
const MICROVM: [&str; 2] = ["boot of a microvm, 4 vCPUs, s", "exits to QEMU of a microvm's boot"];
const Q35: [&str; 2] = ["boot of a q35, 4 vCPUs, s", "exits to QEMU of a q35's boot"];
const DISK: [&str; 2] = ["fio, random reads of 4 KiB, IOPS", "fio, random writes of 4 KiB, IOPS"];
const NET: &str = "stream from the guest, MiB/s";
const TLB: [&str; 3] =
    ["TLB flush, 8 vCPUs, mean, µs", "TLB flush, 8 vCPUs, median, µs", "TLB flush, 8 vCPUs, p99, µs"];

fn rows() -> Vec<Row> {
    use Class::{Count, Exact, Time};
    use Goal::{AtLeast, AtMost};
    use ParentPart::{Boot, Disk, Net, Port, Tlb};
    vec![
        Row::new(Port, PORT, "instructions", Exact, AtMost(1.0)),
        Row::new(Boot, MICROVM[0], "s", Time, AtMost(1.0)),
        Row::new(Boot, MICROVM[1], "exits", Count, AtMost(1.0)),
        Row::new(Boot, Q35[0], "s", Time, AtMost(1.0)),
        Row::new(Boot, Q35[1], "exits", Count, AtMost(1.0)),
        Row::new(Disk, DISK[0], "1/s", Time, AtLeast(1.0)),
        Row::new(Disk, DISK[1], "1/s", Time, AtLeast(1.0)),
        Row::new(Net, NET, "MiB/s", Time, AtLeast(1.0)),
        Row::new(Tlb, TLB[0], "µs", Time, AtMost(0.05)),
        Row::new(Tlb, TLB[1], "µs", Time, AtMost(0.05)),
        Row::new(Tlb, TLB[2], "µs", Time, AtMost(0.05)),
    ]
}

pub(crate) fn run(args: &ParentBenchArgs, log: &Log) -> Result<u8, Failure> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut bench = Bench { rows: rows(), log, failed: Vec::new(), last: Value::Null };
    bench.rows.retain(|row| wanted(row.part));
    let where_it_goes = wanted(ParentPart::Port).then(|| bench.port()).flatten();
    let accesses = wanted(ParentPart::Access).then(|| bench.accesses());
    for pair in 1..=args.pairs {
        let turn = format!("{pair} of {}: ", args.pairs);
        for host in [Host::Dunlin, Host::Kvm] {
            if wanted(ParentPart::Boot) {
                bench.boot(&turn, host, "microvm", MICROVM);
                bench.boot(&turn, host, "q35", Q35);
            }
            if wanted(ParentPart::Disk) {
                bench.disk(&turn, host);
            }
            if wanted(ParentPart::Net) {
                bench.net(&turn, host);
            }
            if wanted(ParentPart::Tlb) {
                bench.tlb(&turn, host, false);
            }
        }
        if wanted(ParentPart::Tlb) {
            bench.tlb(&turn, Host::Kvm, true);
        }
    }
    Ok(bench.report(args, where_it_goes.as_ref(), accesses.as_ref()))
}

struct Bench<'a> {
    rows: Vec<Row>,
    log: &'a Log,
    /// What could not be measured, and why.
    failed: Vec<String>,
    /// The JSON of the last run of Dunlin, which describes the machine.
    last: Value,
}

/// Two CPUs, and time as it passes.
const USUAL: Way = Way { cpus: 2, exact: false, limit: 400 };
/// One CPU, and clocks that count instructions.
const EXACT: Way = Way { cpus: 1, exact: true, limit: 300 };

impl Bench<'_> {
    /// What a host did, if it did it.
    fn outcome(&mut self, turn: &str, host: Host, script: &str, way: Way) -> Option<Outcome> {
        tell(turn, host, script);
        match host.run(script, way) {
            Ok(outcome) => {
                if host == Host::Dunlin {
                    self.last = outcome.run.clone();
                }
                Some(outcome)
            }
            Err(failure) => {
                self.log.failure(script, &failure.to_string());
                self.failed.push(failure.to_string());
                None
            }
        }
    }

    fn add(&mut self, host: Host, what: &str, sample: Option<f64>) {
        let (Some(sample), Some(row)) = (sample, self.rows.iter_mut().find(|row| row.what == what)) else { return };
        row.of(host).push(sample);
        self.log.emulated(&self.last, Figure::new(row.what, row.class, row.unit, [sample]).at("host", host.name()));
    }

    /// Instructions of a port exit on both; where they go, on Dunlin.
    fn port(&mut self) -> Option<WhereItGoes> {
        let mut runs = Vec::new();
        for iterations in [PORT_EXITS, 2 * PORT_EXITS] {
            let script = format!("parent-bench port {iterations}");
            runs.extend(self.outcome("", Host::Dunlin, &script, EXACT));
        }
        let of =
            |outcome: &Outcome| outcome.measured("port-vacant").find_map(|port| port.number("ticks_per_iteration"));
        self.add(Host::Dunlin, PORT, runs.last().and_then(of));
        let kvm = self.outcome("", Host::Kvm, &format!("parent-bench port {PORT_EXITS}"), EXACT);
        self.add(Host::Kvm, PORT, kvm.as_ref().and_then(of));
        match runs.as_slice() {
            [once, twice] => WhereItGoes::of(once, twice, of(twice)?),
            _ => None,
        }
    }

    /// Accesses to devices in a boot on both.
    fn accesses(&mut self) -> Accesses {
        let mut accesses = Accesses::default();
        for host in [Host::Dunlin, Host::Kvm] {
            let outcome = self.outcome("", host, "parent-bench accesses q35 4", USUAL);
            outcome.iter().for_each(|outcome| accesses.add(host, outcome));
        }
        accesses
    }

    fn boot(&mut self, turn: &str, host: Host, machine: &str, [seconds, exits]: [&str; 2]) {
        let script = format!("parent-bench boot {machine} 4");
        let Some(outcome) = self.outcome(turn, host, &script, USUAL) else { return };
        let booted = outcome.measured("boot").find_map(|boot| boot.number::<f64>("centiseconds"));
        self.add(host, seconds, booted.map(|hundredths| hundredths / 100.0));
        let exits_of_kvm = || {
            let counts: Vec<f64> = outcome.measured("exits").filter_map(|reason| reason.number("count")).collect();
            (!counts.is_empty()).then(|| counts.iter().sum())
        };
        let count = match host {
            Host::Dunlin => outcome.vmm_exits.map(|exits| exits as f64),
            Host::Kvm => exits_of_kvm(),
        };
        self.add(host, exits, count);
    }

    fn disk(&mut self, turn: &str, host: Host) {
        let Some(outcome) = self.outcome(turn, host, "parent-bench disk 10", USUAL) else { return };
        for (what, how) in DISK.into_iter().zip(["randread", "randwrite"]) {
            let fio = outcome.measured("fio").find(|fio| fio.text("how") == Some(how));
            self.add(host, what, fio.and_then(|fio| fio.number("iops")));
        }
    }

    fn net(&mut self, turn: &str, host: Host) {
        let Some(outcome) = self.outcome(turn, host, "parent-bench net 64", USUAL) else { return };
        let speed = outcome.measured("net").find_map(|net| {
            let [mib, from, to] = ["mib", "from", "to"].map(|key| net.number::<f64>(key));
            Some(mib? / (to? - from?))
        });
        self.add(host, NET, speed);
    }

    fn tlb(&mut self, turn: &str, host: Host, with_hyperv: bool) {
        const HYPERV: &str =
            "PARENT_BENCH_CPU=qemu64,hv-vpindex,hv-synic,hv-relaxed,hv-time,hv-tlbflush,hv-tlbflush-ext ";
        let script = format!("{}parent-bench tlb 8 100", if with_hyperv { HYPERV } else { "" });
        let Some(outcome) = self.outcome(turn, host, &script, USUAL) else { return };
        for (what, key) in TLB.into_iter().zip(["mean_ns", "p50_ns", "p99_ns"]) {
            let sample = outcome.measured("tlb").find_map(|tlb| tlb.number::<f64>(key)).map(|nanos| nanos / 1e3);
            if !with_hyperv {
                self.add(host, what, sample);
            } else if let Some(row) = self.rows.iter_mut().find(|row| row.what == what) {
                row.kvm_with_hyperv.extend(sample);
            }
        }
    }

    /// Prints everything, the summary first. The status is 1 if a goal is missed or a figure is missing.
    fn report(&self, args: &ParentBenchArgs, where_it_goes: Option<&WhereItGoes>, accesses: Option<&Accesses>) -> u8 {
        let targets: Vec<Target> = self.rows.iter().map(Row::target).collect();
        targets.iter().for_each(|target| target.record(self.log));
        if args.json {
            self.rows.iter().for_each(|row| println!("{}", row.json()));
            where_it_goes.iter().for_each(|table| println!("{}", table.json()));
            accesses.iter().flat_map(|table| table.json()).for_each(|line| println!("{line}"));
            targets.iter().for_each(|target| println!("{}", target.json()));
            self.failed.iter().for_each(|why| println!("{}", json!({ "part": "failure", "why": why })));
        } else {
            let met = targets.iter().filter(|target| target.met == Some(true)).count();
            println!("Dunlin beside KVM, both emulated: {met} of {} goals are met.", targets.len());
            targets.iter().for_each(|target| println!("{target}"));
            println!("\n{:44} {:>26} {:>26} {:>7}", "median (least-greatest)", "Dunlin", "KVM", "ratio");
            self.rows.iter().for_each(|row| println!("{}", row.line()));
            where_it_goes.iter().for_each(|table| print!("\n{}", table.text()));
            accesses.iter().for_each(|table| print!("\n{}", table.text()));
            self.failed.iter().for_each(|why| println!("\nnot measured: {why}"));
            println!("Emulated (TCG): counts are real; compare times only within a row.");
        }
        u8::from(!self.failed.is_empty() || targets.iter().any(|target| target.met != Some(true)))
    }
}

/// Number of port exits in a batch of the shorter run.
const PORT_EXITS: u64 = 1000;

/// Where the instructions of a port exit go on Dunlin, and the parent's exits for it: the difference of two runs.
#[derive(Debug, PartialEq)]
struct WhereItGoes {
    /// Instructions of a port exit.
    whole: f64,
    /// Of these, in the parent: its kernel and QEMU.
    parent: f64,
    /// In the hypervisor, for exits of the parent.
    hypervisor: f64,
    /// The parent's exits, by reason.
    exits: Vec<(String, f64)>,
}

impl WhereItGoes {
    fn of(once: &Outcome, twice: &Outcome, whole: f64) -> Option<Self> {
        let batches: f64 = once.measured("port-vacant").find_map(|port| port.number("batches"))?;
        // One batch comes first that is not counted.
        let more = (batches + 1.0) * PORT_EXITS as f64;
        // The parent's clock counts instructions, one a nanosecond.
        let each = |of: &dyn Fn(&Value) -> f64| {
            let counters = |outcome: &Outcome| of(&only_vm(&outcome.run)["counters"]);
            (counters(twice) - counters(once)) / more
        };
        let time = |key: &'static str| each(&|counters| counters[key].as_f64().unwrap_or_default() * 1e9);
        let names = only_vm(&once.run)["counters"]["exits"].as_object()?.keys().cloned();
        let exits = names.map(|name| {
            let count = each(&|counters| counters["exits"][&name].as_f64().unwrap_or_default());
            (name, count)
        });
        Some(Self {
            whole,
            parent: time("guest_seconds"),
            hypervisor: time("host_seconds"),
            exits: exits.filter(|(_, count)| *count >= 0.01).collect(),
        })
    }

    /// The child's part: its exit, the message, and the switches between parent and child.
    fn rest(&self) -> f64 {
        self.whole - self.parent - self.hypervisor
    }

    fn text(&self) -> String {
        let mut text = "One port exit on Dunlin, in instructions (emulated, exact)\n".to_string();
        for (what, count) in [
            ("in the parent: its kernel and QEMU", self.parent),
            ("in the hypervisor, for the parent's exits", self.hypervisor),
            ("in the hypervisor, for the child, and in switches", self.rest()),
            ("together", self.whole),
        ] {
            let _ = writeln!(text, "  {what:50} {count:>8.0}");
        }
        text.push_str("Exits of the parent for one port exit of its child\n");
        for (name, count) in &self.exits {
            let _ = writeln!(text, "  {name:50} {count:>8.2}");
        }
        text
    }

    fn json(&self) -> Value {
        let exits: serde_json::Map<_, _> =
            self.exits.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
        json!({ "part": "port exit", "emulated": true, "instructions": self.whole, "parent": self.parent,
            "hypervisor_for_parent": self.hypervisor, "hypervisor_for_child": self.rest(), "exits_of_parent": exits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(dunlin: &[f64], kvm: &[f64], goal: Goal) -> Row {
        let mut row = Row::new(ParentPart::Boot, "boot", "s", Class::Time, goal);
        (row.dunlin, row.kvm) = (dunlin.to_vec(), kvm.to_vec());
        row
    }

    #[test]
    fn goal_is_judged_by_the_ratio_of_the_medians() {
        let met = |dunlin: &[f64], goal| row(dunlin, &[4.0, 2.0, 3.0], goal).target().met;
        assert_eq!(met(&[3.0, 9.0, 1.0], Goal::AtMost(1.0)), Some(true));
        assert_eq!(met(&[4.0], Goal::AtMost(1.0)), Some(false));
        assert_eq!(met(&[4.0], Goal::AtLeast(1.0)), Some(true));
        assert_eq!(met(&[], Goal::AtLeast(1.0)), None, "nothing was measured");
    }

    #[test]
    fn instructions_of_a_port_exit_are_the_difference_of_two_runs() {
        let outcome = |seconds: f64, hypercalls: u64| Outcome {
            output: "measured name=port-vacant ticks_per_iteration=5000 batches=9".into(),
            vmm_exits: None,
            run: json!({ "vms": [{ "counters": { "guest_seconds": seconds, "host_seconds": seconds / 2.0,
                "exits": { "hypercalls": hypercalls, "cpuid_exits": 100 } } }] }),
        };
        let found = WhereItGoes::of(&outcome(0.001, 7), &outcome(0.021, 20_007), 5000.0).expect("has figures");
        assert_eq!((found.parent, found.hypervisor, found.rest()), (2000.0, 1000.0, 2000.0));
        assert_eq!(found.exits, [("hypercalls".to_string(), 2.0)]);
    }

    #[test]
    fn every_part_has_a_row_and_names_are_unique() {
        let rows = rows();
        for (at, row) in rows.iter().enumerate() {
            assert!(rows[..at].iter().all(|other| other.what != row.what), "{}", row.what);
        }
    }
}

//! Counters on the emulated host: only its owner writes each, and their sums are exact.
//!
//! A guest with two vCPUs makes a known number of exits, in two runs with different numbers. The sums over both vCPUs
//! must differ by exactly the difference, and each vCPU must have as many exits as entries.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::bench::guest::MeasuringGuest;
use crate::bench::report::Report;
use crate::bench::target::Target;
use crate::bench::{only_vm, progress};
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure};

const VCPUS: u32 = 2;
/// Iterations of each loop, in the two runs.
const ITERATIONS: [u64; 2] = [1000, 3000];
/// How often the measuring guest runs each loop: once to warm up, and then for each of nine batches.
const LOOPS: u64 = 10;

/// The loops, with the counter of their iterations. Writing records does not use these counters.
const ON_X86_64: [(&str, &str); 5] = [
    ("cpuid", "cpuid_exits"),
    ("rdmsr", "msr_read_exits"),
    ("x2apic-read", "msr_read_exits"),
    ("wrmsr", "msr_write_exits"),
    ("x2apic-eoi", "msr_write_exits"),
];
const ON_AARCH64: [(&str, &str); 4] = [
    ("hvc", "hypercalls"),
    ("smc", "hypercalls"),
    ("sysreg-read", "msr_read_exits"),
    ("sysreg-write", "msr_write_exits"),
];

const fn experiments(arch: Arch) -> &'static [(&'static str, &'static str)] {
    match arch {
        Arch::X86_64 => &ON_X86_64,
        Arch::Aarch64 => &ON_AARCH64,
    }
}

const SUMS: &str = "counters of a VM are the sums of its vCPUs', each of them";
const ALGEBRA: &str = "each vCPU was left as often as it was entered";
const GROWTH: &str = "more iterations, and no other exits than theirs, exactly";

pub(super) fn run(arch: Arch, report: &mut Report<'_>) -> Vec<Target> {
    report.say("\nCounts of two vCPUs on two pCPUs, emulated: loops of exits, with fewer and with more iterations\n");
    let [few, many] = ITERATIONS.map(|iterations| {
        progress(&format!("loops of {iterations} exits on two vCPUs"));
        let counted = count(arch, iterations);
        report.of(&format!("counters, {iterations} iterations"), counted)
    });
    let (Some(few), Some(many)) = (few, many) else { return Vec::new() };

    let growth = growth(arch, &few, &many);
    report.say(&format!("{:20}{:>14}{:>14}{:>14}{:>14}", "exits", "fewer", "more", "difference", "expected"));
    for Growth { name, few, many, expected } in &growth {
        let more = many.saturating_sub(*few) as f64;
        let figure = Figure::new("exits more with more iterations", Class::Exact, "exits", [more]).at("reason", *name);
        report.emulated(figure.at("vcpus", VCPUS).at("pcpus", VCPUS));
        report.say(&format!("{name:20}{few:>14}{many:>14}{:>14}{expected:>14}", many.wrapping_sub(*few)));
    }
    for (counted, iterations) in [(&few, ITERATIONS[0]), (&many, ITERATIONS[1])] {
        let vcpus: Vec<_> = counted
            .vcpus
            .iter()
            .map(|vcpu| {
                json!({ "entries": vcpu.get("entries"),
            "exits": vcpu.get("exits_total") })
            })
            .collect();
        report.json(json!({ "part": "counters", "iterations": iterations, "total": counted.total, "vcpus": vcpus }));
    }
    vec![judge_sums(&[&few, &many]), judge_algebra(&[&few, &many]), judge_growth(&growth)]
}

/// Counters by name, as they came from the host.
type Counts = BTreeMap<String, u64>;

#[derive(Clone, Debug, Default, PartialEq)]
struct Counted {
    total: Counts,
    vcpus: Vec<Counts>,
}

fn count(arch: Arch, iterations: u64) -> Result<(Counted, Value), Failure> {
    let names: Vec<_> = experiments(arch).iter().map(|(name, _)| *name).collect();
    let guest = MeasuringGuest {
        arch,
        vcpus: VCPUS,
        pcpus: VCPUS,
        keys: "",
        cmdline: &format!("experiments={} iterations={iterations}", names.join(",")),
        limit: 120,
        // So that everything except the loops is the same in both runs.
        exact: true,
    };
    let run = guest.run()?;
    let counted = Counted::read(only_vm(&run))
        .ok_or_else(|| Failure::failed(format!("the counters of the run could not be read: {}", only_vm(&run))))?;
    Ok((counted, run))
}

impl Counted {
    fn read(vm: &Value) -> Option<Self> {
        let vcpus = vm["vcpu_counters"].as_array()?.iter().map(counts).collect::<Option<Vec<_>>>()?;
        Some(Self { total: counts(&vm["counters"])?, vcpus })
    }
}

/// All whole numbers of a vCPU or VM; exits by reason among the others.
fn counts(counters: &Value) -> Option<Counts> {
    let mut counts = Counts::new();
    for (name, value) in counters.as_object()?.iter().chain(counters["exits"].as_object()?) {
        counts.extend(value.as_u64().map(|count| (name.clone(), count)));
    }
    Some(counts)
}

/// The counters of both runs, and the expected increase.
#[derive(Clone, Debug, PartialEq)]
struct Growth {
    name: &'static str,
    few: u64,
    many: u64,
    expected: u64,
}

fn growth(arch: Arch, few: &Counted, many: &Counted) -> Vec<Growth> {
    let mut names: Vec<&'static str> = experiments(arch).iter().map(|(_, counter)| *counter).collect();
    names.dedup();
    let of = |counted: &Counted, name: &str| counted.total.get(name).copied().unwrap_or(0);
    let growth = names.into_iter().map(|name| {
        let loops = experiments(arch).iter().filter(|(_, counter)| *counter == name).count() as u64;
        let expected = loops * LOOPS * (ITERATIONS[1] - ITERATIONS[0]);
        Growth { name, few: of(few, name), many: of(many, name), expected }
    });
    growth.collect()
}

fn judge_sums(runs: &[&Counted]) -> Target {
    let mut compared = 0;
    for run in runs {
        for (name, &total) in &run.total {
            let sum: u64 = run.vcpus.iter().filter_map(|vcpu| vcpu.get(name)).sum();
            if sum != total {
                return Target::new(SUMS, format!("{name}: {total}, but {sum} of all vCPUs"), false);
            }
            compared += 1;
        }
    }
    Target::new(SUMS, format!("{compared} counts compared"), compared > 0)
}

fn judge_algebra(runs: &[&Counted]) -> Target {
    let vcpus: Vec<_> = runs.iter().flat_map(|run| &run.vcpus).collect();
    let pair = |vcpu: &Counts| (vcpu.get("entries").copied(), vcpu.get("exits_total").copied());
    let broken = vcpus.iter().map(|vcpu| pair(vcpu)).find(|(entries, exits)| entries.is_none() || entries != exits);
    match broken {
        Some((entries, exits)) => Target::new(ALGEBRA, format!("{entries:?} entries and {exits:?} exits"), false),
        None => {
            let entries: u64 = vcpus.iter().filter_map(|vcpu| vcpu.get("entries")).sum();
            Target::new(ALGEBRA, format!("{entries} entries of {} vCPUs", vcpus.len()), entries > 0)
        }
    }
}

fn judge_growth(growth: &[Growth]) -> Target {
    match growth.iter().find(|growth| growth.many.checked_sub(growth.few) != Some(growth.expected)) {
        Some(Growth { name, few, many, expected }) => {
            Target::new(GROWTH, format!("{name}: from {few} to {many}, expected {expected} more"), false)
        }
        None => {
            let all: u64 = growth.iter().map(|growth| growth.expected).sum();
            Target::new(GROWTH, format!("{all} more of {} kinds", growth.len()), !growth.is_empty())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(vcpus: [[u64; 2]; 2], total: [u64; 2]) -> Counted {
        let counts = |[entries, exits]: [u64; 2]| {
            [("entries", entries), ("exits_total", exits)].map(|(name, count)| (name.to_string(), count)).into()
        };
        Counted { total: counts(total), vcpus: vcpus.map(counts).to_vec() }
    }

    #[test]
    fn counters_are_read_with_exits_by_reason_and_without_times() {
        let vcpu = json!({ "exits_total": 3, "exits": { "cpuid_exits": 2 }, "guest_seconds": 0.5 });
        let counted = Counted::read(&json!({ "counters": vcpu, "vcpu_counters": [vcpu, vcpu] })).expect("is complete");
        assert_eq!(counted.vcpus.len(), 2);
        assert_eq!(
            counted.total.into_iter().collect::<Vec<_>>(),
            [("cpuid_exits".into(), 2), ("exits_total".into(), 3)]
        );
        assert_eq!(Counted::read(&json!({ "counters": null })), None);
    }

    #[test]
    fn one_count_that_got_lost_is_seen() {
        let met = |target: Target| target.met;
        let good = counted([[5, 5], [7, 7]], [12, 12]);
        assert_eq!((met(judge_sums(&[&good])), met(judge_algebra(&[&good]))), (Some(true), Some(true)));
        assert_eq!(met(judge_sums(&[&good, &counted([[5, 5], [7, 7]], [12, 11])])), Some(false));
        assert_eq!(met(judge_algebra(&[&good, &counted([[6, 5], [7, 7]], [13, 12])])), Some(false));
        // Nothing was counted, so nothing was shown.
        assert_eq!((met(judge_sums(&[])), met(judge_algebra(&[]))), (Some(false), Some(false)));
        assert_eq!(met(judge_algebra(&[&Counted { total: Counts::new(), vcpus: vec![Counts::new()] }])), Some(false));
    }

    #[test]
    fn growth_must_be_exact() {
        let run = |cpuid: u64, reads: u64, writes: u64| {
            let total = [("cpuid_exits", cpuid), ("msr_read_exits", reads), ("msr_write_exits", writes)];
            Counted { total: total.map(|(name, count)| (name.to_string(), count)).into(), vcpus: Vec::new() }
        };
        let few = run(10, 20, 30);
        let judge = |many: &Counted| judge_growth(&growth(Arch::X86_64, &few, many)).met;
        assert_eq!(judge(&run(20_010, 40_020, 40_030)), Some(true));
        assert_eq!(judge(&run(20_010, 40_020, 40_029)), Some(false));
        assert_eq!(judge(&run(0, 0, 0)), Some(false));
    }
}

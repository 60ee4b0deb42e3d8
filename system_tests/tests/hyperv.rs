//! The Hyper-V interface as guests see it: every applicable conformance case of the project's list, and Linux.
//!
//! The measuring guest tries the cases one by one and leaves a record for each. Some depend on the VM, so there are
//! three VMs. docs/hyperv.md lists the cases that are never tried, with reasons. A case that is neither tried nor
//! listed there fails here.

use std::collections::BTreeMap;

use serde_json::Value;
use system_tests::{dunlin_run, dunlin_run_vms, measuring_vm, vm};

const EVERYTHING: &str = "experiments=hv-discovery,hv-abi,hv-flush,hv-ipi,hv-timers,hv-assist";

/// Cases that no VM here can try; the list in docs/hyperv.md gives the reasons.
const LEFT_OUT: [&str; 9] = ["B21", "C21", "C35", "C36", "C38", "D12", "D14", "D15", "D16"];

/// Cases by name, with their outcome.
fn cases(output: &str) -> BTreeMap<String, String> {
    let word = |line: &str, key: &str| {
        line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)).unwrap_or_default().to_string()
    };
    let lines = output.lines().filter(|line| line.starts_with("case "));
    lines.map(|line| (word(line, "name="), line.split("outcome=").nth(1).map_or(String::new(), outcome))).collect()
}

fn outcome(rest: &str) -> String {
    rest.split_ascii_whitespace().next().unwrap_or_default().to_string()
}

/// Runs the cases in a VM with these vCPUs and further keys; none of them fails.
fn conforms(vcpus: u32, keys: &str) -> BTreeMap<String, String> {
    let toml = format!("{}{keys}\n", measuring_vm("conformance", vcpus, EVERYTHING));
    let json = dunlin_run_vms(300, &toml, &["--json"]).json();
    let output = vm(&json, "conformance")["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or_default();
    let failed = || output.lines().filter(|line| line.contains("outcome=fail")).collect::<Vec<_>>();
    assert!(last.starts_with("done experiments=6 failures=0"), "{last}: {:#?}", failed());
    cases(output)
}

#[test]
fn conformance_cases_pass_and_each_one_is_tried_or_listed() {
    let mut outcomes = conforms(4, "");
    // Where flushing is withheld, calling it is denied; with more than 64 vCPUs there are sets of more than one bank.
    for more in [conforms(3, "hyperv = \"flush\"\nflush = \"ipi\""), conforms(66, "")] {
        for (name, outcome) in more {
            if outcome == "pass" {
                outcomes.insert(name, outcome);
            }
        }
    }
    let passed = outcomes.values().filter(|outcome| *outcome == "pass").count();
    assert!(passed >= 127, "only {passed} cases: {outcomes:?}");
    let untried: Vec<_> =
        outcomes.iter().filter(|(_, outcome)| *outcome != "pass").map(|(name, _)| name.as_str()).collect();
    assert_eq!(untried, LEFT_OUT, "{outcomes:?}");
}

#[test]
fn only_a_parent_may_create_vms() {
    let vms = format!(
        "{}role = \"parent\"\n{}",
        measuring_vm("parent", 2, "experiments=hv-parent"),
        measuring_vm("guest", 2, "experiments=hv-parent"),
    );
    let json = dunlin_run_vms(120, &vms, &["--json"]).json();
    for (name, least) in [("parent", 25), ("guest", 1)] {
        let output = vm(&json, name)["output"].as_str().unwrap_or_default();
        assert!(output.contains("done experiments=1 failures=0"), "{output}");
        let passed = cases(output).values().filter(|outcome| *outcome == "pass").count();
        assert!(passed >= least, "{name} passed {passed}: {output}");
    }
}

#[test]
fn parent_reads_and_writes_a_childs_vcpu_and_they_signal_each_other() {
    let vms = format!("{}role = \"parent\"\n", measuring_vm("parent", 2, "experiments=hv-child"));
    let json = dunlin_run_vms(120, &vms, &["--json"]).json();
    let output = vm(&json, "parent")["output"].as_str().unwrap_or_default();
    assert!(output.contains("done experiments=1 failures=0"), "{output}");
    let passed = cases(output).values().filter(|outcome| *outcome == "pass").count();
    assert!(passed >= 67, "{passed} passed: {output}");
}

#[test]
fn guest_that_is_offered_nothing_finds_nothing() {
    let toml = format!("{}hyperv = \"off\"\n", measuring_vm("bare", 2, EVERYTHING));
    let json = dunlin_run_vms(120, &toml, &["--json"]).json();
    let output = vm(&json, "bare")["output"].as_str().unwrap_or_default();
    assert_eq!(output.matches("unsupported experiment=hv-").count(), 6, "{output}");
}

/// Boots Debian with these arguments, and returns its kernel's messages about the interface and its clock, and its
/// warnings.
fn linux(vcpus: &str) -> String {
    let script = "dmesg | grep -E 'Hyper-V|unchecked|WARNING|BUG|clocksource|unstable'; \
                  cat /sys/devices/system/clocksource/clocksource0/current_clocksource; grep TLB: /proc/interrupts";
    dunlin_run(240, &["--vcpus", vcpus, "--memory", "1G", "--exec", script]).expect_status(0).stdout
}

#[test]
fn linux_flushes_and_sends_ipis_by_hypercall_and_keeps_its_tsc() {
    for vcpus in ["4", "66"] {
        let log = linux(vcpus);
        assert!(log.contains("Hyper-V: Using hypercall for remote TLB flush"), "{log}");
        assert!(log.contains("Hyper-V: Using IPI hypercalls"), "{log}");
        assert!(log.lines().any(|line| line.trim() == "tsc"), "{log}");
        for complaint in ["unchecked MSR", "WARNING", "BUG", "unstable"] {
            assert!(!log.contains(complaint), "{log}");
        }
        // Its own shootdowns, by CPU: not one.
        let shootdowns = log.lines().find(|line| line.trim_start().starts_with("TLB:")).unwrap_or_default();
        let counts = shootdowns.split_ascii_whitespace().map_while(|word| match word {
            "TLB:" => Some(0),
            word => word.parse::<u64>().ok(),
        });
        assert_eq!(counts.sum::<u64>(), 0, "{shootdowns}");
    }
}

#[test]
fn no_translation_is_used_after_its_flush_with_few_tags_and_three_vms() {
    let cmdline = "experiments=stale,stale-selftest iterations=4000";
    let vms: Vec<_> = [("a", 4, "epoch"), ("b", 3, "epoch"), ("c", 2, "generation")]
        .into_iter()
        .map(|(name, vcpus, tags)| format!("{}tag_limit = 2\ntags = \"{tags}\"\n", measuring_vm(name, vcpus, cmdline)))
        .collect();
    let json = dunlin_run_vms(240, &vms.join("\n"), &["--json"]).json();
    for name in ["a", "b", "c"] {
        let output = vm(&json, name)["output"].as_str().unwrap_or_default();
        let record = output.lines().find(|line| line.starts_with("record experiment=stale ")).unwrap_or_default();
        assert!(record.contains(" stale_reads=0 "), "{output}");
        // The detector works: without a flush it finds stale reads.
        assert!(output.contains("noticed=true"), "{output}");
    }
}

#[test]
fn several_pcpus_are_kicked_with_one_command() {
    // As many pCPUs as one command reaches without x2APIC, and more.
    for pcpus in ["4", "9"] {
        let toml = measuring_vm("a", 5, "experiments=stale iterations=5000 approach=hypercall");
        // Only a vCPU that runs is kicked, and on a busy computer few run at the same time.
        let mut kicks = 0;
        for _ in 0..5 {
            let json = dunlin_run_vms(240, &toml, &["--json", "--pcpus", pcpus]).json();
            let output = vm(&json, "a")["output"].as_str().unwrap_or_default();
            assert!(output.contains(" stale_reads=0 "), "{output}");
            kicks += of(&json, "a")["flush_kicks"].as_u64().expect("kicks are counted");
            if kicks > 20 {
                break;
            }
        }
        assert!(kicks > 20, "{kicks} kicks with {pcpus} pCPUs");
    }
}

#[test]
fn more_tags_than_the_machine_has_are_refused_with_the_figures() {
    let vms = format!(
        "{}tag_limit = 32000\n{}tag_limit = 1000\ntags = \"generation\"\n",
        measuring_vm("a", 1, ""),
        measuring_vm("b", 1, "")
    );
    let run = dunlin_run_vms(60, &vms, &[]).expect_status(1);
    assert!(run.stderr.contains("ask for 33000 TLB tags"), "{run:#?}");
}

#[test]
fn steady_vcpus_with_a_tag_each_do_not_flush_whatever_a_neighbour_does() {
    let vms = format!(
        "{}\n{}",
        measuring_vm("steady", 2, "experiments=cpuid iterations=60000"),
        measuring_vm("storm", 2, "experiments=flush-storm seconds=15")
    );
    // The storm continues while the other VM counts; both end with the run.
    let json = dunlin_run_vms(300, &vms, &["--json"]).json();
    let counter = |name: &str, counter: &str| -> u64 { of(&json, name)[counter].as_u64().unwrap_or(u64::MAX) };
    assert!(counter("steady", "entries") > 500_000, "{json:#}");
    // Each vCPU flushes only when it moves to another pCPU, and when its own kernel turns paging or global pages on or
    // off.
    let (flushes, moves) = (counter("steady", "tlb_flushes"), counter("steady", "migrations"));
    let of_its_own = of(&json, "steady")["exits"]["cr_exits"].as_u64().expect("exits are counted by reason");
    assert!(flushes <= moves + of_its_own, "{flushes} flushes, {moves} moves, {of_its_own} of its own: {json:#}");
    assert_eq!(counter("steady", "tlb_flushes_all"), 0);
    assert!(counter("storm", "flush_calls") > 100, "{json:#}");
}

/// The counters of a VM.
fn of<'a>(json: &'a Value, name: &str) -> &'a Value {
    &vm(json, name)["counters"]
}

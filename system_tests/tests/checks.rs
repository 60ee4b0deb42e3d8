//! The measuring guest's own checks, with more vCPUs than pCPUs.

use serde_json::Value;
use system_tests::{Machine, each_machine, measuring_vm, vm};

/// Returns the run's report.
fn clean(machine: Machine, toml: &str) -> Value {
    let run = machine.run_vms(180, toml, &["--json"]).expect_status(0);
    let json = run.json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or_default();
    assert!(last.starts_with("done ") && last.ends_with("failures=0"), "{output}");
    json
}

each_machine! {
    fn default_experiments_are_clean(machine) {
        clean(machine, &measuring_vm("measuring", 4, ""));
    }

    fn mixed_load_on_eight_vcpus_is_clean(machine) {
        let json = clean(machine, &measuring_vm("measuring", 8, "experiments=mixed seconds=10"));
        // An interrupt that has to wait goes in without an exit. With an exit for each, these are every sixth.
        let counters = &vm(&json, "measuring")["counters"];
        let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no number in {counters}"));
        if machine == Machine::X86_64 {
            let windows = count(&counters["exits"]["irq_window_exits"]);
            assert!(windows * 50 <= count(&counters["irq_injections"]), "{counters}");
        }
    }

    fn no_cpu_reads_through_a_translation_that_was_flushed(machine) {
        clean(machine, &measuring_vm("measuring", 4, "experiments=stale iterations=100000 seconds=8"));
    }

    fn vector_registers_are_kept_while_their_vcpu_sleeps_and_moves(machine) {
        clean(machine, &measuring_vm("measuring", 4, "experiments=idle-vectors"));
    }

    fn unknown_experiment_is_named_with_the_nearest(machine) {
        let toml = measuring_vm("measuring", 1, "experiments=mixxed");
        let json = machine.run_vms(60, &toml, &["--json"]).json();
        let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
        assert!(output.contains("error about=unknown-experiment name=\"mixxed\" nearest=mixed"), "{output}");
        assert!(output.contains("done experiments=1 failures=1"), "{output}");
    }
}

#[test]
fn code_that_another_vcpu_has_patched_is_executed_as_it_is_in_memory() {
    clean(Machine::X86_64, &measuring_vm("measuring", 2, "experiments=patched-code seconds=3 stall=5"));
}

#[test]
fn default_experiments_are_clean_in_xapic_mode() {
    clean(Machine::X86_64, &format!("{}apic = \"xapic\"\n", measuring_vm("measuring", 4, "")));
}

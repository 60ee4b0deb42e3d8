//! One clock for all vCPUs, wherever they run.
//!
//! QEMU's counter is the same on all its CPUs and cannot be written, so the hypervisor is told to take it for apart
//! (`selftest=tsc-skew`): each pCPU begins with a clock of its own, and has to find its way back by comparing.

use system_tests::{Run, dunlin_run_vms, measuring_vm, vm};

/// More vCPUs than pCPUs, so that they move.
fn run(experiments: &str, more: &[&str]) -> Run {
    let toml = measuring_vm("measuring", 4, &format!("experiments={experiments} seconds=2"));
    let arguments = [&["--json", "--log"][..], more].concat();
    let run = dunlin_run_vms(120, &toml, &arguments).expect_status(0);
    let json = run.json();
    let measuring = vm(&json, "measuring");
    let output = measuring["output"].as_str().unwrap_or_default();
    assert!(output.trim_end().ends_with("failures=0"), "{output}");
    assert!(measuring["counters"]["migrations"].as_u64().is_some_and(|count| count > 0), "{measuring:#}");
    run
}

#[test]
fn clocks_that_agree_are_left_alone() {
    let log = run("one-clock", &[]).stderr;
    assert!(log.contains("TSC ") && !log.contains("TSC of "), "{log}");
}

#[test]
fn clocks_that_are_apart_are_set_right_and_guests_see_one() {
    let log = run("one-clock,mixed", &["--qemu-arg=-append", "--qemu-arg=selftest=tsc-skew"]).stderr;
    for pcpu in ["cpu1", "cpu2"] {
        let told =
            |line: &str| line.contains(&format!("TSC of {pcpu} is ")) && line.contains("behind the first pCPU's");
        assert!(log.lines().any(told), "{log}");
    }
}

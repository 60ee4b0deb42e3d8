//! Guests that misbehave, each beside one that must not notice.
//!
//! Either the guest's own record says that it got the architectural answer, or its VM ends with one line that says why.
//! In both cases the neighbour finishes its checks without a failure, and the hypervisor does not panic.

use system_tests::{Run, dunlin_run_vms, measuring_vm, vm};

/// The neighbour: all kinds of load on 2 vCPUs, with its own checks, for two seconds.
const NEIGHBOUR: &str = "experiments=mixed seconds=2";

fn beside_a_neighbour(cmdline: &str) -> Run {
    let toml = format!("{}\n{}", measuring_vm("hostile", 2, cmdline), measuring_vm("neighbour", 2, NEIGHBOUR));
    let run = dunlin_run_vms(120, &toml, &["--json"]);
    let json = run.json();
    assert_eq!(vm(&json, "neighbour")["stop_reason"], "power off", "{json:#}");
    let output = vm(&json, "neighbour")["output"].as_str().unwrap_or_default();
    assert!(output.contains("done experiments=1 failures=0"), "the neighbour noticed: {json:#}");
    run
}

/// The guest goes on, and its record says that each answer was the architectural one.
fn gets_the_right_answers(cmdline: &str) {
    let run = beside_a_neighbour(cmdline);
    let json = run.json();
    let hostile = vm(&json, "hostile");
    let output = hostile["output"].as_str().unwrap_or_default();
    assert!(output.contains("done experiments=1 failures=0"), "{json:#}");
    assert_eq!(hostile["stop_reason"], "power off");
}

/// The guest's VM ends for this reason, with a line that names the vCPU.
fn ends_its_own_vm(cmdline: &str, reason: &str) {
    let run = beside_a_neighbour(cmdline);
    let json = run.json();
    let hostile = vm(&json, "hostile");
    assert_eq!(hostile["stop_reason"], reason, "{json:#}");
    assert!(hostile["stop_detail"].as_str().is_some_and(|detail| detail.contains("vCPU")), "{json:#}");
}

#[test]
fn triple_fault_of_a_second_vcpu_ends_its_vm() {
    ends_its_own_vm("experiments=ap-triple-fault", "triple fault");
}

#[test]
fn reset_ends_the_vm_and_says_so() {
    ends_its_own_vm("experiments=reset", "reset");
}

#[test]
fn accesses_to_nowhere_find_an_empty_bus() {
    gets_the_right_answers("experiments=write-nowhere");
}

#[test]
fn reserved_registers_fault() {
    gets_the_right_answers("experiments=reserved-msr");
}

#[test]
fn svm_is_not_there_for_a_guest() {
    gets_the_right_answers("experiments=svm-instructions");
}

#[test]
fn bad_xcr0_faults() {
    gets_the_right_answers("experiments=xsetbv-bad");
}

#[test]
fn loop_with_interrupts_off_costs_nobody_else() {
    gets_the_right_answers("experiments=spin-cli seconds=3");
}

#[test]
fn vcpu_that_halts_for_ever_leaves_the_others_running() {
    gets_the_right_answers("experiments=halt-cli");
}

#[test]
fn init_and_startup_bring_a_vcpu_back() {
    gets_the_right_answers("experiments=init-self-other");
}

#[test]
fn fault_within_delivery_is_delivered() {
    gets_the_right_answers("experiments=nested-event");
}

#[test]
fn timer_storm_leaves_time_for_the_guest() {
    gets_the_right_answers("experiments=lapic-timer-storm");
}

#[test]
fn random_register_accesses_harm_nobody() {
    gets_the_right_answers("experiments=msr-fuzz");
}

#[test]
fn random_port_accesses_harm_nobody() {
    gets_the_right_answers("experiments=port-fuzz");
}

#[test]
fn random_device_accesses_harm_nobody() {
    gets_the_right_answers("experiments=mmio-fuzz");
}

#[test]
fn random_hypercalls_harm_nobody() {
    gets_the_right_answers("experiments=hypercall-fuzz");
}

//! Guests that misbehave, each next to one that must not notice.
//!
//! Either the guest's own record says that it got the architecture's result, or its VM ends with one line that says
//! why. In both cases the neighbour finishes its checks without a failure, and the hypervisor does not panic.

use system_tests::{Machine, Run, each_machine, measuring_vm, vm};

/// The neighbour: all kinds of load on 2 vCPUs, with its own checks, for two seconds.
const NEIGHBOUR: &str = "experiments=mixed seconds=2";

fn beside_a_neighbour(machine: Machine, cmdline: &str) -> Run {
    let toml = format!("{}\n{}", measuring_vm("hostile", 2, cmdline), measuring_vm("neighbour", 2, NEIGHBOUR));
    let run = machine.run_vms(120, &toml, &["--json"]);
    let json = run.json();
    assert_eq!(vm(&json, "neighbour")["stop_reason"], "power off", "{json:#}");
    let output = vm(&json, "neighbour")["output"].as_str().unwrap_or_default();
    assert!(output.contains("done experiments=1 failures=0"), "the neighbour noticed: {json:#}");
    run
}

/// The guest continues, and its record says that each result was the architecture's.
fn gets_the_right_answers(machine: Machine, cmdline: &str) {
    let run = beside_a_neighbour(machine, cmdline);
    let json = run.json();
    let hostile = vm(&json, "hostile");
    let output = hostile["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or_default();
    assert!(last.starts_with("done ") && last.ends_with("failures=0"), "{json:#}");
    assert_eq!(hostile["stop_reason"], "power off");
}

/// The guest's VM ends for this reason, with a line that names the vCPU.
fn ends_its_own_vm(machine: Machine, cmdline: &str, reason: &str) {
    let run = beside_a_neighbour(machine, cmdline);
    let json = run.json();
    let hostile = vm(&json, "hostile");
    assert_eq!(hostile["stop_reason"], reason, "{json:#}");
    assert!(hostile["stop_detail"].as_str().is_some_and(|detail| detail.contains("vCPU")), "{json:#}");
}

each_machine! {
    fn reset_ends_the_vm_and_says_so(machine) {
        ends_its_own_vm(machine, "experiments=reset", "reset");
    }

    fn accesses_to_nowhere_harm_nobody(machine) {
        gets_the_right_answers(machine, "experiments=write-nowhere");
    }

    fn loop_with_interrupts_off_costs_nobody_else(machine) {
        gets_the_right_answers(machine, "experiments=spin-cli seconds=3");
    }

    fn vcpu_that_halts_for_ever_leaves_the_others_running(machine) {
        gets_the_right_answers(machine, "experiments=halt-cli");
    }

    fn timer_storm_leaves_time_for_the_guest(machine) {
        gets_the_right_answers(machine, "experiments=timer-storm");
    }

    fn random_device_accesses_harm_nobody(machine) {
        gets_the_right_answers(machine, "experiments=mmio-fuzz");
    }

    fn random_calls_harm_nobody(machine) {
        let experiment = match machine {
            Machine::X86_64 => "hypercall-fuzz",
            Machine::Aarch64 => "call-fuzz",
        };
        gets_the_right_answers(machine, &format!("experiments={experiment}"));
    }

    fn random_register_accesses_harm_nobody(machine) {
        let experiment = match machine {
            Machine::X86_64 => "msr-fuzz",
            Machine::Aarch64 => "sysreg-sweep",
        };
        gets_the_right_answers(machine, &format!("experiments={experiment}"));
    }

    fn vcpu_goes_and_comes_back(machine) {
        let experiment = match machine {
            Machine::X86_64 => "init-self-other",
            Machine::Aarch64 => "off-and-on",
        };
        gets_the_right_answers(machine, &format!("experiments={experiment}"));
    }
}

#[test]
fn triple_fault_of_a_second_vcpu_ends_its_vm() {
    ends_its_own_vm(Machine::X86_64, "experiments=ap-triple-fault", "triple fault");
}

/// QEMU's CPU accepts a CR3 for which a processor raises #GP, and rejects the next entry.
#[test]
fn state_that_the_cpu_refuses_to_enter_ends_its_own_vm() {
    ends_its_own_vm(Machine::X86_64, "experiments=cr3-beyond-width", "unsupported");
}

#[test]
fn second_vcpu_turns_its_own_vm_off_alone() {
    ends_its_own_vm(Machine::Aarch64, "experiments=off-by-another", "power off");
}

/// Of x86-64 alone.
#[test]
fn reserved_registers_fault() {
    gets_the_right_answers(Machine::X86_64, "experiments=reserved-msr");
}

#[test]
fn svm_is_not_there_for_a_guest() {
    gets_the_right_answers(Machine::X86_64, "experiments=svm-instructions");
}

/// The writes include everything that VMRUN would reject, next to a neighbour that must not notice.
#[test]
fn bad_control_registers_harm_nobody() {
    let json = beside_a_neighbour(Machine::X86_64, "experiments=control-registers").json();
    assert_eq!(vm(&json, "hostile")["stop_reason"], "power off", "{json:#}");
}

#[test]
fn bad_xcr0_faults() {
    gets_the_right_answers(Machine::X86_64, "experiments=xsetbv-bad");
}

#[test]
fn fault_within_delivery_is_delivered() {
    gets_the_right_answers(Machine::X86_64, "experiments=nested-event");
}

#[test]
fn single_steps_over_intercepted_instructions_trap_once() {
    gets_the_right_answers(Machine::X86_64, "experiments=step-exits");
}

#[test]
fn random_port_accesses_harm_nobody() {
    gets_the_right_answers(Machine::X86_64, "experiments=port-fuzz");
}

#[test]
fn pci_has_one_answer_by_both_doors_whatever_is_written_there() {
    let run = beside_a_neighbour(Machine::X86_64, "experiments=pci-doors,pci-fuzz");
    let json = run.json();
    let output = vm(&json, "hostile")["output"].as_str().unwrap_or_default();
    // Once before the random writes, and once after them.
    let bridges = output.matches("record experiment=pci-doors function=00.0 id=1b36:0008 class=060000").count();
    assert!(bridges == 2 && output.contains("record experiment=pci-fuzz accesses=24000 faults=0"), "{output}");
    assert!(output.contains("done experiments=2 failures=0"), "{output}");
}

/// Of AArch64 alone.
#[test]
fn accesses_that_say_too_little_are_aborted() {
    gets_the_right_answers(Machine::Aarch64, "experiments=mmio-forms,fetch-nowhere,bad-tables");
}

#[test]
fn debug_registers_and_programs_at_el0_get_their_exceptions() {
    gets_the_right_answers(Machine::Aarch64, "experiments=debug,el0,timer-extremes");
}

/// Alone, so that the CPU sleeps, and next to others on the same pCPUs.
#[test]
fn physical_timer_is_as_the_architecture_has_it() {
    gets_the_right_answers(Machine::Aarch64, "experiments=physical-timer");
    let toml = measuring_vm("measuring", 1, "experiments=physical-timer");
    let json = Machine::Aarch64.run_vms(60, &toml, &["--json"]).expect_status(0).json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    assert!(output.contains("record experiment=physical-timer passed=15 failed=0"), "{output}");
}

/// QEMU 7.2 has no processor with FEAT_WFxT: there only unit tests cover its decoding. The log says which case it was.
#[test]
fn waits_with_a_time_end_at_it() {
    let toml = measuring_vm("measuring", 1, "experiments=timed-waits");
    let json = Machine::Aarch64.run_vms(60, &toml, &["--json"]).expect_status(0).json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    let is_there = !output.contains("unsupported experiment=timed-waits");
    eprintln!("WFIT and WFET: {}", if is_there { "tried" } else { "not on this QEMU, not tried" });
    assert!(!is_there || output.contains("record experiment=timed-waits passed=6"), "{output}");
    assert!(output.contains("done experiments=1 failures=0"), "{output}");
}

#[test]
fn random_use_of_the_interrupt_controller_harms_nobody() {
    gets_the_right_answers(Machine::Aarch64, "experiments=icc-fuzz,mixed seconds=2");
}

#[test]
fn vcpu_without_tables_or_vectors_leaves_the_others_running() {
    for experiment in ["lost-tables", "lost-vectors", "illegal-return"] {
        gets_the_right_answers(Machine::Aarch64, &format!("experiments={experiment} seconds=1"));
    }
}

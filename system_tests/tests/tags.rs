//! VMs side by side with the same virtual and physical addresses, under every scheme of tags, with enough tags and with
//! too few. No VM ever sees another VM's data, nor what it has flushed itself. The same for extended state.

use system_tests::{Machine, each_machine, measuring_vm};

/// Three VMs, each with contents of its own, on two pCPUs.
fn keep_to_themselves(machine: Machine, experiments: &str, keys: &str) {
    let vms: String = (1..=3)
        .map(|seed| {
            let cmdline = format!("experiments={experiments} seconds=2 seed={seed}");
            format!("{}{keys}\n", measuring_vm(&format!("vm-{seed}"), 2, &cmdline))
        })
        .collect();
    let json = machine.run_vms(120, &vms, &["--json"]).expect_status(0).json();
    for vm in json["vms"].as_array().expect("there are VMs") {
        let output = vm["output"].as_str().unwrap_or_default();
        let last = output.lines().last().unwrap_or_default();
        assert!(last.starts_with("done ") && last.ends_with("failures=0"), "{keys}: {output}");
        assert!(vm["counters"]["migrations"].as_u64().is_some_and(|count| count > 0), "{keys}: {vm:#}");
    }
}

each_machine! {
    fn vms_never_see_the_data_of_others(machine) {
        for keys in ["tags = \"epoch\"", "tags = \"epoch\"\ntag_limit = 2", "tags = \"generation\"\ntag_limit = 2"] {
            keep_to_themselves(machine, "own-data", keys);
        }
        keep_to_themselves(machine, "own-data", "tags = \"flush-always\"");
    }
}

#[test]
fn vcpus_of_a_vm_never_see_the_tables_of_their_siblings() {
    for keys in ["tags = \"epoch\"", "tags = \"generation\"\ntag_limit = 2"] {
        keep_to_themselves(Machine::Aarch64, "private-pages", keys);
    }
}

/// QEMU 7.2 lets guests reach MPX' bound registers, which they are not offered.
#[test]
fn vms_never_see_the_extended_state_of_others() {
    keep_to_themselves(Machine::X86_64, "hidden-state", "");
}

/// On QEMU 7.2, EL1 can access two registers that the ID registers hide, and that QEMU does not trap: DISR_EL1 and
/// TPIDR2_EL0.
#[test]
fn vms_never_see_what_others_leave_in_system_registers() {
    keep_to_themselves(Machine::Aarch64, "hidden-registers", "");
}

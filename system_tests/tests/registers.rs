//! Model-specific registers and the modes of the local APIC, as the measuring guest sees them on x86-64.

use std::collections::BTreeSet;

use system_tests::{Machine, dunlin_run_vms, measuring_vm, vm};

/// Registers that a guest writes without an exit, and in which QEMU's CPU accepts invalid addresses.
const QEMU_TAKES_ANY: [&str; 5] = ["lstar", "cstar", "fs-base", "gs-base", "kernel-gs-base"];

const MODES: [&str; 2] = ["x2apic", "xapic"];

/// Output of experiments in a VM, none of which failed.
fn output(apic: &str, experiments: &str) -> String {
    let toml = format!("{}apic = \"{apic}\"\n", measuring_vm("measuring", 2, &format!("experiments={experiments}")));
    let json = dunlin_run_vms(120, &toml, &["--json"]).json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or_default();
    assert_eq!(last, "done experiments=1 failures=0", "{apic}: {output}");
    output.to_string()
}

/// The lines on registers of the processor's own that are not as the manual has them.
fn differences(output: &str) -> BTreeSet<&str> {
    output.lines().map(str::trim_end).filter(|line| line.starts_with("differs ")).collect()
}

/// A figure of the record that ends the experiment.
fn figure(output: &str, name: &str) -> u64 {
    let key = format!("{name}=");
    let record = output.lines().find(|line| line.starts_with("record experiment=msr-values")).unwrap_or_default();
    let figure = record.split_ascii_whitespace().find_map(|word| word.strip_prefix(&key));
    figure.and_then(|figure| figure.parse().ok()).unwrap_or_else(|| panic!("no {name}: {output}"))
}

#[test]
fn msrs_take_what_is_legal_and_refuse_all_else() {
    let alone = Machine::X86_64.plain_guest("experiments=msr-values").stdout;
    for apic in MODES {
        let output = output(apic, "msr-values");
        assert!(figure(&output, "taken") > 1000 && figure(&output, "refused") > 1000, "{output}");
        // Differences of the processor itself, not of the hypervisor: it behaves so alone as well.
        let differences = differences(&output);
        assert_eq!(differences, self::differences(&alone), "{apic}");
        for line in differences {
            let is_known = QEMU_TAKES_ANY.iter().any(|name| line.contains(&format!("register={name} ")));
            assert!(is_known && line.contains("expected=gp"), "{line}");
        }
    }
}

#[test]
fn local_apic_goes_through_all_its_modes_and_cpuid_follows() {
    for apic in MODES {
        let output = output(apic, "apic-modes");
        let passed = output.matches("outcome=pass").count();
        assert!(passed >= if apic == "x2apic" { 22 } else { 16 }, "{apic}: {passed} cases\n{output}");
    }
}

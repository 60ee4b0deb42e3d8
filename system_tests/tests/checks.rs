//! The measuring guest's own checks, with more vCPUs than pCPUs.

use system_tests::{dunlin_run_vms, measuring_vm, vm};

fn clean(toml: &str) {
    let run = dunlin_run_vms(180, toml, &["--json"]).expect_status(0);
    let json = run.json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or_default();
    assert!(last.starts_with("done ") && last.ends_with("failures=0"), "{output}");
}

#[test]
fn default_experiments_are_clean_in_x2apic_mode() {
    clean(&measuring_vm("measuring", 4, ""));
}

#[test]
fn default_experiments_are_clean_in_xapic_mode() {
    clean(&format!("{}apic = \"xapic\"\n", measuring_vm("measuring", 4, "")));
}

#[test]
fn mixed_load_on_eight_vcpus_is_clean() {
    clean(&measuring_vm("measuring", 8, "experiments=mixed seconds=10"));
}

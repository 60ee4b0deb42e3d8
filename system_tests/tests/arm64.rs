//! The other architecture: unmodified Debian for arm64 on the hypervisor at EL2.

use system_tests::{dunlin_run, vm};

/// Boots Debian's cloud kernel on a processor of this model; the tool's script looks around and turns the machine off.
fn boot(vcpus: u32, pcpus: u32, more: &[&str]) {
    let (vcpus, pcpus) = (vcpus.to_string(), pcpus.to_string());
    let mut arguments = vec!["--arch", "aarch64", "--vcpus", &vcpus, "--pcpus", &pcpus, "--json"];
    arguments.extend(more);
    let json = dunlin_run(240, &arguments).expect_status(0).json();
    let vm = vm(&json, "default");
    assert_eq!(vm["cpus_online"].to_string(), vcpus, "{json:#}");
    assert!(vm["kernel"].as_str().is_some_and(|kernel| kernel.contains("arm64")), "{json:#}");
    assert_eq!(vm["exit_status"], 0, "{json:#}");
    assert_eq!(vm["counters"]["entries"], vm["counters"]["exits_total"], "{json:#}");
}

#[test]
fn debian_boots_on_one_vcpu() {
    boot(1, 1, &[]);
}

#[test]
fn debian_boots_on_four_vcpus_of_two_pcpus() {
    boot(4, 2, &[]);
}

//! Unmodified Debian kernels, booted by `dunlin run`.

use serde_json::Value;
use system_tests::{Machine, debian_vm, dunlin_run, dunlin_run_vms, each_machine, measuring_vm, vm};

#[test]
fn command_in_the_guest_passes_its_output_and_its_status() {
    let run = dunlin_run(120, &["--exec", "echo one two; exit 7"]).expect_status(7);
    assert_eq!(run.stdout, "one two\n");
}

#[test]
fn hundred_kilobytes_of_output_arrive_whole() {
    let run = dunlin_run(180, &["--exec", "seq 1 17000"]).expect_status(0);
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 17000);
    assert!(lines.iter().enumerate().all(|(at, line)| line.parse() == Ok(at + 1)));
}

each_machine! {
    fn one_vcpu_reaches_user_space_on_one_pcpu(machine) {
        let json = machine.run(240, &["--vcpus", "1", "--pcpus", "1", "--json"]).expect_status(0).json();
        boots(&json, 1);
    }

    fn default_vm_reaches_user_space_with_four_vcpus_on_two_pcpus_and_tells_its_kernel(machine) {
        let json = machine.run(240, &["--json"]).expect_status(0).json();
        boots(&json, 4);
        let vm = vm(&json, "default");
        let kernel = vm["kernel"].as_str().unwrap_or_default();
        let wanted = if machine == Machine::Aarch64 { "cloud-arm64" } else { "cloud-amd64" };
        assert!(kernel.contains(wanted), "{json:#}");
        assert_eq!(vm["stop_reason"], "power off");
        assert!(vm["counters"]["entries"].as_u64().is_some_and(|entries| entries > 1000), "{json:#}");
    }
}

#[test]
fn run_that_its_time_limit_cuts_off_tells_what_its_vm_has_done_so_far() {
    let json = dunlin_run(6, &["--json", "--exec", "sleep 1000"]).expect_status(124).json();
    let vm = vm(&json, "default");
    assert!(vm["counters"]["entries"].as_u64().is_some_and(|entries| entries > 0), "{json:#}");
    assert_eq!(vm["vcpu_counters"].as_array().map(Vec::len), Some(4), "{json:#}");
}

/// Our script has run and powered the machine off, and an exit followed each entry.
fn boots(json: &Value, vcpus: u32) {
    let vm = vm(json, "default");
    assert_eq!(vm["cpus_online"], vcpus, "{json:#}");
    assert_eq!(vm["exit_status"], 0, "{json:#}");
    assert_eq!(vm["counters"]["entries"], vm["counters"]["exits_total"], "{json:#}");
}

#[test]
fn two_vcpus_reach_user_space() {
    reaches_user_space(2, &[]);
}

#[test]
fn sixteen_vcpus_on_two_pcpus_reach_user_space() {
    reaches_user_space(16, &["--memory", "1G"]);
}

#[test]
fn sixty_four_vcpus_on_two_pcpus_reach_user_space() {
    reaches_user_space(64, &["--memory", "1G"]);
}

#[test]
fn four_vcpus_share_one_pcpu() {
    reaches_user_space(4, &["--pcpus", "1"]);
}

#[test]
fn four_vcpus_have_a_pcpu_each() {
    reaches_user_space(4, &["--pcpus", "4"]);
}

#[test]
fn four_vcpus_have_eight_pcpus_to_choose_from() {
    reaches_user_space(4, &["--pcpus", "8"]);
}

#[test]
fn full_kernel_reaches_user_space() {
    let run = dunlin_run(180, &["--kernel", "debian", "--exec", "uname -r; nproc"]).expect_status(0);
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert!(lines[0].ends_with("-amd64") && !lines[0].contains("cloud"), "{run:#?}");
    assert_eq!(lines[1], "4");
}

#[test]
fn kernel_without_x2apic_reaches_user_space() {
    let toml = format!("{}apic = \"xapic\"\n", debian_vm("memory-mapped", 4));
    let run = dunlin_run_vms(180, &toml, &["--exec", "grep -c x2apic /proc/cpuinfo; nproc"]).expect_status(0);
    assert_eq!(run.stdout, "0\n4\n");
}

#[test]
fn neighbour_of_a_triple_fault_finishes_its_script() {
    let toml = format!("{}\n{}", measuring_vm("faulty", 4, "experiments=triple-fault"), debian_vm("steady", 4));
    let run = dunlin_run_vms(180, &toml, &["--json"]);
    let json = run.json();
    assert_eq!(vm(&json, "faulty")["stop_reason"], "triple fault");
    assert!(vm(&json, "faulty")["stop_detail"].as_str().is_some_and(|detail| detail.starts_with("vCPU ")), "{json:#}");
    assert_eq!(vm(&json, "steady")["stop_reason"], "power off");
    assert_eq!(vm(&json, "steady")["cpus_online"], 4);
    assert_eq!(run.status, 1, "a VM that ends by a triple fault is a failed run");
}

fn reaches_user_space(vcpus: u32, more: &[&str]) {
    let count = vcpus.to_string();
    let mut arguments = vec!["--vcpus", &count, "--exec", "nproc"];
    arguments.extend(more);
    let run = dunlin_run(180, &arguments).expect_status(0);
    assert_eq!(run.stdout.trim(), count);
}

//! A VM that has the machine's devices (`devices = "all"`): unmodified Linux drives the PC that QEMU emulates.
//!
//! Debian's kernel has few drivers built in. Disks and networks are tried with a parent's kernel (`parent.rs`).

use std::path::Path;

use serde_json::Value;
use system_tests::monitor::Monitor;
use system_tests::{Host, Run, debian_vm, dunlin_run_vms, tool, until};

/// A Debian with 2 vCPUs that has the devices.
fn owner() -> String {
    format!("{}devices = \"all\"\n", debian_vm("owner", 2))
}

fn run(toml: &str, script: &str) -> Run {
    dunlin_run_vms(120, toml, &["--exec", script])
}

#[test]
fn linux_finds_the_machine_with_its_buses_clocks_and_tables_and_turns_it_off() {
    let script = "cat /proc/iomem; ls /sys/bus/pci/devices /sys/firmware/acpi/tables; cat /proc/interrupts; nproc; \
                  cat /sys/class/rtc/rtc0/date; for n in 1 2 3; do cat /sys/bus/pci/devices/*/class; done | sort -u";
    let said = run(&owner(), script).expect_status(0).stdout;
    for there in [
        // RAM of the VM, then RAM that is not its own.
        "System RAM",
        // The chipset's disk controller, the firmware's tables, the counter of the chipset.
        "0000:00:1f.2",
        "MCFG",
        "fed00000-fed003ff : HPET",
        "b0000000-bfffffff",
        // The clock's interrupt comes over the I/O APIC.
        "rtc0",
        "20",
    ] {
        assert!(said.contains(there), "no {there}: {said}");
    }
    // The control port's console (a communication controller) is the hypervisor's.
    assert!(!said.contains("0x078000"), "{said}");
    // Its RAM begins where the machine's does, and the hypervisor's own is not in it.
    let ram: Vec<_> = said.lines().filter(|line| line.ends_with(": System RAM")).collect();
    assert!(ram[0].starts_with("00001000-0009"), "{ram:?}");
    assert!(ram.iter().skip(1).all(|line| !line.starts_with("001") && !line.starts_with("002")), "{ram:?}");
}

#[test]
fn memory_below_4_gib_comes_first_and_the_rest_is_above() {
    // QEMU has 2 GiB below. The kernel must be there, and so must what old devices use.
    let toml = format!("memory = \"6G\"\n\n{}", owner().replace("400M", "3G"));
    let said = run(&toml, "grep 'System RAM' /proc/iomem; free -m").expect_status(0).stdout;
    let ram = |start: u64, end: u64| -> u64 {
        let lines = said.lines().filter_map(|line| line.split_once(" : System RAM")?.0.split_once('-'));
        let ranges = lines.filter_map(|(first, last)| {
            Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()? + 1))
        });
        ranges.map(|(first, last)| last.min(end).saturating_sub(first.max(start))).sum()
    };
    let (low, high) = (ram(0, 1 << 32) >> 20, ram(1 << 32, u64::MAX) >> 20);
    assert!(low > 1500 && low + high > 3000, "{low} and {high} MiB: {said}");
}

#[test]
fn level_triggered_interrupt_arrives_once_for_each_event_of_the_chipset() {
    // A card comes or goes: the chipset raises ACPI's interrupt, which is level-triggered.
    const COUNT: &str = "/sys/firmware/acpi/interrupts/gpe01";
    const EVENTS: u64 = 4;
    let script = format!(
        "echo ready; last=0; while [ $last -lt {EVENTS} ]; do set -- $(cat {COUNT}); \
         if [ $1 != $last ]; then last=$1; echo \"event $last\"; fi; sleep 0.05; done; grep acpi /proc/interrupts"
    );
    let more = |folder: &Path| {
        let [monitor, socket] = Monitor::qemu_arguments(folder);
        let port = "pcie-root-port,id=rp,chassis=1,slot=1".to_string();
        let qemu = [monitor, socket, "-device".to_string(), port].map(|word| format!("--qemu-arg={word}"));
        ["--exec".to_string(), script.clone()].into_iter().chain(qemu).collect()
    };
    let host = Host::start(120, 2, &owner(), more);
    let mut monitor = Monitor::attach(host.folder());
    until("the guest waits", || host.said().contains("ready").then_some(()));
    for event in 1..=EVENTS {
        let comes = event % 2 == 1;
        monitor.say(if comes { "device_add virtio-rng-pci,id=card,bus=rp" } else { "device_del card" });
        until("the guest notices", || host.said().contains(&format!("event {event}")).then_some(()));
    }
    let result = host.finish().expect_status(0).json();
    let said = result["vms"][0]["output"].as_str().expect("said something");
    let line = said.lines().find(|line| line.contains("acpi")).expect("the interrupt is counted");
    let count: u64 = line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum();
    assert!(
        (EVENTS..3 * EVENTS).contains(&count),
        "an interrupt that nobody clears would come thousands of times: {line}"
    );
}

#[test]
fn reset_of_the_machine_and_its_power_off_end_other_vms_too() {
    let toml = format!("{}\n{}", owner(), debian_vm("other", 1));
    for (command, reason) in [("reboot -f", "reset"), ("poweroff -f", "power off")] {
        // Only the machine has the chipset's counter.
        let script = format!("if [ -e /sys/firmware/acpi/tables/HPET ]; then {command}; else sleep 1000; fi");
        let run = run(&toml, &script);
        let all = format!("{}{}", run.stdout, run.stderr);
        assert!(all.contains(&format!("\"owner\": ended, {reason}")), "{command}: {all}");
    }
}

#[test]
fn vm_that_cannot_have_the_devices_is_refused_with_the_reason() {
    let too_many = owner().replace("vcpus = 2", "vcpus = 9");
    let refused = dunlin_run_vms(60, &too_many, &["--exec", "true"]);
    let said = format!("{}{}", refused.stdout, refused.stderr);
    assert!(said.contains("9 vCPUs: with the machine's devices a VM has at most"), "{said}");
    assert_ne!(refused.status, 0);

    let host = Host::start(120, 2, &owner(), |_| vec!["--exec".to_string(), "sleep 60".to_string()]);
    let _ = host.ask("stats");
    let second = host.folder().join("second.toml");
    let vm = debian_vm("second", 1).replace("vcpus", "devices = \"all\"\nvcpus");
    std::fs::write(&second, vm).expect("can be written");
    let pid = host.pid().to_string();
    let create = std::process::Command::new(tool())
        .args(["create", &second.to_string_lossy(), "--host", &pid])
        .output()
        .expect("the tool runs");
    let why = String::from_utf8_lossy(&create.stderr);
    assert!(why.contains("second.toml") && why.contains("devices") && !create.status.success(), "{why}");
    let list: Value = host.ask("list");
    assert!(list.to_string().contains("owner"), "{list}");
    host.end();
}

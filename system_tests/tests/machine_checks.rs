//! Hardware errors, injected by QEMU's monitor: `mce CPU BANK STATUS MCG_STATUS ADDR MISC`.
//!
//! QEMU 7.2 does not support the #MC intercept. While a guest runs, it raises the exception in the guest, or resets the
//! machine if the guest has not set CR4.MCE. So only unit tests (`x86_defs::machine_check`) cover that case.

use abi::exit_code::{HARDWARE_ERROR, qemu_status};
use system_tests::monitor::Monitor;
use system_tests::{Host, Run, measuring_vm, until, vm};

/// An uncorrected error of a data read at a known address; the interrupted code could continue.
const UNCORRECTED: &str = "9 0xbd00000000000135 0x5 0x12345000 0x8c";
/// A corrected error of a TLB.
const CORRECTED: &str = "3 0x9400000000000015 0x0 0xabcd000 0x0";

/// A host that runs a VM for this time, with a readable log.
fn host(seconds: u32, more: &[&str]) -> (Host, Monitor) {
    let vm = measuring_vm("measuring", 2, &format!("experiments=mixed seconds={seconds}"));
    let host = Host::start(60, 2, &vm, |folder| {
        let qemu = Monitor::qemu_arguments(folder);
        let of_qemu = qemu.iter().map(String::as_str).chain(more.iter().copied());
        of_qemu.map(|argument| format!("--qemu-arg={argument}")).chain(["--log".to_string()]).collect()
    });
    let monitor = Monitor::attach(host.folder());
    (host, monitor)
}

fn wait_for(host: &Host, words: &str) {
    until(words, || host.said().contains(words).then_some(()));
}

#[test]
fn uncorrected_error_in_the_hypervisor_ends_the_host_and_is_told() {
    let (host, mut monitor) = host(50, &[]);
    wait_for(&host, "hello ");
    // The first pCPU runs no guests here: it always executes the hypervisor.
    monitor.tell(&format!("mce 0 {UNCORRECTED}"));
    let Run { status, stderr, .. } = host.finish();
    assert_ne!(status, 0, "{stderr}");
    assert!(stderr.contains("the host's hardware failed"), "{} is expected: {stderr}", qemu_status(HARDWARE_ERROR));
    for words in [
        "the hypervisor was interrupted",
        "bank 9: uncorrected error, cache error (data read, data, level 1), at 0x12345000",
    ] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
}

#[test]
fn corrected_errors_harm_nobody() {
    let (host, mut monitor) = host(2, &[]);
    wait_for(&host, "hello ");
    for cpu in 0..2 {
        monitor.say(&format!("mce {cpu} {CORRECTED}"));
    }
    let run = host.finish();
    assert_eq!(run.status, 0, "{run:#?}");
    let json = run.json();
    assert_eq!(vm(&json, "measuring")["stop_reason"], "power off", "{json:#}");
}

#[test]
fn errors_that_were_left_in_banks_are_told_at_the_start() {
    let (host, mut monitor) = host(1, &["-S"]);
    for cpu in 0..2 {
        monitor.say(&format!("mce {cpu} {CORRECTED}"));
    }
    monitor.say("cont");
    let run = host.finish();
    assert_eq!(run.status, 0, "{run:#?}");
    let told = |cpu: &str| {
        run.stderr.lines().any(|line| {
            line.contains(cpu)
                && line.contains(
                    "machine check from before the start: bank 3: corrected error, TLB error (data, level 1), at 0xabcd000",
                )
        })
    };
    assert!(told("cpu0") && told("cpu1"), "{}", run.stderr);
}

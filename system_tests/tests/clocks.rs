//! One clock for all vCPUs, on every pCPU.
//!
//! QEMU's counter is the same on all its CPUs and cannot be written. So `selftest=tsc-skew` makes the hypervisor add an
//! offset: each pCPU begins with another clock, and must correct it by comparison.

use system_tests::{dunlin_run_vms, measuring_vm, vm};

/// More vCPUs than pCPUs, so that they move. Gives the guest's output, and the log.
fn run(experiments: &str, more: &[&str]) -> (String, String) {
    let toml = measuring_vm("measuring", 4, &format!("experiments={experiments} seconds=2"));
    let arguments = [&["--json", "--log"][..], more].concat();
    let run = dunlin_run_vms(120, &toml, &arguments).expect_status(0);
    let json = run.json();
    let measuring = vm(&json, "measuring");
    assert!(measuring["counters"]["migrations"].as_u64().is_some_and(|count| count > 0), "{measuring:#}");
    (measuring["output"].as_str().unwrap_or_default().to_string(), run.stderr)
}

/// The number behind `name` in the text.
fn number(text: &str, name: &str) -> Option<u64> {
    let (_, rest) = text.split_once(name)?;
    rest.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

#[test]
fn clocks_that_agree_are_left_alone() {
    let (output, log) = run("one-clock", &[]);
    assert!(output.trim_end().ends_with("failures=0"), "{output}");
    assert!(log.contains("TSC ") && !log.contains("TSC of "), "{log}");
}

/// Two clocks agree only within the error of their measurement. So a vCPU that reads one soon after the other may see
/// it go back by the errors of both.
#[test]
fn clocks_that_are_apart_are_set_right_and_guests_see_one() {
    let (output, log) = run("one-clock,mixed", &["--qemu-arg=-append", "--qemu-arg=selftest=tsc-skew"]);
    let mut errors = Vec::new();
    for pcpu in ["cpu1", "cpu2"] {
        let told =
            |line: &&str| line.contains(&format!("TSC of {pcpu} is ")) && line.contains("behind the first pCPU's");
        let line = log.lines().find(told).unwrap_or_else(|| panic!("no word of {pcpu} in {log}"));
        errors.push(number(line, "corrected, to ").expect("an error in ticks"));
    }
    let seen = |name| number(&output, name).unwrap_or_else(|| panic!("no {name} in {output}"));
    // A microsecond each: they were 0.2 s apart.
    let hz = 1000 * seen("tsc_khz=");
    assert!(errors.iter().all(|&error| error <= hz / 1_000_000), "{errors:?} of {hz}");
    assert!(seen("furthest_ticks=") <= errors.iter().sum(), "{errors:?}: {output}");
    assert!(seen("backwards=") * 10_000 <= seen("readings="), "{output}");
    assert!(output.contains("result experiment=mixed failures=0"), "{output}");
}

//! Writes of control registers: a guest sees the manual's behaviour, bit by bit.
//!
//! The guest's table is generated, with the architecture's result for each case. QEMU's CPU differs in some cases; each
//! of these is named here, and any other difference is a failure.

use std::collections::BTreeSet;

use system_tests::{Machine, dunlin_run_vms, measuring_vm, vm};

const EXPERIMENT: &str = "experiments=control-registers";

/// The names of the cases that ended like this.
fn names(output: &str, outcome: &str) -> BTreeSet<String> {
    let outcome = format!(" outcome={outcome} ");
    let of = |line: &str| line.strip_prefix("case name=").and_then(|rest| Some(rest.split_once(' ')?.0.to_string()));
    output.lines().filter(|line| line.contains(&outcome)).filter_map(of).collect()
}

/// Names of the same beginning and these numbers.
fn numbered(name: &str, numbers: impl IntoIterator<Item = u32>) -> impl Iterator<Item = String> {
    numbers.into_iter().map(move |number| format!("{name}-{number}"))
}

/// QEMU's own differences, with and without a hypervisor: it drops the upper half of a write of CR0 before the
/// intercept, and the upper bits of CR8.
fn of_qemu() -> BTreeSet<String> {
    numbered("cr0-bit", 32..64).chain(["cr8-bit-4", "cr8-bit-63"].map(String::from)).collect()
}

#[test]
fn every_bit_of_control_registers_is_answered_as_in_the_manual() {
    let json = dunlin_run_vms(120, &measuring_vm("measuring", 1, EXPERIMENT), &["--json"]).json();
    let ended = vm(&json, "measuring");
    let output = ended["output"].as_str().unwrap_or_default();
    assert_eq!(ended["stop_reason"], "power off", "{json:#}");
    assert_eq!(names(output, "fail"), of_qemu(), "{output}");
    assert_eq!(names(output, "skipped"), BTreeSet::new(), "{output}");
    assert!(names(output, "pass").len() > 240, "{output}");
}

#[test]
fn plain_emulator_differs_in_named_cases_only() {
    let output = Machine::X86_64.plain_guest(EXPERIMENT).stdout;
    // Reserved bits of CR0 can be set, and NW without CD; reserved bits of EFER, and FFXSR, are ignored.
    let of_cr0 = numbered("cr0-bit", (6..16).chain([17]).chain(19..30));
    let of_efer = numbered("efer-bit", [9].into_iter().chain(13..64));
    let combined = ["cr0-nw-without-cd", "cr0-all-of-the-low-half", "cr0-all", "cr0-wp-and-bit-32", "efer-all"];
    let forms = ["mov", "mov-from-rdx", "mov-from-r15", "mov-operand-size", "mov-address-size", "mov-rex-w"]
        .into_iter()
        .chain(["mov-many-prefixes", "mov-memory-form"])
        .map(|form| format!("cr0-{form}-nw"));
    let named: BTreeSet<String> =
        of_qemu().into_iter().chain(of_cr0).chain(of_efer).chain(combined.map(String::from)).chain(forms).collect();
    assert_eq!(names(&output, "fail"), named, "{output}");
    assert!(names(&output, "pass").len() > 60, "{output}");
}

//! ID registers of AArch64 as a guest reads them, and the features that they hide.

use std::collections::HashMap;

use aarch64_defs::features::IdRegisters;
use system_tests::{Machine, measuring_vm, vm};

/// The values that a guest reads on this CPU of QEMU, by CRm and op2. All hidden features that it tried were undefined.
fn seen_on(cpu: &str) -> HashMap<(u8, u8), u64> {
    let toml = measuring_vm("measuring", 1, "experiments=id-registers");
    let qemu = format!("--qemu-arg={cpu}");
    let json = Machine::Aarch64.run_vms(60, &toml, &["--json", "--qemu-arg=-cpu", &qemu]).expect_status(0).json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    assert!(output.contains("done experiments=1 failures=0"), "{cpu}: {output}");
    let figure = |line: &str, key: &str| {
        let word = line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let word = word.unwrap_or_else(|| panic!("{cpu}: no {key} in {line}"));
        u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or_else(|_| panic!("{cpu}: {line}"))
    };
    let small = |line, key| u8::try_from(figure(line, key)).expect("one digit");
    output
        .lines()
        .filter(|line| line.starts_with("record experiment=id-registers crm="))
        .map(|line| ((small(line, "crm"), small(line, "op2")), figure(line, "value")))
        .collect()
}

#[test]
fn id_registers_show_what_the_list_allows_and_what_they_hide_is_undefined() {
    for cpu in ["max,pauth-impdef=on", "neoverse-n1", "cortex-a57"] {
        let seen = seen_on(cpu);
        assert_eq!(seen.len(), 56, "{cpu}");
        let read = |crm, op2| seen[&(crm, op2)];
        // Values within the list do not change when the list is applied again.
        let again = IdRegisters::offered(read);
        for (&(crm, op2), &value) in &seen {
            assert_eq!(value, again.get(crm, op2), "{cpu}: CRm {crm}, op2 {op2}");
        }
        // Floating point, EL0 of both widths, GICv3: no processor here lacks them, no guest does.
        assert_eq!(read(4, 0) & 0x0f0f_000f, 0x0100_0002 | read(4, 0) & 0xf_0000, "{cpu}");
        assert_ne!(read(6, 0), 0, "{cpu}");
    }
}

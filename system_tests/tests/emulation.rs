//! Emulated instructions as guests see them, with each kind of cache. They behave as in the manual, whatever the guest
//! does to its code and its page tables. No attack of a guest on the emulator harms other VMs.

use abi::control::Command;
use abi::payload::{DirtyLogging, DirtySource, Split};
use serde_json::Value;
use system_tests::port::Port;
use system_tests::{Host, Run, dunlin_run_vms, measuring_vm, vm};

/// The values of the key `decode_cache`.
const SETTINGS: [&str; 4] = ["bytes", "write-protect", "write-protect-tables", "off"];

/// A VM with the xAPIC, whose registers are in memory.
fn xapic_vm(name: &str, vcpus: u32, setting: &str, cmdline: &str) -> String {
    format!("{}apic = \"xapic\"\ndecode_cache = \"{setting}\"\n", measuring_vm(name, vcpus, cmdline))
}

fn output<'a>(json: &'a Value, name: &str) -> &'a str {
    vm(json, name)["output"].as_str().unwrap_or_default()
}

fn counter(json: &Value, name: &str, counter: &str) -> u64 {
    vm(json, name)["counters"][counter].as_u64().unwrap_or_else(|| panic!("no {counter}: {json:#}"))
}

/// The guest ran all experiments, and found no error.
fn assert_clean(output: &str, experiments: u32) {
    let complaints: Vec<_> = output
        .lines()
        .filter(|line| {
            line.starts_with("violation") || line.contains("outcome=fail") || line.starts_with("unsupported")
        })
        .collect();
    let last = output.lines().last().unwrap_or_default();
    assert_eq!(last, format!("done experiments={experiments} failures=0"), "{complaints:#?}\n{output}");
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn changed_code_and_changed_tables_count_at_once_and_every_form_does_what_it_does_on_memory() {
    for setting in SETTINGS {
        let toml = xapic_vm("a", 2, setting, "experiments=decode-coherence,emulate-forms iterations=40");
        let json = dunlin_run_vms(240, &toml, &["--json"]).json();
        let output = output(&json, "a");
        assert_clean(output, 2);
        let passed = output.matches(" outcome=pass").count();
        assert!(passed >= 170, "{setting}: only {passed} cases\n{output}");
        for name in ["smc-other-vcpu", "remap-upper", "mode-at-same-rip", "rep-outsb"] {
            assert!(output.contains(&format!("case name={name} ")), "{name} was not tried\n{output}");
        }

        // A lookup hits or misses; after a miss the instruction may be inserted.
        let count = |name| counter(&json, "a", name);
        assert!(count("decode_insertions") <= count("decode_misses"), "{setting}: {json:#}");
        if setting == "off" {
            assert_eq!(count("decode_hits") + count("decode_insertions"), 0, "{json:#}");
        }
        if matches!(setting, "off" | "bytes") {
            assert_eq!(count("decode_write_faults"), 0, "{setting} protects nothing: {json:#}");
        } else {
            assert!(count("decode_write_faults") > 0, "{setting}: {json:#}");
        }
    }
}

#[test]
fn vms_with_the_same_address_and_address_space_run_their_own_instructions() {
    for setting in ["bytes", "write-protect", "write-protect-tables"] {
        let vms = ["a", "b"]
            .map(|name| xapic_vm(name, 1, setting, &format!("experiments=decode-variant variant={name} seconds=2")));
        let json = dunlin_run_vms(120, &vms.join("\n"), &["--json"]).json();
        for name in ["a", "b"] {
            assert_clean(output(&json, name), 1);
            if setting != "write-protect-tables" {
                assert!(counter(&json, name, "decode_hits") > 100, "{setting}: {json:#}");
            }
        }
    }
}

#[test]
fn hostile_instructions_harm_neither_host_nor_neighbours() {
    for setting in ["bytes", "write-protect"] {
        // Two aim at the emulator, one has work that it checks itself.
        let vms = [
            xapic_vm("hostile", 3, setting, "experiments=emulator-torture seconds=6 stall=60"),
            xapic_vm("other", 2, setting, "experiments=emulator-torture seconds=6 stall=60 seed=7"),
            measuring_vm("neighbour", 2, "experiments=mixed seconds=6"),
        ];
        let json = dunlin_run_vms(300, &vms.join("\n"), &["--json"]).json();
        for name in ["hostile", "other", "neighbour"] {
            assert_clean(output(&json, name), 1);
        }
        assert!(counter(&json, "hostile", "emulations_refused") > 0, "{setting}: nothing was refused\n{json:#}");
    }
}

/// The end of a log replaces stage-2 entries, with a flush that waits for vCPUs whose instructions are being emulated.
/// These write to pages that another vCPU protects, in an entry that is being replaced. `LOGS` is how many logs end;
/// 600 is the long form.
#[test]
fn ends_of_dirty_logs_and_protected_code_never_wait_for_each_other() {
    let logs: u32 = std::env::var("LOGS").map_or(80, |text| text.parse().expect("LOGS is a number"));
    for setting in ["write-protect", "write-protect-tables"] {
        let host = Host::start(3600, 3, &xapic_vm("a", 4, setting, "experiments=decode-spread"), |_| Vec::new());
        let mut port = Port::of(&host);
        let source = Some(DirtySource::WriteProtect);
        let how = DirtyLogging { split: Split::Eager, source, splits_per_second: None };
        for _ in 0..logs {
            assert!(port.start_log(how, false), "write protection needs no hardware");
            port.round(false);
            port.done(Command::DirtyStop { vm: 0 });
        }
        let collapses = port.info().collapses;
        port.type_keys(b"q");
        let json = host.finish().json();
        assert_clean(output(&json, "a"), 1);
        let faults = counter(&json, "a", "decode_write_faults");
        println!("{setting}: {logs} logs, {collapses} large pages joined again, {faults} writes to protected pages");
        assert!(collapses > u64::from(logs) && faults > u64::from(logs), "{collapses}, {faults}: {json:#}");
    }
}

/// Boots Debian without x2APIC.
fn debian(setting: &str) -> Run {
    let toml = format!(
        "[[vm]]\nname = \"debian\"\nvcpus = 4\napic = \"xapic\"\ndecode_cache = \"{setting}\"\n\
         cmdline = \"console=ttyS0 quiet nox2apic\"\n"
    );
    dunlin_run_vms(
        240,
        &toml,
        &[
            "--json",
            "--exec",
            "for i in 1 2 3 4 5 6 7 8; do /bin/true; done; nproc; dmesg | grep -c -E 'WARNING|BUG|APIC error'",
        ],
    )
}

#[test]
fn debian_with_an_emulated_apic_reaches_user_space_and_its_instructions_are_known() {
    for setting in SETTINGS {
        let json = debian(setting).json();
        let count = |name| counter(&json, "debian", name);
        let (hits, misses) = (count("decode_hits"), count("decode_misses"));
        let emulated = vm(&json, "debian")["counters"]["exits"]["mmio_exits"].as_u64().unwrap_or_default();
        assert!(hits + misses > 1000 && hits + misses <= emulated, "{setting}: {hits} + {misses} of {emulated}");
        match setting {
            "bytes" => assert!(hits > 9 * misses, "{hits} hits, {misses} misses"),
            // A kernel that starts writes to its code.
            "write-protect" => assert!(hits > misses, "{hits} hits, {misses} misses"),
            "off" => assert_eq!(hits, 0),
            // For SVM each walk of a page table is a write, which drops the entries of a protected table.
            _ => assert!(count("decode_evicted_by_walks") > 0, "{json:#}"),
        }
        if setting == "bytes" {
            let evicted =
                ["decode_evicted_by_code_writes", "decode_evicted_by_table_writes", "decode_evicted_by_walks"];
            assert_eq!(evicted.map(count), [0; 3]);
            assert_eq!(count("decode_write_faults"), 0);
        }
    }
}

#[test]
fn unknown_way_to_remember_is_named_with_what_would_be_right() {
    let toml = "[[vm]]\nname = \"a\"\ndecode_cache = \"rip\"\n";
    let run = dunlin_run_vms(30, toml, &[]);
    assert_ne!(run.status, 0);
    assert!(run.stderr.contains("decode_cache") && run.stderr.contains("write-protect"), "{}", run.stderr);
}

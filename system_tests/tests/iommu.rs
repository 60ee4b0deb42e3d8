//! Devices and the IOMMU. The device that does what it is told is QEMU's `edu`: `selftest=iommu` has it write to memory
//! of the hypervisor, to its owner's, and beyond, and raise interrupts.
//!
//! QEMU's IOMMUs of AMD and of Intel are tried alike, with the same processor. All versions translate and block. Those
//! of AMD's that have `dma-remap` need it for that, and only those report faults. AMD's remaps interrupts in all
//! versions, and reports none that it stops. Intel's remaps those of the new format, and lets those of the old one
//! pass.

use std::fs;
use std::path::Path;
use std::process::Command;

use abi::exit_code::{CLEAN, REFUSED, qemu_status};
use system_tests::{Machine, Run, measuring_vm};
use tempfile::TempDir;

/// The device, with all bits of an address.
const EDU: [&str; 2] = ["-device", "edu,addr=4,dma_mask=0xffffffffffffffff"];

/// Whether this QEMU's IOMMU reports faults.
fn reports_faults() -> bool {
    let help = Command::new("qemu-system-x86_64").args(["-device", "amd-iommu,help"]).output().expect("QEMU starts");
    String::from_utf8_lossy(&help.stdout).contains("dma-remap")
}

/// The IOMMU, as QEMU's argument.
fn amd_vi() -> &'static str {
    if reports_faults() { "amd-iommu,dma-remap=on,xtsup=on" } else { "amd-iommu" }
}

/// Intel's, with tables of four levels.
const VT_D: &str = "intel-iommu,aw-bits=48";

/// Starts the hypervisor with the test of devices, on a machine with these arguments.
fn selftest(arguments: &[&str]) -> Run {
    let all = [&["-append", "log=debug selftest=iommu"], &EDU[..], arguments].concat();
    Machine::X86_64.bare_hypervisor(&all)
}

/// The same, on a machine whose firmware has a table of IOMMUs with this body. The machine has no IOMMU.
fn selftest_with_table(folder: &Path, signature: &str, body: &[u8]) -> Run {
    let file = folder.join("table");
    fs::write(&file, body).expect("a file can be written there");
    selftest(&["-acpitable", &format!("sig={signature},data={}", file.display())])
}

#[test]
fn device_reaches_its_owners_memory_and_nothing_else() {
    // The address is 0 in all versions that report faults of AMD's (quirks.rs).
    let vendors = [
        (amd_vi(), "warn  IOMMU: IO_PAGE_FAULT of 00:04.0 at 0x", reports_faults()),
        (VT_D, "warn  IOMMU: 00:04.0: write at 0x", true),
    ];
    for (iommu, told, is_told) in vendors {
        let run = selftest(&["-device", iommu]).expect_status(qemu_status(CLEAN));
        for line in [
            "a device that nobody owns writes to Dunlin's memory: refused",
            "it writes to a page of its owner: done",
            "it writes to a large page of its owner: done",
            "it writes to Dunlin's memory: refused",
            "it writes beyond its owner's memory: refused",
            "it writes to a page that its owner may only read: refused",
            "it reads a page that its owner may only read: done",
            "it writes to a page that was taken away: refused",
            "it writes to a page that is back: done",
            "it writes to a page of its last owner: refused",
        ] {
            assert!(run.stdout.contains(line), "{iommu}: {line}: {run:#?}");
        }
        assert_eq!(run.stdout.contains(told), is_told, "{iommu}: {run:#?}");
    }
}

/// What each IOMMU that remaps interrupts makes of those of a device.
const REMAPPED: [&str; 6] = [
    "it raises the interrupt that it was given: done",
    "it raises one that it was not given: refused",
    "it raises the interrupt that was taken from it: refused",
    "it raises the interrupt that is back: done",
    "whose owner has all devices, it raises a vector: done",
    "interrupts with strange vectors are taken and ended",
];

#[test]
fn device_raises_the_interrupts_that_it_was_given_and_no_others() {
    let run = selftest(&["-device", amd_vi()]).expect_status(qemu_status(CLEAN));
    let others = [
        "info  IOMMU: interrupts are remapped: a VM's device raises only those that it was given",
        "a device that nobody owns raises an interrupt: refused",
        "it raises a vector of its choice: refused",
        "it raises an INIT: refused",
        "it writes a vector to the address of messages: refused",
        "it writes an INIT to the address of messages: refused",
        "it raises the interrupt of its last owner: refused",
        "it raises a vector when it has no owner any more: refused",
        // On a machine with an IOMMU of AMD's it would not (quirks.rs).
        "its INIT would pass, and is not tried",
    ];
    for line in REMAPPED.iter().chain(&others) {
        assert!(run.stdout.contains(line), "{line}: {run:#?}");
    }
}

#[test]
fn intels_iommu_keeps_messages_of_the_new_format_to_their_devices_and_what_it_does_not_keep_is_told() {
    let run = selftest(&["-device", VT_D]).expect_status(qemu_status(CLEAN));
    let others = [
        "it raises the interrupt of another device: refused",
        "warn  IOMMU: interrupts are remapped, but the one at 0xfed90000 lets messages of the old format pass",
        "messages of the old format pass: its INIT would, and is not tried",
    ];
    for line in REMAPPED.iter().chain(&others) {
        assert!(run.stdout.contains(line), "{line}: {run:#?}");
    }
    // All versions that report faults of AMD's report interrupts of Intel's.
    let told = "warn  IOMMU: 00:04.0: interrupt 0x";
    assert!(!reports_faults() || run.stdout.contains(told), "{run:#?}");
}

#[test]
fn machine_whose_interrupts_are_not_remapped_says_so_and_why() {
    let firmwares = "firmware says that the machine cannot (ACPI table DMAR, flag INTR_REMAP)";
    for (iommu, why) in [
        (amd_vi(), "firmware does not say which number the I/O APIC has for the IOMMU (ACPI table IVRS)"),
        (VT_D, firmwares),
    ] {
        let run = selftest(&["-device", &format!("{iommu},intremap=off")]).expect_status(qemu_status(CLEAN));
        let told = format!("warn  IOMMU: interrupts are not remapped: {why}");
        let arrives = "it raises the interrupt that it was given: done";
        assert!(run.stdout.contains(&told) && run.stdout.contains(arrives), "{iommu}: {run:#?}");
    }
}

#[test]
fn without_an_iommu_a_device_writes_to_memory_of_the_hypervisor_and_interrupts_it() {
    let run = selftest(&[]).expect_status(qemu_status(CLEAN));
    let told = "no IOMMU guards this machine (firmware reports none (no ACPI table IVRS or DMAR)): \
                the device has written to Dunlin's memory";
    let interrupted = "an interrupt that the device has raised by a write has arrived";
    let goes_on = "interrupts with strange vectors are taken and ended";
    for line in [told, interrupted, goes_on] {
        assert!(run.stdout.contains(line), "{line}: {run:#?}");
    }
}

/// A block that describes an IOMMU with registers at `base`, and these entries.
fn ivhd(base: u64, entries: &[u8]) -> Vec<u8> {
    let length = u16::try_from(24 + entries.len()).expect("tests make small blocks");
    let mut block = vec![0x10, 0];
    block.extend(length.to_le_bytes());
    block.extend([0x10, 0, 0x40, 0]);
    block.extend(base.to_le_bytes());
    block.resize(24, 0);
    block.extend(entries);
    block
}

#[test]
fn table_of_iommus_that_lies_is_told_and_leaves_the_machine_without_one() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let cases: [(Vec<u8>, &str); 5] = [
        (vec![0x10, 0, 0, 0], "firmware's table is wrong: IVRS, byte 0x30: a block's length is wrong"),
        (
            ivhd(0xfed8_0000, &[3, 0x28, 0, 0, 4, 0x27, 0, 0]),
            "firmware's table is wrong: IVRS, byte 0x48: a range of devices runs backwards",
        ),
        // Where RAM is, and where nothing is.
        (ivhd(0x0100_0000, &[]), "00:02.0 cannot have its registers at 0x1000000"),
        (ivhd(0xfeb8_0000, &[]), "00:02.0 does not answer: waited for a command's completion"),
        (vec![0x55, 0, 8, 0, 1, 2, 3, 4], "firmware's table (IVRS) names none"),
    ];
    for (blocks, why) in cases {
        let body = [&[0; 12], &blocks[..]].concat();
        let run = selftest_with_table(folder.path(), "IVRS", &body).expect_status(qemu_status(CLEAN));
        assert!(run.stdout.contains(&format!("warn  no IOMMU guards this machine: {why}")), "{run:#?}");
    }
}

/// A structure that describes an IOMMU of Intel with registers at `base`, and these devices.
fn drhd(base: u64, scopes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(16 + scopes.len()).expect("tests make small structures");
    [&[0, 0, length, 0, 0, 0, 0, 0][..], &base.to_le_bytes(), scopes].concat()
}

#[test]
fn intels_table_of_iommus_that_lies_is_told_and_leaves_the_machine_without_one() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let cases: [(Vec<u8>, &str); 5] = [
        (vec![0, 0, 0, 0], "firmware's table is wrong: DMAR, byte 0x30: a structure's length is wrong"),
        (drhd(0xfed9_0000, &[1, 2]), "firmware's table is wrong: DMAR, byte 0x30: a device's length is wrong"),
        // Where RAM is, and where nothing is.
        (drhd(0x0100_0000, &[]), "the one at 0x1000000 cannot have its registers at 0x1000000"),
        (drhd(0xfeb8_0000, &[]), "the one at 0xfeb80000 does not answer"),
        (vec![0x55, 0, 8, 0, 1, 2, 3, 4], "firmware's table (DMAR) names none"),
    ];
    for (structures, why) in cases {
        let body = [&[46, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &structures[..]].concat();
        let run = selftest_with_table(folder.path(), "DMAR", &body).expect_status(qemu_status(CLEAN));
        assert!(run.stdout.contains(&format!("warn  no IOMMU guards this machine: {why}")), "{run:#?}");
    }
}

#[test]
fn iommu_that_cannot_walk_the_tables_is_not_used_and_told_with_the_remedy() {
    let run = selftest(&["-device", "intel-iommu,aw-bits=39"]).expect_status(qemu_status(CLEAN));
    let told = "cannot walk four levels (QEMU: -device intel-iommu,aw-bits=48)";
    assert!(
        run.stdout.contains("warn  no IOMMU guards this machine: the one at ") && run.stdout.contains(told),
        "{run:#?}"
    );
}

/// Runs a VM of the measuring guest where an IOMMU is required, on a machine with these arguments.
fn requiring(arguments: &[&str]) -> Run {
    let toml = format!("require_iommu = true\n{}", measuring_vm("guarded", 1, "experiments=cpuid iterations=1000"));
    let more: Vec<String> = arguments.iter().map(|argument| format!("--qemu-arg={argument}")).collect();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    Machine::X86_64.run_vms(60, &toml, &more)
}

#[test]
fn machine_without_an_iommu_is_refused_where_one_is_required() {
    let run = requiring(&[]);
    assert_ne!(run.status, 0, "{run:#?}");
    let told = "cannot start: require_iommu is set, and no IOMMU guards this machine: firmware reports none";
    assert!(run.stderr.contains(told) && run.stderr.contains("or leave require_iommu out"), "{run:#?}");
}

#[test]
fn vm_runs_where_an_iommu_is_required_and_there_is_one() {
    for iommu in [amd_vi(), VT_D] {
        let run = requiring(&["-device", iommu]).expect_status(0);
        assert!(run.stdout.contains("failures=0"), "{iommu}: {run:#?}");
    }
}

#[test]
fn control_port_works_behind_an_iommu() {
    let behind = ["-global", "virtio-serial-pci.iommu_platform=on", "-global", "virtio-serial-pci.disable-legacy=on"];
    for iommu in [amd_vi(), VT_D] {
        let run = requiring(&[&["-device", iommu], &behind[..]].concat()).expect_status(0);
        assert!(run.stdout.contains("failures=0"), "{iommu}: {run:#?}");
    }
}

#[test]
fn check_tells_whether_an_iommu_guards_the_machine() {
    let check = |more: &[&str]| {
        let run = Machine::X86_64.bare_hypervisor(&[&["-append", "check"], more].concat());
        run.expect_status(qemu_status(REFUSED)).stdout
    };
    // 256 MiB and no payload are too little for the rest.
    let without = check(&["-m", "64M"]);
    assert!(without.contains("check: IOMMU            ok, but  none"), "{without}");
    let with = check(&["-m", "64M", "-device", amd_vi()]);
    assert!(with.contains("check: IOMMU            ok       AMD-Vi, 00:0"), "{with}");
    let with = check(&["-m", "64M", "-device", VT_D]);
    assert!(with.contains("check: IOMMU            ok       VT-d, 0xfed90000"), "{with}");
}

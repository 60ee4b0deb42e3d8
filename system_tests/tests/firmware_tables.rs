//! Firmware that lies, or has more than the hypervisor can use: a line on the console, and what is wrong is left out.

use std::fs;

use abi::exit_code::{CLEAN, qemu_status};
use system_tests::Machine;
use system_tests::boot_loader::BootLoader;
use tempfile::TempDir;

/// What the hypervisor prints on a machine with these arguments, when it is only to check the machine.
fn check(arguments: &[&str]) -> String {
    let run = Machine::X86_64.bare_hypervisor(&[&["-append", "check"], arguments].concat());
    run.expect_status(qemu_status(CLEAN)).stdout
}

/// An entry of the table MCFG.
fn window(base: u64, buses: [u8; 2]) -> Vec<u8> {
    [&base.to_le_bytes()[..], &[0, 0], &buses, &[0; 4]].concat()
}

#[test]
fn window_into_pci_configuration_space_that_lies_is_left_out_and_told() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("mcfg");
    for (window, why) in [
        (window(0, [0, 0]), "left out, RAM or an interrupt controller is there"),
        (window(0xb000_0000, [9, 2]), "left out, its last bus comes before the first"),
        (window(0xb000_1000, [0, 0]), "left out, its address is no multiple of 1 MiB"),
        (window(0xf000_0000, [0, 255]), "left out, RAM or an interrupt controller is there"),
        (window(u64::MAX << 20, [0, 255]), "left out, it ends beyond"),
        // Nothing is there.
        (window(0xe000_0000, [0, 0]), "as the first device, and ports show 0x12378086"),
    ] {
        fs::write(&file, [&[0; 8], &window[..]].concat()).expect("a file can be written there");
        // The older chipset has no window, and firmware makes no table of it.
        let table = format!("sig=MCFG,data={}", file.display());
        let said = check(&["-machine", "pc", "-acpitable", &table]);
        let told = "warn  ACPI: the table MCFG names PCI configuration space at ";
        assert!(said.contains(told) && said.contains(why), "{why}: {said}");
        assert!(said.contains("check: VMs can run on this machine"), "{said}");
    }
}

#[test]
fn pcpus_beyond_the_limit_are_told_and_stay_asleep() {
    let said = check(&["-smp", "66"]);
    assert!(said.contains("warn  the machine has 66 pCPUs, only 64 are supported; the others stay asleep"), "{said}");
    assert!(said.contains("ok       64 started"), "{said}");
}

#[test]
fn function_with_its_memory_over_ram_is_told_and_the_hypervisor_does_not_use_it() {
    const ADDRESS: u16 = 0xcf8;
    const WINDOW: u16 = 0xcfc;
    // Firmware has given them addresses. These registers change that: a BAR of each, and the upper half of one.
    let moved = [(5, 0x20, 0x0100_000c), (5, 0x24, 0), (0x10, 0x10, 0x0400_0000)];
    let outputs = moved
        .iter()
        .flat_map(|&(device, register, value)| [(ADDRESS, 1 << 31 | device << 11 | register), (WINDOW, value)]);
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("loader");
    let loader = BootLoader { outputs: outputs.collect(), ..BootLoader::default() };
    loader.write(&Machine::X86_64.hypervisor(), &file);
    let devices = ["-device", "virtio-serial-pci,addr=05,disable-legacy=on", "-device", "edu,addr=10"];
    let arguments = [&["-append", "check"], &devices[..]].concat();
    let run = Machine::X86_64.start_kernel(&file, "stdio", &Machine::X86_64.able(), &arguments);
    let said = run.expect_status(qemu_status(CLEAN)).stdout;
    for told in [
        "warn  PCI: 0000:00:05.0 has its memory at 0x1000000, where RAM is",
        "warn  PCI: 0000:00:10.0 has its memory at 0x4000000, where RAM is",
        "warn  the virtio console at 00:05.0 is not used: it has its memory at 0x1000000, where RAM is",
    ] {
        assert!(said.contains(told), "no '{told}': {said}");
    }
    assert!(said.contains("check: VMs can run on this machine"), "{said}");
}

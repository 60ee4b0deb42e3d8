//! VMs with PCI functions of their own (`devices = ["0000:00:10.0"]`): a disk, a network card, and functions that no VM
//! gets.
//!
//! Debian's kernel has no drivers of disks and network cards built in. So those tests need a parent's kernel:
//! `cargo xtask parent-tests system` builds it and runs them.

use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::monitor::Monitor;
use system_tests::{Host, Run, dunlin_run_vms, finished, measuring_vm, tool};
use tempfile::TempDir;

/// The IOMMU, as QEMU's argument: versions that have `dma-remap` need it to translate.
fn amd_vi() -> &'static str {
    let help = Command::new("qemu-system-x86_64").args(["-device", "amd-iommu,help"]).output().expect("QEMU starts");
    let reports = String::from_utf8_lossy(&help.stdout).contains("dma-remap");
    if reports { "amd-iommu,dma-remap=on,xtsup=on" } else { "amd-iommu" }
}

/// Arguments for a machine with these devices.
fn machine(words: &[(&str, &str)]) -> Vec<String> {
    words.iter().flat_map(|(option, value)| [option, value].map(|word| format!("--qemu-arg={word}"))).collect()
}

fn run(seconds: u32, toml: &str, machine: &[String], more: &[&str]) -> Run {
    let arguments: Vec<&str> = more.iter().copied().chain(machine.iter().map(String::as_str)).collect();
    dunlin_run_vms(seconds, toml, &arguments)
}

/// A small VM with these functions.
fn owner(name: &str, functions: &str) -> String {
    format!("{}devices = [{functions}]\n\n", measuring_vm(name, 1, "experiments=cpuid iterations=1000"))
}

#[test]
fn function_that_no_vm_can_have_is_refused_with_the_reason_and_others_run() {
    let toml = [
        ("nothing", "\"0000:00:1e.7\""),
        ("bus", "\"0000:77:00.0\""),
        ("bridge", "\"0000:00:00.0\""),
        ("port", "\"0000:00:12.0\""),
        ("line", "\"0000:00:13.0\""),
        // QEMU gives these two the first free slots.
        ("own", "\"0000:00:01.0\""),
        ("iommu", "\"0000:00:02.0\""),
        ("good", "\"0000:00:10.0\""),
        ("second", "\"0000:00:11.0\""),
    ]
    .map(|(name, functions)| owner(name, functions))
    .concat();
    let machine = machine(&[
        ("-device", amd_vi()),
        ("-device", "edu,addr=10"),
        ("-device", "virtio-rng-pci,addr=11,disable-legacy=on,iommu_platform=on"),
        ("-device", "pcie-root-port,addr=12,chassis=1"),
        ("-device", "e1000,addr=13"),
    ]);
    let said = run(120, &toml, &machine, &["--log"]);
    let text = format!("{}{}", said.stdout, said.stderr);
    for (function, why) in [
        ("0000:00:1e.7", "the machine has no such PCI function"),
        ("0000:77:00.0", "the machine has no such PCI function"),
        ("0000:00:00.0", "it is a bridge, and others are behind it"),
        ("0000:00:12.0", "it is a bridge, and others are behind it"),
        ("0000:00:13.0", "it has neither MSI-X nor MSI, and other interrupts cannot be given to a VM"),
        ("0000:00:01.0", "the hypervisor uses it for its control port"),
        ("0000:00:02.0", "it is an IOMMU or an interrupt controller, which the hypervisor uses"),
    ] {
        assert!(text.contains(&format!("{function}: {why}")), "{function}: {text}");
    }
    for name in ["good", "second"] {
        assert!(text.contains(&format!("vm \"{name}\": ended, power off")), "{name}: {text}");
    }
    // It has no reset of its own. The log tells what that means.
    assert!(text.contains("warn  0000:00:10.0: it cannot be reset by itself"), "{text}");
}

#[test]
fn without_an_iommu_no_vm_gets_a_function_and_the_remedy_is_told() {
    let said = run(60, &owner("owner", "\"0000:00:10.0\""), &machine(&[("-device", "edu,addr=10")]), &["--log"]);
    let text = format!("{}{}", said.stdout, said.stderr);
    assert_ne!(said.status, 0, "{text}");
    assert!(
        text.contains("no IOMMU guards this machine: firmware reports none (no ACPI table IVRS or DMAR)"),
        "{text}"
    );
    assert!(text.contains("or leave 'devices' out"), "{text}");
}

#[test]
fn function_without_a_reset_of_its_own_is_given_once() {
    let devices =
        machine(&[("-device", amd_vi()), ("-device", "virtio-rng-pci,addr=11,disable-legacy=on,iommu_platform=on")]);
    let other = format!("memory = \"512M\"\n\n{}", measuring_vm("other", 1, "experiments=mixed seconds=60"));
    let host = Host::start(100, 2, &other, |_| devices);
    let _ = host.ask("stats");
    let pid = host.pid().to_string();
    let run = |words: &[&str]| finished(Command::new(tool()).args(words).args(["--host", &pid]));
    let file = host.folder().join("owner.toml");
    std::fs::write(&file, owner("owner", "\"0000:00:11.0\"")).expect("can be written");
    let create = || run(&["create", &file.to_string_lossy()]);
    let _ = create().expect_status(0);
    let taken = create();
    assert!(taken.status != 0 && taken.stderr.contains("owner"), "{taken:#?}");
    let _ = run(&["destroy", "owner"]).expect_status(0);
    let again = create();
    let why = "key 'devices': the host cannot create it: 0000:00:11.0: another VM has had it, and it cannot be reset";
    assert!(again.status != 0 && again.stderr.contains(why), "{again:#?}");
    host.end();
}

#[test]
fn function_with_its_memory_over_ram_is_refused() {
    let devices = machine(&[("-device", amd_vi()), ("-device", "edu,addr=10")]);
    let other = format!("memory = \"512M\"\n\n{}", measuring_vm("other", 1, "experiments=mixed seconds=60"));
    let host = Host::start(100, 2, &other, |folder| {
        devices.into_iter().chain(Monitor::qemu_arguments(folder).map(|word| format!("--qemu-arg={word}"))).collect()
    });
    let _ = host.ask("stats");
    // The first BAR of 00:10.0. The CPUs stand still between the address and the value.
    let mut monitor = Monitor::attach(host.folder());
    for command in ["stop", "o/w 0xcf8 0x80008010", "o/w 0xcfc 0x4000000", "cont"] {
        monitor.say(command);
    }
    let file = host.folder().join("owner.toml");
    std::fs::write(&file, owner("owner", "\"0000:00:10.0\"")).expect("can be written");
    let pid = host.pid().to_string();
    let create = finished(Command::new(tool()).args(["create", &file.to_string_lossy(), "--host", &pid]));
    let why = "0000:00:10.0: its memory at 0x4000000 overlaps RAM";
    assert!(create.status != 0 && create.stderr.contains(why), "{create:#?}");
    host.end();
}

#[test]
fn device_of_a_hostile_guest_reaches_its_memory_alone_and_all_else_runs() {
    let machine = machine(&[
        ("-device", amd_vi()),
        ("-device", "edu,addr=10,dma_mask=0xffffffffffffffff"),
        ("-device", "virtio-rng-pci,addr=11,disable-legacy=on,iommu_platform=on"),
    ]);
    let hostile = "experiments=edu,msi-x-tables,pci-doors,pci-fuzz,pci-doors";
    let functions = "devices = [\"0000:00:10.0\", \"0000:00:11.0\"]\n\n";
    let toml =
        measuring_vm("hostile", 1, hostile) + functions + &measuring_vm("beside", 2, "experiments=mixed seconds=5");
    let said = run(120, &toml, &machine, &["--log"]).expect_status(0);
    for name in ["hostile", "beside"] {
        let of_vm = |line: &&str| line.starts_with(&format!("{name}| ")) && line.contains("failures=");
        let last = said.stdout.lines().rfind(of_vm).unwrap_or_default();
        assert!(last.contains("failures=0"), "{name}: {said:#?}");
        assert!(!said.stdout.contains("violation"), "{said:#?}");
    }
    for record in ["experiment=edu nowhere=5", "experiment=msi-x-tables tables=1", "experiment=pci-fuzz"] {
        assert!(said.stdout.contains(record), "no {record}: {said:#?}");
    }
    // What it was told to write elsewhere was refused, and reported where the IOMMU does that.
    let is_told = said.stderr.contains("warn  IOMMU: IO_PAGE_FAULT of 00:10.0 at 0x");
    assert_eq!(is_told, amd_vi().contains("dma-remap"), "{said:#?}");
}

#[test]
fn hostile_guest_interrupts_no_processor_by_writes_of_its_device_and_all_else_runs() {
    // With Intel's IOMMU this would stop the machine: QEMU's lets messages of the old format pass.
    let machine = machine(&[("-device", amd_vi()), ("-device", "edu,addr=10,dma_mask=0xffffffffffffffff")]);
    let toml = measuring_vm("hostile", 1, "experiments=edu,edu-interrupts,edu")
        + "devices = [\"0000:00:10.0\"]\n\n"
        + &measuring_vm("beside", 2, "experiments=mixed seconds=20");
    let said = run(180, &toml, &machine, &["--log"]).expect_status(0);
    for name in ["hostile", "beside"] {
        let of_vm = |line: &&str| line.starts_with(&format!("{name}| ")) && line.contains("failures=");
        let last = said.stdout.lines().rfind(of_vm).unwrap_or_default();
        assert!(last.contains("failures=0"), "{name}: {said:#?}");
    }
    assert!(said.stdout.contains("experiment=edu-interrupts tried=45 failures=0"), "{said:#?}");
    let remaps = "IOMMU: interrupts are remapped: a VM's device raises only those that it was given";
    assert!(said.stderr.contains(remaps), "{said:#?}");
}

#[test]
fn interrupts_of_a_function_arrive_by_way_of_intels_table() {
    let machine =
        machine(&[("-device", "intel-iommu,aw-bits=48"), ("-device", "edu,addr=10,dma_mask=0xffffffffffffffff")]);
    let toml = measuring_vm("owner", 1, "experiments=edu") + "devices = [\"0000:00:10.0\"]\n";
    let said = run(120, &toml, &machine, &["--log"]).expect_status(0);
    assert!(said.stdout.contains("experiment=edu nowhere=5 failures=0"), "{said:#?}");
    assert!(said.stderr.contains("IOMMU: interrupts are remapped, but"), "{said:#?}");
}

/// A file with random data, and its checksum.
fn random_file(folder: &Path, bytes: usize) -> (PathBuf, String) {
    let mut random = fastrand::Rng::with_seed(25);
    let content: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(bytes).collect();
    let file = folder.join("random.img");
    std::fs::write(&file, content).expect("can be written");
    let sum = finished(Command::new("md5sum").arg(&file)).expect_status(0).stdout;
    let sum = sum.split_whitespace().next().expect("a sum").to_string();
    (file, sum)
}

/// Reads a disk or, without one, a connection over the network card, and shows the checksum and the interrupts.
fn reads(bytes: usize) -> String {
    format!(
        "if [ -e /dev/vda ]; then echo \"read $(dd if=/dev/vda bs=1M 2>/dev/null | md5sum)\"; else \
         ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; \
         echo \"read $(nc 10.0.2.100 80 </dev/null | head -c {bytes} | md5sum)\"; fi; \
         grep PCI-MSI /proc/interrupts; dmesg | grep -e 'nobody cared' -e timeout -e 'lost interrupt'; true"
    )
}

/// A Linux with drivers of disks and network cards, and these functions.
fn linux(name: &str, functions: &str) -> String {
    format!("[[vm]]\nname = \"{name}\"\nvcpus = 2\nmemory = \"256M\"\nkernel = \"parent\"\ndevices = [{functions}]\n\n")
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests system`"]
fn two_vms_without_a_parent_read_a_disk_and_a_network_right_at_the_same_time() {
    const BYTES: usize = 32 << 20;
    let folder = TempDir::new().expect("a temporary folder can be made");
    let (file, sum) = random_file(folder.path(), BYTES);
    let drive = format!("if=none,id=d,format=raw,file={},readonly=on,file.locking=off", file.display());
    let net = format!("user,id=n,net=10.0.2.0/24,guestfwd=tcp:10.0.2.100:80-cmd:cat {}", file.display());
    let machine = machine(&[
        ("-device", amd_vi()),
        ("-drive", &drive),
        ("-device", "virtio-blk-pci,drive=d,addr=10,disable-legacy=on,iommu_platform=on"),
        ("-netdev", &net),
        ("-device", "e1000e,netdev=n,addr=11"),
    ]);
    let toml = linux("disk", "\"0000:00:10.0\"") + &linux("network", "\"0000:00:11.0\"");
    let said = run(240, &toml, &machine, &["--exec", &reads(BYTES)]).expect_status(0).stdout;
    for name in ["disk", "network"] {
        assert!(said.contains(&format!("{name}| read {sum}")), "{name}, {sum}: {said}");
        let of_vm = said.lines().filter(|line| line.starts_with(&format!("{name}| ")));
        let counts = of_vm.filter(|line| line.contains("PCI-MSIX-0000:00:01.0")).flat_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.into_iter().skip(2).take(2).filter_map(|word| word.parse::<u64>().ok()).collect::<Vec<_>>()
        });
        assert!(counts.sum::<u64>() > 0, "no interrupt of {name}: {said}");
    }
    for complaint in ["nobody cared", "timeout", "lost interrupt"] {
        assert!(!said.contains(complaint), "{said}");
    }
}

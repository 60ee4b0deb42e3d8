//! A VM that has the machine's devices (`devices = "all"`) on AArch64: unmodified Linux drives QEMU's `virt`.
//!
//! Debian's kernel for clouds has a driver for NVMe disks built in.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use system_tests::{Host, Machine, Run, debian_vm, finished, tool};
use tempfile::TempDir;

const DISK_BYTES: usize = 24 << 20;

/// A Debian with this number of vCPUs that has the devices.
fn owner(vcpus: u32) -> String {
    format!("{}devices = \"all\"\n", debian_vm("owner", vcpus))
}

fn run(toml: &str, more: &[&str]) -> Run {
    Machine::Aarch64.run_vms(240, toml, more)
}

/// QEMU's arguments for an NVMe disk with random content, and the line that `md5sum` prints about it.
fn disk(folder: &Path) -> ([String; 4], String) {
    let file = folder.join("disk");
    let mut content = vec![0; DISK_BYTES];
    fastrand::Rng::with_seed(19).fill(&mut content);
    fs::write(&file, content).expect("can be written");
    let sum = finished(Command::new("md5sum").arg(&file)).expect_status(0).stdout;
    let sum = sum.split_whitespace().next().expect("a sum").to_string();
    let drive = format!("--qemu-arg=if=none,id=disk,format=raw,file={}", file.display());
    let device = "--qemu-arg=nvme,drive=disk,serial=1".to_string();
    (["--qemu-arg=-drive".to_string(), drive, "--qemu-arg=-device".to_string(), device], sum)
}

/// The counts of all CPUs in the line of `/proc/interrupts` with this word.
fn counts(said: &str, word: &str) -> Vec<u64> {
    let line = said.lines().find(|line| line.contains(word) && line.contains(':'));
    let line = line.unwrap_or_else(|| panic!("no interrupt {word}: {said}"));
    line.split_whitespace().skip(1).map_while(|count| count.parse().ok()).collect()
}

#[test]
fn linux_reads_a_disk_by_line_interrupts_on_each_of_its_cpus() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let (disk, sum) = disk(folder.path());
    // The second pass reads the disk again, with its interrupt at the other CPU. One request at a time: with more of
    // them QEMU's disk can leave its line asserted for good. By its source, it tells the driver from which
    // completion on a doorbell is wanted (`nvme_update_cq_eventidx`) before it looks how far the driver has come. If
    // that is further, the driver omits the doorbell for the next completion, and no doorbell clears the line.
    let script = "cd /proc/irq; n=$(grep nvme0q0 /proc/interrupts | cut -d: -f1 | tr -d ' '); \
                  for cpu in 0 1; do echo $cpu >$n/smp_affinity_list; \
                  dd if=/dev/nvme0n1 bs=128k iflag=direct 2>/dev/null | md5sum; done; \
                  cat /proc/interrupts; cat /proc/iomem; ls /sys/bus/pci/devices; \
                  dmesg | grep -i 'nobody cared'; true";
    let mut arguments = vec!["--exec", script, "--qemu-arg=-machine", "--qemu-arg=its=off"];
    arguments.extend(disk.iter().map(String::as_str));
    let said = run(&owner(2), &arguments).expect_status(0).stdout;
    assert_eq!(said.matches(&sum).count(), 2, "{said}");
    assert!(!said.contains("MSI"), "{said}");
    let counts = counts(&said, "nvme0q0");
    // A request has at most 128 KiB here, or the disk's own limit, and at most one interrupt.
    let requests = DISK_BYTES as u64 / (512 << 10);
    assert!(counts.len() == 2 && counts.iter().all(|&count| (requests..100 * requests).contains(&count)), "{said}");
    assert!(!said.contains("nobody cared"), "an interrupt that nobody clears came again and again: {said}");
    for there in ["System RAM", "nvme", "rtc-pl031", "0000:00:01.0"] {
        assert!(said.contains(there), "no {there}: {said}");
    }
    // RAM is at the machine's addresses: not where the hypervisor is, which QEMU loads to the start of RAM.
    let ram: Vec<_> = said.lines().filter(|line| line.ends_with(": System RAM")).collect();
    assert!(ram.iter().all(|line| !line.starts_with("40000000") && !line.starts_with("40200000")), "{ram:?}");
}

#[test]
fn linux_reads_disks_by_messages_of_each_queue_also_behind_a_bridge() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let (disk, sum) = disk(folder.path());
    let more =
        ["-device", "pcie-root-port,id=bridge,chassis=1", "-drive"].map(|argument| format!("--qemu-arg={argument}"));
    let [_, drive, ..] = &disk;
    fs::copy(folder.path().join("disk"), folder.path().join("disk-2")).expect("can be written");
    let second = format!("{}-2", drive.replace("id=disk", "id=second"));
    let second = [second, "--qemu-arg=-device".to_string()];
    let behind = "--qemu-arg=nvme,drive=second,serial=2,bus=bridge".to_string();
    // What a processor writes to the frame is an interrupt, too: the first one is the bridge's. Numbers of nobody are
    // none.
    let script = "for disk in nvme0n1 nvme1n1; do for cpu in 0 1; do \
                  taskset -c $cpu dd if=/dev/$disk bs=128k iflag=direct 2>/dev/null | md5sum; done; done; \
                  for number in 96 224 31 0xffffffff; do devmem 0x08090040 32 $number; done; sleep 1; \
                  cat /proc/interrupts; ls /sys/bus/pci/devices; \
                  echo typer $(devmem 0x08090008 32) control $(devmem 0x08080000 32 2>&1)";
    let mut arguments = vec!["--exec", script];
    arguments.extend(disk.iter().chain(&more).chain(&second).chain([&behind]).map(String::as_str));
    let said = run(&owner(2), &arguments).expect_status(0).stdout;
    assert_eq!(said.matches(&sum).count(), 4, "{said}");
    let requests = DISK_BYTES as u64 / (512 << 10);
    for queue in ["nvme0q1", "nvme0q2", "nvme1q1", "nvme1q2"] {
        let counts = counts(&said, queue);
        assert!((requests..100 * requests).contains(&counts.iter().sum()), "{queue}: {said}");
    }
    assert!(said.lines().filter(|line| line.contains("nvme")).all(|line| line.contains("MSI")), "{said}");
    assert_eq!(
        counts(&said, "PME").iter().sum::<u64>(),
        2,
        "one of the bridge's, and the one that was written: {said}"
    );
    let functions = ["00:00.0", "00:01.0", "00:02.0", "01:00.0"].map(|function| format!("0000:{function}"));
    let found: Vec<_> = said.split_whitespace().filter(|word| word.starts_with("0000:")).collect();
    assert_eq!(found, functions, "where there is no function, none is found: {said}");
    // The first of 128 interrupts is 96. The ITS itself is out of reach.
    assert!(said.contains("typer 0x00600080 control") && !said.contains("control 0x"), "{said}");
}

/// Whether QEMU's SMMU has stage 2 for a machine that says no more of it: since version 10, not in 7.2.
fn smmu_has_stage_2() -> bool {
    let version = finished(Command::new("qemu-system-aarch64").arg("--version")).expect_status(0).stdout;
    let major = version.split_once("version ").and_then(|(_, rest)| rest.split('.').next()?.parse::<u32>().ok());
    major.unwrap_or_else(|| panic!("no version: {version}")) >= 10
}

const SMMU: [&str; 3] = ["--log", "--qemu-arg=-machine", "--qemu-arg=iommu=smmuv3"];

#[test]
fn device_writes_to_its_owners_memory_alone_where_an_smmu_guards() {
    let toml = format!("require_iommu = true\n\n{}", owner(1));
    if !smmu_has_stage_2() {
        let refused = run(&toml, &SMMU);
        let said = format!("{}{}", refused.stdout, refused.stderr);
        assert!(refused.status != 0 && said.contains("require_iommu is set") && said.contains("no stage 2"), "{said}");
        let taken = run(&owner(1), &[&SMMU[..], &["--exec", "true"]].concat()).expect_status(0);
        assert!(taken.stderr.contains("they can write to Dunlin's memory: no IOMMU guards this machine"), "{taken:?}");
        return;
    }
    let folder = TempDir::new().expect("a temporary folder can be made");
    let (disk, sum) = disk(folder.path());
    // QEMU's educational device copies from its buffer to any address: to the hypervisor's image, to registers, and to
    // each place of RAM that Linux does not have, among it that of the other VM.
    let script = "if [ ! -e /sys/bus/pci/devices/0000:00:00.0 ]; then \
                  dd if=/dev/urandom of=/tmp/file bs=1M count=150 2>/dev/null; before=$(md5sum </tmp/file); sleep 20; \
                  [ \"$before\" = \"$(md5sum </tmp/file)\" ] && echo the other is whole; exit; fi; \
                  for at in /sys/bus/pci/devices/*; do \
                  if [ $(cat $at/vendor) = 0x1234 ]; then edu=$at; fi; done; \
                  printf '\\006' | dd of=$edu/config bs=1 seek=4 conv=notrunc 2>/dev/null; \
                  bar=$(head -n 1 $edu/resource | cut -d' ' -f1); \
                  copy() { devmem $((bar + 0x80)) 64 0x40000; devmem $((bar + 0x88)) 64 $1; \
                  devmem $((bar + 0x90)) 64 64; devmem $((bar + 0x98)) 64 3; \
                  while [ $(($(devmem $((bar + 0x98)) 64) & 1)) = 1 ]; do :; done; }; \
                  for at in 0x40200000 0x0a003e00 0x3000000000; do copy $at; sleep 2; done; \
                  has() { grep 'System RAM' /proc/iomem | (while IFS=' -' read -r start end rest; do \
                  [ $(($1)) -ge $((0x$start)) ] && [ $(($1)) -le $((0x$end)) ] && exit 0; done; exit 1); }; \
                  at=$((0x40000000)); while [ $at -lt $((0x80000000)) ]; do \
                  has $at || { copy $at; echo copied; }; at=$((at + 0x1000000)); done; \
                  dd if=/dev/nvme0n1 bs=128k iflag=direct 2>/dev/null | md5sum; cat /proc/interrupts; sleep 20";
    let mut arguments = [&SMMU[..], &["--exec", script]].concat();
    arguments.extend(["--qemu-arg=-device", "--qemu-arg=edu,dma_mask=0xffffffffffffffff"]);
    arguments.extend(disk.iter().map(String::as_str));
    let run = run(&format!("{toml}\n{}", debian_vm("other", 1)), &arguments).expect_status(0);
    let said = format!("{}{}", run.stdout, run.stderr);
    assert!(said.contains("devices reach only memory of their owners: SMMUv3 at 0x9050000"), "{said}");
    for at in ["0x40200000", "0xa003e00", "0x3000000000"] {
        assert!(said.contains(&format!("write at {at}, which was refused: nothing is there")), "{at}: {said}");
    }
    assert!(said.matches("copied").count() >= 8, "there is RAM that Linux does not have: {said}");
    // Its own memory is in reach, and messages arrive; the other VM has found all that it wrote.
    assert!(said.contains(&sum) && said.contains("MSI"), "{said}");
    assert!(said.contains("the other is whole"), "{said}");
    // Devices that the SMMU does not see are hidden. QEMU's configuration device is one.
    assert!(!said.contains("virtio-mmio"), "{said}");
}

#[test]
fn alarm_of_the_machines_clock_is_one_interrupt_and_hidden_registers_are_out_of_reach() {
    let script = "cat /sys/class/rtc/rtc0/name; echo +2 >/sys/class/rtc/rtc0/wakealarm; sleep 4; cat /proc/interrupts; \
                  for at in 0x0a003e00 0x09020010 0x40200000; do echo \"$at $(devmem $at 32 2>&1)\"; done";
    let said = run(&owner(1), &["--exec", script]).stdout;
    assert!(said.contains("rtc-pl031"), "{said}");
    assert_eq!(counts(&said, "rtc-pl031"), [1], "{said}");
    // QEMU's configuration device, which says so, is the machine's.
    assert!(said.contains("0x09020010 0x554D4551"), "{said}");
    // The control port, the hypervisor's image.
    for hidden in ["0x0a003e00", "0x40200000"] {
        assert!(!said.contains(&format!("{hidden} 0x")), "{said}");
    }
}

#[test]
fn reset_of_the_machine_and_its_power_off_end_other_vms_too() {
    let toml = format!("{}\n{}", owner(1), debian_vm("other", 1));
    for (command, reason) in [("reboot -f", "reset"), ("poweroff -f", "power off")] {
        // Only the machine has a bus for PCI.
        let script = format!("if [ -e /sys/bus/pci/devices/0000:00:00.0 ]; then {command}; else sleep 1000; fi");
        let run = run(&toml, &["--exec", &script]);
        let all = format!("{}{}", run.stdout, run.stderr);
        assert!(all.contains(&format!("\"owner\": ended, {reason}")), "{command}: {all}");
    }
}

#[test]
fn vm_that_cannot_have_the_devices_is_refused_with_the_reason() {
    let refusals = [
        (owner(9), "9 vCPUs: with the machine's devices a VM has at most"),
        (owner(1).replace("\"all\"", "[\"0000:00:01.0\"]"), "PCI functions exist on x86_64 only"),
    ];
    for (toml, why) in refusals {
        let refused = run(&toml, &["--exec", "true"]);
        let said = format!("{}{}", refused.stdout, refused.stderr);
        assert!(said.contains(why) && refused.status != 0, "{said}");
    }

    let host =
        Host::start_on(Machine::Aarch64, 120, 2, &owner(1), |_| vec!["--exec".to_string(), "sleep 100".to_string()]);
    let _ = host.ask("stats");
    let second = host.folder().join("second.toml");
    let vm = debian_vm("second", 1).replace("vcpus", "devices = \"all\"\nvcpus");
    fs::write(&second, format!("[host]\narch = \"aarch64\"\n\n{vm}")).expect("can be written");
    let pid = host.pid().to_string();
    let create = finished(Command::new(tool()).args(["create", &second.to_string_lossy(), "--host", &pid]));
    assert!(create.stderr.contains("another VM has had the machine's devices") && create.status != 0, "{create:?}");
    let list: Value = host.ask("list");
    assert!(list.to_string().contains("owner"), "{list}");
    host.end();
}

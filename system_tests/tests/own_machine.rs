//! A VM that has the machine's devices (`devices = "all"`): unmodified Linux drives the PC that QEMU emulates.
//!
//! Debian's kernel has few drivers built in. What needs more is tried with a parent's kernel, here and in `parent.rs`,
//! by `cargo xtask parent-tests`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use system_tests::boot_loader::{BootLoader, DATA, start_info};
use system_tests::monitor::Monitor;
use system_tests::{Host, Machine, Run, assets, debian_vm, dunlin_run_vms, finished, tool, until};
use tempfile::TempDir;

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
fn access_to_pcis_configuration_exits_once() {
    // Each pass reads 64 registers: an address, which exits, and a window, which does not.
    let script = "for pass in $(seq 50); do cat /sys/bus/pci/devices/0000:00:1f.0/config >/dev/null; done";
    let result = dunlin_run_vms(120, &owner(), &["--json", "--exec", script]).expect_status(0).json();
    let vm = &result["vms"][0];
    let [end, hello] = ["counters", "counters_at_hello"].map(|when| vm[when]["exits"]["io_exits"].as_u64());
    let exits = end.zip(hello).map(|(end, hello)| end - hello).expect("are counted");
    // The rest is the serial lines'.
    assert!((3200..5000).contains(&exits), "{exits} exits for 3200 registers");
}

#[test]
fn cpus_keep_their_interrupts_while_registers_of_a_device_are_sized() {
    // Each round changes the machine's memory map, several times.
    let script = "for round in $(seq 300); do echo 1 >/sys/bus/pci/devices/0000:00:1f.2/remove; \
                  echo 1 >/sys/bus/pci/rescan; done; ls /sys/bus/pci/devices";
    let said = run(&owner(), script).expect_status(0).stdout;
    assert!(said.contains("0000:00:1f.2"), "{said}");
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
    let port = ["-device", "pcie-root-port,id=rp,chassis=1,slot=1"];
    events_of_the_chipset(&owner(), "gpe01", &port, |monitor, event| {
        let comes = event % 2 == 1;
        monitor.say(if comes { "device_add virtio-rng-pci,id=card,bus=rp" } else { "device_del card" });
    });
}

#[test]
fn interrupts_of_devices_reach_cpus_behind_a_gap_of_apic_ids() {
    // Two sockets of three cores: the ids are 0, 1, 2, 4, 5 and 6. The last CPU takes the chipset's interrupt.
    let machine =
        ["-smp", "6,sockets=2,cores=3,threads=1,maxcpus=6", "-device", "pcie-root-port,id=rp,chassis=1,slot=1"];
    let owner = owner().replace("vcpus = 2", "vcpus = 6");
    let before = "n=$(sed -n 's/ *\\([0-9]*\\):.*acpi$/\\1/p' /proc/interrupts); echo 5 >/proc/irq/$n/smp_affinity_list; \
                  echo \"cpus $(nproc) ids $(sed -n 's/^apicid.*: //p' /proc/cpuinfo | tr '\\n' ' ')\"; ";
    let said = events_said(&owner, before, "gpe01", &machine, |monitor, event| {
        let comes = event % 2 == 1;
        monitor.say(if comes { "device_add virtio-rng-pci,id=card,bus=rp" } else { "device_del card" });
    });
    assert!(said.contains("cpus 6 ids 0 1 2 4 5 6"), "{said}");
    let line = said.lines().find(|line| line.contains("acpi")).expect("the interrupt is counted");
    let counts: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    assert!(counts.len() == 6 && counts[5] >= EVENTS - 1, "{line}");
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn each_press_of_the_power_button_is_one_event_of_the_vm() {
    let count = events_of_the_chipset(&owner_with_drivers(), "ff_pwr_btn", &[], |monitor, _| {
        monitor.say("system_powerdown");
    });
    assert_eq!(count, EVENTS, "no press is lost or counted twice");
}

const EVENTS: u64 = 4;

/// Has the chipset of a machine with these devices raise [`EVENTS`] events, which Linux counts under this name. Each of
/// them comes by ACPI's interrupt. Returns the last count.
fn events_of_the_chipset(toml: &str, counter: &str, devices: &[&str], raise: impl FnMut(&mut Monitor, u64)) -> u64 {
    let said = events_said(toml, "", counter, devices, raise);
    let line = said.lines().find(|line| line.contains("acpi")).expect("the interrupt is counted");
    let interrupts: u64 = line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum();
    assert!(
        (EVENTS..3 * EVENTS).contains(&interrupts),
        "an interrupt that nobody clears would come thousands of times: {line}"
    );
    let last = said.lines().find_map(|line| line.strip_prefix("count ")?.parse().ok());
    last.expect("the events are counted")
}

/// The same, with something to do `before`. Returns what the guest has said.
fn events_said(
    toml: &str,
    before: &str,
    counter: &str,
    devices: &[&str],
    mut raise: impl FnMut(&mut Monitor, u64),
) -> String {
    let count = format!("/sys/firmware/acpi/interrupts/{counter}");
    let script = format!(
        "{before}echo ready; last=0; while [ $last -lt {EVENTS} ]; do set -- $(cat {count}); \
         if [ $1 != $last ]; then last=$1; echo \"event $last\"; fi; sleep 0.05; done; sleep 1; \
         grep acpi /proc/interrupts; set -- $(cat {count}); echo \"count $1\""
    );
    let more = |folder: &Path| {
        let qemu = Monitor::qemu_arguments(folder).into_iter().chain(devices.iter().map(ToString::to_string));
        ["--exec".to_string(), script.clone()]
            .into_iter()
            .chain(qemu.map(|word| format!("--qemu-arg={word}")))
            .collect()
    };
    let host = Host::start(120, 2, toml, more);
    let mut monitor = Monitor::attach(host.folder());
    until("the guest waits", || host.said().contains("ready").then_some(()));
    for event in 1..=EVENTS {
        raise(&mut monitor, event);
        until("the guest notices", || host.said().contains(&format!("event {event}")).then_some(()));
    }
    let result = host.finish().expect_status(0).json();
    result["vms"][0]["output"].as_str().expect("said something").to_string()
}

/// A VM that has the devices, with a kernel that has drivers for disks and networks built in.
fn owner_with_drivers() -> String {
    owner().replace("debian-cloud", "parent")
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn vm_starts_from_a_virtio_disk_an_ahci_disk_and_an_nvme_disk() {
    for (device, root) in [
        ("virtio-blk-pci,drive=disk", "/dev/vda"),
        ("ide-hd,drive=disk,bus=ide.0", "/dev/sda"),
        ("nvme,drive=disk,serial=1", "/dev/nvme0n1"),
    ] {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let disk = disk_with_busybox(folder.path());
        let toml = format!(
            "{}role = \"parent\"\ninitrd = \"none\"\ncmdline = \"console=ttyS0 quiet root={root} rw init=/init\"\n",
            owner_with_drivers()
        );
        let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
        let qemu = ["-drive", &drive, "-device", device].map(|word| format!("--qemu-arg={word}"));
        // Twice: the second time finds what the first has written.
        for start in ["first", "second"] {
            let run = dunlin_run_vms(120, &toml, &qemu.each_ref().map(String::as_str));
            let said = format!("{}{}", run.stdout, run.stderr);
            assert!(said.contains(&format!("ROOT: {root} ext4, {start} start, right")), "{root}, {start}: {said}");
        }
    }
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn disk_at_a_pin_of_the_second_io_apic_is_read_right() {
    // QEMU's microvm can have two. Devices get pins from the last one of the second on.
    let folder = TempDir::new().expect("a temporary folder can be made");
    let disk = folder.path().join("disk");
    let mut random = fastrand::Rng::with_seed(47);
    let data: Vec<u8> = (0..4 << 20).map(|_| random.u8(..)).collect();
    fs::write(&disk, &data).expect("can be written");
    let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
    let machine = "microvm,pcie=on,ioapic2=on,acpi=on,rtc=on,pit=on,pic=on,isa-serial=on,auto-kernel-cmdline=off";
    let qemu = ["-machine", machine, "-drive", &drive, "-device", "virtio-blk-device,drive=disk"];
    let qemu = qemu.map(|word| format!("--qemu-arg={word}"));
    let script = "dd if=/dev/vda bs=4k iflag=direct 2>/dev/null | md5sum; grep fasteoi /proc/interrupts";
    let mut arguments = vec!["--log", "--exec", script];
    arguments.extend(qemu.iter().map(String::as_str));
    let toml = format!("{}role = \"parent\"\n", owner_with_drivers());
    // The hypervisor finds no control port there, so all is in its log, and the tool takes the end for a reset.
    let said = dunlin_run_vms(120, &toml, &arguments).stderr;

    let sum = finished(Command::new("md5sum").arg(&disk)).expect_status(0).stdout;
    let sum = sum.split_whitespace().next().expect("a sum");
    assert!(said.contains(sum), "no {sum}: {said}");
    let line = said.lines().find(|line| line.contains("virtio0")).unwrap_or_else(|| panic!("no virtio0: {said}"));
    assert!(line.contains("IO-APIC") && line.contains("23-fasteoi"), "{line}");
    let count: u64 = line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum();
    assert!(count >= 500, "for 1 024 reads: {line}");
}

/// A disk with BusyBox, whose first process writes a file and compares it at the next start.
fn disk_with_busybox(folder: &Path) -> PathBuf {
    const INIT: &str = "#!/bin/busybox sh\n\
        /bin/busybox --install -s /bin; export PATH=/bin\n\
        mount -t proc proc /proc; mount -t devtmpfs dev /dev\n\
        root=$(sed -n 's|^\\([^ ]*\\) / \\([^ ]*\\) .*|\\1 \\2|p' /proc/mounts | tail -n 1)\n\
        case $root in /dev/root*) root=\"$(sed 's/.* root=\\([^ ]*\\).*/\\1/' /proc/cmdline) ${root#* }\" ;; esac\n\
        if [ -e /sum ]; then start=second; else\n\
        start=first; dd if=/dev/urandom of=/data bs=1M count=8 2>/dev/null; md5sum /data >/sum; fi\n\
        sync; echo 3 >/proc/sys/vm/drop_caches\n\
        md5sum -c /sum >/dev/null && echo \"ROOT: $root, $start start, right\"\n\
        mount -o remount,ro /\nstty raw -echo </dev/console\npoweroff -f\n";
    let (root, disk) = (folder.join("root"), folder.join("disk"));
    for name in ["bin", "dev", "proc"] {
        fs::create_dir_all(root.join(name)).expect("a folder can be made");
    }
    let init = root.join("init");
    fs::write(&init, INIT).expect("can be written");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("can be changed");
    let busybox = assets().join("busybox");
    fs::copy(&busybox, root.join("bin/busybox")).unwrap_or_else(|error| panic!("{}: {error}", busybox.display()));
    let mut make = Command::new("mke2fs");
    // Its usual place is not in every user's PATH.
    make.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    let _ = finished(make.args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(&disk).arg("32M")).expect_status(0);
    disk
}

#[test]
fn vm_that_leaves_its_size_to_the_machine_gets_what_others_do_not_need() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let [file, payload] = ["vms.toml", "payload"].map(|name| folder.path().join(name));
    let owner = owner().replace("vcpus = 2", "vcpus = \"all\"").replace("\"400M\"", "\"rest\"");
    // The other one is created later, and finds its memory. Both end without a first process.
    let end = "cmdline = \"console=ttyS0 panic=-1 rdinit=/none\"\n";
    fs::write(&file, format!("{owner}{end}\n{}{end}", debian_vm("other", 1))).expect("can be written");
    let run = |words: &[&str]| finished(Command::new(tool()).args(words));
    let _ = run(&["payload", &file.to_string_lossy(), "-o", &payload.to_string_lossy()]).expect_status(0);
    // One CPU more than run vCPUs under emulation.
    let machine = ["-machine", "q35", "-cpu", "max", "-smp", "4", "-m", "2048M"];
    let arguments = ["-initrd", &payload.to_string_lossy(), "-append", "log=info"];
    let hypervisor = Machine::X86_64.hypervisor();
    let said = Machine::X86_64.start_kernel(&hypervisor, "stdio", &machine, &arguments).stdout;
    let created = said.lines().find(|line| line.contains("owner: ") && line.contains("MiB")).unwrap_or_default();
    assert!(created.contains("3 vCPUs"), "{said}");
    let mib = created.split(" MiB").next().and_then(|before| before.rsplit(' ').next()?.parse::<u32>().ok());
    assert!(mib.is_some_and(|mib| (1200..1500).contains(&mib)), "{created}");
    assert!(said.lines().any(|line| line.contains("other: 1 vCPUs")), "{said}");

    let refused = run(&["run", &file.to_string_lossy()]);
    assert!(refused.stderr.contains("key 'vcpus': \"all\" is known only where"), "{refused:?}");
    assert_ne!(refused.status, 0);
}

/// A table of ACPI with this body, and a right checksum.
fn acpi_table(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(36 + body.len()).expect("tests make small tables");
    let mut table = [&signature[..], &length.to_le_bytes(), &[1], &[0; 27], body].concat();
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    table
}

/// Firmware's tables at [`DATA`]: one CPU and an I/O APIC, a clock, and one more table.
fn firmwares_tables(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
    const AT: usize = 64;
    let local_apic = [0xfee0_0000_u32.to_le_bytes(), [0; 4]].concat();
    let cpu = [0, 8, 0, 0, 1, 0, 0, 0];
    let io_apic = [&[1, 12, 0, 0][..], &0xfec0_0000_u32.to_le_bytes(), &[0; 4]].concat();
    let madt = acpi_table(b"APIC", &[&local_apic[..], &cpu, &io_apic].concat());
    // The clock, of 32 bits, where the chipset has it.
    let mut fixed = [0; 240];
    fixed[40..44].copy_from_slice(&0x608_u32.to_le_bytes());
    fixed[55] = 4;
    let fadt = acpi_table(b"FACP", &fixed);
    let other = acpi_table(signature, body);
    let xsdt_at = u64::from(DATA) + AT as u64;
    let madt_at = xsdt_at + 36 + 24;
    let fadt_at = madt_at + madt.len() as u64;
    let entries = [madt_at, fadt_at, fadt_at + fadt.len() as u64].map(u64::to_le_bytes);
    let xsdt = acpi_table(b"XSDT", entries.as_flattened());
    let mut rsdp = [&b"RSD PTR "[..], &[0; 7], &[2], &[0; 4], &36_u32.to_le_bytes(), &xsdt_at.to_le_bytes()].concat();
    rsdp[8] = rsdp.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    rsdp.resize(36, 0);
    rsdp[32] = rsdp.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    rsdp.resize(AT, 0);
    [rsdp, xsdt, madt, fadt, other].concat()
}

#[test]
fn devices_of_the_owner_reach_memory_that_firmware_uses_for_them() {
    const OUTSIDE: u64 = 0x9000_0000;
    let folder = TempDir::new().expect("a temporary folder can be made");
    let [file, payload, loader] = ["vms.toml", "payload", "loader"].map(|name| folder.path().join(name));
    let one = debian_vm("owner", 1);
    fs::write(&file, format!("{one}devices = \"all\"\ncmdline = \"console=ttyS0 panic=-1 rdinit=/none\"\n"))
        .expect("can be written");
    let words = ["payload", &file.to_string_lossy(), "-o", &payload.to_string_lossy()];
    let _ = finished(Command::new(tool()).args(words)).expect_status(0);

    let [outside, end, ram] = [OUTSIDE, OUTSIDE + 0x2_1000, 0x100_0000].map(u64::to_le_bytes);
    // Memory of two devices, as AMD's firmware and as Intel's describes it.
    let [length, rights] = [0x2_1000_u64.to_le_bytes(), [0x21, 7, 32, 0, 0x20, 0, 0, 0]];
    let unit = [&[0x10, 0, 24, 0, 0x10, 0, 0x40, 0][..], &0xfed8_0000_u64.to_le_bytes(), &[0; 8]].concat();
    let memory = |start: [u8; 8]| [&rights[..], &[0; 8], &start, &length].concat();
    let ivrs = [vec![0; 12], unit, memory(outside), memory(ram)].concat();
    let last = |end: [u8; 8]| (u64::from_le_bytes(end) - 1).to_le_bytes();
    let unit = [&[0, 0, 16, 0, 1, 0, 0, 0][..], &0xfed9_0000_u64.to_le_bytes()].concat();
    let memory = |start: [u8; 8], last: [u8; 8]| {
        [&[1, 0, 32, 0, 0, 0, 0, 0][..], &start, &last, &[1, 8, 0, 0, 0, 0, 4, 0]].concat()
    };
    let dmar = [
        vec![46, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        unit,
        memory(outside, last(end)),
        memory(ram, 0x1_001_000_u64.to_le_bytes()),
    ];
    let dmar = dmar.concat();
    for (signature, body, iommu) in [(b"IVRS", ivrs, "amd-iommu"), (b"DMAR", dmar, "intel-iommu,aw-bits=48")] {
        let data = firmwares_tables(signature, &body);
        BootLoader { data, edits: vec![(start_info::RSDP, DATA, true)], ..BootLoader::default() }
            .write(&Machine::X86_64.hypervisor(), &loader);
        let machine = ["-machine", "q35", "-cpu", "max", "-smp", "1", "-m", "1G", "-device", iommu];
        let arguments = ["-initrd", &payload.to_string_lossy(), "-append", "log=info"];
        let said = Machine::X86_64.start_kernel(&loader, "stdio", &machine, &arguments).stdout;
        let reached = "owner: devices reach 0x90000000 to 0x90021000, too: firmware uses it for one";
        let blocked = "owner: firmware uses memory at 0x1000000 to";
        assert!(said.contains(reached) && said.contains(blocked), "{iommu}: {said}");
        assert!(said.contains("0x1000000 is RAM, or the hypervisor's"), "{iommu}: {said}");
    }
}

#[test]
fn owner_does_not_reach_the_registers_of_the_iommus_that_guard_the_hypervisor_from_its_devices() {
    for (iommu, registers) in [("amd-iommu", "0xfed80018"), ("intel-iommu,aw-bits=48", "0xfed90008")] {
        // Control of the one, capabilities of the other: not all ones where they are within reach. Then the number of
        // functions on bus 0, and those of AMD among them, by ports and in memory.
        let script = format!(
            "mknod /dev/mem c 1 1; echo \"read $(devmem {registers} 32)\"; cd /sys/bus/pci/devices; \
             echo $(ls -d 0000:00:*.0 | wc -l) and $(grep -l 0x1022 */vendor | wc -l) by ports; \
             all=0 amds=0; for slot in $(seq 0 31); do case $(devmem $((0xb0000000 + slot * 32768)) 32) in \
             0xFFFFFFFF) ;; *1022) amds=$((amds + 1)) ;; *) all=$((all + 1)) ;; esac; done; \
             echo $all and $amds in memory"
        );
        let qemu = ["--qemu-arg=-device".to_string(), format!("--qemu-arg={iommu}")];
        let said = dunlin_run_vms(120, &owner(), &["--exec", &script, &qemu[0], &qemu[1]]).stdout;
        assert!(said.contains("read 0xFFFFFFFF"), "{iommu}: {said}");
        // The bridges of the host and of the chipset, and not the IOMMU of AMD.
        for functions in ["2 and 0 by ports", "2 and 0 in memory"] {
            assert!(said.contains(functions), "{iommu}, not {functions}: {said}");
        }
    }
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
    fs::write(&second, vm).expect("can be written");
    let pid = host.pid().to_string();
    let create = Command::new(tool())
        .args(["create", &second.to_string_lossy(), "--host", &pid])
        .output()
        .expect("the tool runs");
    let why = String::from_utf8_lossy(&create.stderr);
    assert!(why.contains("second.toml") && why.contains("devices") && !create.status.success(), "{why}");
    let list: Value = host.ask("list");
    assert!(list.to_string().contains("owner"), "{list}");
    host.end();
}

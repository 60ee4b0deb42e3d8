//! Whole machines as small trees of files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

use super::tree::Tree;
use super::*;

/// Flags of an AMD processor with all that the hypervisor can use.
const ALL_FLAGS: &str =
    "fpu lm pdpe1gb constant_tsc nonstop_tsc x2apic xsave svm npt nrip_save flushbyasid decodeassists";
const SECURE_BOOT: &str = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
const DEBIAN: &str = "#\n# Automatically generated file; DO NOT EDIT.\n# Linux/x86 6.1.158 Kernel Configuration\n#\n\
     CONFIG_X86_64=y\nCONFIG_HYPERV=m\n# CONFIG_MSHV_ROOT is not set\n";
const FEDORA: &str = "# Linux/x86 6.19.14 Kernel Configuration\nCONFIG_X86_64=y\nCONFIG_HYPERV=y\nCONFIG_HYPERV_VMBUS=m\n\
     CONFIG_MSHV_ROOT=m\n# CONFIG_HYPERV_VTL_MODE is not set\n";

/// The files of a machine.
struct Machine(TempDir);

impl Machine {
    fn empty() -> Self {
        Self(tempfile::tempdir().expect("can be made"))
    }

    /// A server that lacks nothing.
    fn amd_server() -> Self {
        Self::empty()
            .cpuinfo("AuthenticAMD", "AMD EPYC 7313 16-Core Processor", ALL_FLAGS)
            .with("proc/sys/kernel/osrelease", "6.19.14-200.fc43.x86_64\n")
            .with("proc/meminfo", "MemTotal:       131072000 kB\nMemFree:        1 kB\n")
            .with("sys/devices/system/cpu/present", "0-31\n")
            .with("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm \n")
            .with("sys/firmware/acpi/tables/APIC", "")
            .with("sys/firmware/acpi/tables/IVRS", "")
            .with("sys/firmware/acpi/tables/SPCR", "")
            .with("sys/firmware/memmap/0/start", "0x0\n")
            .with("sys/firmware/memmap/0/end", "0x9ffff\n")
            .with("sys/firmware/memmap/0/type", "System RAM\n")
            .with("sys/firmware/memmap/1/start", "0x100000\n")
            .with("sys/firmware/memmap/1/end", "0x7fffffff\n")
            .with("sys/firmware/memmap/1/type", "System RAM\n")
            .with(SECURE_BOOT, [6, 0, 0, 0, 0])
            .with("sys/class/dmi/id/sys_vendor", "Supermicro\n")
            .with("sys/class/tty/ttyS0/type", "4\n")
            .with("sys/class/tty/ttyS0/port", "0x3F8\n")
            .with("sys/class/tty/ttyS1/type", "0\n")
            .with("boot/grub2/grub.cfg", "")
            .with("boot/grub2/x86_64-efi/multiboot2.mod", "")
            .with("boot/config-6.19.14-200.fc43.x86_64", FEDORA)
    }

    fn cpuinfo(self, vendor: &str, name: &str, flags: &str) -> Self {
        let processor = |number| {
            format!(
                "processor\t: {number}\nvendor_id\t: {vendor}\nmodel name\t: {name}\ncpuid level\t: 16\nflags\t\t: {flags}\n\n"
            )
        };
        self.with("proc/cpuinfo", [processor(0), processor(1)].concat())
    }

    fn with(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("is below the root")).expect("can be made");
        fs::write(path, content).expect("can be written");
        self
    }

    fn without(self, path: &str) -> Self {
        let path = self.0.path().join(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("was there");
        self
    }

    /// The register VM_CR, as root reads it.
    fn vm_cr(self, value: u64) -> Self {
        use std::os::unix::fs::FileExt;

        let machine = self.with("dev/cpu/0/msr", "");
        let file = fs::OpenOptions::new().write(true).open(machine.0.path().join("dev/cpu/0/msr")).expect("is there");
        // A file with a hole.
        file.write_all_at(&value.to_le_bytes(), 0xc001_0114).expect("can be written");
        machine
    }

    fn tree(&self) -> Tree {
        Tree::open(self.0.path()).expect("is a directory")
    }

    fn report(&self) -> Report {
        Report::of(&self.tree(), &[])
    }
}

/// State, text and remedy of an item.
fn item<'a>(report: &'a Report, name: &str) -> (State, &'a str, &'a str) {
    let item = report.items.iter().find(|item| item.subject.name == name).unwrap_or_else(|| panic!("no item {name}"));
    (item.state, &item.found, item.remedy.as_deref().unwrap_or_default())
}

fn in_state(report: &Report, state: State) -> Vec<&'static str> {
    report.items.iter().filter(|item| item.state == state).map(|item| item.subject.name).collect()
}

#[test]
fn amd_server_with_everything_is_good() {
    let report = Machine::amd_server().report();
    assert!(report.is_good(), "{}", report.text());
    assert_eq!(report.verdict(), "Dunlin can run on this machine, and has all that it needs.");
    assert!(in_state(&report, State::Note).is_empty(), "{}", report.text());
    assert_eq!(item(&report, "IOMMU"), (State::Ok, "AMD-Vi (IVRS)", ""));
    assert!(in_state(&report, State::Unknown).is_empty(), "{}", report.text());
    assert_eq!(item(&report, "pCPUs").1, "32");
    assert_eq!(item(&report, "serial port").1, "ttyS0 at 0x3F8; the firmware names its console (SPCR)");
    assert_eq!(item(&report, "parent's kernel").1, "6.19.14-200.fc43.x86_64 (`modprobe mshv_root` makes the device)");
}

#[test]
fn each_item_is_a_line_below_the_verdict() {
    let report = Machine::amd_server().without("boot/config-6.19.14-200.fc43.x86_64").report();
    let text = report.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], [report.verdict().as_str(), ""]);
    assert_eq!(lines.len(), report.items.len() + 2);
    assert!(lines[2].starts_with("architecture      ok       x86_64, AMD EPYC 7313"), "{}", lines[2]);
    let last = lines.last().expect("is there");
    assert!(last.starts_with("parent's kernel   missing  no kernel is installed: `make parent` builds one"), "{last}");
}

#[test]
fn json_has_the_same_items() {
    let report = Machine::empty().report();
    let json = report.json();
    assert_eq!(json["verdict"], report.verdict());
    assert_eq!(json["good"], false);
    let items = json["items"].as_array().expect("is a list");
    assert_eq!(items.len(), report.items.len());
    let architecture = &items[0];
    assert_eq!((&architecture["name"], &architecture["state"]), (&json!("architecture"), &json!("unknown")));
    assert!(architecture["found"].is_string() && architecture["remedy"].is_string());
    assert_eq!(architecture["needed_for"], "start");
}

#[test]
fn machine_without_a_kernel_for_parents_runs_dunlin_all_the_same() {
    let machine = Machine::amd_server().without("boot/config-6.19.14-200.fc43.x86_64");
    let report = machine.with("boot/config-6.1.0-40-amd64", DEBIAN).report();
    assert_eq!(in_state(&report, State::Missing), ["parent's kernel"]);
    assert!(!report.is_good());
    assert!(report.verdict().starts_with("Dunlin can run on this machine. A parent VM cannot"), "{}", report.verdict());
    let (_, found, remedy) = item(&report, "parent's kernel");
    assert_eq!(found, "6.1.0-40-amd64 has no CONFIG_MSHV_ROOT");
    assert!(remedy.starts_with("`make parent` builds one"), "{remedy}");
}

#[test]
fn kernel_for_parents_is_new_enough_and_has_its_options() {
    let without = |line: &str| FEDORA.replace(line, "");
    for (release, config, able) in [
        ("7.3.4-parent", FEDORA.replace("MSHV_ROOT=m", "MSHV_ROOT=y"), true),
        ("6.19.0", FEDORA.to_string(), true),
        ("6.18.9", FEDORA.to_string(), false),
        ("6.6.135.mshv2", FEDORA.to_string(), false),
        // The version is in the first line of the configuration too.
        ("mine", FEDORA.to_string(), true),
        ("mine", without("# Linux/x86 6.19.14 Kernel Configuration\n"), false),
        ("7.3.4", without("CONFIG_HYPERV=y\n"), false),
        ("7.3.4", FEDORA.replace("# CONFIG_HYPERV_VTL_MODE is not set", "CONFIG_HYPERV_VTL_MODE=y"), false),
        ("7.3.4", "CONFIG_MSHV_ROOT_OF_OTHERS=y\nCONFIG_HYPERV=y\n".to_string(), false),
    ] {
        let machine = Machine::empty().with(&format!("boot/config-{release}"), config.as_bytes());
        let item = kernels::item(&machine.tree(), None, &[]);
        assert_eq!(item.state, if able { State::Ok } else { State::Missing }, "{release}: {}", item.found);
    }
    let beside_modules = Machine::empty().with("usr/lib/modules/7.1.7-300.fc44/config", FEDORA);
    assert_eq!(kernels::item(&beside_modules.tree(), None, &[]).state, State::Ok);
    let built = ["vmlinuz-parent of `make parent`".to_string()];
    let item = kernels::item(&Machine::empty().tree(), None, &built);
    assert_eq!((item.state, item.found.as_str()), (State::Ok, built[0].as_str()));
}

#[test]
fn kernels_for_scripts_are_listed_with_the_newest_last() {
    let machine = ["7.10.0", "6.19.14-200.fc43.x86_64", "7.9.1"]
        .iter()
        .fold(Machine::empty(), |machine, release| machine.with(&format!("boot/config-{release}"), FEDORA))
        .with("boot/config-6.1.0-40-amd64", DEBIAN);
    assert_eq!(kernels::able(&machine.tree()), ["6.19.14-200.fc43.x86_64", "7.9.1", "7.10.0"]);
    assert_eq!(kernels::able(&Machine::empty().tree()), [""; 0]);
}

#[test]
fn many_kernels_are_counted_not_listed() {
    let machine = (0..9)
        .fold(Machine::empty(), |machine, number| machine.with(&format!("boot/config-6.1.0-{number}-amd64"), DEBIAN));
    let item = kernels::item(&machine.tree(), None, &[]);
    assert!(item.found.ends_with("6.1.0-2-amd64 has no CONFIG_MSHV_ROOT, and 6 more"), "{}", item.found);
}

#[test]
fn laptop_of_intel_is_told_plainly() {
    const FLAGS: &str = "fpu lm pdpe1gb constant_tsc nonstop_tsc x2apic xsave";
    const OF_VT_X: &str = "vnmi preemption_timer ept_ad vpid unrestricted_guest ple pml";
    let report = |flags: &str| {
        let machine = Machine::amd_server().cpuinfo("GenuineIntel", "Intel(R) Core(TM) i7-8750H", flags);
        machine.report()
    };
    let able = report(&format!("{FLAGS} vmx ept vpid\nvmx flags\t: {OF_VT_X}"));
    assert_eq!(in_state(&able, State::Missing), [""; 0]);
    assert_eq!(item(&able, "virtualization").1, "Intel VT-x, on which Dunlin has run in an emulator only");
    // An old Linux does not show the parts.
    assert_eq!(in_state(&report(&format!("{FLAGS} vmx")), State::Missing), [""; 0]);

    let report = report(&format!("{FLAGS} vmx ept vpid\nvmx flags\t: {}", OF_VT_X.replace("unrestricted_guest", "")));
    assert_eq!(in_state(&report, State::Missing), ["virtualization"]);
    assert_eq!(item(&report, "virtualization").1, "VT-x without unrestricted guests");
    assert_eq!(report.verdict(), "Dunlin cannot run on this machine as it is. Missing: virtualization.");

    let machine = Machine::amd_server().cpuinfo("GenuineIntel", "Intel(R) Core(TM) i7-8750H", FLAGS);
    let report = machine.report();
    let (_, found, remedy) = item(&report, "virtualization");
    assert!(found.contains("locked") && remedy.contains("firmware"), "{found}: {remedy}");
    // What only AMD's processors have is not asked for.
    assert!(report.items.iter().all(|item| item.subject.name != "nested paging"));
}

#[test]
fn vm_without_nesting_is_told_how_its_hypervisor_nests() {
    let flags = ALL_FLAGS.replace("svm npt nrip_save flushbyasid decodeassists", "hypervisor");
    let vm = |vendor: &str| {
        Machine::amd_server()
            .cpuinfo("AuthenticAMD", "AMD EPYC", &flags)
            .with("sys/class/dmi/id/sys_vendor", vendor.as_bytes())
            .report()
    };
    for (vendor, name, words) in [
        ("QEMU\n", "QEMU", "nested=1"),
        ("VMware, Inc.\n", "VMware", "Expose hardware assisted virtualization"),
        ("Microsoft Corporation\n", "Hyper-V", "Set-VMProcessor"),
        ("Amazon EC2\n", "Amazon EC2", "bare-metal"),
        ("\n", "an unnamed hypervisor", "nest"),
    ] {
        let report = vm(vendor);
        let (state, found, remedy) = item(&report, "virtualization");
        assert_eq!(state, State::Missing);
        assert_eq!(found, format!("no SVM in this VM of {name}"));
        assert!(remedy.contains(words), "{remedy}");
        assert_eq!(item(&report, "outer hypervisor").0, State::Note);
        assert_eq!(item(&report, "nested paging").0, State::Unknown);
        assert!(
            report.items.iter().all(|item| item.subject.name != "firmware's lock"),
            "a VM's firmware locks nothing"
        );
    }
}

#[test]
fn vm_with_nesting_is_good() {
    let report = Machine::amd_server()
        .cpuinfo("AuthenticAMD", "AMD EPYC", &format!("{ALL_FLAGS} hypervisor"))
        .with("sys/hypervisor/type", "xen\n")
        .report();
    assert!(report.is_good(), "{}", report.text());
    let (state, found, _) = item(&report, "outer hypervisor");
    assert_eq!((state, found), (State::Note, "this is a VM of Xen: Dunlin would run nested, and slower"));
}

#[test]
fn first_domain_of_xen_is_told_to_start_without_it() {
    let report = Machine::amd_server()
        .cpuinfo("AuthenticAMD", "AMD EPYC", "fpu lm xsave hypervisor")
        .with("proc/xen/capabilities", "control_d\n")
        .report();
    assert_eq!(item(&report, "virtualization").2, "start this Linux without Xen");
}

#[test]
fn svm_that_the_firmware_has_locked_is_found_by_its_register() {
    let report = Machine::amd_server().vm_cr(1 << 4 | 1 << 3).report();
    let (state, _, remedy) = item(&report, "firmware's lock");
    assert_eq!(state, State::Missing);
    assert!(remedy.contains("SVM Mode (ASRock, ASUS"), "{remedy}");
    assert_eq!(item(&Machine::amd_server().vm_cr(1 << 3).report(), "firmware's lock").0, State::Ok);
}

#[test]
fn svm_that_linux_hides_may_be_locked() {
    let machine = || Machine::amd_server().cpuinfo("AuthenticAMD", "AMD Ryzen 7", "fpu lm xsave");
    let report = machine().report();
    let (state, found, remedy) = item(&report, "virtualization");
    assert_eq!(state, State::Missing);
    assert!(found.contains("or the processor is older than 2008") && remedy.contains("SVM Mode"), "{found}: {remedy}");
    assert_eq!(item(&report, "firmware's lock").0, State::Unknown);

    let report = machine().vm_cr(1 << 4).report();
    assert_eq!(item(&report, "virtualization").1, "the firmware has locked SVM off");
    assert_eq!(item(&report, "firmware's lock").0, State::Missing);
}

#[test]
fn old_linux_shows_svm_even_if_it_is_locked() {
    let machine = || Machine::amd_server().with("proc/sys/kernel/osrelease", "6.1.0-40-amd64\n");
    let report = machine().report();
    let (state, _, remedy) = item(&report, "firmware's lock");
    assert_eq!(state, State::Unknown);
    assert!(remedy.starts_with("as root, `modprobe msr`"), "{remedy}");
    assert!(!report.is_good());
    assert!(report.verdict().ends_with("is not known. Unknown: firmware's lock."), "{}", report.verdict());
    // The module refuses a locked SVM.
    let report = machine().with("sys/module/kvm_amd/initstate", "live\n").report();
    assert_eq!(item(&report, "firmware's lock").0, State::Ok);
}

#[test]
fn missing_feature_is_a_note_if_dunlin_is_only_slower() {
    let flags = |gone: &str| ALL_FLAGS.replace(gone, "");
    for (gone, name, state) in [
        ("npt", "nested paging", State::Missing),
        ("xsave", "XSAVE", State::Missing),
        ("flushbyasid", "flush by ASID", State::Note),
        ("decodeassists", "decode assists", State::Note),
        ("nrip_save", "next RIP", State::Note),
        ("x2apic", "x2APIC", State::Note),
        ("pdpe1gb", "1 GiB pages", State::Note),
        ("nonstop_tsc", "invariant TSC", State::Note),
    ] {
        let report = Machine::amd_server().cpuinfo("AuthenticAMD", "AMD", &flags(gone)).report();
        assert_eq!(item(&report, name).0, state, "{name}");
        assert_eq!(report.is_good(), state == State::Note, "{name}");
    }
}

#[test]
fn feature_of_some_processors_only_is_not_there() {
    let text = "processor : 0\nflags : lm svm npt xsave\nprocessor : 1\nflags : lm svm xsave\n";
    let report = Machine::amd_server().with("proc/cpuinfo", text).report();
    assert_eq!(item(&report, "nested paging").0, State::Missing);
}

#[test]
fn secure_boot_that_is_on_is_to_be_turned_off() {
    let report = Machine::amd_server().with(SECURE_BOOT, [6, 0, 0, 0, 1]).report();
    assert_eq!(in_state(&report, State::Missing), ["Secure Boot"]);
    assert!(item(&report, "Secure Boot").2.contains("turn it off"));

    let unmounted = Machine::amd_server().without("sys/firmware/efi/efivars").report();
    assert_eq!(item(&unmounted, "Secure Boot").0, State::Unknown);
    let short = Machine::amd_server().with(SECURE_BOOT, [6, 0]).report();
    assert_eq!(item(&short, "Secure Boot").0, State::Unknown);
    let bios = Machine::amd_server().without("sys/firmware/efi").report();
    assert_eq!(item(&bios, "Secure Boot").0, State::Ok);
}

#[test]
fn machine_without_grub_starts_from_a_stick() {
    let report = Machine::amd_server().without("boot/grub2").report();
    let (state, found, remedy) = item(&report, "GRUB");
    assert_eq!((state, found), (State::Note, "not installed"));
    assert!(remedy.contains("dunlin image"), "{remedy}");
    assert!(report.is_good());

    // Its tools alone, as `dunlin image` needs them.
    let report = Machine::amd_server().without("boot/grub2").with("etc/grub.d/10_linux", "").report();
    assert_eq!(item(&report, "GRUB").1, "its tools are installed, but /boot has no grub.cfg");
    let report = Machine::amd_server().without("boot/grub2/x86_64-efi").report();
    assert_eq!(item(&report, "GRUB").1, "installed, but its loader multiboot2 is not in sight");
}

#[test]
fn pcpus_and_memory_are_compared_with_the_limits() {
    let report = Machine::amd_server().with("sys/devices/system/cpu/present", "0-63,128-191\n").report();
    let (state, found, _) = item(&report, "pCPUs");
    assert_eq!((state, found), (State::Note, "128, of which Dunlin uses 64; the others stay asleep"));
    // A list that makes no sense.
    let report = Machine::amd_server().with("sys/devices/system/cpu/present", "7-0,x\n").report();
    assert_eq!(item(&report, "pCPUs").1, "2");
    for (kib, state) in
        [(100_000, State::Missing), (500_000, State::Note), (1_000_000, State::Ok), (1u64 << 37, State::Note)]
    {
        let report = Machine::amd_server().with("proc/meminfo", format!("MemTotal: {kib} kB\n")).report();
        assert_eq!(item(&report, "memory").0, state, "{kib}");
    }
}

#[test]
fn firmware_at_the_place_of_the_image_is_found() {
    let report = Machine::amd_server().with("sys/firmware/memmap/1/end", "0x2fffff\n").report();
    assert_eq!(item(&report, "RAM at 2 MiB").0, State::Missing);
    // Two ranges that meet are as good as one.
    let report = Machine::amd_server()
        .with("sys/firmware/memmap/1/end", "0x2fffff\n")
        .with("sys/firmware/memmap/2/start", "0x300000\n")
        .with("sys/firmware/memmap/2/end", "0xffffffffffffffff\n")
        .with("sys/firmware/memmap/2/type", "System RAM\n")
        .report();
    assert_eq!(item(&report, "RAM at 2 MiB").0, State::Ok);
    let report = Machine::amd_server().without("sys/firmware/memmap").report();
    assert_eq!(item(&report, "RAM at 2 MiB").0, State::Unknown);
    assert!(report.is_good(), "GRUB would tell");
}

#[test]
fn clock_whose_rate_only_the_pit_may_give_is_unknown() {
    let sources = "sys/devices/system/clocksource/clocksource0/available_clocksource";
    let fadt = |register: u8| {
        let mut table = [0; 276];
        table[..4].copy_from_slice(b"FACP");
        table[76] = register;
        table
    };
    let machine = || Machine::amd_server().with(sources, "tsc \n");
    assert_eq!(item(&machine().report(), "clock").0, State::Unknown);
    for (register, state) in [(0x8, State::Ok), (0, State::Unknown)] {
        let report = machine().with("sys/firmware/acpi/tables/FACP", fadt(register)).report();
        assert_eq!(item(&report, "clock").0, state);
        assert_eq!(item(&report, "clock").1.contains("PIT"), register == 0);
    }
    let ports = "0000-0000 : PCI Bus\n  0000-0000 : ACPI PM_TMR\n";
    assert_eq!(item(&machine().with("proc/ioports", ports).report(), "clock").0, State::Ok);
}

#[test]
fn acpi_without_a_list_of_processors_is_missing() {
    let report = Machine::amd_server().without("sys/firmware/acpi/tables/APIC").report();
    assert_eq!(item(&report, "ACPI").0, State::Missing);
    let report = Machine::amd_server().without("sys/firmware/acpi").report();
    assert_eq!(item(&report, "ACPI").0, State::Unknown);
}

/// An Arm server with firmware that passes a device tree.
fn arm_server() -> Machine {
    Machine::empty()
        .with("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd0c\n")
        .with("proc/meminfo", "MemTotal: 16000000 kB\n")
        .with("proc/interrupts", "           CPU0\n 11:      42     GICv3  27 Level     arch_timer\n")
        .with("sys/class/misc/kvm/dev", "10:232\n")
        .with("sys/class/tty/ttyAMA0/dev", "204:64\n")
        .with(SECURE_BOOT, [6, 0, 0, 0, 0])
        .with("sys/firmware/devicetree/base/cpus/name", "cpus\0")
        .with("boot/grub/grub.cfg", "")
}

#[test]
fn arm_server_needs_el2_and_a_device_tree() {
    let report = arm_server().report();
    assert!(report.is_good(), "{}", report.text());
    assert_eq!(item(&report, "architecture").1, "aarch64");
    assert_eq!(item(&report, "parent's kernel").0, State::Note);
    assert!(report.items.iter().all(|item| item.subject.name != "XSAVE"));

    let report = arm_server().without("sys/class/misc").report();
    assert_eq!(item(&report, "EL2").0, State::Unknown);
    let acpi = arm_server().without("sys/firmware/devicetree").with("sys/firmware/acpi/tables/APIC", "").report();
    assert_eq!(in_state(&acpi, State::Missing), ["device tree"]);
    let old = arm_server().with("proc/interrupts", " 11:  42  GICv2  27 Level  arch_timer\n").report();
    assert_eq!(in_state(&old, State::Missing), ["interrupts"]);
}

#[test]
fn empty_tree_tells_nothing() {
    let report = Machine::empty().report();
    assert!(report.items.iter().all(|item| item.state == State::Unknown), "{}", report.text());
    assert!(!report.is_good());
}

#[test]
fn mounted_image_tells_its_kernels() {
    let report = Machine::empty().with("boot/config-6.19.14", FEDORA).with("etc/grub.d/10_linux", "").report();
    assert_eq!(item(&report, "architecture").1, "x86_64");
    assert_eq!(item(&report, "parent's kernel").0, State::Ok);
    assert_eq!(item(&report, "nested paging").0, State::Unknown);
}

#[test]
fn garbage_is_survived_and_not_shown_to_the_terminal() {
    let mut random = fastrand::Rng::with_seed(15);
    let garbage =
        |random: &mut fastrand::Rng| -> Vec<u8> { (0..random.usize(..2000)).map(|_| random.u8(..)).collect() };
    let paths = [
        "proc/cpuinfo",
        "proc/meminfo",
        "proc/interrupts",
        "proc/ioports",
        "proc/sys/kernel/osrelease",
        "proc/xen/capabilities",
        "sys/hypervisor/type",
        "sys/devices/system/cpu/present",
        "sys/devices/system/clocksource/clocksource0/available_clocksource",
        "sys/firmware/acpi/tables/FACP",
        "sys/firmware/memmap/0/start",
        "sys/firmware/memmap/1/type",
        "sys/class/dmi/id/sys_vendor",
        "sys/class/tty/ttyS0/type",
        "sys/class/tty/ttyS0/port",
        "sys/module/kvm_amd/initstate",
        "boot/config-6.19.14-200.fc43.x86_64",
        "dev/cpu/0/msr",
        SECURE_BOOT,
    ];
    for _ in 0..50 {
        let machine = paths.iter().fold(Machine::amd_server(), |machine, path| {
            if random.bool() { machine.with(path, garbage(&mut random)) } else { machine }
        });
        let text = machine.report().text();
        assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text}");
    }
    let evil = Machine::amd_server().cpuinfo("AuthenticAMD", "AMD \u{1b}[2J\u{9b}31m", ALL_FLAGS).report();
    assert_eq!(item(&evil, "architecture").1, "x86_64, AMD ?[2J?31m");
}

#[test]
fn directories_pipes_and_links_out_of_the_tree_are_not_read() {
    let machine = Machine::empty().with("proc/meminfo/x", "").with("elsewhere", "");
    let pipe = machine.0.path().join("proc/cpuinfo");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("is installed");
    assert!(made.success());
    fs::create_dir(machine.0.path().join("boot")).expect("can be made");
    let outside = Machine::empty().with("config", FEDORA);
    symlink(outside.0.path().join("config"), machine.0.path().join("boot/config-7.3.4")).expect("can be made");
    let report = machine.report();
    assert_eq!(item(&report, "memory").0, State::Unknown);
    assert_eq!(item(&report, "architecture").0, State::Unknown);
    assert_eq!(item(&report, "parent's kernel").1, "no kernel is installed");
}

#[test]
fn root_that_is_no_directory_is_bad_input() {
    let machine = Machine::empty().with("file", "");
    for path in [machine.0.path().join("file"), machine.0.path().join("nowhere"), Path::new("").to_path_buf()] {
        let failure = Tree::open(&path).err().expect("is no directory");
        assert_eq!(failure.status, crate::failure::BAD_INPUT);
        assert!(failure.to_string().starts_with("option '--root': ") && failure.has_help(), "{failure}");
    }
}

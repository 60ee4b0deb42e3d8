//! The machine around the processor: an outer hypervisor, pCPUs, memory, clock, ACPI's tables, and a serial port.

use super::processor::Processor;
use super::tree::{Look, Tree};
use super::{Item, Subject};
use crate::config::Arch;

const OUTER: Subject = Subject::useful("outer hypervisor");
const PCPUS: Subject = Subject::needed("pCPUs");
const MEMORY: Subject = Subject::needed("memory");
const PLACE: Subject = Subject::needed("RAM at 2 MiB");
const CLOCK: Subject = Subject::needed("clock");
const ACPI: Subject = Subject::needed("ACPI");
const IOMMU: Subject = Subject::useful("IOMMU");
const SERIAL: Subject = Subject::useful("serial port");

const TABLES: &str = "sys/firmware/acpi/tables";

/// The hypervisor that this machine is a VM of.
#[derive(Clone, Debug)]
pub(super) struct Outer {
    pub(super) name: String,
    /// How it is told to offer virtualization.
    pub(super) remedy: &'static str,
}

/// Words in DMI's names of vendors and products, what they stand for, and how such a hypervisor nests.
const OUTERS: [(&str, &str, &str); 9] = [
    ("QEMU", "QEMU", "load the host's kvm_amd with nested=1, and give QEMU `-cpu host`"),
    ("KVM", "KVM", "load the host's kvm_amd with nested=1, and give QEMU `-cpu host`"),
    ("VMware", "VMware", "turn on `Expose hardware assisted virtualization to the guest OS` for this VM"),
    ("VirtualBox", "VirtualBox", "`VBoxManage modifyvm NAME --nested-hw-virt on`"),
    (
        "Microsoft",
        "Hyper-V",
        "`Set-VMProcessor NAME -ExposeVirtualizationExtensions $true`, on a host with AMD's processor",
    ),
    ("Xen", "Xen", "give the VM `nestedhvm=1`, if this Xen supports it"),
    ("Amazon", "Amazon EC2", "take a bare-metal instance with a processor of AMD"),
    ("Google", "Google Compute Engine", "take a machine with a processor of AMD that is no VM"),
    ("Bochs", "Bochs", "choose a processor with SVM or VT-x, such as `ryzen` or `corei7_skylake_x`"),
];
const NEST: &str =
    "let the outer hypervisor nest (QEMU: kvm_amd with nested=1, and `-cpu host`), or take a machine that is no VM";

/// Finds an outer hypervisor.
pub(super) fn outer(tree: &Tree, processor: Option<&Processor>) -> Option<Outer> {
    // Xen's first domain has the machine, but not its virtualization.
    if tree.value("proc/xen/capabilities").is_some_and(|text| text.contains("control_d")) {
        let remedy = "start this Linux without Xen";
        return Some(Outer { name: "Xen, as its first domain".to_string(), remedy });
    }
    let ids = ["sys_vendor", "product_name", "bios_vendor"].map(|name| format!("sys/class/dmi/id/{name}"));
    let mut texts: Vec<String> = ids.iter().filter_map(|path| tree.value(path)).collect();
    let is_xen = tree.value("sys/hypervisor/type").as_deref() == Some("xen");
    texts.extend(is_xen.then(|| "Xen".to_string()));
    // Linux sets the flag by CPUID 1 ECX bit 31. Processors of Arm have none.
    let is_vm = match processor {
        Some(processor) if processor.arch == Arch::X86_64 => processor.has("hypervisor"),
        _ => {
            let tree_of_qemu = tree.value("sys/firmware/devicetree/base/compatible");
            texts.extend(tree_of_qemu.filter(|text| text.contains("linux,dummy-virt")).map(|_| "QEMU".to_string()));
            // Firmware of Microsoft's computers and of Google's and Amazon's own machines has these names too.
            texts.retain(|text| !["Microsoft", "Google", "Amazon"].iter().any(|name| text.contains(name)));
            OUTERS.iter().any(|(word, ..)| texts.iter().any(|text| text.contains(word)))
        }
    };
    if !is_vm {
        return None;
    }
    let known = OUTERS.iter().find(|(word, ..)| texts.iter().any(|text| text.contains(word)));
    Some(match known {
        Some(&(_, name, remedy)) => Outer { name: name.to_string(), remedy },
        None => Outer { name: "an unnamed hypervisor".to_string(), remedy: NEST },
    })
}

pub(super) fn items(
    tree: &Tree,
    arch: Option<Arch>,
    processor: Option<&Processor>,
    outer: Option<&Outer>,
) -> Vec<Item> {
    let mut items = vec![within(processor, outer), pcpus(tree, processor), memory(tree)];
    if arch != Some(Arch::Aarch64) {
        items.extend([place(tree), clock(tree, processor), acpi(tree)]);
    }
    items.extend([iommu(tree, arch), serial(tree, arch)]);
    items
}

fn within(processor: Option<&Processor>, outer: Option<&Outer>) -> Item {
    match (outer, processor) {
        (Some(outer), _) => OUTER.note(format!("this is a VM of {}: Dunlin would run nested, and slower", outer.name)),
        (None, Some(_)) => OUTER.ok("no sign of one"),
        (None, None) => OUTER.unknown("/proc/cpuinfo does not tell"),
    }
}

/// `MAX_CPUS` in hypervisor/src/cpu/mod.rs. The hypervisor starts no others.
const MAX_PCPUS: u64 = 64;

fn pcpus(tree: &Tree, processor: Option<&Processor>) -> Item {
    let listed = tree.value("sys/devices/system/cpu/present").and_then(|text| count(&text));
    let found = listed.or_else(|| processor.and_then(|processor| u64::try_from(processor.count).ok()));
    match found.filter(|&count| count != 0) {
        Some(count) if count > MAX_PCPUS => {
            PCPUS.note(format!("{count}, of which Dunlin uses {MAX_PCPUS}; the others stay asleep"))
        }
        Some(count) => PCPUS.ok(count.to_string()),
        None => PCPUS.unknown("neither /sys/devices/system/cpu/present nor /proc/cpuinfo tells"),
    }
}

/// The length of a list such as `0-3,8`.
fn count(list: &str) -> Option<u64> {
    list.split(',').try_fold(0u64, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

const MIB: u64 = 1 << 20;
/// `LEAST_MEMORY` in hypervisor/src/check.rs: without so much no VM can be created.
const LEAST_MEMORY: u64 = 128 * MIB;
/// A machine of 1 GiB has this much at least; it is enough for the default VM (docs/real-machine.md).
const ENOUGH_MEMORY: u64 = 900 * MIB;
/// Size of the direct map (`DIRECT_MAP_END` in hypervisor/src/arch/mappings.rs).
const MOST_MEMORY: u64 = 64 << 40;

fn memory(tree: &Tree) -> Item {
    let text = tree.text("proc/meminfo").found().unwrap_or_default();
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let Some(bytes) = kib.and_then(|kib: u64| kib.checked_mul(1024)) else {
        return MEMORY.unknown("/proc/meminfo does not tell");
    };
    let found = format!("{} MiB", bytes / MIB);
    match bytes {
        ..LEAST_MEMORY => MEMORY.missing(found, "VMs need 128 MiB; the default VM needs a machine of 1 GiB"),
        LEAST_MEMORY..ENOUGH_MEMORY => {
            MEMORY.note(found).remedy("the default VM needs a machine of 1 GiB; give VMs less (`--memory`)")
        }
        ENOUGH_MEMORY..=MOST_MEMORY => MEMORY.ok(found),
        _ => MEMORY.note(format!("{found}, of which Dunlin uses what is below 64 TiB")),
    }
}

/// The image's place (hypervisor/src/arch/x86_64/host/link.ld). It has some 1.6 MiB.
const IMAGE: std::ops::Range<u64> = 2 * MIB..4 * MIB;
/// Maximum number of ranges of the memory map.
const MOST_RANGES: usize = 1024;

/// GRUB loads the image only to RAM that the firmware does not use.
fn place(tree: &Tree) -> Item {
    let folder = "sys/firmware/memmap";
    let Some(names) = tree.names(folder).found() else {
        // GRUB would say it too, so nobody needs to worry.
        return Subject::useful(PLACE.name).unknown("Linux does not show the firmware's memory map");
    };
    let number = |path: String| u64::from_str_radix(tree.value(&path)?.strip_prefix("0x")?, 16).ok();
    let range = |name: &String| {
        let is_ram = tree.value(&format!("{folder}/{name}/type"))? == "System RAM";
        let (start, last) = (number(format!("{folder}/{name}/start"))?, number(format!("{folder}/{name}/end"))?);
        is_ram.then_some((start, last))
    };
    let mut ram: Vec<(u64, u64)> = names.iter().take(MOST_RANGES).filter_map(range).collect();
    ram.sort_unstable();
    let covered = ram.into_iter().fold(
        IMAGE.start,
        |end, (start, last)| {
            if start <= end { end.max(last.saturating_add(1)) } else { end }
        },
    );
    if covered >= IMAGE.end {
        PLACE.ok("free for the hypervisor's image")
    } else {
        let remedy = "start from UEFI instead of BIOS, or the other way round: each has another memory map";
        PLACE.missing("the firmware uses the place of the hypervisor's image", remedy)
    }
}

/// Leaf 15h of CPUID, with the TSC's rate.
const RATE_LEAF: u32 = 0x15;

/// `tsc::calibrate` refuses a machine that has neither the ACPI PM timer nor CPUID leaf 15h, nor a PIT, which shows
/// nowhere.
fn clock(tree: &Tree, processor: Option<&Processor>) -> Item {
    let sources = tree.value("sys/devices/system/clocksource/clocksource0/available_clocksource").unwrap_or_default();
    let ports = tree.text("proc/ioports").found().unwrap_or_default();
    if sources.split(' ').any(|source| source == "acpi_pm") || ports.contains("ACPI PM_TMR") {
        return CLOCK.ok("the ACPI PM timer");
    }
    let timer = tree.bytes(&format!("{TABLES}/FACP"), 0, 4096).found().map(|table| has_pm_timer(&table));
    let last_leaf = processor.and_then(|processor| processor.last_leaf);
    match (timer, last_leaf) {
        (Some(true), _) => CLOCK.ok("the ACPI PM timer"),
        (Some(false), Some(last)) if last < RATE_LEAF => CLOCK
            .unknown("no ACPI PM timer, and no CPUID leaf 15h; the TSC's rate is measured by the PIT, if there is one")
            .remedy("turn the PM timer on in the firmware's set-up, if it can be turned off there"),
        (Some(false), _) => CLOCK
            .unknown("no ACPI PM timer; CPUID leaf 15h may have the TSC's rate")
            .remedy("the image of `dunlin image` tells whether it has"),
        (None, _) => CLOCK
            .unknown("no sign of an ACPI PM timer")
            .remedy("repeat this check as root, which may read ACPI's tables"),
    }
}

/// PM_TMR_BLK and X_PM_TMR_BLK of the FADT (ACPI 6.5, 5.2.9).
fn has_pm_timer(table: &[u8]) -> bool {
    let is_set = |at: std::ops::Range<usize>| table.get(at).is_some_and(|bytes| bytes.iter().any(|&byte| byte != 0));
    table.starts_with(b"FACP") && (is_set(76..80) || is_set(212..220))
}

/// `acpi::read` gives up without a MADT, which lists the pCPUs. Everyone sees that a table is there; root may read it.
fn acpi(tree: &Tree) -> Item {
    match (tree.look(&format!("{TABLES}/APIC")), tree.look(TABLES)) {
        (Look::Found(()), _) => ACPI.ok("tables with a MADT"),
        (Look::Absent, Look::Found(())) => ACPI.missing(
            "tables without a MADT, which lists the pCPUs",
            "turn ACPI's APIC mode on in the firmware's set-up",
        ),
        _ => ACPI.unknown("Linux shows no tables").remedy("start Linux without `acpi=off`"),
    }
}

/// Dunlin starts without an IOMMU, too. It uses AMD's and Intel's (docs/decisions/0023-iommu.md).
fn iommu(tree: &Tree, arch: Option<Arch>) -> Item {
    const UNGUARDED: &str = "devices can reach all memory by DMA";
    let has = |table: &str| tree.has(&format!("{TABLES}/{table}"));
    if arch == Some(Arch::Aarch64) {
        return IOMMU.note(format!("Dunlin uses no SMMU yet, so {UNGUARDED}"));
    }
    if has("IVRS") {
        IOMMU.ok("AMD-Vi (IVRS)")
    } else if has("DMAR") {
        IOMMU.ok("VT-d (DMAR)")
    } else if tree.has(TABLES) {
        IOMMU.note(format!("none (no IVRS, no DMAR), so {UNGUARDED}")).remedy("firmware calls it IOMMU, AMD-Vi or VT-d")
    } else {
        IOMMU.unknown("Linux shows no ACPI tables")
    }
}

/// Maximum number of serial ports that are looked at.
const MOST_PORTS: usize = 32;

/// The log goes to the serial port that the firmware names (SPCR), else to COM1; on Arm to a PL011.
fn serial(tree: &Tree, arch: Option<Arch>) -> Item {
    if arch == Some(Arch::Aarch64) {
        return if tree.has("sys/class/tty/ttyAMA0") {
            SERIAL.ok("a PL011 (ttyAMA0)")
        } else {
            SERIAL.note("no PL011 (ttyAMA0): there is no other place for messages on AArch64 yet")
        };
    }
    let names = tree.names("sys/class/tty").found();
    let is_known = names.is_some();
    let ports = names.into_iter().flatten().filter(|name| name.starts_with("ttyS")).take(MOST_PORTS);
    // Linux has names for ports that do not exist; those have type 0.
    let port = ports.filter(|name| tree.value(&format!("sys/class/tty/{name}/type")).is_some_and(|kind| kind != "0"));
    let found: Vec<String> = port
        .map(|name| match tree.value(&format!("sys/class/tty/{name}/port")) {
            Some(port) => format!("{name} at {port}"),
            None => name,
        })
        .collect();
    let is_named = if tree.has(&format!("{TABLES}/SPCR")) { "; the firmware names its console (SPCR)" } else { "" };
    if !found.is_empty() {
        SERIAL.ok(format!("{}{is_named}", found.join(", ")))
    } else if is_known {
        SERIAL.note(format!("none, so messages are on the screen{is_named}"))
    } else {
        SERIAL.unknown("Linux shows no terminals")
    }
}

//! The processor: what the hypervisor needs of it, and what makes it faster.
//!
//! Linux shows CPUID as flags in `/proc/cpuinfo`. It omits a flag that it does not know or that it has cleared.

use std::collections::BTreeSet;

use super::machine::Outer;
use super::tree::{Look, Tree};
use super::{Item, Subject};
use crate::config::Arch;

const ARCHITECTURE: Subject = Subject::needed("architecture");
const VIRTUALIZATION: Subject = Subject::needed("virtualization");
const LOCK: Subject = Subject::needed("firmware's lock");
const EL2: Subject = Subject::needed("EL2");
const GIC: Subject = Subject::needed("interrupts");

/// Usual names of the option, by vendor of the machine or board.
pub(super) const SVM_OPTION: &str = "turn it on in the firmware's set-up: SVM Mode (ASRock, ASUS, Gigabyte, MSI, Supermicro), \
     Virtualization Technology (Dell, HP), AMD-V or SVM (Lenovo, others)";

/// The same for VT-x.
const VT_X_OPTION: &str =
    "turn it on in the firmware's set-up, where it is called VT-x, VMX or Virtualization Technology";

/// The machine's processors.
#[derive(Clone, Debug)]
pub(super) struct Processor {
    pub(super) arch: Arch,
    /// How many Linux uses.
    pub(super) count: usize,
    vendor: String,
    name: String,
    /// Flags that all of them have; of x86-64.
    flags: BTreeSet<String>,
    /// What the first one has of VT-x. Linux shows it since 5.9.
    vt_x: Option<String>,
    /// The last standard leaf of CPUID.
    pub(super) last_leaf: Option<u32>,
}

impl Processor {
    /// Reads `/proc/cpuinfo`. `None` if it says nothing of a known architecture.
    pub(super) fn read(tree: &Tree) -> Option<Self> {
        Self::parse(&tree.text("proc/cpuinfo").found()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let fields =
            || text.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim()));
        let first = |wanted: &str| fields().find(|(key, _)| *key == wanted).map(|(_, value)| value.to_string());
        let mut flags: Option<BTreeSet<String>> = None;
        for (_, line) in fields().filter(|(key, _)| *key == "flags") {
            let these: BTreeSet<&str> = line.split_ascii_whitespace().collect();
            match &mut flags {
                Some(common) => common.retain(|flag| these.contains(flag.as_str())),
                None => flags = Some(these.into_iter().map(str::to_string).collect()),
            }
        }
        let arch = match (&flags, first("CPU implementer")) {
            (Some(_), _) => Arch::X86_64,
            // 32-bit kernels show the same fields on a processor of Armv8, with this number.
            (None, Some(_)) if first("CPU architecture").as_deref() == Some("8") => Arch::Aarch64,
            (None, _) => return None,
        };
        Some(Self {
            arch,
            count: fields().filter(|(key, _)| *key == "processor").count(),
            vendor: first("vendor_id").unwrap_or_default(),
            name: first("model name").unwrap_or_default(),
            flags: flags.unwrap_or_default(),
            vt_x: first("vmx flags"),
            last_leaf: first("cpuid level").and_then(|level| level.parse().ok()),
        })
    }

    pub(super) fn has(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }

    /// Whether Linux shows a part of VT-x, in either of two places, or shows none of them.
    fn has_of_vt_x(&self, flag: &str) -> bool {
        let Some(shown) = &self.vt_x else { return true };
        self.has(flag) || shown.split_ascii_whitespace().any(|one| one == flag)
    }
}

pub(super) fn items(
    tree: &Tree,
    arch: Option<Arch>,
    processor: Option<&Processor>,
    outer: Option<&Outer>,
) -> Vec<Item> {
    let mut items = vec![architecture(arch, processor)];
    match (arch, processor) {
        (Some(Arch::Aarch64), _) => items.extend([el2(tree, outer), interrupts(tree)]),
        (_, Some(processor)) if processor.has("svm") || processor.vendor != "GenuineIntel" => {
            items.push(svm(tree, processor, outer));
            items.extend(lock(tree, processor));
            items.extend(FEATURES.map(|feature| feature.item(Some(processor))));
        }
        (_, Some(processor)) => {
            items.push(vt_x(processor));
            items.extend(
                FEATURES.iter().filter(|feature| !feature.is_of_svm).map(|feature| feature.item(Some(processor))),
            );
        }
        (_, None) => {
            items.extend([VIRTUALIZATION, LOCK].map(|subject| subject.unknown(NO_CPUINFO)));
            items.extend(FEATURES.map(|feature| feature.item(None)));
        }
    }
    items
}

const NO_CPUINFO: &str = "/proc/cpuinfo does not tell";

fn architecture(arch: Option<Arch>, processor: Option<&Processor>) -> Item {
    let Some(arch) = arch else {
        return ARCHITECTURE
            .unknown("neither /proc/cpuinfo nor a kernel's configuration tells")
            .remedy("Dunlin runs on x86-64 and on AArch64");
    };
    match processor {
        // `boot_entry` stops without long mode (hypervisor/src/arch/x86_64/host/boot.rs).
        Some(processor) if arch == Arch::X86_64 && !processor.has("lm") => {
            ARCHITECTURE.missing(format!("{} has no 64-bit mode", processor.name), "this needs another processor")
        }
        Some(processor) if !processor.name.is_empty() => ARCHITECTURE.ok(format!("{arch}, {}", processor.name)),
        _ => ARCHITECTURE.ok(arch.to_string()),
    }
}

/// The hypervisor refuses to start VMs without SVM (`Missing::Svm` in hypervisor/src/arch/x86_64/svm/mod.rs).
fn svm(tree: &Tree, processor: &Processor, outer: Option<&Outer>) -> Item {
    if processor.has("svm") {
        return VIRTUALIZATION.ok("AMD SVM");
    }
    if let Some(outer) = outer {
        let found = format!("no SVM in this VM of {}", outer.name);
        return VIRTUALIZATION.missing(found, outer.remedy);
    }
    if processor.vendor != "AuthenticAMD" && processor.vendor != "HygonGenuine" {
        let found = format!("no SVM in this processor ({})", processor.vendor);
        return VIRTUALIZATION.missing(found, "this needs a processor of AMD");
    }
    // Since 6.7 Linux hides the flag when the firmware has locked SVM (`init_amd` in arch/x86/kernel/cpu/amd.c).
    let found = match is_locked(tree) {
        Some(true) => "the firmware has locked SVM off",
        _ => "no SVM: the firmware has locked it off, or the processor is older than 2008",
    };
    VIRTUALIZATION.missing(found, SVM_OPTION)
}

/// The hypervisor refuses to start VMs without these (`Capability::read` in crates/x86_defs/src/vmx/controls.rs).
fn vt_x(processor: &Processor) -> Item {
    if !processor.has("vmx") {
        let found = "no VT-x: the firmware has locked it off, or this processor has none";
        return VIRTUALIZATION.missing(found, VT_X_OPTION);
    }
    let needed = [("ept", "EPT"), ("vpid", "VPID"), ("unrestricted_guest", "unrestricted guests")];
    match needed.into_iter().find(|(flag, _)| !processor.has_of_vt_x(flag)) {
        Some((_, name)) => VIRTUALIZATION.missing(format!("VT-x without {name}"), "this needs another processor"),
        None => VIRTUALIZATION.ok("Intel VT-x, on which Dunlin has run in an emulator only"),
    }
}

/// `Missing::LockedByFirmware`. `None` if there is nothing to lock.
fn lock(tree: &Tree, processor: &Processor) -> Option<Item> {
    match is_locked(tree) {
        Some(true) => return Some(LOCK.missing("SVM is locked off (VM_CR.SVMDIS is set)", SVM_OPTION)),
        Some(false) => return Some(LOCK.ok("SVM is not locked off (VM_CR.SVMDIS is clear)")),
        None => {}
    }
    if !processor.has("svm") {
        let remedy = "as root, `modprobe msr` and repeat this check: VM_CR tells";
        return (!processor.has("hypervisor")).then(|| LOCK.unknown("VM_CR cannot be read").remedy(remedy));
    }
    let release = tree.value("proc/sys/kernel/osrelease").unwrap_or_default();
    if super::kernels::version(&release).is_some_and(|version| version >= HIDES_LOCKED_SVM) {
        return Some(LOCK.ok(format!("SVM is not locked off: Linux {} would hide it", release)));
    }
    // The module does not load when SVM is locked. One that is built in has no such file.
    if tree.value("sys/module/kvm_amd/initstate").as_deref() == Some("live") {
        return Some(LOCK.ok("SVM is not locked off: the module kvm_amd has loaded"));
    }
    let remedy = format!("as root, `modprobe msr` and repeat this check. If it is locked, {SVM_OPTION}");
    Some(LOCK.unknown("the flag svm does not tell whether the firmware has locked SVM off").remedy(remedy))
}

/// From this version on Linux surely hides SVM that is locked off.
const HIDES_LOCKED_SVM: (u32, u32) = (6, 8);
/// VM_CR and its bit SVMDIS (APM vol. 2, 15.30.1).
const VM_CR: u64 = 0xc001_0114;
const SVMDIS: u64 = 1 << 4;

/// Whether the firmware has locked SVM off. `None` if Linux does not let us read the register.
fn is_locked(tree: &Tree) -> Option<bool> {
    let bytes = tree.bytes("dev/cpu/0/msr", VM_CR, 8).found()?;
    let value = u64::from_le_bytes(bytes.try_into().ok()?);
    Some(value & SVMDIS != 0)
}

/// A feature that Linux shows as one or two flags.
struct Feature {
    subject: Subject,
    flags: &'static [&'static str],
    /// Linux shows it only where there is SVM.
    is_of_svm: bool,
    present: &'static str,
    absent: &'static str,
}

/// The features that the hypervisor asks for. `Missing` in hypervisor/src/arch/x86_64/svm/mod.rs lists those without
/// which it starts no VM.
const FEATURES: [Feature; 8] = [
    Feature {
        subject: Subject::needed("nested paging"),
        flags: &["npt"],
        is_of_svm: true,
        present: "yes",
        absent: "no nested paging (CPUID 8000_000A EDX bit 0)",
    },
    Feature {
        subject: Subject::needed("XSAVE"),
        flags: &["xsave"],
        is_of_svm: false,
        present: "yes",
        absent: "no XSAVE (CPUID 1 ECX bit 26)",
    },
    Feature {
        subject: Subject::useful("flush by ASID"),
        flags: &["flushbyasid"],
        is_of_svm: true,
        present: "yes",
        absent: "no: a flush of one vCPU's TLB entries flushes those of all",
    },
    Feature {
        subject: Subject::useful("decode assists"),
        flags: &["decodeassists"],
        is_of_svm: true,
        present: "yes",
        absent: "no: the hypervisor reads the guest's instructions from memory more often",
    },
    Feature {
        subject: Subject::useful("next RIP"),
        flags: &["nrip_save"],
        is_of_svm: true,
        present: "yes",
        absent: "no: the hypervisor finds the next instruction itself",
    },
    Feature {
        subject: Subject::useful("x2APIC"),
        flags: &["x2apic"],
        is_of_svm: false,
        present: "yes",
        absent: "no: with more than 8 pCPUs each one is kicked alone",
    },
    Feature {
        subject: Subject::useful("1 GiB pages"),
        flags: &["pdpe1gb"],
        is_of_svm: false,
        present: "yes",
        absent: "no: memory is mapped by pages of 2 MiB",
    },
    Feature {
        subject: Subject::useful("invariant TSC"),
        flags: &["constant_tsc", "nonstop_tsc"],
        is_of_svm: false,
        present: "yes",
        absent: "no: guests will take another clock, which costs exits",
    },
];

impl Feature {
    fn item(&self, processor: Option<&Processor>) -> Item {
        let Some(processor) = processor else { return self.subject.unknown(NO_CPUINFO) };
        if self.flags.iter().all(|flag| processor.has(flag)) {
            self.subject.ok(self.present)
        } else if self.is_of_svm && !processor.has("svm") {
            self.subject.unknown("not known as long as there is no SVM")
        } else if self.subject.need == super::Need::Nothing {
            self.subject.note(self.absent)
        } else {
            self.subject.missing(self.absent, "this needs another processor")
        }
    }
}

/// The hypervisor runs at EL2 only (`Refused::NotAtEl2` in hypervisor/src/boot/efi.rs).
fn el2(tree: &Tree, outer: Option<&Outer>) -> Item {
    // KVM registers its device if Linux was started at EL2.
    if tree.has("sys/class/misc/kvm") || tree.has("dev/kvm") {
        return EL2.ok("Linux has /dev/kvm, which needs EL2");
    }
    let item = EL2.unknown("there is no /dev/kvm, which would show EL2");
    item.remedy(match outer {
        Some(_) => "the outer hypervisor must offer EL2 (QEMU: `-machine virt,virtualization=on`)",
        None => "`dmesg | grep EL2` shows `CPU: All CPU(s) started at EL2` if the firmware starts systems there",
    })
}

/// Only GICv3 has the virtual interface that the hypervisor uses (`Unusable` in
/// hypervisor/src/arch/aarch64/host/gic.rs). Linux names the controller in each line of an interrupt.
fn interrupts(tree: &Tree) -> Item {
    match tree.text("proc/interrupts") {
        Look::Found(text) if text.contains("GICv3") => GIC.ok("GICv3"),
        Look::Found(text) if text.contains("GIC") => {
            GIC.missing("an interrupt controller older than GICv3", "this needs another machine")
        }
        _ => GIC.unknown("/proc/interrupts does not tell"),
    }
}

//! The firmware and the boot loader: how the hypervisor gets started.

use super::tree::{Look, Tree};
use super::{Item, Subject};
use crate::config::Arch;

const FIRMWARE: Subject = Subject::useful("firmware");
const SECURE_BOOT: Subject = Subject::needed("Secure Boot");
const DEVICE_TREE: Subject = Subject::needed("device tree");
const GRUB: Subject = Subject::useful("GRUB");

const EFI: &str = "sys/firmware/efi";
/// The variable (UEFI 2.10, 3.3): four bytes of attributes, then 1 if Secure Boot is on.
const VARIABLE: &str = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// What started this Linux.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Firmware {
    Uefi,
    /// Or none at all, as in some VMs.
    Other,
    Unknown,
}

pub(super) fn items(tree: &Tree, arch: Option<Arch>) -> Vec<Item> {
    let firmware = match (tree.look(EFI), tree.look("sys/firmware")) {
        (Look::Found(()), _) => Firmware::Uefi,
        (Look::Absent, Look::Found(())) => Firmware::Other,
        _ => Firmware::Unknown,
    };
    let mut items = vec![kind(firmware, arch), secure_boot(tree, firmware)];
    if arch == Some(Arch::Aarch64) {
        items.push(device_tree(tree));
    }
    items.push(grub(tree, arch, firmware));
    items
}

fn kind(firmware: Firmware, arch: Option<Arch>) -> Item {
    match (firmware, arch) {
        (Firmware::Uefi, _) => FIRMWARE.ok("UEFI"),
        (Firmware::Other, Some(Arch::Aarch64)) => FIRMWARE
            .note("no UEFI")
            .remedy("the hypervisor also starts like Linux at EL2, for example by U-Boot's `booti`"),
        (Firmware::Other, _) => FIRMWARE.ok("BIOS, or none"),
        (Firmware::Unknown, _) => FIRMWARE.unknown("/sys/firmware is not there"),
    }
}

/// GRUB's loader for multiboot2 is not signed (docs/real-machine.md), and neither is the hypervisor.
fn secure_boot(tree: &Tree, firmware: Firmware) -> Item {
    const REMEDY: &str = "turn it off in the firmware's set-up: under Boot or Security, Secure Boot (ASUS: OS Type = Other OS). Dunlin is not signed";
    match firmware {
        Firmware::Other => return SECURE_BOOT.ok("off: only UEFI has it"),
        Firmware::Unknown => return SECURE_BOOT.unknown("/sys/firmware is not there"),
        Firmware::Uefi => {}
    }
    let variables = tree.names("sys/firmware/efi/efivars").found().is_some_and(|names| !names.is_empty());
    match tree.bytes(VARIABLE, 0, 16) {
        Look::Found(bytes) if bytes.len() == 5 && bytes[4] == 1 => SECURE_BOOT.missing("Secure Boot is on", REMEDY),
        Look::Found(bytes) if bytes.len() == 5 && bytes[4] == 0 => SECURE_BOOT.ok("off"),
        Look::Absent if variables => SECURE_BOOT.ok("the firmware has none"),
        _ => SECURE_BOOT
            .unknown("the firmware's variable SecureBoot cannot be read")
            .remedy("`mount -t efivarfs efivarfs /sys/firmware/efi/efivars` as root, and repeat this check"),
    }
}

/// `Refused::NoDeviceTree` in hypervisor/src/boot/efi.rs. A tree without CPUs is one of a boot loader.
fn device_tree(tree: &Tree) -> Item {
    if tree.has("sys/firmware/devicetree/base/cpus") {
        DEVICE_TREE.ok("the firmware passes one")
    } else if tree.has("sys/firmware/acpi/tables") {
        let remedy = "choose Device Tree in the firmware's set-up (QEMU: `-machine virt,acpi=off`)";
        DEVICE_TREE.missing("the firmware describes the machine only by ACPI", remedy)
    } else {
        DEVICE_TREE.unknown("Linux shows neither a device tree nor ACPI's tables")
    }
}

/// GRUB's folders. Debian's and Fedora's names differ.
const FOLDERS: [&str; 2] = ["boot/grub", "boot/grub2"];

/// The image of `dunlin image` has its own GRUB, so a machine without GRUB lacks nothing that is needed.
fn grub(tree: &Tree, arch: Option<Arch>, firmware: Firmware) -> Item {
    const FROM_STICK: &str = "the image of `dunlin image` has its own, so start from a USB stick";
    let configuration = FOLDERS.map(|folder| tree.look(&format!("{folder}/grub.cfg")));
    if !configuration.contains(&Look::Found(())) {
        return if configuration.contains(&Look::Hidden) {
            GRUB.unknown("only root may look for its grub.cfg").remedy(FROM_STICK)
        } else if tree.has("etc/grub.d") {
            GRUB.note("its tools are installed, but /boot has no grub.cfg").remedy(FROM_STICK)
        } else if tree.has("boot") {
            GRUB.note("not installed").remedy(FROM_STICK)
        } else {
            GRUB.unknown("there is no /boot").remedy(FROM_STICK)
        };
    }
    if arch == Some(Arch::Aarch64) {
        // There the hypervisor starts as a Linux kernel, which every GRUB can.
        return GRUB.ok("installed");
    }
    let platforms: &[&str] = match firmware {
        Firmware::Uefi => &["x86_64-efi"],
        Firmware::Other => &["i386-pc"],
        Firmware::Unknown => &["i386-pc", "x86_64-efi"],
    };
    let has_loader = FOLDERS
        .iter()
        .chain(&["usr/lib/grub"])
        .any(|folder| platforms.iter().any(|platform| tree.has(&format!("{folder}/{platform}/multiboot2.mod"))));
    if has_loader {
        GRUB.ok("installed, with the loader multiboot2")
    } else {
        GRUB.note("installed, but its loader multiboot2 is not in sight").remedy(
            "install grub-pc-bin or grub-efi-amd64-bin (Debian), grub2-pc-modules or grub2-efi-x64-modules (Fedora), or start from a USB stick (`dunlin image`)",
        )
    }
}

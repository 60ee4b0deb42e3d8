//! Debian with libvirt, as a root file system of a parent VM.
//!
//! `parent-libvirt.cpio` follows the usual initrd. It holds Debian as one compressed file: systemd, libvirt,
//! virt-install, and the QEMU of that release, installed from packages. The suite is the first one of Debian whose
//! libvirt knows `/dev/mshv` (since 11.10). The user's cache keeps that file and the disk.
//!
//! ```text
//! dunlin/debian.squashfs   Debian, as it is installed from packages
//! dunlin/root/             `parent/libvirt/root`, and the programs `dunlin` and `guest-move`
//! guest/                   a kernel and an initrd for guests, and a disk like those of clouds
//! init                     `parent/libvirt/init`, which makes all of it the root file system
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::archive::Archive;
use crate::artifacts::Places;
use crate::mmdebstrap::{self, System};
use crate::{cloud_disk, parent, workloads};

const ARCHIVE: &str = "parent-libvirt.cpio";
const DEBIAN: System = System {
    suite: "forky",
    // What a user would install, and what comes with it as a recommendation.
    packages: &[
        // `script`, for the check of `dunlin top` on a terminal: not in every Debian any more.
        "bsdutils",
        "dbus",
        "dnsmasq-base",
        "iproute2",
        "less",
        "libvirt-clients",
        "libvirt-daemon-system",
        "login",
        "nftables",
        "procps",
        "qemu-system-x86",
        "qemu-utils",
        "systemd-sysv",
        "udev",
        "virtinst",
    ],
    commands: &[],
};
/// LZ4: the file is half as large again as with zstd, and an emulated processor unpacks it in a fraction of the time.
const COMPRESSION: &[&str] = &["--quiet", "--force", "--no-xattr", "--compressor", "lz4"];

/// Leaves the archive in `target/dunlin`. It is packed anew each time, because `parent/libvirt` may have changed.
pub(crate) fn build(places: &Places) -> Result<()> {
    parent::build(places)?;
    let ours = places.root.join("parent/libvirt");
    let mut archive = Archive::default();
    archive.add_program("init", &read(&ours.join("init"))?)?;
    archive.add_directory("dunlin/root/usr/local/bin")?;
    archive.add_tree(&ours.join("root"), "dunlin/root/", |_| true)?;
    for (package, program) in [("dunlin-cli", "dunlin"), ("dunlin-guest-move", "guest-move")] {
        let content = workloads::static_program_of(places, package, program)?;
        archive.add_program(&format!("dunlin/root/usr/local/bin/{program}"), &content)?;
    }
    archive.add_file("dunlin/debian.squashfs", &read(&debian()?)?)?;
    parent::add_guest(&mut archive, places)?;
    archive.add_file("guest/debian.qcow2", &read(&cloud_disk::cached()?)?)?;
    parent::write(&places.assets().join(ARCHIVE), archive)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Debian in the user's cache. Makes it if it is not there.
fn debian() -> Result<PathBuf> {
    let recipe = [&DEBIAN.recipe(), &COMPRESSION.join(" ")].map(String::as_str).join("\n");
    mmdebstrap::cached("parent-libvirt.squashfs", &recipe, |scratch, to| {
        let mut pack = Command::new("tar2sqfs");
        pack.args(COMPRESSION).arg(to);
        DEBIAN
            .install(scratch, &mut pack)
            .context("no root file system (Debian packages mmdebstrap, squashfs-tools-ng)")
    })
}

//! The guest's first RAM disk: a `newc` archive of `initrd/`, BusyBox and the first device files.
//!
//! The kernel unpacks it into an empty file system. The archive already has everything that BusyBox would set up at
//! boot: the links of its applets, and the few device files needed before devtmpfs is mounted. `dunlin run --exec`
//! appends another archive with the script, and so do VMs with the [`workloads`](crate::workloads).

use std::fs;
use std::io::Write;
use std::process::Command;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::archive::Archive;
use crate::artifacts::{Arch, Places, output};
use crate::debian;

/// Directories of the root file system; those for applets come before their content.
const DIRECTORIES: [&str; 12] =
    ["bin", "sbin", "usr", "usr/bin", "usr/sbin", "dev", "proc", "sys", "tmp", "root", "etc", "dunlin"];
/// Device files: name, major and minor number. `/dev/console` is opened by the kernel for `/init`.
const DEVICES: [(&str, u32, u32); 6] = [
    ("dev/console", 5, 1),
    ("dev/null", 1, 3),
    ("dev/ttyS0", 4, 64),
    ("dev/ttyS1", 4, 65),
    ("dev/ttyAMA0", 204, 64),
    ("dev/ttyAMA1", 204, 65),
];

/// Packs `initrd.cpio.gz`. Equal input gives equal bytes.
pub(crate) fn build(places: &Places, arch: Arch) -> Result<()> {
    let mut archive = busybox(places, arch)?;
    archive.add_tree(&places.root.join("initrd"), "", |_| true)?;

    let packed = gzip(&archive.finish()?)?;
    let to = places.assets_of(arch).join("initrd.cpio.gz");
    fs::write(&to, packed).with_context(|| format!("cannot write {}", to.display()))
}

/// The beginning of an initrd: directories, device files, BusyBox and its applets.
pub(crate) fn busybox(places: &Places, arch: Arch) -> Result<Archive> {
    let busybox = debian::busybox(places, arch)?;
    // A BusyBox that runs on this machine lists the applets, which are the same everywhere.
    let runs_here = debian::busybox(places, Arch::X86_64)?;
    let applets = output(Command::new(&runs_here).arg("--list-full"))
        .with_context(|| format!("{} does not run on this machine", runs_here.display()))?;

    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.add_directory(directory)?;
    }
    for (name, major, minor) in DEVICES {
        archive.add_device(name, major, minor)?;
    }
    archive.add_program("bin/busybox", &fs::read(&busybox)?)?;
    for applet in applets.lines() {
        add_applet(&mut archive, applet)?;
    }
    Ok(archive)
}

/// Stored, not deflated: unpacking costs the guest 42 million instructions instead of 94 million, of a boot of some
/// 1 600 million (one vCPU, `-icount shift=0`), and the megabyte saved would only matter on a slow disk.
fn gzip(archive: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::none());
    encoder.write_all(archive)?;
    let mut packed = encoder.finish()?;
    // The kernel skips zero bytes between archives, and wants the next one at a multiple of four.
    packed.resize(packed.len().next_multiple_of(4), 0);
    Ok(packed)
}

/// A link to BusyBox. Applets in directories that the guest has not are left out.
fn add_applet(archive: &mut Archive, path: &str) -> Result<()> {
    match path.rsplit_once('/') {
        Some((directory, name)) if archive.has_directory(directory) && name != "busybox" => {
            archive.add_link(path, "/bin/busybox")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::archive::read_back;

    #[test]
    fn applets_neither_replace_busybox_nor_invent_directories() {
        let mut archive = Archive::default();
        archive.add_directory("bin").expect("fits");
        for applet in ["bin/busybox", "linuxrc", "opt/bin/odd", "bin/ls"] {
            add_applet(&mut archive, applet).expect("fits or is left out");
        }
        let entries = read_back(archive);
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[1].0.as_str(), entries[1].2.as_slice()), ("bin/ls", b"/bin/busybox".as_slice()));
    }

    #[test]
    fn the_sources_of_the_initrd_hold_an_executable_init() {
        let mut archive = Archive::default();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../initrd");
        archive.add_tree(&sources, "", |_| true).expect("sources are there");
        let entries = read_back(archive);

        assert!(entries.iter().any(|(name, mode, _)| name == "init" && mode & 0o111 == 0o111));
        assert!(entries.iter().any(|(name, ..)| name == "etc/fstab"));
    }

    #[test]
    fn a_second_archive_would_start_at_a_multiple_of_four() {
        for length in 0..8 {
            let packed = gzip(&vec![1; length]).expect("memory is there");
            assert_eq!(packed.len() % 4, 0);
        }
    }
}

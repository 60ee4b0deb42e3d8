//! The guest's first RAM disk: a `newc` archive of `initrd/`, BusyBox and the device files of the first moment.
//!
//! The kernel unpacks it into an empty file system. Everything that BusyBox would set up at boot is in the archive
//! already: the links of its applets, and the few device files that are needed before devtmpfs is mounted. `dunlin run
//! --exec` appends a second archive with the script; the kernel unpacks one after the other.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use cpio::newc;
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::artifacts::{Places, output};
use crate::debian;

/// Directories of the root file system; those of the applets come before what they hold.
const DIRECTORIES: [&str; 12] =
    ["bin", "sbin", "usr", "usr/bin", "usr/sbin", "dev", "proc", "sys", "tmp", "root", "etc", "dunlin"];
/// Device files: name, major and minor number. `/dev/console` is opened by the kernel for `/init`.
const DEVICES: [(&str, u32, u32); 4] =
    [("dev/console", 5, 1), ("dev/null", 1, 3), ("dev/ttyS0", 4, 64), ("dev/ttyS1", 4, 65)];

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Packs `target/dunlin/initrd.cpio.gz`. Equal input gives equal bytes.
pub(crate) fn build(places: &Places) -> Result<()> {
    let busybox = debian::busybox(places)?;
    let applets = output(Command::new(&busybox).arg("--list-full"))
        .with_context(|| format!("{} does not run on this machine", busybox.display()))?;

    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.add(directory, DIRECTORY, &[])?;
    }
    for (name, major, minor) in DEVICES {
        archive.add_device(name, major, minor)?;
    }
    archive.add("bin/busybox", PROGRAM, &fs::read(&busybox)?)?;
    for applet in applets.lines() {
        archive.add_applet(applet)?;
    }
    archive.add_tree(&places.root.join("initrd"), "")?;

    let packed = gzip(&archive.finish()?)?;
    let to = places.assets().join("initrd.cpio.gz");
    fs::write(&to, packed).with_context(|| format!("cannot write {}", to.display()))
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

/// An archive being written.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    /// Inode number of the last entry; the kernel takes equal numbers for hard links.
    inode: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.write(newc::Builder::new(name).mode(mode), name, content)
    }

    fn add_device(&mut self, name: &str, major: u32, minor: u32) -> Result<()> {
        let entry = newc::Builder::new(name).mode(CHARACTER_DEVICE).rdev_major(major).rdev_minor(minor);
        self.write(entry, name, &[])
    }

    /// A link to BusyBox. Applets in directories that the guest has not are left out.
    fn add_applet(&mut self, path: &str) -> Result<()> {
        match path.rsplit_once('/') {
            Some((directory, name)) if DIRECTORIES.contains(&directory) && name != "busybox" => {
                self.add(path, LINK, b"/bin/busybox")
            }
            _ => Ok(()),
        }
    }

    /// Everything below `directory`, in order of names. Files of `initrd/` keep their execute permission.
    fn add_tree(&mut self, directory: &Path, prefix: &str) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;

        let mut entries = fs::read_dir(directory)
            .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
            .with_context(|| format!("cannot read {}", directory.display()))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let Ok(file_name) = entry.file_name().into_string() else {
                bail!("{}: the name is not UTF-8", entry.path().display())
            };
            let name = format!("{prefix}{file_name}");
            if entry.file_type()?.is_dir() {
                if !DIRECTORIES.contains(&name.as_str()) {
                    self.add(&name, DIRECTORY, &[])?;
                }
                self.add_tree(&entry.path(), &format!("{name}/"))?;
            } else {
                let executable = entry.metadata()?.permissions().mode() & 0o100 != 0;
                self.add(&name, if executable { PROGRAM } else { 0o100_644 }, &fs::read(entry.path())?)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, entry: newc::Builder, name: &str, content: &[u8]) -> Result<()> {
        let bytes = u32::try_from(content.len()).with_context(|| format!("{name} is larger than 4 GiB"))?;
        self.inode += 1;
        let mut writer = entry.ino(self.inode).write(&mut self.bytes, bytes);
        writer.write_all(content)?;
        writer.finish()?;
        Ok(())
    }

    fn finish(self) -> Result<Vec<u8>> {
        Ok(newc::trailer(self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    /// Reads an archive back: name to mode and content.
    fn read(mut bytes: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
        let mut found = BTreeMap::new();
        loop {
            let mut entry = newc::Reader::new(bytes).expect("the archive is well formed");
            if entry.entry().is_trailer() {
                return found;
            }
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("the content is there");
            found.insert(entry.entry().name().to_owned(), (entry.entry().mode(), content));
            bytes = entry.finish().expect("padding is there");
        }
    }

    #[test]
    fn files_links_and_devices_come_back_as_written() {
        let mut archive = Archive::default();
        archive.add("bin", DIRECTORY, &[]).expect("fits");
        archive.add("bin/busybox", PROGRAM, b"odd").expect("fits");
        archive.add_applet("bin/ls").expect("fits");
        archive.add_device("dev/console", 5, 1).expect("fits");
        let entries = read(&archive.finish().expect("ends"));

        assert_eq!(entries["bin"].0, DIRECTORY);
        assert_eq!(entries["bin/busybox"], (PROGRAM, b"odd".to_vec()));
        assert_eq!(entries["bin/ls"], (LINK, b"/bin/busybox".to_vec()));
        assert_eq!(entries["dev/console"].0, CHARACTER_DEVICE);
    }

    #[test]
    fn applets_neither_replace_busybox_nor_invent_directories() {
        let mut archive = Archive::default();
        for applet in ["bin/busybox", "linuxrc", "opt/bin/odd"] {
            archive.add_applet(applet).expect("left out");
        }
        assert!(archive.bytes.is_empty());
    }

    #[test]
    fn the_sources_of_the_initrd_hold_an_executable_init() {
        let mut archive = Archive::default();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../initrd");
        archive.add_tree(&sources, "").expect("sources are there");
        let entries = read(&archive.finish().expect("ends"));

        assert_eq!(entries["init"].0, PROGRAM);
        assert!(entries.contains_key("etc/fstab"));
    }

    #[test]
    fn a_second_archive_would_start_at_a_multiple_of_four() {
        for length in 0..8 {
            let packed = gzip(&vec![1; length]).expect("memory is there");
            assert_eq!(packed.len() % 4, 0);
        }
    }
}

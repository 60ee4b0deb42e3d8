//! Archives in the format `newc`. Linux unpacks them into its first file system, in order.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use cpio::newc;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive being written. A directory must come before its content.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    /// Inode number of the last entry; the kernel treats equal numbers as hard links.
    inode: u32,
}

impl Archive {
    /// Adds the directory `name` and its parents, unless they exist.
    pub(crate) fn add_directory(&mut self, name: &str) -> Result<()> {
        let ends = name.match_indices('/').map(|(end, _)| end).chain([name.len()]);
        for directory in ends.map(|end| &name[..end]) {
            if self.directories.insert(directory.to_owned()) {
                self.write(newc::Builder::new(directory).mode(DIRECTORY), directory, &[])?;
            }
        }
        Ok(())
    }

    pub(crate) fn add_program(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.write(newc::Builder::new(name).mode(PROGRAM), name, content)
    }

    pub(crate) fn add_file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.write(newc::Builder::new(name).mode(FILE), name, content)
    }

    pub(crate) fn add_link(&mut self, name: &str, to: &str) -> Result<()> {
        self.write(newc::Builder::new(name).mode(LINK), name, to.as_bytes())
    }

    pub(crate) fn add_device(&mut self, name: &str, major: u32, minor: u32) -> Result<()> {
        let entry = newc::Builder::new(name).mode(CHARACTER_DEVICE).rdev_major(major).rdev_minor(minor);
        self.write(entry, name, &[])
    }

    /// Adds everything below `directory` whose relative path satisfies `wanted`, in order of names, with `prefix`
    /// before the names. Files keep their execute permission.
    pub(crate) fn add_tree(&mut self, directory: &Path, prefix: &str, wanted: fn(&Path) -> bool) -> Result<()> {
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
                self.add_directory(&name)?;
                self.add_tree(&entry.path(), &format!("{name}/"), wanted)?;
            } else if wanted(&entry.path()) {
                let executable = entry.metadata()?.permissions().mode() & 0o100 != 0;
                let content = fs::read(entry.path())?;
                if executable { self.add_program(&name, &content) } else { self.add_file(&name, &content) }?;
            }
        }
        Ok(())
    }

    /// Is this directory in the archive?
    pub(crate) fn has_directory(&self, name: &str) -> bool {
        self.directories.contains(name)
    }

    /// The whole archive. Its length is a multiple of four, as the kernel wants it for another one to follow.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        let mut bytes = newc::trailer(self.bytes)?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        Ok(bytes)
    }

    fn write(&mut self, entry: newc::Builder, name: &str, content: &[u8]) -> Result<()> {
        let bytes = u32::try_from(content.len()).with_context(|| format!("{name} is larger than 4 GiB"))?;
        self.inode += 1;
        let mut writer = entry.ino(self.inode).write(&mut self.bytes, bytes);
        writer.write_all(content)?;
        writer.finish()?;
        Ok(())
    }
}

/// Reads an archive back: names, modes and contents, in order.
#[cfg(test)]
pub(crate) fn read_back(archive: Archive) -> Vec<(String, u32, Vec<u8>)> {
    let bytes = archive.finish().expect("ends");
    let mut rest = bytes.as_slice();
    let mut found = Vec::new();
    loop {
        let reader = newc::Reader::new(rest).expect("the archive is well formed");
        if reader.entry().is_trailer() {
            return found;
        }
        let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
        let mut content = Vec::new();
        rest = reader.to_writer(&mut content).expect("content and padding are there");
        found.push((name, mode, content));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_links_and_devices_come_back_as_written() {
        let mut archive = Archive::default();
        archive.add_directory("bin").expect("fits");
        archive.add_program("bin/busybox", b"odd").expect("fits");
        archive.add_file("fstab", b"proc").expect("fits");
        archive.add_link("bin/ls", "/bin/busybox").expect("fits");
        archive.add_device("console", 5, 1).expect("fits");
        let wanted: [(&str, u32, &[u8]); 5] = [
            ("bin", 0o040_755, b""),
            ("bin/busybox", 0o100_755, b"odd"),
            ("fstab", 0o100_644, b"proc"),
            ("bin/ls", 0o120_777, b"/bin/busybox"),
            ("console", 0o020_600, b""),
        ];
        let wanted = wanted.map(|(name, mode, content)| (name.to_owned(), mode, content.to_vec()));
        assert_eq!(read_back(archive), wanted);
    }

    #[test]
    fn directories_come_once_and_after_those_that_they_are_in() {
        let mut archive = Archive::default();
        for directory in ["opt/cc/bin", "opt", "opt/cc/lib", "opt/cc/bin"] {
            archive.add_directory(directory).expect("fits");
        }
        assert!(archive.has_directory("opt/cc") && !archive.has_directory("opt/c"));
        let names: Vec<String> = read_back(archive).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["opt", "opt/cc", "opt/cc/bin", "opt/cc/lib"]);
    }

    #[test]
    fn a_tree_holds_what_is_wanted_of_it() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../initrd");
        let mut archive = Archive::default();
        archive.add_tree(&sources, "copy/", |path| path.ends_with("fstab")).expect("sources are there");
        let names: Vec<String> = read_back(archive).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["copy", "copy/etc", "copy/etc/fstab"]);
    }

    #[test]
    fn a_second_archive_would_start_at_a_multiple_of_four() {
        for length in 0..8 {
            let mut archive = Archive::default();
            archive.add_file("file", &vec![1; length]).expect("fits");
            assert_eq!(archive.finish().expect("ends").len() % 4, 0);
        }
    }
}

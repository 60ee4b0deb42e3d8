//! A small Debian for guests of a parent VM: a disk with a compiler, sources, archivers and fio.
//!
//! `parent-debian.cpio` follows `parent.cpio`. It holds `/guest/debian`, a disk with one ext4 file system and no
//! partitions, made from Debian's packages, unpacked and not installed. `/load` on it is `parent/debian/load`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::archive::Archive;
use crate::artifacts::{Places, run};
use crate::{debian, parent};

const ARCHIVE: &str = "parent-debian.cpio";
/// Unpacked with all that they depend on.
const PACKAGES: &[&str] = &[
    "bash",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "fio",
    "gcc",
    "grep",
    "gzip",
    "libc6-dev",
    "make",
    "newlib-source",
    "sed",
    "tar",
    "util-linux",
    "xz-utils",
    "zstd",
];
/// What nobody needs of it: half of its size.
const NOT_NEEDED: &[&str] = &[
    "usr/share/doc",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl5",
    "usr/lib/x86_64-linux-gnu/perl-base",
    "usr/libexec/gcc/x86_64-linux-gnu/14/lto1",
];
/// The disk's size. Half of it is free for what a guest writes; those blocks are not in the archive's way, but the
/// parent has all of it in memory.
const SIZE: &str = "384M";

/// Leaves the archive in `target/dunlin`. It is packed anew each time, because `parent/debian` may have changed; the
/// packages are fetched once.
pub(crate) fn build(places: &Places) -> Result<()> {
    parent::build(places)?;
    let [scratch, root, disk] =
        ["unpack-userland-download", "userland", "userland.ext4"].map(|name| places.assets().join(name));
    if !root.is_dir() {
        println!("xtask: fetching a small Debian with gcc (unpacked below target, not installed)");
        let unfinished = root.with_extension("unfinished");
        let _ = fs::remove_dir_all(&unfinished);
        debian::unpack_from(&["trixie"], PACKAGES, &scratch, &unfinished)?;
        for name in NOT_NEEDED {
            let _ = fs::remove_dir_all(unfinished.join(name)).or_else(|_| fs::remove_file(unfinished.join(name)));
        }
        // The rename comes last, so that an interrupted run leaves nothing that looks complete.
        fs::rename(&unfinished, &root)?;
    }
    let load = root.join("load");
    let from = places.root.join("parent/debian/load");
    fs::copy(&from, &load).with_context(|| format!("cannot copy {}", from.display()))?;
    make_disk(&root, &disk)?;

    let mut archive = Archive::default();
    archive.add_directory("guest")?;
    archive.add_file("guest/debian", &fs::read(&disk)?)?;
    fs::remove_file(&disk)?;
    parent::write(&places.assets().join(ARCHIVE), archive)
}

fn make_disk(root: &Path, disk: &Path) -> Result<()> {
    let _ = fs::remove_file(disk);
    let mut make = Command::new("mke2fs");
    // Its usual place is not in every user's PATH.
    make.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    make.args(["-q", "-t", "ext4", "-E", "root_owner=0:0", "-d"]).arg(root).arg(disk).arg(SIZE);
    run(&mut make).context("mke2fs cannot make a disk (Debian package e2fsprogs)")
}

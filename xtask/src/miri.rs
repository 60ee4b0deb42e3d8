//! `cargo xtask miri`: tests that reach unsafe code on the host, and tests of crates without any, under Miri.
//!
//! Miri executes Rust by its rules, and stops at the first access that they do not allow. It is part of nightly
//! toolchains. It takes some thousand times as long as a processor, so few tests are worth it: those of `arch/` that
//! compile for the host, scenarios of the core on the fake machine, which use nearly all that `arch/` shares between
//! architectures, and short tests of crates. Entries, exits and page tables of a real machine are beyond it.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::artifacts::{Places, run};

const HELP: &str = "\
cargo xtask miri [PACKAGE..] [--help]

Runs tests under Miri, of all packages that are listed in xtask/src/miri.rs, or of those named. It needs a nightly
toolchain: `rustup toolchain install nightly --profile minimal --component miri --component rust-src`.
";

/// Tests of a package: parts of their names.
struct Part {
    package: &'static str,
    tests: &'static [&'static str],
}

const fn part(package: &'static str, tests: &'static [&'static str]) -> Part {
    Part { package, tests }
}

/// None named: all of them.
const PARTS: [Part; 3] = [
    part(
        "dunlin-hypervisor",
        &["arch::growing", "arch::tables", "tests::life", "tests::end::tags", "tests::end::vm_that"],
    ),
    part("dunlin-addr", &[]),
    part("dunlin-aarch64-defs", &[]),
];

/// Runs the command.
pub(crate) fn command(places: &Places, arguments: &[String]) -> Result<ExitCode> {
    if arguments.iter().any(|word| word == "--help" || word == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(word) = arguments.iter().find(|word| PARTS.iter().all(|part| part.package != word.as_str())) {
        let names = PARTS.map(|part| part.package).join(", ");
        bail!("no package `{word}` here, but {names}\n\n{HELP}");
    }
    let has_miri = miri(places, &["--version"]).output().is_ok_and(|told| told.status.success());
    if !has_miri {
        bail!("there is no Miri\n\n{HELP}");
    }
    for Part { package, tests } in PARTS {
        if !arguments.is_empty() && arguments.iter().all(|word| word != package) {
            continue;
        }
        println!("xtask: {package} under Miri");
        let mut command = miri(places, &["test", "--package", package, "--lib", "--"]);
        run(command.args(tests)).with_context(|| format!("Miri has found something in {package}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A command of the nightly toolchain's Miri.
fn miri(places: &Places, arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]).args(arguments);
    // The one that runs this is another.
    command.current_dir(&places.root).env_remove("CARGO").env("CARGO_TARGET_DIR", places.target.join("miri"));
    // Corpora are files. Memory of the fake machine is found by numbers, as a hypervisor finds memory, and is never
    // given back.
    command.env(
        "MIRIFLAGS",
        "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks -Zmiri-tree-borrows",
    );
    command.env("FUZZ_MUTATIONS", "1");
    command
}

//! The steps of continuous integration: each has a name and a time, and there is a summary.
//!
//! A failed step does not stop the others, nor a failed test its step, so one run shows everything. A step whose
//! requirement is missing is skipped and says so. CI first installs what a step needs from the machine. Steps are in
//! order of cost: cheap ones fail first. A step that keeps only one CPU busy may run beside another.
//!
//! The system tests use the first QEMU in PATH. `--qemu` puts another one there, and selects a short list of them.

use std::fs;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::artifacts::{self, AARCH64_BARE_METAL, BARE_METAL, BARE_METAL_PROGRAMS, Places, Wanted, run as execute};
use crate::bochs;
use crate::house;
use crate::other_qemu;
use crate::reproducible;

struct Step {
    name: &'static str,
    what: &'static str,
    /// The step without which this one has no meaning.
    needs: Option<&'static str>,
    /// Requirements of this command alone, by their names in `setup.sh`.
    wants: &'static [&'static str],
    action: fn(&Places) -> Result<()>,
    /// What it does beside another step, which comes before it.
    beside: Option<Beside>,
}

/// A step that keeps one CPU busy, and runs on a thread of its own while `step` runs.
struct Beside {
    step: &'static str,
    /// The action, after all that the step needs was done in this command.
    action: fn(&Places) -> Result<()>,
}

const STEPS: [Step; 13] = [
    Step { name: "fmt", what: "the code is formatted", needs: None, wants: &[], action: fmt, beside: None },
    Step {
        name: "house",
        what: "the rules of the house hold",
        needs: None,
        wants: &[],
        action: house_checks,
        beside: None,
    },
    Step {
        name: "clippy",
        what: "no warnings in what runs on the host",
        needs: None,
        wants: &[],
        action: clippy,
        beside: None,
    },
    Step {
        name: "clippy-bare-metal",
        what: "no warnings in hypervisor and guest",
        needs: None,
        wants: &[],
        action: clippy_bare_metal,
        beside: None,
    },
    Step { name: "unit", what: "unit and model tests", needs: None, wants: &[], action: unit, beside: None },
    Step {
        name: "openmetrics",
        what: "Prometheus reads our metrics",
        needs: None,
        wants: &["prometheus"],
        action: openmetrics,
        beside: None,
    },
    Step {
        name: "browser",
        what: "a browser shows the report",
        needs: None,
        wants: &["browser"],
        action: browser,
        beside: None,
    },
    Step {
        name: "loom",
        what: "the small races, all interleavings",
        needs: None,
        wants: &[],
        action: loom,
        // Both wait for one test for a while, and they share no folder.
        beside: Some(Beside { step: "unit", action: loom }),
    },
    Step {
        name: "doc",
        what: "the documentation builds without warnings",
        needs: None,
        wants: &[],
        action: doc,
        beside: None,
    },
    Step {
        name: "build",
        what: "all that the system tests boot",
        needs: None,
        wants: &[],
        action: build,
        beside: None,
    },
    Step {
        name: "reproducible",
        what: "a second build in other folders is the same hypervisor",
        needs: Some("build"),
        wants: &[],
        action: reproducible::check,
        beside: None,
    },
    Step {
        name: "system",
        what: "hypervisor and guests in QEMU",
        needs: Some("build"),
        wants: &["image", "uefi"],
        action: system,
        beside: None,
    },
    Step {
        name: "bochs",
        what: "hypervisor and guests on a second emulator of SVM",
        needs: Some("build"),
        wants: &["image"],
        action: bochs::short,
        beside: Some(Beside { step: "system", action: bochs::short_of_built }),
    },
];

/// The packages of `unit`. Other steps name the same, because cargo compiles a dependency anew for another selection of
/// packages, which may need other features of it.
const ALL_BUT_SYSTEM_TESTS: [&str; 3] = ["--workspace", "--exclude", "dunlin-system-tests"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// A step before it failed.
    Skipped,
}

/// Runs all steps, or those named. With `--qemu WHICH` the short list of system tests, with that QEMU.
pub(crate) fn run(places: &Places, words: &[String]) -> Result<ExitCode> {
    let (qemu, names) = other_qemu::named(words);
    let Some(qemu) = qemu else { return run_steps(places, &names) };
    if names.first().is_none_or(|name| *name != "system") {
        bail!("--qemu goes with the step `system`: `cargo xtask test system --qemu {qemu} [TEST..]`");
    }
    let tests: Vec<&str> = names.iter().skip(1).map(|name| name.as_str()).collect();
    other_qemu::run(places, qemu, &tests)
}

fn run_steps(places: &Places, names: &[&String]) -> Result<ExitCode> {
    if names.iter().any(|name| *name == "--list") {
        for step in &STEPS {
            println!("{:18} {}", step.name, step.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(unknown) = names.iter().find(|name| !STEPS.iter().any(|step| step.name == name.as_str())) {
        bail!("no step `{unknown}`; `cargo xtask test --list` shows them");
    }

    let chosen = |step: &&Step| names.is_empty() || names.iter().any(|name| *name == step.name);
    let mut results: Vec<(&Step, Outcome, Duration)> = Vec::new();
    thread::scope(|threads| {
        let mut beside: Vec<(&str, thread::ScopedJoinHandle<'_, Result<()>>)> = Vec::new();
        for step in STEPS.iter().filter(chosen) {
            println!("\n== {}: {}", step.name, step.what);
            let started = Instant::now();
            let missing =
                results.iter().any(|(done, outcome, _)| Some(done.name) == step.needs && *outcome != Outcome::Passed);
            let begun = beside.iter().position(|(name, _)| *name == step.name).map(|at| beside.swap_remove(at).1);
            let result = match begun {
                Some(begun) => begun.join().unwrap_or_else(|_| bail!("a panic, see above")),
                None if missing => Ok(()),
                None => set_up(places, step.wants).and_then(|()| {
                    let has_passed = |wanted: &str| {
                        results.iter().any(|(done, outcome, _)| done.name == wanted && *outcome == Outcome::Passed)
                    };
                    let can_run = |other: &&Step| other.needs.is_none_or(has_passed);
                    for other in STEPS.iter().filter(chosen).filter(can_run) {
                        let Some(Beside { step: name, action }) = other.beside else { continue };
                        if name == step.name {
                            println!("{} runs at the same time", other.name);
                            beside.push((other.name, threads.spawn(move || action(places))));
                        }
                    }
                    (step.action)(places)
                }),
            };
            let outcome = match result {
                Ok(()) if missing => Outcome::Skipped,
                Ok(()) => Outcome::Passed,
                Err(error) => {
                    println!("{error:#}");
                    Outcome::Failed
                }
            };
            results.push((step, outcome, started.elapsed()));
        }
    });

    println!("\n== summary");
    for (step, outcome, took) in &results {
        let word = match outcome {
            Outcome::Passed => "passed",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        };
        println!("{:18} {word:8} {:6.1} s", step.name, took.as_secs_f64());
    }
    let whole: Duration = results.iter().map(|(_, _, took)| *took).sum();
    println!("{:18} {:8} {:6.1} s", "in total", "", whole.as_secs_f64());
    let passed = results.iter().all(|(_, outcome, _)| *outcome == Outcome::Passed);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs `setup.sh` to install what a step needs and this machine lacks. A step that cannot run has failed.
pub(crate) fn set_up(places: &Places, wants: &[&str]) -> Result<()> {
    if wants.is_empty() {
        return Ok(());
    }
    execute(Command::new(places.root.join("xtask/setup.sh")).args(wants))
}

fn fmt(places: &Places) -> Result<()> {
    execute(&mut places.cargo(&["fmt", "--all", "--check"]))
}

fn house_checks(places: &Places) -> Result<()> {
    if house::report(&places.root)? != ExitCode::SUCCESS {
        bail!("a rule of the house is broken");
    }
    Ok(())
}

fn clippy(places: &Places) -> Result<()> {
    let deny = ["--", "--deny", "warnings"];
    execute(on_host(places, "clippy").arg("--all-targets").args(deny))?;
    // The parts of the bare-metal packages that are tested on the host.
    let mut tested = places.cargo(&["clippy", "--tests"]);
    for (package, _) in BARE_METAL_PROGRAMS {
        tested.args(["--package", package]);
    }
    execute(tested.args(deny))
}

fn clippy_bare_metal(places: &Places) -> Result<()> {
    execute(on_bare_metal(places, "clippy").args(["--", "--deny", "warnings"]))
}

fn unit(places: &Places) -> Result<()> {
    // Includes the parts of hypervisor and guest that need no machine.
    execute(places.cargo(&["test", "--no-fail-fast"]).args(ALL_BUT_SYSTEM_TESTS))
}

/// Tests that need a program that no other test needs. `cargo test` ignores them; they run here, where the program is
/// installed.
fn openmetrics(places: &Places) -> Result<()> {
    ignored(places, "metrics_are_read_by_the_parser_of_prometheus_itself")
}

fn browser(places: &Places) -> Result<()> {
    ignored(places, "report_can_be_read_on_phone_and_desktop_in_light_and_dark")
}

fn ignored(places: &Places, test: &str) -> Result<()> {
    execute(places.cargo(&["test"]).args(ALL_BUT_SYSTEM_TESTS).args(["--test", "cli", "--", "--ignored", test]))
}

fn loom(places: &Places) -> Result<()> {
    // `--cfg loom` applies to all crates, so the other steps cannot use this build: a directory of its own keeps it
    // from replacing theirs. Optimized code lets loom explore more in the same time; a longer link does not.
    let mut command = places.cargo(&["test", "--release", "--test", "loom"]);
    for package in ["decode-cache", "hw-model", "sched", "shootdown", "stage2", "synic", "tlb-tag"] {
        command.args(["--package", &format!("dunlin-{package}")]);
    }
    command
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", places.target.join("loom"))
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    execute(&mut command)
}

fn doc(places: &Places) -> Result<()> {
    let flags = ("RUSTDOCFLAGS", "--deny warnings");
    execute(on_host(places, "doc").arg("--no-deps").env(flags.0, flags.1))?;
    execute(on_bare_metal(places, "doc").arg("--no-deps").env(flags.0, flags.1))
}

pub(crate) fn build(places: &Places) -> Result<()> {
    artifacts::build(places, Wanted::Everything)?;
    artifacts::build_aarch64(places, Wanted::Everything)
}

/// System tests that keep about one CPU busy, and do not depend on how fast it is: they count instructions, watch
/// firmware and a kernel start, or wait for what a guest says. Two of them run at a time. The others run alone.
const ON_ONE_CPU: [&str; 14] = [
    "bounds",
    "budget",
    "events",
    "exits",
    "functions",
    "image",
    "iommu",
    "kernel_logs",
    "layout",
    "memtest",
    "own_machine",
    "own_machine_aarch64",
    "saving",
    "uefi",
];

fn system(places: &Places) -> Result<()> {
    let mut others = Vec::new();
    for entry in fs::read_dir(places.root.join("system_tests/tests"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        others.extend(name.strip_suffix(".rs").filter(|name| !ON_ONE_CPU.contains(name)).map(str::to_string));
    }
    others.sort_unstable();
    let run = |files: &[&str], threads: u32| {
        let mut command = places.cargo(&["test", "--no-fail-fast", "--release", "--package", "dunlin-system-tests"]);
        files.iter().for_each(|file| {
            command.args(["--test", file]);
        });
        execute(command.args(["--", &format!("--test-threads={threads}")]))
    };
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let alone = run(&others, 1);
    run(&ON_ONE_CPU, 2).and(alone)
}

/// A cargo command for all packages but hypervisor and guest.
fn on_host(places: &Places, command: &str) -> Command {
    let mut command = places.cargo(&[command, "--workspace"]);
    for (package, _) in BARE_METAL_PROGRAMS {
        command.args(["--exclude", package]);
    }
    command
}

/// A cargo command for hypervisor and guest, on both architectures.
fn on_bare_metal(places: &Places, command: &str) -> Command {
    let mut command = places.cargo(&[command, "--target", BARE_METAL, "--target", AARCH64_BARE_METAL]);
    for (package, _) in BARE_METAL_PROGRAMS {
        command.args(["--package", package]);
    }
    command
}

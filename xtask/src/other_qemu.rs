//! `--qemu WHICH`: `cargo xtask test system` and `cargo xtask bench` with another QEMU than this machine's.
//!
//! They take the QEMU that is first in PATH, so the other one is put there. Without names a short list of system tests
//! runs, a few minutes long. It covers what depends on QEMU: boots on both architectures and by each loader,
//! consoles, exits, flushes, tags, dirty logs, QEMU's SVM and EL2, guests and devices that misbehave.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Result, bail};

use crate::artifacts::{Places, run as execute};
use crate::ci;
use crate::emulators::{QEMU_10, QEMU_11};

/// A file of tests, and words: a test whose name has one of them runs, or each test if there are no words.
type Tests = (&'static str, &'static [&'static str]);

/// The short list. On an idle computer it takes some seven minutes.
const SHORT: [Tests; 21] = [
    ("hypervisor", &[]),
    ("boot_loaders", &[]),
    ("console_choice", &[]),
    ("consoles", &[]),
    ("uefi", &[]),
    ("image", &["image_starts", "shown_on_the_screen", "serial_port_only"]),
    ("linux", &["default_vm", "one_vcpu", "sixteen_vcpus", "triple_fault"]),
    ("exits", &[]),
    ("hyperv", &["after_its_flush", "linux_flushes"]),
    ("tags", &[]),
    ("dirty", &["on_x86_64", "splits_by_one_store", "breaks_before_it_makes"]),
    ("events", &[]),
    ("registers", &[]),
    ("id_registers", &[]),
    ("control_registers", &[]),
    ("clocks", &[]),
    ("machine_checks", &[]),
    ("iommu", &[]),
    ("functions", &[]),
    ("own_machine_aarch64", &["messages", "smmu"]),
    ("misbehaviour", &["random", "timer", "vcpu", "loop_with", "debug_registers", "waits"]),
];

/// A test that a QEMU cannot pass, and why.
struct Impossible {
    /// The first characters of the versions.
    versions: &'static [&'static str],
    file: &'static str,
    test: &'static str,
    why: &'static str,
}

/// All of them: faults of QEMU, not ours.
const IMPOSSIBLE: &[Impossible] = &[Impossible {
    versions: &["10.0."],
    file: "misbehaviour",
    test: "waits_with_a_time_end_at_it",
    why: "a trapped WFIT does not name the register with its time, so the hypervisor ends the wait at once",
}];

/// Runs these tests with the QEMU of the name `which`: the short list if there are none, all tests if it is `all`.
pub(crate) fn run(places: &Places, which: &str, names: &[&str]) -> Result<ExitCode> {
    let folder = folder_of(which)?;
    ci::set_up(places, &["image", "uefi"])?;
    ci::build(places)?;

    let version = Command::new(folder.join("qemu-system-x86_64")).arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default().to_string();
    println!("{version}");
    let path = path_with(folder)?;
    let mut table = String::new();
    let mut all_passed = true;
    for (file, words) in chosen(names) {
        let started = Instant::now();
        let mut command = places.cargo(&["test", "--no-fail-fast", "--release", "--package", "dunlin-system-tests"]);
        match file {
            Some(file) => command.args(["--test", file]),
            None => command.arg("--tests"),
        };
        command.args(["--", "--test-threads=1"]).args(words).env("PATH", &path);
        for left_out in impossible(&version).filter(|left_out| file.is_none_or(|file| file == left_out.file)) {
            println!("without {}: {}: {}", left_out.file, left_out.test, left_out.why);
            command.args(["--skip", left_out.test]);
        }
        let has_passed = execute(&mut command).is_ok();
        let status = if has_passed { "passed" } else { "FAILED" };
        table += &format!("{:18} {status} {:6.1} s\n", file.unwrap_or("all"), started.elapsed().as_secs_f64());
        all_passed &= has_passed;
    }
    print!("\n== summary of {version}\n{table}");
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The files of tests and the words that stand for these names. No file stands for all files.
fn chosen<'a>(names: &[&'a str]) -> Vec<(Option<&'a str>, &'static [&'static str])> {
    match names {
        [] => SHORT.iter().map(|&(file, words)| (Some(file), words)).collect(),
        ["all"] => vec![(None, &[])],
        names => names.iter().map(|&name| (Some(name), &[][..])).collect(),
    }
}

/// The tests that cannot pass on a QEMU of this version.
fn impossible(version: &str) -> impl Iterator<Item = &'static Impossible> {
    let number = version.strip_prefix("QEMU emulator version ").unwrap_or(version).to_string();
    IMPOSSIBLE.iter().filter(move |test| test.versions.iter().any(|version| number.starts_with(version)))
}

/// The word after `--qemu`, and all other words.
pub(crate) fn named(words: &[String]) -> (Option<&str>, Vec<&String>) {
    let (mut rest, mut words, mut qemu) = (Vec::new(), words.iter(), None);
    while let Some(word) = words.next() {
        match word.strip_prefix("--qemu") {
            Some("") => qemu = Some(words.next().map_or("", String::as_str)),
            Some(joined) if joined.starts_with('=') => qemu = Some(&joined[1..]),
            _ => rest.push(word),
        }
    }
    (qemu, rest)
}

/// PATH, with the QEMU of the name `which` before this machine's.
pub(crate) fn path(which: &str) -> Result<OsString> {
    path_with(folder_of(which)?)
}

fn path_with(folder: PathBuf) -> Result<OsString> {
    let usual = env::var_os("PATH").unwrap_or_default();
    Ok(env::join_paths(std::iter::once(folder).chain(env::split_paths(&usual)))?)
}

/// The folder with the programs of this QEMU: a version that Debian has, or a folder.
fn folder_of(which: &str) -> Result<PathBuf> {
    Ok(match which {
        "10" => QEMU_10.unpack()?.programs(),
        "11" => QEMU_11.unpack()?.programs(),
        folder if PathBuf::from(folder).join("qemu-system-x86_64").is_file() => PathBuf::from(folder).canonicalize()?,
        other => bail!("--qemu takes 10, 11, or a folder with qemu-system-x86_64 in it, and not `{other}`"),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{IMPOSSIBLE, SHORT, chosen, named};

    #[test]
    fn qemu_is_named_by_the_word_after_its_option_or_within_it() {
        let words = |words: &str| words.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(named(&words("move --qemu 11 --pairs 2")), (Some("11"), words("move --pairs 2").iter().collect()));
        assert_eq!(named(&words("--qemu=/some/where")), (Some("/some/where"), Vec::new()));
        assert_eq!(named(&words("system --qemu")).0, Some(""));
        assert_eq!(named(&words("move --qemus 11")), (None, words("move --qemus 11").iter().collect()));
    }

    /// The source of a file of system tests.
    fn source(file: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../system_tests/tests/{file}.rs"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    #[test]
    fn each_word_of_the_short_list_names_a_test() {
        for (file, words) in SHORT {
            let source = source(file);
            // `on_x86_64` and the like are written by a macro in some files, and in function names in others.
            let names: Vec<&str> = source.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")).collect();
            for word in words {
                assert!(names.iter().any(|name| name.contains(word)), "no test of {file} has {word} in its name");
            }
        }
        for left_out in IMPOSSIBLE {
            assert!(source(left_out.file).contains(left_out.test), "{} has no {}", left_out.file, left_out.test);
            assert!(!left_out.why.is_empty() && !left_out.versions.is_empty());
        }
    }

    #[test]
    fn names_are_files_and_all_is_all_of_them() {
        assert_eq!(chosen(&[]).len(), SHORT.len());
        assert_eq!(chosen(&["all"]), [(None, &[][..])]);
        assert_eq!(chosen(&["linux", "tags"]), [(Some("linux"), &[][..]), (Some("tags"), &[][..])]);
    }
}

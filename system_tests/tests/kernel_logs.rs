//! Warnings of guests' kernels: only the lines that `kernel_logs.toml` lists and explains.
//!
//! A kernel that misses a feature prints a warning or worse, and continues. So its log shows how complete the guests'
//! machine is. Each line of that kind is either in the list, with the reason why it stays, or fails the test.

use std::fs;
use std::io::Write as _;

use system_tests::{Machine, each_machine, workspace};
use toml::{Table, Value};

/// The list.
const LIST: &str = "system_tests/kernel_logs.toml";

each_machine! {
    fn log_of_debians_kernel_is_clean_or_explained(machine) {
        is_clean_or_explained(machine, "debian", None, &[]);
    }

    fn log_of_debians_newest_kernel_is_clean_or_explained(machine) {
        let kernel = machine.assets().join("vmlinuz-newest");
        assert!(kernel.is_file(), "{} is missing: run `cargo xtask test build` first", kernel.display());
        is_clean_or_explained(machine, "newest", Some(&kernel.to_string_lossy()), &[]);
    }
}

#[test]
fn log_on_a_processor_of_arms_is_clean_or_explained() {
    is_clean_or_explained(Machine::Aarch64, "debian", None, &["--qemu-arg=-cpu", "--qemu-arg=neoverse-n1"]);
}

#[test]
fn log_with_a_memory_mapped_apic_is_clean_or_explained() {
    let vm = format!("{}apic = \"xapic\"\n", system_tests::debian_vm("memory-mapped", 4));
    let run = Machine::X86_64.run_vms(240, &vm, &["--exec", "dmesg -r"]).expect_status(0);
    judge(&run.stdout, "x86_64", "debian");
}

fn is_clean_or_explained(machine: Machine, kernel: &str, file: Option<&str>, more: &[&str]) {
    let mut arguments = vec!["--exec", "dmesg -r"];
    arguments.extend(file.into_iter().flat_map(|file| ["--kernel", file]));
    arguments.extend(more);
    let run = machine.run(240, &arguments).expect_status(0);
    judge(&run.stdout, machine.name(), kernel);
}

/// A line of the list.
struct Known {
    /// As the kernel prints it, without its time; `*` stands for any text.
    text: String,
    /// It need not be in every log that it may be in.
    comes_and_goes: bool,
}

/// The lines that may be in the log of this kernel.
fn known(arch: &str, kernel: &str) -> Vec<Known> {
    let text = fs::read_to_string(workspace().join(LIST)).expect("the list is in the repository");
    let list: Table = text.parse().unwrap_or_else(|error| panic!("{LIST}: {error}"));
    let lines = list.get("line").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let names = |line: &Value, key: &str| -> Vec<String> {
        let names = line.get(key).and_then(Value::as_array).unwrap_or_else(|| panic!("{LIST}: no `{key}` in {line}"));
        names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
    };
    let applies = |line: &&Value| {
        let is_explained = line.get("why").and_then(Value::as_str).is_some_and(|why| why.len() > 20);
        assert!(is_explained, "{LIST}: a line without a reason: {line}");
        names(line, "arch").iter().any(|name| name == arch) && names(line, "kernel").iter().any(|name| name == kernel)
    };
    lines
        .iter()
        .filter(applies)
        .map(|line| Known {
            text: line.get("text").and_then(Value::as_str).unwrap_or_else(|| panic!("{LIST}: no text")).to_owned(),
            comes_and_goes: line.get("comes_and_goes").and_then(Value::as_bool).unwrap_or(false),
        })
        .collect()
}

fn judge(log: &str, arch: &str, kernel: &str) {
    assert!(log.contains("Linux version"), "the beginning of the log is missing: {log}");
    let complaints: Vec<&str> = log.lines().filter_map(complaint).collect();
    let known = known(arch, kernel);

    let is_listed = |complaint: &&&str| !known.iter().any(|line| matches(&line.text, complaint));
    let unknown: Vec<_> = complaints.iter().filter(is_listed).collect();
    tell(&format!("{arch}, kernel {kernel}: {} lines of warnings and errors", complaints.len()));
    complaints.iter().for_each(|complaint| tell(&format!("    {complaint}")));
    let is_gone = |line: &&Known| !line.comes_and_goes && !complaints.iter().any(|it| matches(&line.text, it));
    known.iter().filter(is_gone).for_each(|line| tell(&format!("{LIST}: does not occur any more: {}", line.text)));
    assert!(unknown.is_empty(), "not in {LIST}: {unknown:#?}");
}

/// The text of a kernel's line of level warning or above. Raw lines begin with `<priority>[time] `; priorities from 8
/// on are not the kernel's own.
fn complaint(line: &str) -> Option<&str> {
    const WARNING: u32 = 4;
    let (priority, rest) = line.strip_prefix('<')?.split_once('>')?;
    let (_, text) = rest.split_once("] ")?;
    (priority.parse::<u32>().ok()? <= WARNING).then_some(text.trim_end())
}

/// Whether `text` matches `pattern`, where `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

/// Into the log of the tests, whether they pass or not.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[test]
fn patterns_match_whole_lines() {
    assert!(matches("a * c", "a b c") && matches("*", "") && matches("x", "x") && matches("x*", "xyz"));
    assert!(!matches("a * c", "a b c d") && !matches("x", "xy") && !matches("a*b*c", "ac"));
    assert!(matches("a*b*c", "a1b2c"));
}

#[test]
fn warnings_and_errors_of_the_kernel_are_told_from_other_lines() {
    assert_eq!(complaint("<3>[    0.1] PCI: Fatal"), Some("PCI: Fatal"));
    assert_eq!(complaint("<4>[    0.000000] x"), Some("x"));
    assert_eq!(complaint("<6>[    0.1] smp: up"), None);
    assert_eq!(complaint("<12>[    0.1] written by a program"), None);
    assert_eq!(complaint("no line of a log"), None);
}

//! Each rule holds, and is broken, on trees of a few lines.

use super::source::blank;
use super::*;

fn tree(files: &[(&str, &str)]) -> Tree {
    Tree { files: files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect() }
}

/// The places as `path:line`.
fn places(find: fn(&Tree) -> Vec<Broken>, files: &[(&str, &str)]) -> Vec<String> {
    find(&tree(files)).into_iter().map(|place| format!("{}:{}", place.path, place.line)).collect()
}

const NOWHERE: [&str; 0] = [];

#[test]
fn blanking_keeps_code_and_line_breaks_only() {
    let text = "a /* b /* c */ d */ e // f\n\"g \\\" h\" r#\"i \" j\"# 'k' '\\'' &'l m b\"n\" number\"o\"";
    let code = blank(text);
    assert_eq!(code.len(), text.len());
    assert_eq!(code.split_whitespace().collect::<Vec<_>>(), ["a", "e", "&'l", "m", "b", "number"]);
    assert_eq!(code.lines().count(), 2);
}

#[test]
fn unfinished_comments_and_strings_end_with_the_file() {
    for text in ["/* a", "\"a", "r#\"a\"", "'\\", "b/*/", "'"] {
        assert_eq!(blank(text).len(), text.len());
    }
}

#[test]
fn unsafe_is_found_outside_of_its_places_only() {
    let files = [
        ("hypervisor/src/arch/x86_64/svm/mod.rs", "unsafe {}"),
        ("guest/src/arch/mod.rs", "unsafe fn f() {}"),
        ("workloads/src/memory.rs", "unsafe fn f() {}"),
        ("workloads/src/storm.rs", "unsafe fn f() {}"),
        ("hypervisor/src/vm/memory.rs", "//! unsafe\nfn f() {\n    unsafe { g() }\n}"),
        ("hypervisor/src/architecture.rs", "unsafe fn f() {}"),
        ("crates/addr/src/lib.rs", "#![forbid(unsafe_code)]\nconst A: &str = \"unsafe\";"),
    ];
    let found = ["hypervisor/src/architecture.rs:1", "hypervisor/src/vm/memory.rs:3", "workloads/src/storm.rs:1"];
    assert_eq!(places(unsafe_in_arch, &files), found);
}

#[test]
fn an_architecture_is_named_in_arch_only() {
    let files = [
        ("hypervisor/src/arch/mod.rs", "#[cfg(target_arch = \"x86_64\")]\nmod x86_64;"),
        ("hypervisor/src/vcpu/run.rs", "// svm\nuse crate::arch::x86_64::enter;"),
        ("hypervisor/src/cpu/mod.rs", "fn f(area: SvmArea) {}"),
        ("hypervisor/src/device/pit.rs", "use x86_64::f;\n#[cfg(target_arch = \"x86_64\")]\nfn f() {}"),
        ("crates/stage2/src/lib.rs", "mod npt;\nmod aarch64;"),
        ("crates/sched/src/sync.rs", "#[cfg(target_arch = \"x86_64\")]\nuse aarch64::f;"),
        ("crates/sched/src/lib.rs", "const A: bool = cfg!(target_arch = \"x86_64\");"),
        ("crates/aarch64_defs/src/lib.rs", "mod aarch64;"),
        ("crates/x86_boot/tests/all.rs", "use x86_64::f;"),
        ("cli/src/qemu.rs", "use Arch::Aarch64;"),
    ];
    let found = [
        "crates/sched/src/lib.rs:1",
        "crates/sched/src/sync.rs:2",
        "crates/stage2/src/lib.rs:2",
        "hypervisor/src/cpu/mod.rs:1",
        "hypervisor/src/device/pit.rs:2",
        "hypervisor/src/vcpu/run.rs:2",
    ];
    assert_eq!(places(arch_named_once, &files), found);
}

#[test]
fn the_core_names_the_contract_and_shared_files_only() {
    let files = [
        ("hypervisor/src/arch/x86_64/mod.rs", "use crate::arch::control_port;"),
        ("hypervisor/src/log.rs", "use crate::arch::{Arch, Machine};\nuse crate::arch::serial::Serial;"),
        ("hypervisor/src/vm/mod.rs", "// crate::arch::tlb\nuse crate::arch::{block::Block, ram::{self, Frames},};"),
        ("hypervisor/src/vm/serial.rs", "use crate::arch::{tables::{A, B}, uart::Uart};"),
        ("hypervisor/src/device/psci.rs", "use smccc::arch::{FEATURES, error::Error};"),
        ("hypervisor/src/lib.rs", "mod arch;\nuse arch::{Arch, hypercall};"),
        ("cli/src/config/arch.rs", "use crate::arch::Guest;"),
    ];
    let found = ["hypervisor/src/lib.rs:2", "hypervisor/src/log.rs:2", "hypervisor/src/vm/serial.rs:1"];
    assert_eq!(places(contract, &files), found);
}

#[test]
fn arrows_point_from_binaries_to_algorithms_to_vocabulary() {
    let good = [
        ("hypervisor/Cargo.toml", "[dependencies]\nsched.workspace = true\nabi.workspace = true"),
        (
            "crates/sched/Cargo.toml",
            "[dependencies]\nabi.workspace = true\n[dev-dependencies]\nhw_model = {}\nloom = '1'",
        ),
        ("crates/stage2/Cargo.toml", "[dependencies]\naddr.workspace = true"),
        ("crates/abi/Cargo.toml", "[dependencies]\naddr.workspace = true"),
        ("crates/addr/Cargo.toml", ""),
        ("crates/hw_model/Cargo.toml", "[dependencies]\nstage2.workspace = true"),
        ("crates/interleave/Cargo.toml", ""),
        ("crates/shootdown/Cargo.toml", "[dependencies]\ninterleave = { workspace = true, optional = true }"),
        ("cli/Cargo.toml", "[dependencies]\nabi.workspace = true"),
        ("crates/vcpu_layout/Cargo.toml", "[dependencies]\nvcpu_layout_derive.workspace = true"),
        ("crates/vcpu_layout_derive/Cargo.toml", ""),
        ("crates/x86_emulate/Cargo.toml", "[dev-dependencies]\nfuzz.workspace = true"),
        ("fuzz/Cargo.toml", "[dev-dependencies]\nabi.workspace = true"),
        ("crates/emulator/Cargo.toml", "[dependencies]\nx86_emulate.workspace = true"),
    ];
    assert_eq!(places(arrows, &good), NOWHERE);

    let with = |path: &'static str, text: &'static str| {
        let mut files: Vec<_> = good.into_iter().filter(|(other, _)| *other != path).collect();
        files.push((path, text));
        places(arrows, &files)
    };
    // An algorithm, also under another name and for one target only.
    assert_eq!(
        with("crates/sched/Cargo.toml", "[dependencies]\nstage2.workspace = true"),
        ["crates/sched/Cargo.toml:2"]
    );
    let renamed = "[target.'cfg(unix)'.dependencies]\nx = { package = 'dunlin-stage2', path = '' }";
    assert_eq!(with("crates/sched/Cargo.toml", renamed).len(), 1);
    assert_eq!(with("crates/sched/Cargo.toml", "[dev-dependencies]\nstage2.workspace = true").len(), 1);
    // An algorithm's macros belong to that algorithm, and not the other way round.
    assert_eq!(with("crates/sched/Cargo.toml", "[dependencies]\nvcpu_layout_derive.workspace = true").len(), 1);
    assert_eq!(with("crates/vcpu_layout_derive/Cargo.toml", "[dependencies]\nvcpu_layout.workspace = true").len(), 1);
    // Such a crate may use only those algorithm crates, and no other crate may use it as an algorithm.
    let others = "[dependencies]\nx86_emulate.workspace = true\nstage2.workspace = true";
    assert_eq!(with("crates/emulator/Cargo.toml", others), ["crates/emulator/Cargo.toml:3"]);
    assert_eq!(with("crates/stage2/Cargo.toml", "[dependencies]\nemulator.workspace = true").len(), 1);
    // The vocabulary.
    assert_eq!(with("crates/abi/Cargo.toml", "[dependencies]\nsched.workspace = true"), ["crates/abi/Cargo.toml:2"]);
    // The model in a product, and a program as a library.
    assert_eq!(with("hypervisor/Cargo.toml", "[dependencies]\nhw_model.workspace = true").len(), 1);
    assert_eq!(with("crates/x86_emulate/Cargo.toml", "[dependencies]\nfuzz.workspace = true").len(), 1);
    // A simulation where it is not allowed.
    assert_eq!(with("hypervisor/Cargo.toml", "[dependencies]\ninterleave.workspace = true").len(), 1);
    assert_eq!(with("crates/stage2/Cargo.toml", "[dev-dependencies]\ndunlin-cli = {}").len(), 1);
    assert_eq!(with("crates/stage2/Cargo.toml", "[dependencies").len(), 1);
}

#[test]
fn std_is_found_where_there_is_no_operating_system() {
    let files = [
        ("cli/src/main.rs", "use std::fs;"),
        ("crates/abi/src/tests.rs", "use std::vec;"),
        ("crates/sched/tests/loom.rs", "use std::sync::Arc;"),
        ("crates/sched/src/lib.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n    use std::vec;\n}"),
        ("crates/addr/src/lib.rs", "#[cfg(test)]\nextern crate std;\nfn f(std: u8) {}"),
        ("crates/stage2/src/lib.rs", "//! std::vec\nuse core::fmt;\nuse std::vec::Vec;"),
        ("hypervisor/src/main.rs", "extern crate std;"),
    ];
    assert_eq!(places(std_on_host_only, &files), ["crates/stage2/src/lib.rs:3", "hypervisor/src/main.rs:1"]);
}

#[test]
fn libraries_are_no_std_and_forbid_unsafe() {
    let files = [
        ("crates/addr/src/lib.rs", "#![no_std]\n#![forbid(unsafe_code)]"),
        ("crates/hw_model/src/lib.rs", "#![forbid(unsafe_code)]"),
        ("crates/abi/src/lib.rs", "//! no_std\n#![forbid(unsafe_code)]"),
        ("crates/sched/src/lib.rs", "#![no_std]\n#![deny(unsafe_code)]"),
    ];
    assert_eq!(places(library_attributes, &files), ["crates/abi/src/lib.rs:1", "crates/sched/src/lib.rs:1"]);
}

#[test]
fn nameless_modules_are_found_as_files_and_as_declarations() {
    let files = [
        ("cli/src/terminal.rs", "mod common_case;"),
        ("cli/src/util.rs", ""),
        ("cli/tests/common/mod.rs", ""),
        ("cli/src/main.rs", "mod run;\nmod misc;"),
    ];
    assert_eq!(places(module_names, &files), ["cli/src/main.rs:2", "cli/src/util.rs:1", "cli/tests/common/mod.rs:1"]);
}

#[test]
fn a_lint_switched_off_without_a_reason_is_found() {
    let files = [
        ("a.rs", "#[expect(dead_code, reason = \"x\")]\n#![allow(\n    dead_code,\n    reason = \"x\"\n)]"),
        ("b.rs", "fn f() {\n    #[allow(dead_code)]\n    g().expect(\"invariant\");\n}"),
        ("c.rs", "#[cfg_attr(test, expect(dead_code))]"),
        ("d.rs", "#[inline] fn expect(a: u8) {}\nlet reason = x.expect(\"\");"),
    ];
    assert_eq!(places(reasons, &files), ["b.rs:2", "c.rs:1"]);
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let files = [
        ("README.md", "[a](docs/a.md#part) [b](docs) [c](https://x.invalid/y) [d](#here)\n[e](docs/b.md)\n`[f](g)`"),
        ("docs/a.md", "[up](../README.md)\n```text\n[x](y)\n```\n[out](../../README.md)"),
    ];
    assert_eq!(places(links, &files), ["README.md:2", "docs/a.md:5"]);
}

#[test]
fn a_vm_description_without_a_comment_is_found() {
    let files = [("vms/a.toml", "# A VM.\n"), ("vms/sub/b.toml", "[[vm]]\n"), ("deny.toml", "x = 1")];
    assert_eq!(places(vm_comments, &files), ["vms/sub/b.toml:1"]);
}

#[test]
fn a_file_that_does_not_tell_its_idea_is_found() {
    let files = [
        ("a.rs", "//! A.\n"),
        ("a/tests.rs", "use a;\n"),
        ("b/src/tests/c.rs", "use c;\n"),
        ("b.rs", "// B.\n"),
        ("b/tests/c.rs", ""),
    ];
    assert_eq!(places(opening, &files), ["b.rs:1", "b/tests/c.rs:1"]);
}

#[test]
fn a_crate_without_an_explanation_is_found() {
    let manifest = "[workspace.dependencies]\nabi = { path = 'crates/abi' }\nlog = '1'\nspin = { version = '1' }\n";
    let files = [("Cargo.toml", manifest), (CRATES_DOCUMENT, "| `spin` | locks |")];
    assert_eq!(places(crates_explained, &files), ["Cargo.toml:3"]);
}

/// The files that figures are compared with, and these.
fn with_figures<'a>(files: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let figures = [
        ("docs/exits.toml", "[instructions]\ncpuid = 195\nself-ipi = 1540\n"),
        ("docs/exits-aarch64.toml", "[instructions]\nhvc = 198\n"),
    ];
    figures.iter().chain(files).copied().collect()
}

#[test]
fn a_marked_figure_that_is_not_its_files_is_found_with_both() {
    let files = with_figures(&[
        ("README.md", "x\n\n[195](docs/exits.toml \"cpuid\") and [1 540](docs/exits.toml \"self-ipi\"), right."),
        (
            "docs/a.md",
            "A CPUID takes [194](exits.toml \"cpuid\")\ninstructions, an HVC [195](exits-aarch64.toml \"hvc\").",
        ),
        ("docs/b.md", "| CPUID | [195](exits-aarch64.toml \"cpuid\") |\n| HVC | [198](exits-aarch64.toml) |"),
        ("docs/c.md", "[exits.toml](exits.toml) and [exits](exits.toml \"cpuid\") are links to a file."),
        ("crates/addr/src/lib.rs", "//! As quick as [209](docs/exits.toml \"cpuid\") instructions.\nfn f() {}"),
    ]);
    let found: Vec<String> = figures::find(&tree(&files)).iter().map(ToString::to_string).collect();
    let wanted = [
        "docs/a.md:1: says 194, docs/exits.toml says 195 for `cpuid` (`cargo xtask figures` mends it)",
        "docs/a.md:2: says 195, docs/exits-aarch64.toml says 198 for `hvc` (`cargo xtask figures` mends it)",
        "docs/b.md:1: docs/exits-aarch64.toml has no `cpuid`",
        "docs/b.md:2: `198`: the link's title has to name the figure in docs/exits-aarch64.toml",
        "crates/addr/src/lib.rs:1: says 209, docs/exits.toml says 195 for `cpuid` (`cargo xtask figures` mends it)",
    ];
    assert_eq!(found, wanted);
}

#[test]
fn a_figure_without_a_mark_is_found_in_sentences_tables_listings_and_comments() {
    let files = [
        ("a.md", "An EOI takes 210 instructions, of which\n1 207\ninstructions are ours, and 305 guest instructions."),
        ("b.md", "```text\ncarry it out, 552 instructions in all\n```"),
        ("c.md", "| exit | Dunlin |\n|---|---|\n| EOI, instructions | 555 of 600 |\n| boot, seconds | 555 |"),
        (
            "d.md",
            "| exit | instructions | ticks | KVM's instructions |\n|---|---|---|---|\n| CPUID | 176 | 177 | 2 681 |",
        ),
        ("e.md", "With KVM it is 3 659 instructions."),
        (
            "f.rs",
            "//! Opens.\n//!\n//! Each takes 190 instructions.\nfn f() {}\n    // It is 191 instructions.\n    let a = 1;",
        ),
    ];
    let found = ["a.md:1", "a.md:2", "a.md:3", "b.md:2", "c.md:3", "d.md:3", "e.md:1", "f.rs:3", "f.rs:5"];
    assert_eq!(places(figures::find, &files), found);
}

#[test]
fn a_figure_of_a_day_a_commit_or_a_version_of_kvm_stands() {
    let files = [
        ("a.md", "On 2026-11-20 it was 605 instructions."),
        ("b.md", "Before `a69958e` it was\n605 instructions."),
        ("c.md", "KVM 6.1 needs 3 758 instructions, KVM/arm64 6.12 3 697 instructions."),
        ("d.md", "## Figures of 2026-11-21\n\nIt was 605 instructions.\n\n## Today\n\nIt is 606 instructions."),
        (
            "e.md",
            "Measured on 2026-11-21:\n\n| a | b |\n|---|---|\n| instructions | 605 |\n\n| a | b |\n|---|---|\n| instructions | 605 |",
        ),
        ("f.md", "KVM 6.1 needs 3 758 instructions. Dunlin needs 525 instructions."),
        ("g.md", "Since `exits` on port 4-10-20 it is 605 instructions."),
    ];
    assert_eq!(places(figures::find, &files), ["d.md:7", "e.md:9", "f.md:1", "g.md:1"]);
}

#[test]
fn numbers_that_are_no_cost_of_an_exit_stand() {
    let files = [
        (
            "a.md",
            "42 million instructions, 16 instructions, 10 500 instructions, 0.195 instructions, section 15-210 instructions.",
        ),
        ("b.md", "Instructions are counted 195 times, and a line of 128 bytes has instructions."),
        ("c.rs", "//! Opens.\nconst A: &str = \"at most 600 instructions\";"),
    ];
    assert_eq!(places(figures::find, &files), NOWHERE);
}

#[test]
fn figures_are_renewed_where_they_are_marked_and_nothing_else_changes() {
    let tree = tree(&with_figures(&[]));
    let old = "| [1](exits.toml \"self-ipi\") | [195](a/exits.toml \"cpuid\") | 7 | [8](exits.toml \"gone\") |\n[2](x.toml \"hvc\")";
    let new = "| [1 540](exits.toml \"self-ipi\") | [195](a/exits.toml \"cpuid\") | 7 | [8](exits.toml \"gone\") |\n[2](x.toml \"hvc\")";
    assert_eq!(figures::renewed(&tree, old).as_deref(), Some(new));
    assert_eq!(figures::renewed(&tree, new), None);
}

#[test]
fn a_line_of_prose_has_at_most_120_characters() {
    let words = |length: usize| "word ".repeat(length.div_ceil(5))[..length - 1].to_owned() + ".";
    let (fits, long) = (words(120), words(121));
    let link = format!("[![{long}](a.svg)](b.md)");
    let files = [
        ("a.md", format!("{fits}\n{long}\n| {long} |\n```\n{long}\n```\n{link}\n{}\n- {fits}", "x".repeat(121))),
        ("b.rs", format!("//! {}\n/// {}\n    // {fits}\n//! | {long} |", words(116), words(117))),
        ("c.rs", format!("/// ```text\n/// {long}\n/// ```\nconst A: &str = \"{long}\";\n// é{}", words(115))),
        ("d.toml", format!("# {long}")),
    ];
    let files: Vec<_> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    assert_eq!(places(line_length, &files), ["a.md:2", "a.md:9", "b.rs:2", "b.rs:3"]);
}

#[test]
fn every_rule_has_a_name_of_its_own() {
    let names: std::collections::BTreeSet<_> = CHECKS.iter().map(|check| check.name).collect();
    assert_eq!(names.len(), CHECKS.len());
}

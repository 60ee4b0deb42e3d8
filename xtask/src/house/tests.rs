//! Each rule is seen to hold and seen to be broken, on trees of a few lines.

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
        ("hypervisor/src/arch/x86_64/svm.rs", "unsafe {}"),
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
        ("cli/Cargo.toml", "[dependencies]\nabi.workspace = true"),
        ("crates/vcpu_layout/Cargo.toml", "[dependencies]\nvcpu_layout_derive.workspace = true"),
        ("crates/vcpu_layout_derive/Cargo.toml", ""),
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
    // The vocabulary.
    assert_eq!(with("crates/abi/Cargo.toml", "[dependencies]\nsched.workspace = true"), ["crates/abi/Cargo.toml:2"]);
    // The model in a product, and a program as a library.
    assert_eq!(with("hypervisor/Cargo.toml", "[dependencies]\nhw_model.workspace = true").len(), 1);
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

#[test]
fn every_rule_has_a_name_of_its_own() {
    let names: std::collections::BTreeSet<_> = CHECKS.iter().map(|check| check.name).collect();
    assert_eq!(names.len(), CHECKS.len());
}

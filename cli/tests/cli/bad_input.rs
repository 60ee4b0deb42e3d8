//! Bad input: one line that names place and fault, one that says what to do, status 2, and nothing started.

use std::process::Output;

use crate::rig::{Rig, kernel};

/// What `dunlin run` says of a file with this text; it must end with status 2 and start nothing.
fn refused(rig: &Rig, text: &str, words: &[&str]) -> String {
    rig.write("x.toml", text.as_bytes());
    let output = rig.run(&["x.toml"]).args(words).output().expect("runs");
    said(rig, &output)
}

fn said(rig: &Rig, output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty());
    assert!(!rig.path("arguments").exists(), "QEMU was started");
    text
}

const ONE: &str = "[[vm]]\nname = \"a\"\n";

#[test]
fn missing_file_is_named() {
    let rig = Rig::new();
    let output = rig.run(&["nowhere/x.toml"]).output().expect("runs");
    let text = said(&rig, &output);
    assert!(text.starts_with("nowhere/x.toml: cannot be read: No such file"), "{text}");
    assert!(text.contains("\nhelp: "), "{text}");
}

#[test]
fn unreadable_text_is_refused() {
    let rig = Rig::new();
    rig.write("x.toml", b"\xff\xfe");
    let output = rig.run(&["x.toml"]).output().expect("runs");
    assert!(said(&rig, &output).starts_with("x.toml: cannot be read: "));
}

#[test]
fn syntax_error_has_line_and_column() {
    let text = refused(&Rig::new(), "[[vm]]\nname == \"a\"\n", &[]);
    assert!(text.starts_with("x.toml:2:7: not TOML: "), "{text}");
}

#[test]
fn unknown_key_comes_with_the_nearest_known_one() {
    let text = refused(&Rig::new(), &format!("{ONE}memroy = \"1G\"\n"), &[]);
    assert!(text.starts_with("x.toml:3:1: key 'memroy': unknown in [[vm]]\nhelp: did you mean 'memory'?"), "{text}");
}

#[test]
fn no_machine_is_refused() {
    let text = refused(&Rig::new(), "[host]\npcpus = 2\n", &[]);
    assert!(text.starts_with("x.toml: no [[vm]]"), "{text}");
}

#[test]
fn number_of_vcpus_has_bounds() {
    let rig = Rig::new();
    for (count, shown) in [("0", "0"), ("513", "513"), ("-4", "-4")] {
        let text = refused(&rig, &format!("{ONE}vcpus = {count}\n"), &[]);
        assert!(
            text.starts_with(&format!("x.toml:3: key 'vcpus': {shown} vCPUs; a VM needs 1 to 512\nhelp: ")),
            "{text}"
        );
        let text = refused(&rig, ONE, &["--vcpus", count]);
        assert!(text.starts_with(&format!("option '--vcpus': {shown} vCPUs; a VM needs 1 to 512")), "{text}");
    }
    let text = refused(&rig, &format!("[host]\npcpus = 0\n{ONE}"), &[]);
    assert!(text.starts_with("x.toml:2: key 'pcpus': 0 pCPUs"), "{text}");
}

#[test]
fn xapic_cannot_name_more_than_255_vcpus() {
    let text = refused(&Rig::new(), &format!("{ONE}vcpus = 300\napic = \"xapic\"\n"), &[]);
    assert!(text.starts_with("x.toml:3: key 'vcpus': 300 vCPUs") && text.contains("x.toml:4"), "{text}");
}

#[test]
fn memory_is_neither_nothing_nor_too_small_nor_more_than_the_computer_has() {
    let rig = Rig::new();
    let text = refused(&rig, &format!("{ONE}memory = \"0\"\n"), &[]);
    assert!(text.starts_with("x.toml:3: key 'memory': a VM needs memory"), "{text}");
    let text = refused(&rig, &format!("{ONE}memory = \"32M\"\n"), &[]);
    assert!(text.starts_with("x.toml:3: key 'memory': ") && text.contains("needs at least 68 MiB"), "{text}");
    let text = refused(&rig, &format!("{ONE}memory = \"900T\"\n"), &[]);
    assert!(text.starts_with("x.toml:3: key 'memory': 900T is more than a VM can have"), "{text}");
    let text = refused(&rig, &format!("{ONE}memory = \"15T\"\n"), &[]);
    assert!(text.starts_with("x.toml:3: key 'memory': the host needs "), "{text}");
    let text = refused(&rig, &format!("[host]\nmemory = \"512M\"\n{ONE}memory = \"512M\"\n"), &[]);
    assert!(text.starts_with("x.toml:2: key 'memory': 512 MiB for the host; its VMs have 512 MiB"), "{text}");
    let text = refused(&rig, ONE, &["--memory", "lots"]);
    assert!(text.starts_with("option '--memory': 'lots' is not a unit"), "{text}");
}

#[test]
fn kernel_that_is_none_is_refused() {
    let rig = Rig::new();
    let file = format!("{ONE}kernel = \"k\"\n");
    let text = refused(&rig, &file, &[]);
    assert!(text.starts_with("x.toml:3: key 'kernel': 'k' does not exist\nhelp: name a file"), "{text}");

    rig.write("k", b"#!/bin/sh\n");
    let text = refused(&rig, &file, &[]);
    assert!(
        text.starts_with("x.toml:3: key 'kernel': k: not a kernel: 10 bytes that start with 23 21 2f 62"),
        "{text}"
    );

    rig.write("k", b"");
    assert!(refused(&rig, &file, &[]).contains("the file is empty"));

    let whole = kernel();
    for end in [0x208, 0x230, 0x300, whole.len() - 16] {
        rig.write("k", &whole[..end]);
        let text = refused(&rig, &file, &[]);
        assert!(text.starts_with("x.toml:3: key 'kernel': k: the kernel is truncated"), "{end}: {text}");
    }
    let text = refused(&rig, ONE, &["--kernel", "gone"]);
    assert!(text.starts_with("option '--kernel': 'gone' does not exist"), "{text}");
}

#[test]
fn initrd_that_does_not_fit_is_refused() {
    let rig = Rig::new();
    rig.write("big", &vec![0; 20 << 20]);
    let text = refused(&rig, &format!("{ONE}memory = \"80M\"\ninitrd = \"big\"\n"), &[]);
    assert!(text.starts_with("x.toml:4: key 'initrd': the initrd has 20 MiB"), "{text}");
    assert!(text.contains("x.toml:3: key 'memory'"), "{text}");
}

#[test]
fn command_line_that_would_be_cut_off_is_refused() {
    let text = refused(&Rig::new(), ONE, &["--append", &"x".repeat(3000)]);
    assert!(text.starts_with("option '--append': the command line has "), "{text}");
}

#[test]
fn what_was_not_built_is_named_with_the_command_that_builds_it() {
    let rig = Rig::new();
    for (asset, start) in [
        ("vmlinuz-cloud", "x.toml:1: key 'kernel' (default): no kernel at "),
        ("initrd.cpio.gz", "x.toml:1: key 'initrd' (default): no initrd at "),
        ("hypervisor", "no hypervisor at "),
    ] {
        std::fs::rename(rig.path(asset), rig.path("away")).expect("is there");
        let text = refused(&rig, ONE, &[]);
        assert!(text.starts_with(start) && text.contains("\nhelp: run 'make build' first"), "{text}");
        std::fs::rename(rig.path("away"), rig.path(asset)).expect("is there");
    }
}

#[test]
fn move_is_not_measured_without_the_files_of_its_hosts() {
    let rig = Rig::new();
    for asset in ["vmlinuz-parent", "parent.cpio", "vmlinuz-newest", "kvm.cpio"] {
        let text = said(&rig, &rig.dunlin(&["bench", "move", "--pairs", "1"]).output().expect("runs"));
        assert!(text.contains(asset) && text.contains("\nhelp: run 'make parent' first"), "{text}");
        rig.write(asset, b"is there");
    }
}

#[test]
fn qemu_that_is_missing_or_too_old_is_refused() {
    let rig = Rig::new();
    let output = rig.dunlin(&["run", "--qemu", "no-such-qemu"]).output().expect("runs");
    let text = said(&rig, &output);
    assert!(
        text.starts_with("option '--qemu': QEMU: 'no-such-qemu' is not there\nhelp: install it: 'apt install"),
        "{text}"
    );

    let output = rig.dunlin(&["run"]).env("PATH", rig.path("empty")).output().expect("runs");
    assert!(said(&rig, &output).starts_with("QEMU: 'qemu-system-x86_64' is not there\n"));

    rig.write("version", b"QEMU emulator version 6.9.0\n");
    let text = refused(&rig, ONE, &[]);
    assert!(text.contains("is version 6.9.0; at least 7.2 is needed\n"), "{text}");
    rig.write("version", b"GNU Emacs 29\n");
    assert!(refused(&rig, ONE, &[]).contains("is it QEMU?"));
}

#[test]
fn command_for_an_initrd_that_is_not_ours_is_refused() {
    let rig = Rig::new();
    rig.write("mine", b"an initrd");
    for initrd in ["mine", "none"] {
        let text = refused(&rig, &format!("{ONE}initrd = \"{initrd}\"\n"), &["--exec", "true"]);
        assert!(text.starts_with("x.toml:3: key 'initrd': --exec needs Dunlin's initrd"), "{text}");
    }
}

#[test]
fn words_that_mean_nothing_are_listed_with_those_that_do() {
    let rig = Rig::new();
    let text = refused(&rig, &format!("[host]\naccel = \"hax\"\n{ONE}"), &[]);
    assert!(
        text.starts_with(
            "x.toml:2: key 'accel': 'hax' is not a valid accelerator\nhelp: one of auto, tcg, tcg-single, kvm"
        ),
        "{text}"
    );
    let text = refused(&rig, &format!("{ONE}apic = \"x3apic\"\n"), &[]);
    assert!(text.contains("one of x2apic, xapic"), "{text}");
    let text = refused(&rig, ONE, &["--time-limit", "soon"]);
    assert!(text.starts_with("option '--time-limit': 'soon' is not a duration"), "{text}");
    let output = rig.dunlin(&["rum"]).output().expect("runs");
    assert!(said(&rig, &output).contains("run"));
}

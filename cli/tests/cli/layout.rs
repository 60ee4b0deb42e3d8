//! `dunlin layout`: of a host without VMs that is started for it, and of one that runs.

use std::process::Output;

use abi::exit_code::{CLEAN, qemu_status};
use serde_json::Value;

use crate::rig::{Rig, after, wait_for};

/// `dunlin layout` with a host of its own, and whether its payload had no VMs.
fn ask(rig: &Rig, words: &[&str]) -> (Output, bool) {
    let host = rig.play(|host| {
        assert!(host.manifest.vms.is_empty() && !host.manifest.exit_when_idle);
        host.up();
        host.serve();
    });
    let qemu = rig.path("qemu");
    let output = rig.dunlin(&["layout", "--qemu"]).arg(qemu).args(words).output().expect("runs");
    let had_no_vms = host.join().is_ok();
    let _ = std::fs::remove_file(rig.path("arguments"));
    (output, had_no_vms)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn host_without_vms_is_started_asked_and_ended() {
    let rig = Rig::new();
    let (output, had_no_vms) = ask(&rig, &[]);
    assert!(had_no_vms);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.starts_with("The hypervisor's data by writer, in cache lines of 128 bytes.\n"), "{shown}");
    assert!(shown.contains("Vcpu: 256 bytes, 2 lines, aligned to 128\n"), "{shown}");
    assert!(!shown.contains('\u{1b}'), "no colours where there is no terminal");
    assert!(!rig.path("dunlin-layout-").exists());
    // Nothing of the run is left.
    let left = std::fs::read_dir(rig.path("")).expect("is there").flatten();
    assert!(!left.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("dunlin-layout-")));
}

#[test]
fn text_that_was_written_passes_and_shift_is_shown_line_by_line() {
    let rig = Rig::new();
    let (output, _) = ask(&rig, &["--write", "golden.txt"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0), "{}", text(&output.stderr));
    let (output, _) = ask(&rig, &["--check", "golden.txt"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "golden.txt: up to date\n"));

    let golden = std::fs::read_to_string(rig.path("golden.txt")).expect("was written");
    rig.write("golden.txt", golden.replace("     128     128", "     136     120").as_bytes());
    let (output, _) = ask(&rig, &["--check", "golden.txt"]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(&output.stdout);
    assert!(shown.contains("\n-     136     120") && shown.contains("\n+     128     128"), "{shown}");
    assert!(text(&output.stderr).contains("update the file with 'dunlin layout --write golden.txt'"));
}

#[test]
fn file_that_is_not_there_starts_nothing() {
    let rig = Rig::new();
    let output = rig.dunlin(&["layout", "--check", "nowhere.txt"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.starts_with("nowhere.txt: ") && said.contains("help: 'dunlin layout --write nowhere.txt'"), "{said}");
    assert!(!rig.path("arguments").exists());
}

#[test]
fn host_that_ends_instead_of_answering_is_told_with_its_last_words() {
    let rig = Rig::new();
    let host = rig.play(|host| {
        host.log("no SVM here\n");
        host.end(qemu_status(CLEAN));
    });
    let output = rig.dunlin(&["layout", "--qemu"]).arg(rig.path("qemu")).output().expect("runs");
    host.join().expect("was not upset");
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.starts_with("the host did not start: ") && said.contains("no SVM here"), "{said}");
}

#[test]
fn running_host_also_tells_where_its_blocks_are() {
    let rig = Rig::new();
    let none = rig.dunlin(&["layout", "--host"]).output().expect("runs");
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none.stderr).starts_with("no host is running\n"), "{}", text(&none.stderr));

    rig.write("one.toml", b"[[vm]]\nname = \"one\"\nvcpus = 2\n");
    let host = rig.play(|host| {
        host.up();
        host.start(0);
        host.serve();
    });
    let tool = rig.run(&["one.toml", "--initrd", "none"]).spawn().expect("runs");
    let dunlin = |words: &[&str]| rig.dunlin(words).output().expect("runs");
    wait_for(|| dunlin(&["list"]).status.success().then_some(())).expect("answers in the end");

    let shown = text(&dunlin(&["layout", "--host"]).stdout);
    assert!(shown.ends_with("  Each begins with a line, and no line belongs to two.\n"), "{shown}");
    let pid = tool.id().to_string();
    let json: Value = serde_json::from_slice(&dunlin(&["layout", "--host", &pid, "--json"]).stdout).expect("is JSON");
    assert_eq!((&json["places"][1]["vcpu"], &json["places"][1]["hva"]), (&1.into(), &0x3080.into()));
    assert_eq!(json["layouts"][0]["lines_by_class"]["owner"], 1);
    assert_eq!(dunlin(&["layout", "--host", "1"]).status.code(), Some(2));

    assert!(dunlin(&["stop", "one"]).status.success());
    assert!(tool.wait_with_output().expect("is ours").status.success());
    host.join().expect("was not upset");
}

#[test]
fn host_that_is_started_is_a_small_one() {
    let rig = Rig::new();
    let host = rig.play(|host| {
        assert_eq!(after(&host.arguments, "-m"), "128M");
        host.up();
        host.serve();
    });
    let output = rig.dunlin(&["layout", "--json", "--qemu"]).arg(rig.path("qemu")).output().expect("runs");
    host.join().expect("was not upset");
    let json: Value = serde_json::from_slice(&output.stdout).expect("is JSON");
    assert_eq!((&json["layouts"][0]["gap_bytes"], &json["places"]), (&120.into(), &Value::Null));
}

//! Results of measurements: written by `dunlin bench all`, compared, and shown as a page. The QEMU here is a script
//! that dies, or one that never comes up.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rig::{Rig, is_alive, wait_for};

/// Results of a short run.
const REAL: &str = include_str!("../results.jsonl");

const DYING: &str = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 7.2.22' && exit\necho 'no more memory' >&2\nexit 1\n";
const SLEEPING: &str = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 7.2.22' && exit\necho $$ >\"$(dirname \"$0\")/../pid\"\nexec sleep 100\n";

/// `dunlin` that finds this script as QEMU.
fn dunlin(rig: &Rig, script: &str, words: &[&str]) -> Command {
    let bin = rig.path("bin");
    fs::create_dir_all(&bin).expect("can be made");
    let qemu = bin.join("qemu-system-x86_64");
    fs::write(&qemu, script).expect("can be written");
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).expect("is ours");
    let mut command = rig.dunlin(words);
    command.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn records(rig: &Rig, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(rig.path(name)).expect("is there");
    text.lines().map(|line| serde_json::from_str(line).expect("is JSON")).collect()
}

fn kinds(records: &[Value]) -> Vec<&str> {
    records.iter().filter_map(|record| record["kind"].as_str()).collect()
}

#[test]
fn host_that_dies_becomes_a_record_that_says_so_and_is_measured_again() {
    let rig = Rig::new();
    let all = |words: &[&str]| -> Output {
        let words = [&["bench", "all", "--only", "budget"], words].concat();
        dunlin(&rig, DYING, &words).output().expect("runs")
    };
    let output = all(&["-o", "r.jsonl"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let found = records(&rig, "r.jsonl");
    assert_eq!(kinds(&found).last(), Some(&"step"));
    let failure = found.iter().find(|record| record["kind"] == "failure").expect("was recorded");
    assert_eq!(failure["experiment"], "budget");
    assert!(failure["why"].as_str().is_some_and(|why| why.contains("no more memory")), "{failure}");
    assert_eq!(found.last().expect("has a last")["complete"], false);
    let page = fs::read_to_string(rig.path("r.html")).expect("was written");
    assert!(page.contains("no more memory") && page.contains("Not measured."), "{page}");

    let again = all(&["--resume", "r.jsonl"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(records(&rig, "r.jsonl").len() > found.len(), "what failed is measured again");
    let refused = all(&["-o", "r.jsonl"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("'--resume r.jsonl'"), "{}", text(&refused.stderr));
}

#[test]
fn experiment_on_an_architecture_that_is_not_built_is_told_and_is_no_failure() {
    let rig = Rig::new();
    let words = ["bench", "all", "--only", "exits-aarch64", "-o", "r.jsonl"];
    let output = dunlin(&rig, DYING, &words).output().expect("runs");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("exits-aarch64: not measured: no hypervisor at "), "{said}");
    let found = records(&rig, "r.jsonl");
    assert_eq!(kinds(&found), ["unmeasured", "step"]);
    assert_eq!((&found[0]["experiment"], &found[1]["complete"]), (&"exits".into(), &false.into()));
    let page = fs::read_to_string(rig.path("r.html")).expect("was written");
    assert!(page.contains("instructions per exit, on AArch64"), "{page}");
}

#[test]
fn reader_that_has_gone_ends_the_output_and_is_no_crash() {
    let rig = Rig::new();
    // Closed before the start: a reader that closes later may be too late for a short output.
    let (reader, writer) = std::io::pipe().expect("can be made");
    drop(reader);
    let output = rig.dunlin(&["bench", "all", "--list"]).stdout(writer).output().expect("runs");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(141), ""));
}

#[test]
fn interrupted_measurement_ends_all_it_started_and_says_how_to_go_on() {
    let rig = Rig::new();
    let child = dunlin(&rig, SLEEPING, &["bench", "all", "--only", "budget", "-o", "r.jsonl"]).spawn().expect("runs");
    let qemu: i32 = wait_for(|| fs::read_to_string(rig.path("pid")).ok()?.trim().parse().ok()).expect("was started");
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("is one")).expect("is one");
    kill_process(pid, Signal::INT).expect("is ours");
    let output = child.wait_with_output().expect("is ours");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(said.contains("dunlin bench all --resume r.jsonl --only budget"), "{said}");
    wait_for(|| (!is_alive(qemu)).then_some(())).expect("QEMU is gone");
}

#[test]
fn steps_that_are_complete_are_not_measured_again() {
    let rig = Rig::new();
    let real = REAL.lines().next().expect("has lines");
    let circumstances: Value = serde_json::from_str(real).expect("is JSON");
    let step = serde_json::json!({ "schema": 1, "experiment": "all", "kind": "step", "step": "budget", "form": "short",
        "seconds": 1.0, "complete": true, "ground": "emulated", "machine": circumstances["machine"],
        "commit": circumstances["commit"], "date": circumstances["date"] });
    rig.write("r.jsonl", format!("{real}\n{step}\n").as_bytes());
    let output =
        dunlin(&rig, DYING, &["bench", "all", "--resume", "r.jsonl", "--only", "budget"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("budget: is in r.jsonl already"), "{}", text(&output.stderr));
    assert_eq!(records(&rig, "r.jsonl").len(), 2);
}

#[test]
fn results_are_compared_with_themselves_and_with_worse_ones() {
    let rig = Rig::new();
    rig.write("a.jsonl", REAL.as_bytes());
    rig.write("b.jsonl", REAL.replace("\"samples\":[194.0,194.0]", "\"samples\":[250.0,250.0]").as_bytes());
    let compare = |a: &str, b: &str| rig.dunlin(&["bench", "compare", a, b]).output().expect("runs");
    let same = compare("a.jsonl", "a.jsonl");
    assert_eq!(same.status.code(), Some(0), "{}", text(&same.stdout));
    assert!(text(&same.stdout).contains(" 0 differ,"), "{}", text(&same.stdout));
    let worse = compare("a.jsonl", "b.jsonl");
    assert_eq!(worse.status.code(), Some(1));
    assert!(text(&worse.stdout).contains("DIFFERS: +28.9 %"), "{}", text(&worse.stdout));
    assert_eq!(compare("a.jsonl", "nowhere.jsonl").status.code(), Some(2));
    rig.write("empty.jsonl", b"");
    assert_eq!(compare("a.jsonl", "empty.jsonl").status.code(), Some(2));
}

#[test]
fn page_is_made_of_what_can_be_read_and_the_rest_is_told() {
    let rig = Rig::new();
    rig.write("r.jsonl", format!("{REAL}not a record\n").as_bytes());
    let output = rig.dunlin(&["report", "r.jsonl", "-o", "page.html"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let place = format!("r.jsonl:{}: no JSON", REAL.lines().count() + 1);
    assert!(text(&output.stderr).starts_with(&place), "{}", text(&output.stderr));
    assert!(fs::read_to_string(rig.path("page.html")).expect("was written").contains(&place));
    rig.write("none.jsonl", b"nothing\n");
    assert_eq!(rig.dunlin(&["report", "none.jsonl"]).output().expect("runs").status.code(), Some(2));
}

#[test]
fn records_are_for_single_experiments_by_option_and_must_have_a_place() {
    let rig = Rig::new();
    let output = rig.dunlin(&["bench", "all", "--record", "x.jsonl"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(2));
    let output = dunlin(&rig, DYING, &["bench", "budget", "--record", "no/such/place"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

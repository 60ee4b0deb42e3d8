//! `dunlin dirty`, `pause` and `resume`, against a host that plays logs.

use std::process::Output;

use serde_json::Value;

use crate::console::Terminal;
use crate::rig::{Rig, wait_for};

/// Runs a host of these VMs and, while it runs, `look`.
fn while_running(names: &[&str], look: impl FnOnce(&Rig)) {
    let rig = Rig::new();
    let vms = names.iter().map(|name| format!("[[vm]]\nname = \"{name}\"\nsplit = \"eager\"\nsplit_rate = 500\n"));
    rig.write("vms.toml", vms.collect::<String>().as_bytes());
    let count = u32::try_from(names.len()).expect("is small");
    let host = rig.play(move |host| {
        host.up();
        (0..count).for_each(|vm| host.start(vm));
        host.serve();
    });
    let tool = rig.run(&["vms.toml", "--initrd", "none"]).spawn().expect("runs");
    wait_for(|| dunlin(&rig, &["list"]).status.success().then_some(())).expect("answers in the end");
    look(&rig);
    for name in names {
        assert!(dunlin(&rig, &["stop", name]).status.success());
    }
    assert_eq!(tool.wait_with_output().expect("is ours").status.code(), Some(0));
    host.join().expect("was not upset");
}

fn dunlin(rig: &Rig, words: &[&str]) -> Output {
    rig.dunlin(words).output().expect("runs")
}

/// What `dunlin dirty` with these words says; it must end well.
fn dirty(rig: &Rig, words: &[&str]) -> String {
    let output = dunlin(rig, &[&["dirty"], words].concat());
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json(rig: &Rig, words: &[&str]) -> Value {
    let said = dirty(rig, &[words, &["--json"]].concat());
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// What is said to words that cannot be obeyed, with that status.
fn refused(rig: &Rig, status: i32, words: &[&str]) -> String {
    let output = dunlin(rig, words);
    assert_eq!(output.status.code(), Some(status), "{words:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn log_is_started_harvested_and_stopped() {
    while_running(&["default"], |rig| {
        assert!(dirty(rig, &["info"]).contains("no log is active"));
        let said = dirty(rig, &["start"]);
        assert!(said.contains("split eager, at most 500 per second; recorded by hardware if it can"), "{said}");
        let all = json(rig, &["round", "default"]);
        assert_eq!(all["pages"], (512 << 20) / 4096, "all pages count as written at first");
        let said = dirty(rig, &["round"]);
        let expected = "vm \"default\": round 2: 1,000 pages (3.90625 MiB) written, harvested in 1.50 ms, 1 flushes";
        assert!(said.starts_with(&expected.replace("3.90625 MiB", "4000 KiB")), "{said}");

        let info = json(rig, &["info", "0"]);
        assert_eq!((&info["rounds"], &info["running"]["split"]), (&2.into(), &"eager".into()));
        assert_eq!(info["counters"]["exits_total"], 1000, "what its vCPUs counted is there too");
        let said = dirty(rig, &["info"]);
        assert!(said.contains("2 rounds, ") && said.contains("stage-2 tables 64 KiB"), "{said}");
        assert!(said.contains("faults of the log"), "{said}");

        assert!(dirty(rig, &["stop"]).contains("no longer recorded; split large pages are being joined"));
        assert_eq!(json(rig, &["start", "--split=lazy", "--source=write-protect"])["running"]["split"], "lazy");
        assert_eq!(json(rig, &["stop"])["running"], Value::Null);
    });
}

#[test]
fn memory_of_a_paused_vm_is_compared_with_its_mirror() {
    while_running(&["default"], |rig| {
        dirty(rig, &["start"]);
        assert!(refused(rig, 1, &["dirty", "compare"]).contains("has no mirror (start it with --mirror)"));
        dirty(rig, &["stop"]);
        assert!(dirty(rig, &["start", "--mirror"]).contains("with a mirror"));
        dirty(rig, &["round"]);
        assert!(refused(rig, 1, &["dirty", "compare"]).contains("not paused"));
        assert!(text(&dunlin(rig, &["pause"]).stdout).contains("paused"));
        assert!(dirty(rig, &["info"]).starts_with("vm \"default\", paused\n"));
        assert!(dirty(rig, &["compare"]).contains("131,072 pages compared, all are equal"));

        assert!(dirty(rig, &["round", "--lose"]).contains("lost, so they are dirty again"));
        let output = dunlin(rig, &["dirty", "compare"]);
        assert_eq!(output.status.code(), Some(1), "a difference is a failure");
        assert!(text(&output.stdout).contains("1,000 of 131,072 pages DIFFER, the first at GPA 0x201000"));
        dirty(rig, &["round"]);
        assert_eq!(json(rig, &["compare"])["different"], 0);
        assert!(text(&dunlin(rig, &["resume", "default"]).stdout).contains("runs again"));
        assert!(!dirty(rig, &["info"]).contains("paused"));
    });
}

#[test]
fn rate_starts_a_log_if_there_is_none_and_stops_only_its_own() {
    while_running(&["default"], |rig| {
        let said = dirty(rig, &["rate", "-n", "2", "-d", "20ms", "--split", "adaptive"]);
        let lines: Vec<_> = said.lines().collect();
        assert!(lines[0].contains("PAGES/s") && lines.len() == 3, "{said}");
        let words: Vec<_> = lines[1].split_whitespace().take(4).collect();
        assert_eq!(words, ["2", "1,000", "1000", "3.9"], "{said}");
        assert_eq!(json(rig, &["info"])["running"], Value::Null);

        dirty(rig, &["start"]);
        let said = dirty(rig, &["watch", "-n", "1", "-d", "20ms", "--json"]);
        let interval: Value = serde_json::from_str(said.trim()).expect("one line is one object");
        assert_eq!((&interval["round"], &interval["pages_per_second"]), (&2.into(), &1000.0.into()));
        assert_eq!(json(rig, &["info"])["running"]["split"], "eager", "it was not ours to stop");
        let said = refused(rig, 2, &["dirty", "rate", "--split", "lazy"]);
        assert!(said.contains("a log is already active") && said.contains("dunlin dirty stop"), "{said}");
    });
}

#[test]
fn watching_draws_until_a_key_and_leaves_terminal_and_vm_as_they_were() {
    while_running(&["default"], |rig| {
        let mut terminal = Terminal::open();
        let before = terminal.modes();
        let mut watch = rig.dunlin(&["dirty", "watch", "-d", "50ms"]);
        let mut watch = watch.stdin(terminal.stdio()).stdout(terminal.stdio()).spawn().expect("runs");
        terminal.until("written");
        terminal.until("pages/s");
        terminal.key(b"q");
        assert_eq!(watch.wait().expect("is ours").code(), Some(0));
        assert_eq!(terminal.modes(), before);
        assert_eq!(json(rig, &["info"])["running"], Value::Null);
    });
}

#[test]
fn what_cannot_be_done_is_said_in_words() {
    while_running(&["left", "right"], |rig| {
        let said = refused(rig, 2, &["dirty", "start"]);
        assert!(said.contains("which of 2 VMs?") && said.contains("this host has: left, right"), "{said}");
        assert!(refused(rig, 2, &["dirty", "info", "middle"]).contains("there is no VM 'middle'"));
        assert!(refused(rig, 1, &["dirty", "round", "left"]).contains("vm \"left\": no dirty log is active"));
        dirty(rig, &["start", "right"]);
        assert!(refused(rig, 1, &["dirty", "start", "right"]).contains("a dirty log is already active"));
        assert!(refused(rig, 2, &["dirty", "start", "left", "--split", "often"]).contains("adaptive, eager, lazy"));
        assert!(refused(rig, 2, &["dirty", "rate", "left", "-d", "soon"]).contains("option '--delay': 'soon'"));
        assert!(refused(rig, 2, &["pause"]).contains("which of 2 VMs?"));
    });
    assert!(refused(&Rig::new(), 1, &["dirty", "info"]).starts_with("no host is running\nhelp: "));
}

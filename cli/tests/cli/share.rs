//! A running host, seen from another terminal.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};

use abi::control::{About, StopReason};
use serde_json::Value;

use crate::console::Terminal;
use crate::rig::{Rig, wait_for};

/// Runs a host and, while it runs, `look`.
fn while_running(look: impl FnOnce(&Rig)) -> Output {
    let rig = Rig::new();
    rig.write("two.toml", b"[[vm]]\nname = \"left\"\nvcpus = 20\n[[vm]]\nname = \"right\"\n");
    let host = rig.play(|host| {
        host.up();
        host.start(0);
        host.start(1);
        host.serve();
    });
    let tool = rig.run(&["two.toml", "--initrd", "none"]).spawn().expect("runs");
    wait_for(|| dunlin(&rig, &["list"]).status.success().then_some(())).expect("answers in the end");
    look(&rig);
    let output = tool.wait_with_output().expect("is ours");
    host.join().expect("was not upset");
    output
}

fn dunlin(rig: &Rig, words: &[&str]) -> Output {
    rig.dunlin(words).output().expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn running_host_can_be_listed_measured_watched_and_stopped() {
    let output = while_running(|rig| {
        let list = text(&dunlin(rig, &["list"]).stdout);
        assert!(list.lines().any(|line| line.starts_with("  0  left") && line.ends_with("running")), "{list}");
        let json: Value = serde_json::from_slice(&dunlin(rig, &["ls", "--json"]).stdout).expect("is JSON");
        assert_eq!(json[1]["name"], "right");

        let stats = text(&dunlin(rig, &["stats", "--vm", "left", "-v"]).stdout);
        assert!(stats.contains("vm \"left\", 20 vCPUs, running"), "{stats}");
        assert!(stats.contains("io_exits") && stats.contains("18,000") && stats.contains("90.00%"), "{stats}");
        assert!(stats.contains("guest 75.0 %") && !stats.contains("right"), "{stats}");
        assert!(stats.contains("stage-2 tables 64 KiB; 3 large pages joined again"), "{stats}");
        let json: Value = serde_json::from_slice(&dunlin(rig, &["stats", "--json"]).stdout).expect("is JSON");
        assert_eq!(json[0]["vcpus"].as_array().map(Vec::len), Some(20));
        assert_eq!(json[1]["total"]["exits"]["halt_exits"], 100);
        assert_eq!(json[1]["stage2"]["table_bytes"], 64 << 10);

        let host = text(&dunlin(rig, &["stats", "--host"]).stdout);
        assert!(host.contains("2 pCPUs run vCPUs") && host.contains("A processor, SVM, NPT"), "{host}");
        assert!(host.contains("spectre_v2") && host.contains("held by IBRS at exits"), "{host}");
        let json: Value = serde_json::from_slice(&dunlin(rig, &["stats", "--host", "--json"]).stdout).expect("is JSON");
        assert_eq!(json["speculation"]["weaknesses"]["mds"]["state"], "not affected");

        let top = dunlin(rig, &["top", "-b", "-n", "2", "-d", "100ms"]);
        assert!(top.status.success(), "{}", text(&top.stderr));
        assert_eq!(text(&top.stdout).matches("left").count(), 2);

        let once = dunlin(rig, &["top", "--once", "--json"]);
        let json: Value = serde_json::from_slice(&once.stdout).expect("is one line of JSON");
        assert_eq!((&json["vms"][0]["name"], &json["pcpus"]), (&"left".into(), &2.into()));
        assert!(text(&dunlin(rig, &["top", "--once"]).stdout).contains("shootdowns 0 sent"));
        metrics_are_served(rig);

        let mut terminal = Terminal::open();
        let before = terminal.modes();
        let mut top = rig.dunlin(&["top", "-d", "100ms"]);
        let mut top = top.stdin(terminal.stdio()).stdout(terminal.stdio()).spawn().expect("runs");
        terminal.until("left");
        terminal.until("io_exits 90 %");
        terminal.key(b"jv+-kq");
        assert_eq!(top.wait().expect("is ours").code(), Some(0));
        assert_eq!(terminal.modes(), before);

        let wrong = dunlin(rig, &["stop", "middle"]);
        assert_eq!(wrong.status.code(), Some(2));
        assert!(text(&wrong.stderr).contains("this host has: left, right"), "{}", text(&wrong.stderr));
        assert_eq!(dunlin(rig, &["list", "--host", "1"]).status.code(), Some(2));

        assert!(dunlin(rig, &["stop", "left"]).status.success());
        let list = text(&dunlin(rig, &["list"]).stdout);
        assert!(list.contains(&format!("ended: {}", StopReason::Commanded.name())), "{list}");
        assert!(dunlin(rig, &["stop", "1"]).status.success());
    });
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

/// What Prometheus would get.
fn metrics_are_served(rig: &Rig) {
    let mut server = rig.dunlin(&["metrics", "--listen", "127.0.0.1:0"]).spawn().expect("runs");
    let mut said = String::new();
    BufReader::new(server.stderr.take().expect("is piped")).read_line(&mut said).expect("says where");
    let address =
        said.trim().strip_prefix("http://").and_then(|it| it.strip_suffix("/metrics")).expect("is an address");
    let get = |request: &str| {
        let mut stream = TcpStream::connect(address).expect("is listened on");
        stream
            .write_all(format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
            .expect("is read");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("is text");
        answer
    };
    let answer = get("GET /metrics");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("application/openmetrics-text; version=1.0.0"),
        "{answer}"
    );
    assert!(answer.contains("dunlin_vcpu_exits_total{vm=\"left\",vcpu=\"19\",reason=\"io_exits\"} 900"), "{answer}");
    assert!(get("GET /else").starts_with("HTTP/1.1 404") && get("POST /metrics").starts_with("HTTP/1.1 405"));
    server.kill().expect("is ours");
    server.wait().expect("is ours");

    let once = dunlin(rig, &["metrics", "--once"]).stdout;
    assert!(text(&once).contains("dunlin_vcpu_guest_seconds_total{vm=\"right\",vcpu=\"0\"} 3"), "{}", text(&once));
}

#[test]
fn trace_is_a_file_of_slices_and_a_path_that_cannot_be_written_is_told_first() {
    while_running(|rig| {
        let path = rig.path("trace.json");
        let words = ["trace", "--time", "200ms", "--json", "-o", path.to_str().expect("is text")];
        let output = dunlin(rig, &words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let seen: Value = serde_json::from_slice(&output.stdout).expect("is JSON");
        let trace: Value = serde_json::from_slice(&std::fs::read(&path).expect("was written")).expect("is JSON");
        let events = trace["traceEvents"].as_array().expect("a list");
        let exits = events.iter().filter(|event| event["cat"] == "exit").count();
        assert!(exits > 0 && seen["exits"] == exits && seen["lost"] == 0 && seen["pcpus"] == 2, "{seen}");
        assert!(events.iter().any(|event| event["name"] == "left vCPU 1" && event["args"]["then"] == "blocked"));

        let nowhere = dunlin(rig, &["trace", "-o", "/nowhere/at/all.json"]);
        assert_eq!(nowhere.status.code(), Some(1));
        assert!(text(&nowhere.stderr).contains("/nowhere/at/all.json"), "{}", text(&nowhere.stderr));
        assert_eq!(dunlin(rig, &["trace", "--time", "soon"]).status.code(), Some(2));
        for vm in ["left", "right"] {
            assert!(dunlin(rig, &["stop", vm]).status.success());
        }
    });
}

#[test]
#[ignore = "needs python3-prometheus-client; `cargo xtask test openmetrics` installs it and runs this test"]
fn metrics_are_read_by_the_parser_of_prometheus_itself() {
    let output = while_running(|rig| {
        let once = dunlin(rig, &["metrics", "--once"]).stdout;
        let parser = "import sys; from prometheus_client.openmetrics.parser import text_string_to_metric_families as read; \
                      print(len(list(read(sys.stdin.read()))))";
        // Debian's, which has Debian's packages, whatever else is called so.
        let mut python = Command::new("/usr/bin/python3");
        let python = python.args(["-c", parser]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut python = python.spawn().expect("is installed");
        python.stdin.take().expect("is piped").write_all(&once).expect("is read");
        let read = python.wait_with_output().expect("is ours");
        assert!(read.status.success(), "{}", text(&read.stderr));
        assert!(text(&read.stdout).trim().parse::<u32>().is_ok_and(|families| families > 20), "{}", text(&read.stdout));
        for vm in ["left", "right"] {
            assert!(dunlin(rig, &["stop", vm]).status.success());
        }
    });
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn without_a_host_there_is_an_answer_and_stale_sockets_are_removed() {
    let rig = Rig::new();
    let directory = rig.path("dunlin");
    std::fs::create_dir(&directory).expect("can be made");
    // No process has this id: Linux ends at 2^22.
    let stale = directory.join("99999999.sock");
    drop(UnixListener::bind(&stale).expect("can be made"));
    let output = dunlin(&rig, &["stats"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("no host is running\nhelp: start one"), "{}", text(&output.stderr));
    assert!(!stale.exists());
}

/// As [`while_running`], with a file of one more VM.
fn while_running_with_a_file(not_created: Option<(About, String)>, look: impl FnOnce(&Rig)) -> Output {
    let rig = Rig::new();
    rig.write("one.toml", b"[[vm]]\nname = \"left\"\n");
    rig.write("guest.toml", b"[[vm]]\nname = \"guest\"\nvcpus = 3\nmemory = \"256M\"\n");
    let host = rig.play(move |host| {
        host.not_created = not_created;
        host.up();
        host.start(0);
        host.serve();
    });
    let tool = rig.run(&["one.toml", "--initrd", "none"]).spawn().expect("runs");
    wait_for(|| dunlin(&rig, &["list"]).status.success().then_some(())).expect("answers in the end");
    look(&rig);
    let output = tool.wait_with_output().expect("is ours");
    host.join().expect("was not upset");
    output
}

#[test]
fn vm_is_created_started_and_destroyed_and_keeps_the_host_up_meanwhile() {
    let output = while_running_with_a_file(None, |rig| {
        let created = dunlin(rig, &["create", "guest.toml", "--exec", "uname"]);
        assert_eq!(text(&created.stdout), "vm \"guest\": created, number 10\n", "{}", text(&created.stderr));
        let list = text(&dunlin(rig, &["list"]).stdout);
        assert!(list.lines().any(|line| line.starts_with(" 10  guest") && line.ends_with("created")), "{list}");
        let again = dunlin(rig, &["create", "guest.toml"]);
        let complaint = text(&again.stderr);
        assert_eq!(again.status.code(), Some(2), "{complaint}");
        assert!(complaint.starts_with("guest.toml:2: key 'name': this host already has a VM 'guest'"), "{complaint}");

        assert!(dunlin(rig, &["start", "guest"]).status.success());
        assert!(dunlin(rig, &["stop", "left"]).status.success());
        // All VMs of the file are over, and one runs.
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(text(&dunlin(rig, &["list"]).stdout).contains("running"));
        assert_eq!(dunlin(rig, &["start", "left"]).status.code(), Some(1));
        assert!(dunlin(rig, &["destroy", "10"]).status.success());
    });
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for what in ["created by a command, number 10", "started by a command", "vm \"guest\": destroyed"] {
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[test]
fn host_says_what_it_has_left() {
    while_running_with_a_file(None, |rig| {
        let shown = text(&dunlin(rig, &["host"]).stdout);
        assert!(shown.contains("A processor, SVM, NPT") && shown.contains("0 of 15 in pools"), "{shown}");
        let json: Value = serde_json::from_slice(&dunlin(rig, &["host", "--json"]).stdout).expect("is JSON");
        assert_eq!((&json["vms"], &json["tags"], &json["arch"]), (&7.into(), &15.into(), &"x86_64".into()));
        assert!(dunlin(rig, &["stop", "left"]).status.success());
    });
}

#[test]
fn vm_that_cannot_be_created_is_told_by_file_line_and_key() {
    let why = "memory 256 MiB: the host has 3 MiB left".to_string();
    while_running_with_a_file(Some((About::Memory, why)), |rig| {
        let refused = dunlin(rig, &["create", "guest.toml"]);
        let complaint = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{complaint}");
        let wanted = "guest.toml:4: key 'memory': the host cannot create it: memory 256 MiB: the host has 3 MiB left";
        assert!(complaint.starts_with(wanted) && complaint.contains("help: "), "{complaint}");

        rig.write("arm.toml", b"[host]\narch = \"aarch64\"\n[[vm]]\nname = \"guest\"\n");
        let refused = dunlin(rig, &["create", "arm.toml"]);
        let complaint = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{complaint}");
        assert!(complaint.starts_with("arm.toml:2: key 'arch': 'aarch64', but the running host"), "{complaint}");
        assert_eq!(dunlin(rig, &["create", "none.toml"]).status.code(), Some(2));
        assert_eq!(dunlin(rig, &["destroy", "guest"]).status.code(), Some(2));
        assert!(dunlin(rig, &["stop", "left"]).status.success());
    });
}

//! A trace of `dunlin trace`: every counted exit, and nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use system_tests::{Host, Machine, each_machine, measuring_vm, tool, until};

/// Sends a request to the host, and returns the answer.
fn ask(host: &Host, words: &[&str]) -> Value {
    let output = Command::new(tool()).args(words).args(["--json", "--host", &host.pid().to_string()]).output();
    let output = output.expect("the tool runs");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Exits of all vCPUs, by reason.
fn counted(host: &Host) -> BTreeMap<String, u64> {
    let stats = host.ask("stats");
    let exits = stats[0]["total"]["exits"].as_object().expect("exits by reason");
    exits.iter().map(|(reason, count)| (reason.clone(), count.as_u64().expect("a count"))).collect()
}

/// Events of this kind in a trace.
fn of_kind<'a>(events: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |event| event["cat"] == kind)
}

/// Traces a VM that runs during the trace, and is paused before and after. Returns the trace's events and the counted
/// exits.
fn trace(machine: Machine, experiment: &str) -> (Vec<Value>, BTreeMap<String, u64>) {
    let vms = measuring_vm("measuring", 4, &format!("experiments={experiment}"));
    let host = Host::start_on(machine, 180, 2, &vms, |_| Vec::new());
    until("a guest that works", || (counted(&host).values().sum::<u64>() > 5_000).then_some(()));
    ask(&host, &["pause"]);
    let before = counted(&host);
    let file = host.folder().join("trace.json");
    let mut words = Command::new(tool());
    words.args(["trace", "--json", "--time", "3s", "--host", &host.pid().to_string(), "-o"]).arg(&file);
    let tracing = words.stdout(Stdio::piped()).spawn().expect("the tool runs");
    // The file is there as soon as the trace is about to begin.
    until("a trace", || file.exists().then_some(()));
    std::thread::sleep(Duration::from_millis(500));
    ask(&host, &["resume"]);
    std::thread::sleep(Duration::from_millis(300));
    ask(&host, &["pause"]);
    let after = counted(&host);
    let output = tracing.wait_with_output().expect("is ours");
    assert!(output.status.success(), "{output:?}");
    let seen: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(seen["lost"], 0, "{seen}");
    let trace: Value = serde_json::from_slice(&fs::read(&file).expect("was written")).expect("is JSON");
    host.end();
    let exits = after.into_iter().map(|(reason, count)| (reason.clone(), count - before[&reason]));
    let exits = exits.filter(|(_, count)| *count > 0).collect();
    (trace["traceEvents"].as_array().expect("a list").clone(), exits)
}

each_machine! {
    fn trace_has_every_exit_that_was_counted_within_a_run_of_its_vcpu(machine) {
        let (events, counted) = trace(machine, "mixed seconds=120");
        let mut traced = BTreeMap::new();
        let mut runs: BTreeMap<u64, Vec<[f64; 2]>> = BTreeMap::new();
        let number = |value: &Value| value.as_f64().expect("a number");
        let span = |event: &Value| [number(&event["ts"]), number(&event["ts"]) + number(&event["dur"])];
        // Group 1 are the pCPUs, group 2 is the first VM.
        for run in of_kind(&events, "run").filter(|run| run["pid"] == 2) {
            runs.entry(run["tid"].as_u64().expect("a vCPU")).or_default().push(span(run));
        }
        for exit in of_kind(&events, "exit") {
            *traced.entry(exit["name"].as_str().expect("a reason").to_string()).or_insert(0) += 1;
            let ([begin, end], vcpu) = (span(exit), exit["tid"].as_u64().expect("a vCPU"));
            let is_within = |run: &[f64; 2]| run[0] <= begin && end <= run[1] + 0.001;
            assert!(runs.get(&vcpu).is_some_and(|runs| runs.iter().any(is_within)), "{exit}");
        }
        println!("{traced:?}");
        assert!(traced.values().sum::<u64>() > 100, "{traced:?}");
        assert_eq!(traced, counted);
        assert!(of_kind(&events, "kick").next().is_some(), "vCPUs that were paused were woken");
    }
}

#[test]
fn flushes_by_hypercall_are_within_the_hypercall_that_asked_for_them() {
    let (events, _) = trace(Machine::X86_64, "flush-storm seconds=120");
    let span = |event: &Value| {
        let begin = event["ts"].as_f64().expect("a number");
        [begin, begin + event["dur"].as_f64().expect("a number")]
    };
    let calls: Vec<_> = of_kind(&events, "exit").filter(|exit| exit["name"] == "hypercalls").collect();
    let flushes: Vec<_> = of_kind(&events, "flush").collect();
    assert!(flushes.len() > 10, "{} flushes", flushes.len());
    for flush in flushes {
        let [begin, end] = span(flush);
        let asked = |call: &&Value| {
            let [from, to] = span(call);
            call["tid"] == flush["tid"] && from <= begin && end <= to + 0.001
        };
        assert!(calls.iter().any(asked), "{flush}");
    }
}

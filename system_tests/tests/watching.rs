//! What it costs guests that somebody watches them.
//!
//! Each picture of `dunlin top` is some requests on the control port, each of which interrupts a pCPU: that is the cost in
//! exits. It is measured in turn with and without a `top` that asks ten times as often as usual, so that a cost of one per cent
//! would be ten and stand out of what exits vary by anyway.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use system_tests::{Host, measuring_vm, tool, until};

const VCPUS: u32 = 64;
const PCPUS: u32 = 2;
const TURNS: usize = 5;
/// Of a turn, and of the same without `top`.
const TIME: Duration = Duration::from_secs(4);
/// How many times more often than usual (every second) pictures are taken.
const MORE_OFTEN: f64 = 10.0;

/// Exits of the VM so far, and when.
fn exits(host: &Host) -> (f64, Instant) {
    let stats = host.ask("stats");
    (stats[0]["total"]["exits_total"].as_f64().expect("was counted"), Instant::now())
}

/// Exits per second while `what` is done.
fn rate(host: &Host, what: impl FnOnce()) -> f64 {
    let (before, from) = exits(host);
    what();
    let (after, to) = exits(host);
    (after - before) / (to - from).as_secs_f64()
}

/// `dunlin top` for as long; how many pictures it took.
fn watch(host: &Host) -> usize {
    let pid = host.pid().to_string();
    let words = ["top", "--json", "--delay", "100ms", "--iterations", "1000000", "--host", &pid];
    let file = tempfile::NamedTempFile::new().expect("can be made");
    let out = file.reopen().expect("is there");
    let mut top = Command::new(tool()).args(words).stdout(out).spawn().expect("runs");
    sleep(TIME);
    top.kill().expect("is ours");
    top.wait().expect("is ours");
    std::fs::read_to_string(file.path()).expect("is text").lines().count()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
fn top_costs_a_host_of_64_vcpus_less_than_a_hundredth_of_its_exits() {
    let toml = measuring_vm("measuring", VCPUS, "experiments=mixed seconds=600");
    let host = Host::start(600, PCPUS, &toml, |_| Vec::new());
    // All vCPUs are up and at work.
    until("64 vCPUs at work", || {
        let stats = host.ask("stats");
        let vcpus = stats[0]["vcpus"].as_array()?;
        let is_busy = |vcpu: &serde_json::Value| vcpu["irq_injections"].as_u64().is_some_and(|count| count > 20);
        (vcpus.len() == VCPUS as usize && vcpus.iter().all(is_busy)).then_some(())
    });

    let mut quiet = Vec::new();
    let mut shares = Vec::new();
    let mut pictures = 0;
    for turn in 0..TURNS {
        let without = rate(&host, || sleep(TIME));
        let with = rate(&host, || pictures += watch(&host));
        println!("turn {turn}: {without:.0} exits/s, {with:.0} with top");
        quiet.push(without);
        shares.push((with - without) / without / MORE_OFTEN);
    }
    let share = median(shares.clone());
    println!(
        "{pictures} pictures; of {:.0} exits/s, top at its usual pace costs {:.3} %",
        median(quiet),
        100.0 * share
    );
    println!("all turns: {shares:.5?}");
    // As many pictures as it was asked for, or the test would be of nothing.
    let asked = TIME.as_secs_f64() * 10.0 * TURNS as f64;
    assert!(pictures as f64 > 0.3 * asked, "{pictures} pictures of {asked}");
    assert!(share < 0.01, "top costs {:.2} % of the exits", 100.0 * share);
    host.end();
}

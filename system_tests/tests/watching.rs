//! The cost of watching a host, for its guests.
//!
//! Each refresh of `dunlin top` sends some requests to the control port. They interrupt a pCPU, and so perhaps a guest:
//! this is the cost in exits. A busy guest's own exits would hide it. So the test counts next to 64 spinning vCPUs,
//! which only the host's own timer interrupts. It compares the result with the exits of 64 vCPUs at work.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use system_tests::{Host, measuring_vm, tool, until};

const VCPUS: u32 = 64;
const PCPUS: u32 = 2;
const TURNS: usize = 5;
/// Duration of a turn with `top`, and of one without.
const TIME: Duration = Duration::from_secs(3);
/// Refreshes per second of `top` by default.
const USUAL: f64 = 1.0;

/// A host whose guest runs this experiment; all vCPUs have begun.
fn host(experiment: &str) -> Host {
    let toml = measuring_vm("measuring", VCPUS, &format!("experiments={experiment}"));
    let host = Host::start(600, PCPUS, &toml, |_| Vec::new());
    until("64 vCPUs at work", || {
        let stats = host.ask("stats");
        let vcpus = stats[0]["vcpus"].as_array()?;
        // A start takes a dozen entries; the host interrupts a working vCPU again and again.
        let is_busy = |vcpu: &Value| vcpu["exits"]["irq_exits"].as_u64().is_some_and(|count| count > 3);
        (vcpus.len() == VCPUS as usize && vcpus.iter().all(is_busy)).then_some(())
    });
    host
}

/// Exits of the VM per second during `what`: all, and those for interrupts of the host.
fn rates(host: &Host, what: impl FnOnce()) -> [f64; 2] {
    let exits = || {
        let stats = host.ask("stats");
        let total = &stats[0]["total"];
        let number = |value: &Value| value.as_f64().expect("was counted");
        ([number(&total["exits_total"]), number(&total["exits"]["irq_exits"])], Instant::now())
    };
    let (before, from) = exits();
    what();
    let (after, to) = exits();
    [0, 1].map(|at| (after[at] - before[at]) / (to - from).as_secs_f64())
}

/// Runs `dunlin top` for the same time, with ten refreshes per second; returns their number.
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
fn top_costs_a_guest_of_64_vcpus_less_than_a_hundredth_of_its_exits() {
    let spinning = host("spin-cli seconds=0");
    let mut each = Vec::new();
    let mut all = 0;
    for turn in 0..TURNS {
        let [_, without] = rates(&spinning, || sleep(TIME));
        let mut pictures = 0;
        let [_, with] = rates(&spinning, || pictures = watch(&spinning));
        let per_second = pictures as f64 / TIME.as_secs_f64();
        println!("turn {turn}: {without:.1} host interrupts/s, {with:.1} with {per_second:.1} pictures/s");
        each.push((with - without) / per_second.max(0.01));
        all += pictures;
    }
    spinning.end();

    let working = host("mixed seconds=600");
    let [exits, _] = rates(&working, || sleep(2 * TIME));
    working.end();

    let share = median(each.clone()) * USUAL / exits;
    println!("exits of a picture: {:.1}, all turns {each:.1?}", median(each.clone()));
    println!("of {exits:.0} exits/s at work, one picture a second is {:.3} %", 100.0 * share);
    // Without refreshes the test would measure nothing.
    assert!(all > 5 * TURNS, "{all} pictures");
    assert!(share < 0.01, "top costs {:.2} % of the exits", 100.0 * share);
}

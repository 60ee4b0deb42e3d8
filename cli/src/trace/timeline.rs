//! Converts events into slices in the Trace Event Format, which Perfetto and Chrome read.
//!
//! There are two groups of rows. One has the pCPUs, each with the vCPUs that it ran. The other has each VM's vCPUs,
//! with the pCPUs on which they ran, their exits by reason, and the flushes that they requested. Between two exits a
//! vCPU was in its guest.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use abi::trace::{Event, Events, What};
use serde_json::{Value, json};

/// The group of rows for the pCPUs; the groups of the VMs follow.
const PCPUS: u32 = 1;

/// Writes a trace as events arrive.
pub(super) struct Timeline<W> {
    out: W,
    hz: f64,
    names: BTreeMap<u32, String>,
    /// Time zero: the first event that was read, less than which others can be by a little.
    zero: Option<u64>,
    last: u64,
    pcpus: Vec<Pcpu>,
    /// vCPUs whose row already has a name.
    named: BTreeSet<(u32, u32)>,
    seen: Seen,
}

/// The state of a pCPU at one position in its events.
#[derive(Clone, Debug, Default)]
struct Pcpu {
    run: Option<Run>,
    lost: u64,
}

/// A run: a vCPU on a pCPU.
#[derive(Clone, Copy, Debug)]
struct Run {
    vm: u32,
    vcpu: u32,
    since: u64,
}

/// The contents of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seen {
    pub(super) events: u64,
    pub(super) exits: u64,
    pub(super) runs: u64,
    pub(super) kicks: u64,
    pub(super) flushes: u64,
    pub(super) lost: u64,
    pub(super) seconds: f64,
}

impl<W: Write> Timeline<W> {
    /// `hz` is the number of ticks per second of the host's clock; `names` are the names of the VMs.
    pub(super) fn new(mut out: W, hz: u64, names: BTreeMap<u32, String>) -> io::Result<Self> {
        let group = metadata("process_name", PCPUS, None, "pCPUs");
        write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{group}")?;
        let mut timeline = Self {
            out,
            hz: hz.max(1) as f64,
            names: BTreeMap::new(),
            zero: None,
            last: 0,
            pcpus: Vec::new(),
            named: BTreeSet::new(),
            seen: Seen::default(),
        };
        timeline.learn(names)?;
        Ok(timeline)
    }

    /// VMs that there are now. Those that are known already keep their names.
    pub(super) fn learn(&mut self, names: impl IntoIterator<Item = (u32, String)>) -> io::Result<()> {
        for (vm, name) in names {
            if let Entry::Vacant(place) = self.names.entry(vm) {
                let title = format!("VM {}", place.insert(name));
                self.write(&metadata("process_name", group_of(vm), None, &title))?;
            }
        }
        Ok(())
    }

    /// Exits so far.
    pub(super) fn exits(&self) -> u64 {
        self.seen.exits
    }

    /// The next events of a pCPU.
    pub(super) fn add(&mut self, pcpu: u32, read: &Events) -> io::Result<()> {
        let at = pcpu as usize;
        while self.pcpus.len() <= at {
            let number = u32::try_from(self.pcpus.len()).unwrap_or(u32::MAX);
            self.pcpus.push(Pcpu::default());
            self.write(&metadata("thread_name", PCPUS, Some(number), &format!("pCPU {number}")))?;
        }
        self.pcpus[at].lost = read.lost;
        read.events.iter().try_for_each(|event| self.event(pcpu, *event))
    }

    fn event(&mut self, pcpu: u32, Event { at, what }: Event) -> io::Result<()> {
        self.seen.events += 1;
        self.zero.get_or_insert(at);
        self.last = self.last.max(at);
        let run = self.pcpus[pcpu as usize].run;
        match what {
            What::RunBegan { vm, vcpu } => {
                // The end of the run before was lost.
                self.end(pcpu, at, "?")?;
                self.pcpus[pcpu as usize].run = Some(Run { vm, vcpu, since: at });
                if self.named.insert((vm, vcpu)) {
                    self.write(&metadata("thread_name", group_of(vm), Some(vcpu), &format!("vCPU {vcpu}")))?;
                }
            }
            What::RunEnded(end) => self.end(pcpu, at, end.name())?,
            What::Exit { reason, ticks } => {
                self.seen.exits += 1;
                let row = run.map_or((PCPUS, pcpu), |run| (group_of(run.vm), run.vcpu));
                self.slice(row, reason.name(), "exit", at, ticks.into(), json!({ "pcpu": pcpu }))?;
            }
            What::Flushed { targets, kicked, ticks } => {
                self.seen.flushes += 1;
                let row = run.map_or((PCPUS, pcpu), |run| (group_of(run.vm), run.vcpu));
                let how = json!({ "vcpus": targets, "kicked": kicked });
                self.slice(row, "flush of other vCPUs", "flush", at, ticks.into(), how)?;
            }
            What::Kicked { pcpus, first } => {
                self.seen.kicks += 1;
                let ts = self.micros(at);
                self.write(
                    &json!({ "ph": "i", "s": "t", "name": "kick", "cat": "kick", "pid": PCPUS, "tid": pcpu, "ts": ts,
                    "args": { "pcpus": pcpus, "first": first } }),
                )?;
            }
        }
        Ok(())
    }

    /// Ends the run on this pCPU, if there is one.
    fn end(&mut self, pcpu: u32, at: u64, how: &str) -> io::Result<()> {
        let Some(Run { vm, vcpu, since }) = self.pcpus[pcpu as usize].run.take() else { return Ok(()) };
        self.seen.runs += 1;
        let ticks = at.saturating_sub(since);
        let vcpu_name = format!("{} vCPU {vcpu}", self.name(vm));
        self.slice((PCPUS, pcpu), &vcpu_name, "run", since, ticks, json!({ "then": how }))?;
        self.slice((group_of(vm), vcpu), &format!("on pCPU {pcpu}"), "run", since, ticks, json!({ "then": how }))
    }

    fn name(&self, vm: u32) -> String {
        self.names.get(&vm).cloned().unwrap_or_else(|| vm.to_string())
    }

    fn micros(&self, at: u64) -> f64 {
        let zero = self.zero.unwrap_or(at);
        let ticks = if at >= zero { (at - zero) as f64 } else { -((zero - at) as f64) };
        ticks / self.hz * 1e6
    }

    fn slice(&mut self, row: (u32, u32), name: &str, kind: &str, at: u64, ticks: u64, args: Value) -> io::Result<()> {
        let (ts, dur) = (self.micros(at), ticks as f64 / self.hz * 1e6);
        self.last = self.last.max(at.saturating_add(ticks));
        self.write(&json!({ "ph": "X", "name": name, "cat": kind, "pid": row.0, "tid": row.1, "ts": ts, "dur": dur, "args": args }))
    }

    fn write(&mut self, event: &Value) -> io::Result<()> {
        write!(self.out, ",\n{event}")
    }

    /// Ends the file; vCPUs that still run end with it.
    pub(super) fn finish(mut self) -> io::Result<Seen> {
        for pcpu in 0..u32::try_from(self.pcpus.len()).unwrap_or(u32::MAX) {
            self.end(pcpu, self.last, "still there")?;
        }
        self.seen.lost = self.pcpus.iter().map(|pcpu| pcpu.lost).sum();
        self.seen.seconds = self.zero.map_or(0.0, |zero| self.last.saturating_sub(zero) as f64 / self.hz);
        let lost = self.seen.lost;
        write!(self.out, "\n],\"otherData\":{{\"events lost\":\"{lost}\"}}}}\n")?;
        self.out.flush()?;
        Ok(self.seen)
    }
}

const fn group_of(vm: u32) -> u32 {
    PCPUS.saturating_add(vm).saturating_add(1)
}

fn metadata(what: &str, pid: u32, tid: Option<u32>, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": pid, "tid": tid.unwrap_or(0), "args": { "name": name } })
}

#[cfg(test)]
mod tests {
    use abi::counters::ExitReason;
    use abi::trace::RunEnd;

    use super::*;

    fn written(read: &[(u32, Events)]) -> (Vec<Value>, Seen) {
        let mut out = Vec::new();
        let mut timeline =
            Timeline::new(&mut out, 1_000_000, BTreeMap::from([(0, "a \"b\"".to_string())])).expect("memory");
        read.iter().for_each(|(pcpu, read)| timeline.add(*pcpu, read).expect("memory"));
        let seen = timeline.finish().expect("memory");
        let all: Value = serde_json::from_slice(&out).expect("is JSON");
        (all["traceEvents"].as_array().expect("a list").clone(), seen)
    }

    fn slices<'a>(all: &'a [Value], kind: &str) -> Vec<&'a Value> {
        all.iter().filter(|event| event["cat"] == kind).collect()
    }

    fn event(at: u64, what: What) -> Event {
        Event { at, what }
    }

    #[test]
    fn exits_lie_within_the_stay_of_their_vcpu() {
        let events = vec![
            event(100, What::RunBegan { vm: 0, vcpu: 3 }),
            event(110, What::Exit { reason: ExitReason::Cpuid, ticks: 5 }),
            event(120, What::Flushed { targets: 2, kicked: 1, ticks: 7 }),
            event(120, What::Kicked { pcpus: 1, first: 2 }),
            event(119, What::Exit { reason: ExitReason::Hypercall, ticks: 10 }),
            event(150, What::RunEnded(RunEnd::Blocked)),
        ];
        let (all, seen) = written(&[(1, Events { lost: 4, events })]);
        let counts = (seen.exits, seen.runs, seen.kicks, seen.flushes, seen.lost);
        assert_eq!(counts, (2, 1, 1, 1, 4));
        assert!((seen.seconds - 50e-6).abs() < 1e-9);
        let runs = slices(&all, "run");
        assert_eq!(runs.len(), 2, "a row of the pCPU, and one of the vCPU");
        assert_eq!(
            (&runs[0]["pid"], &runs[0]["tid"], &runs[0]["name"]),
            (&json!(1), &json!(1), &json!("a \"b\" vCPU 3"))
        );
        assert_eq!((&runs[1]["pid"], &runs[1]["tid"], &runs[1]["dur"]), (&json!(2), &json!(3), &json!(50.0)));
        for inner in slices(&all, "exit").into_iter().chain(slices(&all, "flush")) {
            assert_eq!((&inner["pid"], &inner["tid"]), (&json!(2), &json!(3)));
            let begin = inner["ts"].as_f64().expect("a number");
            assert!(begin >= 0.0 && begin + inner["dur"].as_f64().expect("a number") <= 50.0, "{inner}");
        }
    }

    #[test]
    fn event_without_its_beginning_or_end_is_shown_all_the_same() {
        let events = vec![
            event(10, What::Exit { reason: ExitReason::Halt, ticks: 1 }),
            event(20, What::RunBegan { vm: 7, vcpu: 0 }),
            event(30, What::RunBegan { vm: 0, vcpu: 1 }),
            event(40, What::Exit { reason: ExitReason::Halt, ticks: 5 }),
        ];
        let (all, seen) = written(&[(0, Events { lost: 0, events })]);
        assert_eq!((seen.exits, seen.runs), (2, 2));
        assert_eq!(slices(&all, "exit")[0]["pid"], json!(1), "nobody knows whose it was");
        let ends: Vec<_> = slices(&all, "run").iter().map(|run| run["args"]["then"].clone()).collect();
        assert_eq!(ends, ["?", "?", "still there", "still there"]);
    }

    #[test]
    fn vm_that_came_after_the_start_is_shown_by_its_name() {
        let mut out = Vec::new();
        let mut timeline = Timeline::new(&mut out, 1_000_000, BTreeMap::from([(0, "a".to_string())])).expect("memory");
        let vms = || [(0, "a".to_string()), (7, "a/100".to_string())];
        timeline.learn(vms()).expect("memory");
        timeline.learn(vms()).expect("memory");
        let events = vec![event(20, What::RunBegan { vm: 7, vcpu: 0 }), event(30, What::RunEnded(RunEnd::Blocked))];
        timeline.add(0, &Events { lost: 0, events }).expect("memory");
        timeline.finish().expect("memory");
        let all: Value = serde_json::from_slice(&out).expect("is JSON");
        let all = all["traceEvents"].as_array().expect("a list");
        assert_eq!(slices(all, "run")[0]["name"], json!("a/100 vCPU 0"));
        let is_title = |event: &&Value| event["args"]["name"] == json!("VM a/100");
        assert_eq!(all.iter().filter(is_title).count(), 1);
    }

    #[test]
    fn trace_of_nothing_is_a_file_that_can_be_opened() {
        let (all, seen) = written(&[]);
        assert_eq!((all.len(), seen), (2, Seen::default()));
    }
}

//! One run: the guest writes; the tool starts, harvests and stops a log, and reads the guest's counts.

use std::time::Duration;

use abi::control::{Answer, Command, Refusal};
use abi::counters::VcpuCounters;
use abi::dirty::{DirtyInfo, Round};
use abi::payload::{DirtyLogging, DirtySource, Split};
use serde_json::{Value, json};

use super::curve::{Curve, Shape};
use super::host::Host;
use crate::bench::circumstances::Watch;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Figure, Settings};
use crate::stats;

/// The setting of a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Setting {
    pub(super) arch: Arch,
    /// Model of QEMU's CPUs, if it is not the usual one.
    pub(super) cpu: Option<String>,
    pub(super) vcpus: u32,
    /// MiB that are written.
    pub(super) memory: u64,
    /// How many of 100 large pages are written.
    pub(super) regions: u32,
    pub(super) split: Split,
    pub(super) source: DirtySource,
    pub(super) rate: Option<u32>,
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// Before the log is started, and after it was stopped.
    pub(super) aside: Duration,
    /// Between two rounds.
    pub(super) interval: Duration,
    pub(super) rounds: u32,
}

/// Times of the events, by the host's clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Moments {
    pub(super) started_ns: u64,
    pub(super) rounds_ns: Vec<u64>,
    pub(super) stopped_ns: u64,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) curve: Curve,
    pub(super) moments: Moments,
    pub(super) shape: Shape,
    pub(super) rounds: Vec<Round>,
    /// The vCPUs' counters during the log.
    pub(super) counters: VcpuCounters,
    pub(super) splits_ahead: u64,
    /// Flushes of all vCPUs by the host while the log ran.
    pub(super) flushes: u64,
    /// Maximum number of bytes in tables; the number before the log.
    pub(super) tables: u64,
    pub(super) tables_before: u64,
    pub(super) collapses: u64,
    pub(super) clock_hz: u64,
    /// The share of this computer that other processes used at the same time, from 0 to 1.
    pub(super) others: Option<f64>,
    /// QEMU and the host, for JSON.
    pub(super) run: Value,
}

/// How a run can end.
pub(super) enum Measured {
    Outcome(Box<Outcome>),
    /// The machine cannot record writes.
    NoHardware,
}

/// pCPUs of the host: no more than this computer is likely to have cores for.
const MOST_PCPUS: u32 = 2;
/// MiB of the guest besides the memory that it writes: its image and its counters.
const BESIDES: u64 = 24;

impl Setting {
    /// As tables call it.
    pub(super) fn name(&self) -> String {
        let rate = self.rate.map_or(String::new(), |rate| format!(", {rate}/s"));
        format!("{}, {}{rate}", self.split.name(), self.source.name())
    }

    /// The machine.
    pub(super) fn machine(&self) -> String {
        let cpu = self.cpu.as_ref().map_or(String::new(), |cpu| format!(" {cpu}"));
        format!("{}{cpu}, {} vCPUs", self.arch, self.vcpus)
    }

    /// As a command starts it.
    pub(super) fn logging(&self) -> DirtyLogging {
        DirtyLogging { split: self.split, source: Some(self.source), splits_per_second: self.rate }
    }

    /// A host for this setting, whose guest gets `cmdline`.
    pub(super) fn host(&self, cmdline: &str, keys: &str, exact: &[String]) -> Result<Host, Failure> {
        let pcpus = self.vcpus.min(if exact.is_empty() { MOST_PCPUS } else { 1 });
        let memory = (self.memory + BESIDES).next_multiple_of(2);
        let toml = format!(
            "[host]\npcpus = {pcpus}\narch = \"{}\"\naccel = \"tcg\"\n[[vm]]\nname = \"measuring\"\nvcpus = {}\n\
             memory = \"{memory}M\"\nkernel = \"measuring-guest\"\ninitrd = \"none\"\ncmdline = \"{cmdline}\"\n{keys}",
            self.arch, self.vcpus
        );
        let mut arguments = exact.to_vec();
        if let Some(cpu) = &self.cpu {
            arguments.extend(["-cpu".to_string(), cpu.clone()]);
        }
        Host::start(&toml, self.vcpus, &arguments)
    }

    /// On a figure of it.
    pub(super) fn on(&self, figure: Figure) -> Figure {
        self.settings().into_iter().fold(figure, |figure, (name, value)| figure.at(&name, value))
    }

    /// The setting as in records. (The circumstances have the architecture.)
    pub(super) fn settings(&self) -> Settings {
        let mut settings = Settings::new();
        let mut set = |name: &str, value: Value| settings.insert(name.to_string(), value);
        set("vcpus", json!(self.vcpus));
        set("pcpus", json!(self.vcpus.min(MOST_PCPUS)));
        set("memory_mib", json!(self.memory));
        set("regions_percent", json!(self.regions));
        set("split", json!(self.split.name()));
        set("source", json!(self.source.name()));
        for (name, value) in
            [("cpu", self.cpu.as_ref().map(|cpu| json!(cpu))), ("splits_per_second", self.rate.map(|rate| json!(rate)))]
        {
            if let Some(value) = value {
                set(name, value);
            }
        }
        settings
    }

    pub(super) fn json(&self) -> Value {
        json!({ "arch": self.arch.name(), "cpu": self.cpu, "vcpus": self.vcpus, "memory_mib": self.memory,
            "regions_percent": self.regions, "split": self.split.name(),
            "source": self.source.name(), "splits_per_second": self.rate })
    }
}

/// Runs it once.
pub(super) fn measure(setting: &Setting, times: Times) -> Result<Measured, Failure> {
    let logged = times.interval * (times.rounds + 1);
    let seconds = (times.aside * 2 + logged + Duration::from_secs(8)).as_secs();
    let cmdline = format!("experiments=stride seconds={seconds} memory={} regions={}", setting.memory, setting.regions);
    let watch = Watch::start();
    let mut host = setting.host(&cmdline, "", &[])?;
    let mut measured = follow(&mut host, setting, times)?;
    host.end();
    if let Measured::Outcome(outcome) = &mut measured {
        outcome.others = watch.others();
    }
    Ok(measured)
}

fn follow(host: &mut Host, setting: &Setting, times: Times) -> Result<Measured, Failure> {
    let (begin_ns, begin) = host.record("begin", Duration::from_secs(300))?;
    host.wait(times.aside)?;

    let before = host.counters()?;
    let DirtyInfo { at_ns: started_ns, table_bytes: tables_before, flushes: flushes_before, .. } = host.dirty_info()?;
    match host.ask(Command::DirtyStart { vm: 0, how: Some(setting.logging()), mirror: false })? {
        Ok(Answer::Done) => {}
        Err(Refusal::NoHardwareLog) => return Ok(Measured::NoHardware),
        other => return Err(host.unexpected(other)),
    }
    let mut rounds = Vec::new();
    let mut tables = 0;
    for _ in 0..times.rounds {
        host.wait(times.interval)?;
        match host.ask(Command::DirtyRound { vm: 0, lose: false })? {
            Ok(Answer::Round(round)) => rounds.push(round),
            other => return Err(host.unexpected(other)),
        }
        tables = host.dirty_info()?.table_bytes.max(tables);
    }
    host.wait(times.interval)?;
    let DirtyInfo { at_ns: stopped_ns, splits_ahead, flushes, .. } = host.dirty_info()?;
    let counters = stats::difference(&before, &host.counters()?);
    host.done(Command::DirtyStop { vm: 0 })?;
    host.wait(times.aside)?;
    let DirtyInfo { collapses, .. } = host.dirty_info()?;

    host.type_byte(b'q')?;
    let curve = read_curve(host, begin_ns, begin.number("window_us").unwrap_or(0))?;
    let moments = Moments { started_ns, rounds_ns: rounds.iter().map(|round| round.at_ns).collect(), stopped_ns };
    let Some(shape) = curve.shape(&moments) else {
        return Err(Failure::failed("the guest counted too little for a judgement"));
    };
    let run = host.run();
    Ok(Measured::Outcome(Box::new(Outcome {
        curve,
        moments,
        shape,
        rounds,
        counters,
        splits_ahead,
        flushes: flushes.saturating_sub(flushes_before),
        tables,
        tables_before,
        collapses,
        clock_hz: host.info.clock_hz,
        others: None,
        run,
    })))
}

fn read_curve(host: &mut Host, begin_ns: u64, window_us: u64) -> Result<Curve, Failure> {
    let mut accesses = Vec::new();
    let mut lines = Vec::new();
    // The sums come before the record, so a record of another kind ends them.
    host.record_all("windows", "record", Duration::from_secs(120), &mut lines)?;
    for line in &lines {
        let numbers = line.text("accesses").unwrap_or_default().split(',').map(str::parse::<u64>);
        for number in numbers {
            accesses.push(number.map_err(|_| Failure::failed("the guest's sums are not numbers"))?);
        }
    }
    Ok(Curve { begin_ns, window_ns: window_us * 1000, accesses })
}

impl Outcome {
    /// Number of split large pages, by vCPUs and by the host.
    pub(super) fn splits(&self) -> u64 {
        self.counters.dirty_splits + self.splits_ahead
    }

    /// Seconds for which vCPUs were held up.
    pub(super) fn stall(&self) -> f64 {
        self.counters.stage2_stall_ticks as f64 / self.clock_hz.max(1) as f64
    }

    pub(super) fn json(&self, setting: &Setting) -> Value {
        let Shape { before, worst_before, worst, mean, back_after_ns, back_after_rounds, after } = self.shape;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let offset = |ns: u64| seconds(ns.saturating_sub(self.curve.begin_ns));
        let rounds: Vec<_> = self
            .rounds
            .iter()
            .map(|round| {
                json!({ "at_seconds": offset(round.at_ns), "pages": round.pages, "seconds": seconds(round.nanos),
                    "harvest_seconds": seconds(round.harvest_nanos), "flushes": round.flushes })
            })
            .collect();
        json!({ "part": "curve", "setting": setting.json(), "accesses_per_second_before": before,
            "worst_before": worst_before, "worst": worst, "mean": mean, "after": after,
            "recovered_after_seconds": back_after_ns.map(seconds), "recovered_after_rounds": back_after_rounds,
            "started_seconds": offset(self.moments.started_ns), "stopped_seconds": offset(self.moments.stopped_ns),
            "rounds": rounds, "faults": self.counters.dirty_faults, "splits": self.counters.dirty_splits,
            "splits_ahead": self.splits_ahead, "broadcasts": self.counters.stage2_broadcasts,
            "local_flushes": self.counters.stage2_local_flushes, "flushes_by_host": self.flushes,
            "stall_seconds": self.stall(), "table_bytes": self.tables, "table_bytes_before": self.tables_before,
            "collapses": self.collapses, "others": self.others, "window_seconds": seconds(self.curve.window_ns),
            "accesses": self.curve.accesses })
    }
}

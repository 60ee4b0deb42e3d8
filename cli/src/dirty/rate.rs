//! Rounds at an interval: pages written per second, and their cost.

use std::time::Duration;

use abi::control::Command;
use abi::counters::VcpuCounters;
use abi::dirty::{DirtyInfo, Round};
use serde_json::{Value, json};

use super::{Attached, info_json, millis, round_json};
use crate::args::RateArgs;
use crate::failure::Failure;
use crate::quantity::{parse_time, percent, seconds, show_count, show_size};
use crate::stats::{self, printable};

/// Shortest and longest time between two rounds.
const DELAYS: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(60)];

/// `dunlin dirty rate`.
pub(super) fn run(args: &RateArgs) -> Result<(), Failure> {
    let (mut rounds, delay) = Rounds::begin(args)?;
    let result = rounds.repeat(delay, args.iterations, |vm, interval| {
        if args.which.json {
            println!("{}", interval.json(&vm.name));
        } else {
            if interval.round.number % 20 == 1 || interval.is_first {
                println!("{}", Interval::HEAD);
            }
            println!("{}", interval.line());
        }
    });
    rounds.end(result)
}

/// The rounds of one VM. If it had no log, they have started one.
pub(super) struct Rounds {
    pub(super) vm: Attached,
    /// Whether the log is ours to stop.
    started: bool,
    clock_hz: u64,
    before: VcpuCounters,
    last_ns: u64,
}

/// The events between two rounds.
#[derive(Clone, Debug)]
pub(super) struct Interval {
    pub(super) round: Round,
    pub(super) info: DirtyInfo,
    /// Between the begin of the last round and of this one.
    pub(super) nanos: u64,
    /// The vCPUs' counters for that time.
    pub(super) counters: VcpuCounters,
    clock_hz: u64,
    is_first: bool,
}

impl Rounds {
    /// Connects, starts a log if there is none, and makes a first round for the pages written earlier.
    pub(super) fn begin(args: &RateArgs) -> Result<(Self, Duration), Failure> {
        let delay = parse_time(&args.delay).map_err(|what| Failure::bad_input(format!("option '--delay': {what}")))?;
        let mut vm = Attached::to(&args.which)?;
        let running = vm.info()?.running;
        if running.is_some() && args.how.logging().is_some() {
            return Err(Failure::bad_input(format!(
                "vm \"{}\": a log is already active, so --split, --source and --rate cannot be used",
                printable(&vm.name)
            ))
            .help("omit them, or stop it first: 'dunlin dirty stop'"));
        }
        if running.is_none() {
            vm.start(args.how, false)?;
        }
        let mut rounds =
            Self { vm, started: running.is_none(), clock_hz: 0, before: VcpuCounters::default(), last_ns: 0 };
        match rounds.first() {
            Ok(()) => Ok((rounds, delay.clamp(DELAYS[0], DELAYS[1]))),
            Err(failure) => {
                // Report the first failure.
                let _ = rounds.end(Ok(()));
                Err(failure)
            }
        }
    }

    fn first(&mut self) -> Result<(), Failure> {
        self.last_ns = self.vm.round(false)?.at_ns;
        (self.before, self.clock_hz) = self.vm.counters()?;
        self.vm.client.rest();
        Ok(())
    }

    /// Ticks of a second of the counters' times.
    pub(super) fn clock_hz(&self) -> u64 {
        self.clock_hz
    }

    /// One more round.
    pub(super) fn next(&mut self) -> Result<Interval, Failure> {
        let round = self.vm.round(false)?;
        let info = self.vm.info()?;
        let (now, _) = self.vm.counters()?;
        self.vm.client.rest();
        let counters = stats::difference(&self.before, &now);
        let nanos = round.at_ns.saturating_sub(self.last_ns);
        (self.before, self.last_ns) = (now, round.at_ns);
        Ok(Interval { round, info, nanos, counters, clock_hz: self.clock_hz, is_first: false })
    }

    fn repeat(
        &mut self,
        delay: Duration,
        most: Option<u64>,
        mut show: impl FnMut(&Attached, &Interval),
    ) -> Result<(), Failure> {
        let interrupted = interrupted()?;
        for number in 0..most.unwrap_or(u64::MAX) {
            if interrupted.wait(delay) {
                break;
            }
            let mut interval = self.next()?;
            interval.is_first = number == 0;
            show(&self.vm, &interval);
        }
        Ok(())
    }

    /// Stops the log if it was started for this, however it went.
    pub(super) fn end(mut self, result: Result<(), Failure>) -> Result<(), Failure> {
        let stopped = if self.started { self.vm.done(Command::DirtyStop { vm: self.vm.number }) } else { Ok(()) };
        result.and(stopped)
    }
}

impl Interval {
    #[cfg(test)]
    pub(super) fn new(round: Round, info: DirtyInfo, nanos: u64, counters: VcpuCounters) -> Self {
        Self { round, info, nanos, counters, clock_hz: 0, is_first: false }
    }

    pub(super) const HEAD: &str =
        "  ROUND     PAGES   PAGES/s    MiB/s    FAULTS    SPLITS  STALL%   HARVEST     TABLES";

    /// Pages written in a second.
    pub(super) fn pages_per_second(&self) -> f64 {
        if self.nanos == 0 { 0.0 } else { self.round.pages as f64 / seconds(self.nanos) }
    }

    /// Large pages that were split, by vCPUs.
    pub(super) fn splits(&self) -> u64 {
        self.counters.dirty_splits
    }

    /// The share of time, in per cent, for which running vCPUs were stopped.
    pub(super) fn stall(&self) -> f64 {
        let all = self.counters.guest_ticks.saturating_add(self.counters.host_ticks);
        percent(self.counters.stage2_stall_ticks, all).min(100.0)
    }

    pub(super) fn line(&self) -> String {
        let rate = self.pages_per_second();
        format!(
            "{:>7}{:>10}{rate:>10.0}{:>9.1}{:>10}{:>10}{:>8.1}{:>8.2} ms{:>11}",
            self.round.number,
            show_count(self.round.pages),
            rate / 256.0,
            show_count(self.counters.dirty_faults),
            show_count(self.splits()),
            self.stall(),
            millis(self.round.harvest_nanos),
            show_size(self.info.table_bytes)
        )
    }

    fn json(&self, vm: &str) -> Value {
        let mut all = round_json(&self.round);
        if let Some(object) = all.as_object_mut() {
            object.insert("vm".to_string(), json!(vm));
            object.insert("interval_seconds".to_string(), json!(seconds(self.nanos)));
            object.insert("pages_per_second".to_string(), json!(self.pages_per_second()));
            object.insert("counters".to_string(), stats::json(&self.counters, self.clock_hz));
            object.insert("log".to_string(), info_json(&self.info));
        }
        all
    }
}

/// Ctrl-C and similar signals. They end the rounds, but only after the log has been stopped.
pub(super) struct Interrupted(std::sync::mpsc::Receiver<()>);

pub(super) fn interrupted() -> Result<Interrupted, Failure> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

    let cannot = |error: std::io::Error| Failure::failed(format!("cannot catch signals: {error}"));
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(cannot)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if sender.send(()).is_err() {
                return;
            }
        }
    });
    Ok(Interrupted(receiver))
}

impl Interrupted {
    /// Waits for this time. Returns whether a signal arrived.
    pub(super) fn wait(&self, time: Duration) -> bool {
        self.0.recv_timeout(time).is_ok()
    }
}

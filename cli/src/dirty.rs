//! `dunlin dirty`: which pages a VM writes, and what the log costs the VM. Also `pause` and `resume`, which a
//! comparison of memory with its copy needs.
//!
//! All commands ask a running host. This file has single commands; [`rate`] repeats rounds, [`watch`] draws them.

mod rate;
mod watch;

use abi::control::{Answer, Command};
use abi::counters::VcpuCounters;
use abi::dirty::{Comparison, DirtyInfo, Round};
use abi::payload::{DirtyLogging, DirtySource};
use serde_json::{Value, json};

use crate::args::{DirtyArgs, DirtyVerb, HowArgs, RoundArgs, StartArgs, WhichArgs};
use crate::control::{Client, refusal};
use crate::failure::{FAILED, Failure};
use crate::quantity::{seconds, show_count, show_size};
use crate::share;
use crate::stats::{self, printable};

/// `dunlin dirty`; the status to end with.
pub(crate) fn run(args: &DirtyArgs) -> Result<u8, Failure> {
    match &args.what {
        DirtyVerb::Start(args) => start(args).map(|()| 0),
        DirtyVerb::Round(args) => round(args).map(|()| 0),
        DirtyVerb::Stop(args) => stop(args).map(|()| 0),
        DirtyVerb::Info(args) => info(args).map(|()| 0),
        DirtyVerb::Compare(args) => compare(args),
        DirtyVerb::Rate(args) => rate::run(args).map(|()| 0),
        DirtyVerb::Watch(args) => watch::run(args).map(|()| 0),
    }
}

/// `dunlin pause`.
pub(crate) fn run_pause(args: &WhichArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(args)?;
    vm.done(Command::Pause { vm: vm.number })?;
    vm.say(args.json, "paused", json!({ "paused": true }));
    Ok(())
}

/// `dunlin resume`.
pub(crate) fn run_resume(args: &WhichArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(args)?;
    vm.done(Command::Resume { vm: vm.number })?;
    vm.say(args.json, "runs again", json!({ "paused": false }));
    Ok(())
}

fn start(args: &StartArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(&args.which)?;
    vm.start(args.how, args.mirror)?;
    let info = vm.info()?;
    let how = info.running.map_or(String::new(), |how| format!(": {}", how_in_words(&how)));
    let mirror = if args.mirror { ", with a mirror" } else { "" };
    vm.say(args.which.json, &format!("writes are recorded{how}{mirror}"), info_json(&info));
    Ok(())
}

fn round(args: &RoundArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(&args.which)?;
    let round = vm.round(args.lose)?;
    let lost = if args.lose { "; lost, so they are dirty again" } else { "" };
    let text = format!(
        "round {}: {} pages ({}) written, harvested in {:.2} ms, {} flushes of all vCPUs{lost}",
        round.number,
        show_count(round.pages),
        show_size(round.pages.saturating_mul(PAGE)),
        millis(round.harvest_nanos),
        round.flushes
    );
    vm.say(args.which.json, &text, round_json(&round));
    Ok(())
}

fn stop(args: &WhichArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(args)?;
    vm.done(Command::DirtyStop { vm: vm.number })?;
    let info = vm.info()?;
    let coming = if info.is_collapsing { "; split large pages are being joined" } else { "" };
    vm.say(args.json, &format!("writes are no longer recorded{coming}"), info_json(&info));
    Ok(())
}

fn info(args: &WhichArgs) -> Result<(), Failure> {
    let mut vm = Attached::to(args)?;
    let info = vm.info()?;
    let (total, clock_hz) = vm.counters()?;
    if args.json {
        let mut all = info_json(&info);
        if let Some(object) = all.as_object_mut() {
            object.insert("vm".to_string(), json!(vm.name));
            object.insert("counters".to_string(), stats::json(&total, clock_hz));
        }
        println!("{all}");
    } else {
        println!("vm \"{}\"{}", printable(&vm.name), if info.paused { ", paused" } else { "" });
        print!("{}{}", info_in_words(&info), cost_in_words(&total, clock_hz));
    }
    Ok(())
}

/// Ends with 1 if they differ.
fn compare(args: &WhichArgs) -> Result<u8, Failure> {
    let mut vm = Attached::to(args)?;
    let command = Command::DirtyCompare { vm: vm.number };
    let Comparison { pages, different, first } = match vm.client.ask_patiently(command)? {
        Ok(Answer::Compared(comparison)) => comparison,
        other => return Err(vm.refused(other.map_err(refusal))),
    };
    let text = match first {
        None => format!("{} pages compared, all are equal", show_count(pages)),
        Some(gpa) => {
            format!("{} of {} pages DIFFER, the first at GPA {gpa:#x}", show_count(different), show_count(pages))
        }
    };
    vm.say(args.json, &text, json!({ "pages": pages, "different": different, "first_gpa": first }));
    Ok(if different == 0 { 0 } else { FAILED })
}

/// Bytes of a recorded page.
const PAGE: u64 = 4096;

/// A VM of a running host.
#[derive(Debug)]
struct Attached {
    client: Client,
    number: u32,
    name: String,
    vcpus: u32,
}

impl Attached {
    fn to(args: &WhichArgs) -> Result<Self, Failure> {
        let mut client = share::attach(args.host.host)?;
        let vms = stats::list(&mut client)?;
        let vm = match (&args.vm, vms.as_slice()) {
            (Some(name), _) => stats::find(&vms, name)?,
            (None, [only]) => only,
            (None, []) => return Err(Failure::failed("this host has no VM")),
            (None, _) => {
                let names = vms.iter().map(|vm| printable(&vm.name)).collect::<Vec<_>>().join(", ");
                let what = format!("which of {} VMs?", vms.len());
                return Err(Failure::bad_input(what).help(format!("this host has: {names}")));
            }
        };
        Ok(Self { client, number: vm.number, name: vm.name.clone(), vcpus: vm.vcpus })
    }

    /// A failure that names the VM.
    fn refused(&self, answer: Result<Answer, &'static str>) -> Failure {
        match answer {
            Err(why) => Failure::failed(format!("vm \"{}\": {why}", printable(&self.name))),
            answer => stats::unexpected(answer),
        }
    }

    fn done(&mut self, command: Command) -> Result<(), Failure> {
        match self.client.ask_patiently(command)? {
            Ok(Answer::Done) => Ok(()),
            other => Err(self.refused(other.map_err(refusal))),
        }
    }

    fn start(&mut self, how: HowArgs, mirror: bool) -> Result<(), Failure> {
        self.done(Command::DirtyStart { vm: self.number, how: how.logging(), mirror })
    }

    fn round(&mut self, lose: bool) -> Result<Round, Failure> {
        match self.client.ask_patiently(Command::DirtyRound { vm: self.number, lose })? {
            Ok(Answer::Round(round)) => Ok(round),
            other => Err(self.refused(other.map_err(refusal))),
        }
    }

    fn info(&mut self) -> Result<DirtyInfo, Failure> {
        match self.client.ask(Command::DirtyInfo { vm: self.number })? {
            Ok(Answer::Dirty(info)) => Ok(info),
            other => Err(self.refused(other.map_err(refusal))),
        }
    }

    /// The counters of all its vCPUs together, and the ticks of a second.
    fn counters(&mut self) -> Result<(VcpuCounters, u64), Failure> {
        let clock_hz = stats::host(&mut self.client)?.clock_hz;
        match stats::snapshot(&mut self.client, self.number, self.vcpus)? {
            Ok(snapshot) => Ok((snapshot.total(), clock_hz)),
            Err(why) => Err(self.refused(Err(why))),
        }
    }

    /// One line for people, or an object for programs, which gets the VM's name.
    fn say(&self, as_json: bool, text: &str, mut object: Value) {
        if as_json {
            if let Some(object) = object.as_object_mut() {
                object.insert("vm".to_string(), json!(self.name));
            }
            println!("{object}");
        } else {
            println!("vm \"{}\": {text}", printable(&self.name));
        }
    }
}

fn millis(nanos: u64) -> f64 {
    seconds(nanos) * 1e3
}

/// The name of what records writes, in files and options; without a choice, the hardware if it can.
fn source_name(source: Option<DirtySource>) -> &'static str {
    source.map_or("hardware if it can", DirtySource::name)
}

fn how_in_words(how: &DirtyLogging) -> String {
    let rate = how.splits_per_second.map_or(String::new(), |rate| format!(", at most {rate} per second"));
    format!("large pages are split {}{rate}; recorded by {}", how.split.name(), source_name(how.source))
}

fn info_in_words(info: &DirtyInfo) -> String {
    let log = match &info.running {
        None => "no log is active".to_string(),
        Some(how) => {
            let mirror = if info.mirror { "; with a mirror" } else { "" };
            let splitting = if info.is_splitting { ", in progress" } else { "" };
            format!(
                "{}{mirror}\n  {} rounds, {} pages found dirty; {} large pages split ahead of the guest{splitting}",
                how_in_words(how),
                show_count(info.rounds),
                show_count(info.pages),
                show_count(info.splits_ahead)
            )
        }
    };
    format!("  {log}\n  {}; {} flushes of all vCPUs by the host\n", tables_in_words(info), show_count(info.flushes))
}

/// What the log leaves behind, and takes back when it has ended.
pub(crate) fn tables_in_words(info: &DirtyInfo) -> String {
    let collapsing = if info.is_collapsing { ", in progress" } else { "" };
    let (size, joined) = (show_size(info.table_bytes), show_count(info.collapses));
    format!("stage-2 tables {size}; {joined} large pages joined again{collapsing}")
}

/// The vCPUs' work for the log since the VM was created.
fn cost_in_words(counters: &VcpuCounters, clock_hz: u64) -> String {
    let stall = counters.stage2_stall_ticks as f64 / clock_hz.max(1) as f64;
    format!(
        "  vCPUs: {} faults of the log, {} splits in them, {} first touches; {} flushes of their own pCPU, {} of all; stopped for {:.3} s\n",
        show_count(counters.dirty_faults),
        show_count(counters.dirty_splits),
        show_count(counters.pages_populated),
        show_count(counters.stage2_local_flushes),
        show_count(counters.stage2_broadcasts),
        stall
    )
}

fn round_json(round: &Round) -> Value {
    json!({ "round": round.number, "at_seconds": seconds(round.at_ns), "pages": round.pages,
        "bytes": round.pages.saturating_mul(PAGE), "seconds": seconds(round.nanos),
        "harvest_seconds": seconds(round.harvest_nanos), "flushes": round.flushes })
}

fn info_json(info: &DirtyInfo) -> Value {
    let running = info.running.map(|how| {
        json!({ "split": how.split.name(), "source": how.source.map(DirtySource::name),
            "splits_per_second": how.splits_per_second })
    });
    json!({ "at_seconds": seconds(info.at_ns), "running": running, "mirror": info.mirror, "paused": info.paused,
        "rounds": info.rounds, "pages": info.pages, "splits_ahead": info.splits_ahead,
        "is_splitting": info.is_splitting, "flushes": info.flushes, "collapses": info.collapses,
        "is_collapsing": info.is_collapsing, "table_bytes": info.table_bytes })
}

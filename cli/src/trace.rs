//! `dunlin trace`: the events on each pCPU of a running host, as a file for Perfetto.
//!
//! The host writes events into rings. The tool empties them as fast as the control port allows. [`timeline`] turns them
//! into slices: one for each run of a vCPU on a pCPU, and one for each exit.

mod timeline;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use abi::control::{Answer, Command, Refusal};
use abi::trace::Events;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::args::TraceArgs;
use crate::control::{Client, refusal};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::quantity::{parse_time, show_count};
use crate::{share, stats};
use timeline::Timeline;

/// The pause after all rings were empty.
const PAUSE: Duration = Duration::from_millis(2);
/// Between two lines of progress.
const TELL: Duration = Duration::from_secs(2);

/// `dunlin trace`.
pub(crate) fn run(args: &TraceArgs) -> Result<(), Failure> {
    let time = parse_time(&args.time).map_err(|what| Failure::bad_input(format!("option '--time': {what}")))?;
    let mut client = share::attach(args.host.host)?;
    let info = stats::host(&mut client)?;
    let names = names(&mut client)?.collect();

    // Open the file before the trace starts: a path that is not writable fails at once.
    let at = |error: std::io::Error| Failure::failed(format!("{}: {error}", args.output.display()));
    let file = BufWriter::new(File::create(&args.output).map_err(at)?);
    let mut timeline = Timeline::new(file, info.clock_hz, names).map_err(at)?;

    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, is_over.clone())
            .map_err(|error| Failure::failed(format!("signals: {error}")))?;
    }
    ask(&mut client, Command::TraceStart)?;
    let result = follow(&mut client, time, &is_over, &mut timeline).and_then(|pcpus| {
        ask(&mut client, Command::TraceStop)?;
        // Read the last events before the stop.
        drain(&mut client, pcpus, &mut timeline)?;
        Ok(pcpus)
    });
    if result.is_err() {
        // Report the first failure.
        let _ = client.ask(Command::TraceStop);
    }
    // Even if the host has ended, the events so far are kept.
    let seen = timeline.finish().map_err(at)?;
    let pcpus = result?;

    let path = args.output.display();
    if args.json {
        println!(
            "{}",
            json!({ "file": path.to_string(), "pcpus": pcpus, "events": seen.events, "exits": seen.exits, "runs": seen.runs,
                "kicks": seen.kicks, "flushes": seen.flushes, "lost": seen.lost, "seconds": seen.seconds })
        );
        return Ok(());
    }
    println!(
        "{path}: {:.2} s of {pcpus} pCPUs: {} exits, {} runs of vCPUs, {} kicks, {} flushes of others' TLBs",
        seen.seconds,
        show_count(seen.exits),
        show_count(seen.runs),
        show_count(seen.kicks),
        show_count(seen.flushes)
    );
    if seen.lost > 0 {
        println!("{} events were lost: they arrived faster than they were read", show_count(seen.lost));
    }
    println!("open it at https://ui.perfetto.dev");
    Ok(())
}

/// Reads events until the time is over or the user stops it. Returns the number of pCPUs.
fn follow<W: Write>(
    client: &mut Client,
    time: Duration,
    is_over: &AtomicBool,
    timeline: &mut Timeline<W>,
) -> Result<u32, Failure> {
    let progress = Progress::new();
    let begin = Instant::now();
    let mut told = begin;
    let mut pcpus = 0;
    while begin.elapsed() < time && !is_over.load(Ordering::Relaxed) {
        let (count, events) = pass(client, timeline)?;
        pcpus = count;
        if told.elapsed() > TELL {
            told = Instant::now();
            progress.say(&format!("{} exits", show_count(timeline.exits())));
            learn(client, timeline)?;
        }
        if events == 0 {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(pcpus)
}

/// The names of the VMs that there are now, by number.
fn names(client: &mut Client) -> Result<impl Iterator<Item = (u32, String)> + use<>, Failure> {
    Ok(stats::list(client)?.into_iter().map(|vm| (vm.number, vm.name)))
}

/// Guests of a parent come and go.
fn learn<W: Write>(client: &mut Client, timeline: &mut Timeline<W>) -> Result<(), Failure> {
    timeline.learn(names(client)?).map_err(cannot_write)
}

/// Reads each ring until it is empty.
fn drain<W: Write>(client: &mut Client, pcpus: u32, timeline: &mut Timeline<W>) -> Result<(), Failure> {
    for pcpu in 0..pcpus {
        while let Some(read) = read(client, pcpu)?.filter(|read| !read.events.is_empty()) {
            add(timeline, pcpu, &read)?;
        }
    }
    Ok(())
}

/// Reads one message of events from each ring. Returns the number of pCPUs and of events.
fn pass<W: Write>(client: &mut Client, timeline: &mut Timeline<W>) -> Result<(u32, usize), Failure> {
    let mut events = 0;
    let mut pcpu = 0;
    while let Some(read) = read(client, pcpu)? {
        events += read.events.len();
        add(timeline, pcpu, &read)?;
        pcpu += 1;
    }
    Ok((pcpu, events))
}

fn add<W: Write>(timeline: &mut Timeline<W>, pcpu: u32, read: &Events) -> Result<(), Failure> {
    timeline.add(pcpu, read).map_err(cannot_write)
}

fn cannot_write(error: std::io::Error) -> Failure {
    Failure::failed(format!("cannot write the trace: {error}"))
}

/// The oldest events of a pCPU, if there is one.
fn read(client: &mut Client, pcpu: u32) -> Result<Option<Events>, Failure> {
    match client.ask(Command::TraceRead { pcpu })? {
        Ok(Answer::Events(events)) => Ok(Some(events)),
        Err(Refusal::NoSuchPcpu) => Ok(None),
        other => Err(stats::unexpected(other.map_err(refusal))),
    }
}

fn ask(client: &mut Client, command: Command) -> Result<(), Failure> {
    match client.ask(command)? {
        Ok(Answer::Done) => Ok(()),
        other => Err(stats::unexpected(other.map_err(refusal))),
    }
}

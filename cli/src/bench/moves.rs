//! A guest that writes and moves to another host meanwhile: on Dunlin, and on KVM in the same emulated machines.
//!
//! The hosts run `parent-bench move-source` and `move-target` (`parent/files/bin`). Dunlin and KVM take turns, so that
//! other load on the computer affects both alike.

mod host;

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::parent::Host;
use super::record::Record;
use super::target::{Goal, Target};
use super::{Spread, progress};
use crate::args::MoveBenchArgs;
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};
use host::{Line, Pair, Said};

/// Memory of a host besides the guest's: kernel, initrd, QEMU.
const HOST_MIB: u32 = 700;
/// Memory of the guest besides what it writes to.
const GUEST_MIB: u32 = 128;
/// Speeds are told for tenths of a second.
const WINDOW: f64 = 0.1;
const WINDOWS_OF_A_SECOND: usize = 10;

/// One move.
#[derive(Clone, Debug, Default, PartialEq)]
struct Move {
    /// Pages in each window before it begins, until the guest stops, and afterwards.
    before: Vec<f64>,
    during: Vec<f64>,
    after: Vec<f64>,
    /// Seconds for which the guest was stopped.
    stopped: f64,
    /// Seconds until the source has given it away.
    seconds: f64,
    rounds: f64,
    /// Sent.
    mib: f64,
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl Move {
    /// What two hosts have said about it. An error says what is missing.
    fn of(said: &Said) -> Result<Self, String> {
        let event = |lines: &[Line], name: &str| lines.iter().find(|line| line.text == name).map(|line| line.at);
        let begin = event(&said.source, "event begin").ok_or("the guest did not start to write")?;
        let told = said.source.iter().find_map(|line| line.text.strip_prefix("moved "));
        let told: Value = told.and_then(|text| serde_json::from_str(text).ok()).ok_or("the source tells no result")?;
        let is_failed = told["status"].as_str().is_some_and(|status| status != "completed");
        let stop = said.source.iter().rev().find(|line| line.text == "event stop").map(|line| line.at);
        let resume = event(&said.target, "event resume");
        let (Some(stop), Some(resume), false) = (stop, resume, is_failed) else {
            return Err(format!("the guest has not moved: {told}"));
        };

        // A line is about the second before it.
        let second = Duration::from_secs(1);
        let source = speeds(&said.source)?;
        let part = |is_in: &dyn Fn(Instant) -> bool| -> Vec<f64> {
            source.iter().filter(|(at, _)| is_in(*at)).flat_map(|(_, speeds)| speeds.clone()).collect()
        };
        let mut target = speeds(&said.target)?.into_iter();
        // The line in whose second it was stopped.
        let last = target.next().ok_or("the guest did not write on the target")?.1;
        let mut during = part(&|at| at > begin + second);
        during.extend(last);
        let moved = Self {
            before: part(&|at| at <= begin),
            during,
            after: target.flat_map(|(_, speeds)| speeds).collect(),
            stopped: resume.saturating_duration_since(stop).as_secs_f64(),
            seconds: told["seconds"].as_f64().or(told["total-time"].as_f64().map(|ms| ms / 1e3)).unwrap_or_default(),
            rounds: number(&told, "rounds", "dirty-sync-count"),
            mib: number(&told, "bytes", "transferred") / f64::from(1 << 20),
        };
        if moved.before.is_empty() || moved.after.is_empty() {
            return Err("the guest told too few speeds".to_string());
        }
        Ok(moved)
    }

    /// Means by that before.
    fn mean_during(&self) -> f64 {
        mean(&self.during) / mean(&self.before)
    }

    fn worst_during(&self) -> f64 {
        self.during.iter().copied().fold(f64::INFINITY, f64::min) / mean(&self.before)
    }

    fn mean_after(&self) -> f64 {
        mean(&self.after) / mean(&self.before)
    }

    /// A character for each second: how fast the guest was, by the speed before; `|` where it begins, and where the
    /// guest is on the target.
    fn picture(&self) -> String {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let whole = mean(&self.before);
        let bar = |speeds: &[f64]| {
            let part = (mean(speeds) / whole * 7.0).round().clamp(0.0, 7.0);
            BARS.into_iter().zip(0..).find(|(_, at)| f64::from(*at) >= part).map_or('█', |(bar, _)| bar)
        };
        let bars = |speeds: &[f64]| speeds.chunks(WINDOWS_OF_A_SECOND).map(bar).collect::<String>();
        [bars(&self.before), bars(&self.during), bars(&self.after)].join("|")
    }
}

/// A number that Dunlin's answer has by one name, and QEMU's, about memory, by another.
fn number(told: &Value, of_dunlin: &str, of_qemu: &str) -> f64 {
    told[of_dunlin].as_f64().or(told["ram"][of_qemu].as_f64()).unwrap_or_default()
}

/// The speeds that a guest has told, with the time of each line. An error if it has found a page wrong.
fn speeds(lines: &[Line]) -> Result<Vec<(Instant, Vec<f64>)>, String> {
    let mut all = Vec::new();
    for line in lines {
        let Some(record) = Record::parse(&line.text) else { continue };
        let (Some(windows), Some(wrong)) = (record.text("windows"), record.number::<u64>("wrong")) else { continue };
        if wrong != 0 {
            return Err(format!("the guest has found {wrong} pages wrong"));
        }
        all.push((line.at, windows.split(',').filter_map(|speed| speed.parse().ok()).collect()));
    }
    Ok(all)
}

/// A quantity of moves.
struct Row {
    what: &'static str,
    unit: &'static str,
    class: Class,
    of: fn(&Move) -> f64,
    goal: Option<Wanted>,
}

/// What the project wants.
#[derive(Clone, Copy)]
enum Wanted {
    /// Of Dunlin alone.
    Value(Goal),
    /// Dunlin's by KVM's.
    Ratio(Goal),
}

const ROWS: [Row; 7] = [
    Row {
        what: "speed while it moves, by that before",
        unit: "",
        class: Class::Ratio,
        of: Move::mean_during,
        goal: Some(Wanted::Value(Goal::AtLeast(0.8))),
    },
    Row {
        what: "its worst 100 ms, by the mean before",
        unit: "",
        class: Class::Ratio,
        of: Move::worst_during,
        goal: Some(Wanted::Value(Goal::AtLeast(0.5))),
    },
    Row { what: "speed afterwards, by that before", unit: "", class: Class::Ratio, of: Move::mean_after, goal: None },
    Row {
        what: "the guest stands still",
        unit: "s",
        class: Class::Time,
        of: |moved| moved.stopped,
        goal: Some(Wanted::Ratio(Goal::AtMost(1.0))),
    },
    Row { what: "the move", unit: "s", class: Class::Time, of: |moved| moved.seconds, goal: None },
    Row { what: "rounds", unit: "rounds", class: Class::Count, of: |moved| moved.rounds, goal: None },
    Row { what: "sent", unit: "MiB", class: Class::Count, of: |moved| moved.mib, goal: None },
];

/// All moves on a host.
struct Moves {
    host: Host,
    moves: Vec<Move>,
}

impl Moves {
    fn spread(&self, row: &Row) -> Option<Spread> {
        Spread::of(&self.moves.iter().map(row.of).collect::<Vec<_>>())
    }
}

pub(crate) fn run(args: &MoveBenchArgs, log: &Log) -> Result<u8, Failure> {
    let mut all = [Host::Dunlin, Host::Kvm].map(|host| Moves { host, moves: Vec::new() });
    let mut failed = Vec::new();
    let words = format!("{} {} {}", args.vcpus, args.memory, args.rate);
    let source = format!("parent-bench move-source {words}{}", if args.slow_down { " slow-down" } else { "" });
    let target = format!("parent-bench move-target {words}");
    for turn in 1..=args.pairs {
        for Moves { host, moves } in &mut all {
            progress(&format!("{turn} of {}: a move on {}", args.pairs, host.name()));
            let limit = Duration::from_secs(args.limit);
            let pair = Pair { host: *host, memory_mib: HOST_MIB + GUEST_MIB + args.memory, limit };
            let moved = pair.run(&source, &target).and_then(|said| {
                Move::of(&said).map_err(|why| {
                    let [source, target] = [&said.source, &said.target].map(|lines| host::last(lines));
                    Failure::failed(format!("{why}\nthe source has said:\n{source}\nthe target has said:\n{target}"))
                })
            });
            match moved {
                Ok(moved) => moves.push(moved),
                Err(failure) => {
                    let why = format!("{}: {failure}", host.name());
                    log.failure("a move", &why);
                    failed.push(why);
                }
            }
        }
    }
    Ok(report(args, log, &all, &failed))
}

/// Prints everything, the summary first. The status is 1 if a goal is missed or a move has failed.
fn report(args: &MoveBenchArgs, log: &Log, all: &[Moves; 2], failed: &[String]) -> u8 {
    let [dunlin, kvm] = all;
    for row in &ROWS {
        for Moves { host, moves } in all {
            let samples: Vec<f64> = moves.iter().map(row.of).collect();
            if !samples.is_empty() {
                let figure = Figure::new(row.what, row.class, row.unit, samples).at("host", host.name());
                log.emulated(&Value::Null, figure.at("rate", args.rate).at("memory", args.memory));
            }
        }
    }
    let targets: Vec<Target> = ROWS.iter().filter_map(|row| target(row, dunlin, kvm)).collect();
    targets.iter().for_each(|target| target.record(log));
    if args.json {
        for row in &ROWS {
            let spread = |moves: &Moves| moves.spread(row).map(Spread::json);
            let line = json!({ "part": "row", "emulated": true, "what": row.what, "unit": row.unit,
                "dunlin": spread(dunlin), "kvm": spread(kvm) });
            println!("{line}");
        }
        for Moves { host, moves } in all {
            for moved in moves {
                let Move { before, during, after, .. } = moved;
                let line = json!({ "part": "speeds", "emulated": true, "host": host.name(), "window_seconds": WINDOW,
                    "before": before, "during": during, "after": after });
                println!("{line}");
            }
        }
        targets.iter().for_each(|target| println!("{}", target.json()));
        failed.iter().for_each(|why| println!("{}", json!({ "part": "failure", "why": why })));
    } else {
        let met = targets.iter().filter(|target| target.met == Some(true)).count();
        println!("Moves between two hosts, both emulated: {met} of {} goals are met.", targets.len());
        targets.iter().for_each(|target| println!("{target}"));
        println!("\n{:40} {:>26} {:>26}", "median (least-greatest)", "Dunlin", "KVM");
        for row in &ROWS {
            let shown = |moves: &Moves| moves.spread(row).map_or("-".to_string(), |spread| spread.to_string());
            let what = format!("{} {}", row.what, if row.class == Class::Count { "" } else { row.unit });
            println!("{what:40} {:>26} {:>26}  emulated", shown(dunlin), shown(kvm));
        }
        println!("\nSpeed of the guest, a bar for each second: before | while it moves | on the target");
        for Moves { host, moves } in all {
            moves.iter().for_each(|moved| println!("{:8} {}", host.name(), moved.picture()));
        }
        failed.iter().for_each(|why| println!("\nfailed: {why}"));
    }
    u8::from(!failed.is_empty() || targets.iter().any(|target| target.met != Some(true)))
}

fn target(row: &Row, dunlin: &Moves, kvm: &Moves) -> Option<Target> {
    let goal = row.goal?;
    let median = |moves: &Moves| moves.spread(row).map(|spread| spread.median);
    let (value, text, goal) = match goal {
        Wanted::Value(goal) => (median(dunlin), "", goal),
        Wanted::Ratio(goal) => (median(dunlin).zip(median(kvm)).map(|(dunlin, kvm)| dunlin / kvm), " of KVM's", goal),
    };
    Some(match value {
        Some(value) => Target::new(row.what, format!("{value:.2}{text}, {goal} wanted"), goal.is_met_by(value)),
        None => Target::not_judged(row.what, "not measured"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines, one each half second.
    fn lines(texts: &[&str]) -> Vec<Line> {
        let start = Instant::now();
        let line = |(half, text): (u32, &&str)| Line {
            at: start + half * Duration::from_millis(500),
            text: (*text).to_string(),
        };
        (0..).zip(texts).map(line).collect()
    }

    #[test]
    fn speeds_belong_to_what_happens_meanwhile() {
        let source = [
            "writer windows=100,100 wrong=0",
            "event begin",
            "writer windows=70,70 wrong=0",
            "guest-move: 2 s, round 1",
            "writer windows=80,40 wrong=0",
            "event stop",
            r#"moved {"seconds":2.5,"rounds":3,"bytes":2097152}"#,
        ];
        let target =
            ["", "", "", "", "", "", "event resume", "writer windows=60,60 wrong=0", "writer windows=99,101 wrong=0"];
        let both = |source: &[&str], target: &[&str]| {
            let (source, mut target) = (lines(source), lines(target));
            let shift = source[0].at;
            let first = target[0].at;
            target.iter_mut().for_each(|line| line.at = shift + (line.at - first));
            Move::of(&Said { source, target })
        };
        let moved = both(&source, &target).expect("is whole");
        assert_eq!(moved.before, [100.0, 100.0]);
        assert_eq!(moved.during, [80.0, 40.0, 60.0, 60.0], "the line of the second in which it began is left out");
        assert_eq!(moved.after, [99.0, 101.0]);
        assert!((moved.stopped - 0.5).abs() < 1e-9 && (moved.mib - 2.0).abs() < 1e-9);
        assert!((moved.mean_during() - 0.6).abs() < 1e-9 && (moved.worst_during() - 0.4).abs() < 1e-9);
        assert_eq!(moved.picture(), "█|▅|█");

        assert!(both(&source[..5], &target).is_err());
        assert!(both(&source, &target[..6]).is_err());
        let mut wrong = target;
        wrong[8] = "writer windows=99,101 wrong=1";
        assert_eq!(both(&source, &wrong), Err("the guest has found 1 pages wrong".to_string()));
    }
}

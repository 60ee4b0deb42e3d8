//! A guest that writes and moves to another host meanwhile: on Dunlin, and on KVM in the same emulated machines.
//!
//! The hosts run `parent-bench move-source` and `move-target` (`parent/files/bin`). Dunlin and KVM take turns, so that
//! other load on the computer affects both alike.

mod host;
mod outcome;
mod records;

use std::time::Duration;

use serde_json::json;

use super::circumstances::Watch;
use super::parent::Host;
use super::target::{Goal, Target};
use super::{Spread, progress};
use crate::args::MoveBenchArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::qemu::Qemu;
use crate::records::{Class, Log};
use host::Pair;
use outcome::{Move, WINDOW};

/// Memory of a host besides the guest's: kernel, initrd, QEMU.
const HOST_MIB: u32 = 700;
/// Memory of the guest besides what it writes to.
const GUEST_MIB: u32 = 128;

/// A quantity of moves.
struct Row {
    what: &'static str,
    unit: &'static str,
    class: Class,
    of: fn(&Move) -> f64,
    goal: Option<Wanted>,
}

/// What a guest shall have at least in each 100 ms of its move, by the mean before.
pub(crate) const WORST_WANTED: f64 = 0.5;

/// What the project wants.
#[derive(Clone, Copy)]
enum Wanted {
    /// Of Dunlin alone.
    Value(Goal),
    /// Dunlin's by KVM's.
    Ratio(Goal),
}

const ROWS: [Row; 11] = [
    Row {
        what: "speed before it moves",
        unit: "pages/s",
        class: Class::Time,
        of: |moved| moved.mean_before() / WINDOW,
        goal: None,
    },
    Row {
        what: "speed while it moves, by that before",
        unit: "",
        class: Class::Ratio,
        of: Move::mean_during,
        goal: Some(Wanted::Value(Goal::AtLeast(0.8))),
    },
    Row {
        what: "its worst 100 ms until it stops",
        unit: "",
        class: Class::Ratio,
        of: Move::worst_copied,
        goal: Some(Wanted::Value(Goal::AtLeast(WORST_WANTED))),
    },
    Row { what: "its worst 100 ms before", unit: "", class: Class::Ratio, of: Move::worst_before, goal: None },
    Row {
        what: "its worst 100 ms around the stop",
        unit: "",
        class: Class::Ratio,
        of: Move::worst_around_stop,
        goal: None,
    },
    Row { what: "speed afterwards, by that before", unit: "", class: Class::Ratio, of: Move::mean_after, goal: None },
    Row {
        what: "the guest stands still",
        unit: "s",
        class: Class::Time,
        of: Move::still,
        goal: Some(Wanted::Ratio(Goal::AtMost(1.0))),
    },
    Row { what: "the move", unit: "s", class: Class::Time, of: |moved| moved.seconds, goal: None },
    Row { what: "rounds", unit: "rounds", class: Class::Count, of: |moved| moved.rounds, goal: None },
    Row { what: "sent", unit: "MiB", class: Class::Count, of: |moved| moved.mib, goal: None },
    Row {
        what: "starts that failed before",
        unit: "starts",
        class: Class::Count,
        of: |moved| moved.restarts,
        goal: None,
    },
];

/// All quantities that are recorded, with their units.
pub(crate) fn quantities() -> impl Iterator<Item = (&'static str, &'static str)> {
    ROWS.iter().map(|row| (row.what, row.unit))
}

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
    let qemu = Qemu::find(Arch::X86_64, None)?;
    host::must_have_files()?;
    let words = format!("{} {} {}", args.vcpus, args.memory, args.rate);
    let source = format!("parent-bench move-source {words}{}", if args.slow_down { " slow-down" } else { "" });
    let target = format!("parent-bench move-target {words}");
    for turn in 1..=args.pairs {
        for Moves { host, moves } in &mut all {
            for attempt in 1..=attempts(*host) {
                progress(&format!("{turn} of {}: a move on {}", args.pairs, host.name()));
                let limit = Duration::from_secs(args.limit);
                let pair = Pair { host: *host, memory_mib: HOST_MIB + GUEST_MIB + args.memory, limit };
                let watch = Watch::start();
                let moved = pair.run(&source, &target).and_then(|said| {
                    Move::of(&said).map_err(|why| {
                        let [source, target] = [("source", &said.source), ("target", &said.target)]
                            .map(|(role, lines)| host::last(role, lines));
                        Failure::failed(format!("{why}\n{source}\n{target}"))
                    })
                });
                match moved {
                    Ok(moved) => {
                        records::run(args, *host, &qemu.version, &moved, watch.others(), log);
                        moves.push(moved);
                        break;
                    }
                    Err(failure) => {
                        let why = format!("{}: {failure}", host.name());
                        log.failure("a move", &why);
                        failed.push(Failed { why, is_last: attempt == attempts(*host) });
                    }
                }
            }
        }
    }
    Ok(report(args, log, &qemu, &all, &failed))
}

/// The first QEMU that gives each CPU its part of the time until the next timer, if its clock counts instructions.
/// Before, the first CPU that has work may take all of it, again and again.
const FAIR: (u32, u32) = (8, 1);

fn is_fair(number: (u32, u32)) -> bool {
    number >= FAIR
}

/// What a reader of the figures must know about a QEMU of this number.
fn warning(number: (u32, u32)) -> Option<String> {
    let (major, minor) = FAIR;
    (!is_fair(number)).then(|| {
        format!(
            "The worst 100 ms may be this QEMU's: before {major}.{minor}, a host's CPU can wait for its turn for as \
             long. 'cargo xtask bench --qemu 11 move' fetches a newer one."
        )
    })
}

/// How often a move is tried. On emulated hosts with KVM about one of four fails: the guest hangs on the target, or
/// QEMU cannot load it.
const fn attempts(host: Host) -> u32 {
    match host {
        Host::Dunlin => 1,
        Host::Kvm => 3,
    }
}

/// A move that has failed.
struct Failed {
    why: String,
    /// It was not tried again.
    is_last: bool,
}

/// Prints everything, the summary first. The status is 1 if a goal is missed, or a move has failed for good.
fn report(args: &MoveBenchArgs, log: &Log, qemu: &Qemu, all: &[Moves; 2], failed: &[Failed]) -> u8 {
    let [dunlin, kvm] = all;
    let targets: Vec<Target> = ROWS.iter().filter_map(|row| target(row, dunlin, kvm)).collect();
    targets.iter().for_each(|target| target.record(log));
    if args.json {
        println!("{}", json!({ "part": "emulator", "qemu": qemu.version, "takes_turns_fairly": is_fair(qemu.number) }));
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
        for Failed { why, is_last } in failed {
            println!("{}", json!({ "part": "failure", "why": why, "tried_again": !is_last }));
        }
    } else {
        let met = targets.iter().filter(|target| target.met == Some(true)).count();
        let version = &qemu.version;
        println!("Moves between two hosts, both emulated by QEMU {version}: {met} of {} goals are met.", targets.len());
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
        for Failed { why, is_last } in failed {
            println!("\n{}: {why}", if *is_last { "failed" } else { "failed, and tried again" });
        }
        if let Some(warning) = warning(qemu.number) {
            println!("\n{warning}");
        }
    }
    u8::from(failed.iter().any(|failed| failed.is_last) || targets.iter().any(|target| target.met != Some(true)))
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

    #[test]
    fn qemu_whose_cpus_do_not_take_turns_fairly_is_told_of_with_the_command_that_fetches_another() {
        for old in [(7, 2), (8, 0)] {
            let warning = warning(old).expect("it must be told");
            assert!(
                warning.contains("before 8.1") && warning.contains("'cargo xtask bench --qemu 11 move'"),
                "{warning}"
            );
        }
        assert_eq!([(8, 1), (11, 1)].map(warning), [None, None]);
    }
}

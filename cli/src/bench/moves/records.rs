//! Records of moves: their results, and the guest's speed over time.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ROWS;
use super::host::MODEL;
use super::outcome::{Move, WINDOW};
use crate::args::MoveBenchArgs;
use crate::bench::parent::Host;
use crate::config::Arch;
use crate::records::{Class, Course, Figure, Log, Settings};

/// Records one move between hosts of a QEMU of this version. Others used this share of the computer meanwhile.
pub(super) fn run(args: &MoveBenchArgs, host: Host, qemu: &str, moved: &Move, others: Option<f64>, log: &Log) {
    let settings = settings(args, host);
    let run = json!({ "qemu": qemu, "accel": "tcg", "cpu_model": MODEL, "arch": Arch::X86_64.name() });
    for row in &ROWS {
        let figure = Figure::new(row.what, row.class, row.unit, [(row.of)(moved)]).others(others);
        let figure = settings.iter().fold(figure, |figure, (name, value)| figure.at(name, value.clone()));
        log.emulated(&run, figure);
    }
    log.course(&run, Course { others_share: others, ..course(settings, moved) });
}

fn settings(args: &MoveBenchArgs, host: Host) -> Settings {
    let settings: [(&str, Value); 5] = [
        ("host", host.name().into()),
        ("vcpus", args.vcpus.into()),
        ("memory", args.memory.into()),
        ("rate", args.rate.into()),
        ("slow_down", args.slow_down.into()),
    ];
    settings.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// The speed over time, in seconds from the beginning of the move.
fn course(settings: Settings, moved: &Move) -> Course {
    let Move { windows, stop, resume, rounds, .. } = moved;
    let moments = [("begin", 0.0), ("stop", *stop), ("resume", *resume)];
    Course {
        quantity: "speed".to_string(),
        settings,
        unit: "% of the speed before".to_string(),
        class: Class::Ratio,
        from: windows.first().map_or(0.0, |window| window.middle - WINDOW / 2.0),
        step: WINDOW,
        samples: windows.iter().map(|window| 100.0 * window.pages / moved.mean_before()).collect(),
        middles: windows.iter().map(|window| window.middle).collect(),
        moments: moments.into_iter().map(|(name, at)| (name.to_string(), vec![at])).collect(),
        counts: BTreeMap::from([("rounds".to_string(), *rounds)]),
        others_share: None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::outcome::Window;
    use super::*;
    use crate::records::{Content, read};

    fn args() -> MoveBenchArgs {
        MoveBenchArgs { pairs: 1, memory: 128, rate: 4, vcpus: 4, slow_down: false, limit: 400, json: true }
    }

    fn moved() -> Move {
        let window = |middle, pages| Window { middle, pages };
        Move {
            before: vec![200.0],
            during: vec![100.0],
            after: vec![0.0],
            windows: vec![window(-0.55, 200.0), window(0.05, 100.0), window(1.25, 0.0)],
            stop: 0.2,
            resume: 1.2,
            seconds: 1.5,
            rounds: 3.0,
            mib: 120.0,
            restarts: 0.0,
        }
    }

    #[test]
    fn all_that_a_move_came_to_is_written_and_can_be_read() {
        let file = tempfile::NamedTempFile::new().expect("can be made");
        let log = Log::open("move", Some(file.path())).expect("can be written");
        run(&args(), Host::Kvm, "11.1.3", &moved(), Some(0.25), &log);
        let read = read(file.path()).expect("is there");
        assert!(read.bad.is_empty(), "{:?}", read.bad);
        let settings = json!({ "host": "KVM", "vcpus": 4, "memory": 128, "rate": 4, "slow_down": false });
        let (mut figures, mut courses) = (BTreeMap::new(), Vec::new());
        for record in &read.records {
            let qemu = record.circumstances.qemu.as_ref().expect("it is told on what");
            assert_eq!((qemu.version.as_str(), qemu.accel.as_str()), ("11.1.3", "tcg"));
            let of = match &record.content {
                Content::Figure { quantity, settings, samples, .. } => {
                    figures.insert(quantity.as_str(), samples.clone());
                    settings
                }
                Content::Course(course) => {
                    courses.push(course);
                    &course.settings
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(json!(of), settings);
        }
        assert_eq!(figures.len(), ROWS.len());
        assert_eq!(
            (&figures["the guest stands still"], &figures["speed before it moves"]),
            (&vec![1.0], &vec![2000.0])
        );
        let [course] = courses[..] else { panic!("{courses:?}") };
        assert_eq!((course.from, course.step, course.others_share), (-0.6, 0.1, Some(0.25)));
        assert_eq!(course.pieces().collect::<Vec<_>>(), [(-0.55, 100.0), (0.05, 50.0), (1.25, 0.0)]);
        assert_eq!((course.moment("stop"), course.moment("resume")), (Some(0.2), Some(1.2)));
        assert_eq!(course.counts["rounds"], 3.0);
    }
}

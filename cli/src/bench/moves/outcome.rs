//! What came of one move, by what both hosts have said.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::host::{Line, Said};
use crate::bench::record::Record;

/// Speeds are told for tenths of a second.
pub(super) const WINDOW: f64 = 0.1;
const WINDOWS_OF_A_SECOND: usize = 10;

/// One move.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Move {
    /// Pages in each window before it begins, until the guest stops, and afterwards.
    pub(super) before: Vec<f64>,
    pub(super) during: Vec<f64>,
    pub(super) after: Vec<f64>,
    /// Seconds for which the guest was stopped.
    pub(super) stopped: f64,
    /// Seconds until the source has given it away.
    pub(super) seconds: f64,
    pub(super) rounds: f64,
    /// Sent.
    pub(super) mib: f64,
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl Move {
    /// What two hosts have said about it. An error says what is missing.
    pub(super) fn of(said: &Said) -> Result<Self, String> {
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
    pub(super) fn mean_during(&self) -> f64 {
        mean(&self.during) / mean(&self.before)
    }

    pub(super) fn worst_during(&self) -> f64 {
        self.during.iter().copied().fold(f64::INFINITY, f64::min) / mean(&self.before)
    }

    pub(super) fn mean_after(&self) -> f64 {
        mean(&self.after) / mean(&self.before)
    }

    /// A character for each second: how fast the guest was, by the speed before; `|` where it begins, and where the
    /// guest is on the target.
    pub(super) fn picture(&self) -> String {
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

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
    /// Pages in each window before it begins, until the guest stops, and afterwards. The second in which it begins is
    /// in none of them.
    pub(super) before: Vec<f64>,
    pub(super) during: Vec<f64>,
    pub(super) after: Vec<f64>,
    /// All windows, with their times.
    pub(super) windows: Vec<Window>,
    /// When the guest stops at the source and goes on at the target, in seconds of the source's clock from the
    /// beginning.
    pub(super) stop: f64,
    pub(super) resume: f64,
    /// Seconds until the source has given it away.
    pub(super) seconds: f64,
    pub(super) rounds: f64,
    /// Sent.
    pub(super) mib: f64,
    /// How often the guest did not come up and was started again, before it moved.
    pub(super) restarts: f64,
}

/// Pages written in a tenth of a second of the guest's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// Its middle, in seconds from the beginning of the move.
    pub(super) middle: f64,
    pub(super) pages: f64,
}

fn worst(pages: impl Iterator<Item = f64>) -> f64 {
    pages.fold(f64::INFINITY, f64::min)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl Move {
    /// What two hosts have said about it. An error says what is missing.
    pub(super) fn of(said: &Said) -> Result<Self, String> {
        let event = |lines: &[Line], name: &str| lines.iter().find(|line| line.text == name).map(|line| line.at);
        let begin = event(&said.source, "event begin").ok_or("the guest did not start to write")?;
        let told = said.source.iter().find_map(|line| Some((line.at, line.text.strip_prefix("moved ")?)));
        let told = told.and_then(|(at, text)| Some((at, serde_json::from_str::<Value>(text).ok()?)));
        let (told_at, told) = told.ok_or("the source tells no result")?;
        let is_failed = told["status"].as_str().is_some_and(|status| status != "completed");
        // QEMU says `STOP` only when it has stopped the devices too, which took more than a second. But it tells in the
        // end how long ago it began to stop the vCPUs.
        let sent = said.source.iter().rev().find(|line| line.text == "event sent").map(|line| line.at);
        let downtime = told["qemu_downtime_ms"].as_f64().or(told["downtime"].as_f64()).map(|ms| ms / 1e3);
        let resume = event(&said.target, "event resume");
        let (Some(sent), Some(downtime), Some(resume), false) = (sent, downtime, resume, is_failed) else {
            return Err(format!("the guest has not moved: {told}"));
        };

        // The hosts' clocks count instructions, and lines are heard by this computer's clock. Both know how long the
        // move took: Dunlin's until the end is told, QEMU's until it has sent all.
        let (taken, heard) = match told["seconds"].as_f64() {
            Some(seconds) => (seconds, told_at),
            None => (told["total-time"].as_f64().unwrap_or_default() / 1e3, sent),
        };
        let stretch = heard.saturating_duration_since(begin).as_secs_f64() / taken;
        if !(stretch.is_finite() && stretch > 0.0) {
            return Err(format!("the move took no time: {told}"));
        }
        // A line is about the second before it.
        let second = Duration::from_secs_f64(stretch);
        let seconds = |at: Instant| match at.checked_duration_since(begin) {
            Some(after) => after.as_secs_f64() / stretch,
            None => -begin.duration_since(at).as_secs_f64() / stretch,
        };
        let stop = seconds(sent) - downtime;
        let resume = seconds(resume).max(stop);
        let source = speeds(&said.source)?;
        let part = |is_in: &dyn Fn(Instant) -> bool| -> Vec<f64> {
            source.iter().filter(|(at, _)| is_in(*at)).flat_map(|(_, speeds)| speeds.clone()).collect()
        };
        let target = speeds(&said.target)?;
        let timed = |(at, speeds): &(Instant, Vec<f64>)| (seconds(*at), speeds.clone());
        let windows = windows(source.iter().map(timed).collect(), target.iter().map(timed).collect(), stop, resume);
        let mut target = target.into_iter();
        // The line in whose second it was stopped.
        let last = target.next().ok_or("the guest did not write on the target")?.1;
        let mut during = part(&|at| at > begin + second);
        during.extend(last);
        let moved = Self {
            before: part(&|at| at <= begin),
            during,
            after: target.flat_map(|(_, speeds)| speeds).collect(),
            windows,
            stop,
            resume,
            seconds: taken,
            rounds: number(&told, "rounds", "dirty-sync-count"),
            mib: number(&told, "bytes", "transferred") / f64::from(1 << 20),
            restarts: said.source.iter().filter(|line| line.text == "event again").count() as f64,
        };
        if moved.before.is_empty() || moved.during.is_empty() || moved.after.is_empty() {
            return Err("the guest told too few speeds".to_string());
        }
        if mean(&moved.before) <= 0.0 {
            return Err("the guest wrote nothing before it moved".to_string());
        }
        Ok(moved)
    }

    /// Pages in a window before it begins.
    pub(super) fn mean_before(&self) -> f64 {
        mean(&self.before)
    }

    /// Seconds for which the guest stands still.
    pub(super) fn still(&self) -> f64 {
        self.resume - self.stop
    }

    /// Means by that before.
    pub(super) fn mean_during(&self) -> f64 {
        mean(&self.during) / self.mean_before()
    }

    /// The worst window before it begins.
    pub(super) fn worst_before(&self) -> f64 {
        worst(self.before.iter().copied()) / self.mean_before()
    }

    /// The worst window from the beginning until the guest stops.
    pub(super) fn worst_copied(&self) -> f64 {
        self.worst_between(0.0, self.stop)
    }

    /// The worst window of those in which the guest stops, goes on, or has just gone on.
    pub(super) fn worst_around_stop(&self) -> f64 {
        const JUST: f64 = 1.0;
        self.worst_between(self.stop - WINDOW, self.resume + JUST)
    }

    /// The worst window that lies in this time.
    fn worst_between(&self, from: f64, to: f64) -> f64 {
        let is_in = |window: &&Window| window.middle - WINDOW / 2.0 >= from && window.middle + WINDOW / 2.0 <= to;
        worst(self.windows.iter().filter(is_in).map(|window| window.pages)) / self.mean_before()
    }

    pub(super) fn mean_after(&self) -> f64 {
        mean(&self.after) / self.mean_before()
    }

    /// A character for each second: how fast the guest was, by the speed before; `|` where it begins, and where the
    /// guest is on the target.
    pub(super) fn picture(&self) -> String {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let whole = self.mean_before();
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

/// Lines of speeds, with the time of each in seconds.
type Lines = Vec<(f64, Vec<f64>)>;

/// All windows with their times, which the guest does not tell. The windows of a line last until it is heard, and begin
/// with the line before. The guest's clock stands still with the guest, so a window in which that happens goes on after
/// it.
fn windows(source: Lines, target: Lines, stop: f64, resume: f64) -> Vec<Window> {
    let still = resume - stop;
    // By the guest's clock. A line is heard late, but none tells of time in which the guest was not on that host.
    let at_source = source.into_iter().map(|(heard, speeds)| (heard.min(stop), speeds));
    let at_target = target.into_iter().map(|(heard, speeds)| (heard.max(resume) - still, speeds));
    let mut windows = Vec::new();
    let mut before = None;
    for (end, speeds) in at_source.chain(at_target) {
        let count = speeds.len() as f64;
        let begin: f64 = before.unwrap_or(end - WINDOW * count);
        for (number, pages) in (0_u32..).zip(speeds) {
            let at = begin + (end - begin) * (f64::from(number) + 0.5) / count;
            windows.push(Window { middle: if at < stop { at } else { at + still }, pages });
        }
        before = Some(end);
    }
    windows
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
            "guest-move: 3 s, round 3",
            "event sent",
            r#"moved {"seconds":3.0,"rounds":3,"bytes":2097152,"qemu_downtime_ms":500}"#,
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
        assert!((moved.still() - 0.5).abs() < 1e-9 && (moved.mib - 2.0).abs() < 1e-9);
        assert!((moved.mean_during() - 0.6).abs() < 1e-9);
        let worst = [moved.worst_before(), moved.worst_copied(), moved.worst_around_stop()];
        assert_eq!(worst, [1.0, 0.4, 0.6], "the last line is about the time around the stop");
        assert_eq!(moved.picture(), "█|▅|█");
        let windows: Vec<_> = moved.windows.iter().map(|it| ((it.middle * 1e3).round(), it.pages)).collect();
        // It stands still from 2 s to 2.5 s, and the line that is heard at 3 s began at 1.5 s.
        let expected = [(-650.0, 100.0), (-550.0, 100.0), (-250.0, 70.0), (250.0, 70.0), (750.0, 80.0), (1250.0, 40.0)];
        assert_eq!(windows[..6], expected);
        assert_eq!(windows[6..], [(1750.0, 60.0), (2750.0, 60.0), (3125.0, 99.0), (3375.0, 101.0)]);

        assert!(both(&source[..5], &target).is_err());
        // A host whose second lasts for two of this computer's. QEMU takes half the time for a stop then.
        let mut slow = source;
        slow[7] = r#"moved {"seconds":1.5,"rounds":3,"bytes":2097152,"qemu_downtime_ms":250}"#;
        let slow = both(&slow, &target).expect("is whole");
        let of = |moved: &Move, stretch: f64| [moved.stop * stretch, moved.resume * stretch, moved.still() * stretch];
        assert_eq!(of(&slow, 2.0), of(&moved, 1.0));
        let mut timeless = source;
        timeless[7] = r#"moved {"seconds":0,"qemu_downtime_ms":250}"#;
        assert!(both(&timeless, &target).is_err());
        assert!(both(&source, &target[..6]).is_err());
        let mut wrong = target;
        wrong[8] = "writer windows=99,101 wrong=1";
        assert_eq!(both(&source, &wrong), Err("the guest has found 1 pages wrong".to_string()));
        assert!(moved.restarts.abs() < 1e-9);
        let again = ["event again"].into_iter().chain(source).collect::<Vec<_>>();
        assert_eq!(both(&again, &target).map(|moved| moved.restarts), Ok(1.0));
        let mut idle = source;
        idle[0] = "writer windows=0,0 wrong=0";
        assert_eq!(both(&idle, &target), Err("the guest wrote nothing before it moved".to_string()));
    }

    #[test]
    fn lines_that_are_heard_late_or_early_do_not_turn_time_around() {
        let line = |heard: f64| (heard, vec![1.0; 10]);
        let windows = windows(vec![line(0.0), line(1.4)], vec![line(1.9), line(3.0)], 1.2, 2.0);
        assert_eq!(windows.len(), 40);
        assert!(windows.is_sorted_by(|one, other| one.middle <= other.middle), "{windows:?}");
        assert!(windows[..20].iter().all(|it| it.middle < 1.2), "{windows:?}");
        assert!(windows[20..].iter().all(|it| it.middle >= 2.0), "{windows:?}");
    }
}

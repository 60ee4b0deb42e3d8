//! Speed over time: before the log, at its minimum, and after recovery.

use super::measure::Moments;

/// The guest's counts in windows of equal length, by the host's clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    /// When window 0 began, in nanoseconds of the host.
    pub(super) begin_ns: u64,
    /// Length of a window in nanoseconds.
    pub(super) window_ns: u64,
    /// Accesses of all vCPUs in each window.
    pub(super) accesses: Vec<u64>,
}

/// Length of an evaluated piece in nanoseconds: 100 ms.
const PIECE: u64 = 100_000_000;
/// The share of the speed before at which it counts as back.
const BACK: f64 = 0.9;

/// The evaluation of a curve. Shares are relative to the speed before the log.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Shape {
    /// Accesses per second before the log was started.
    pub(super) before: f64,
    /// The slowest piece before.
    pub(super) worst_before: f64,
    /// The slowest piece while the log ran.
    pub(super) worst: f64,
    /// The mean during the log.
    pub(super) mean: f64,
    /// From the start of the log until it is fast between one round and the next, or before the first.
    pub(super) back_after_ns: Option<u64>,
    /// Rounds until then.
    pub(super) back_after_rounds: Option<u32>,
    /// The last half of the time after the log was stopped.
    pub(super) after: f64,
}

impl Curve {
    /// Evaluates the curve with the times of the events. `None` if it is too short.
    pub(super) fn shape(&self, moments: &Moments) -> Option<Shape> {
        let end = self.begin_ns + self.window_ns * self.accesses.len() as u64;
        let before = self.speed(self.begin_ns, moments.started_ns)?;
        if before <= 0.0 {
            return None;
        }
        let share = |speed: f64| speed / before;
        // The piece that ends after the start has some of the log's time in it already.
        let slowest = |from, until| {
            let pieces = self.pieces(from, until);
            pieces.map(|at| (at, self.speed(at, at + PIECE).unwrap_or(0.0))).min_by(|a, b| a.1.total_cmp(&b.1))
        };
        let (_, worst_before) = slowest(self.begin_ns, moments.started_ns)?;
        let (_, worst) = slowest(moments.started_ns, moments.stopped_ns)?;
        let back = self.back(moments, before);
        Some(Shape {
            before,
            worst_before: share(worst_before),
            worst: share(worst),
            mean: share(self.speed(moments.started_ns, moments.stopped_ns)?),
            back_after_ns: back.map(|(_, at)| at.saturating_sub(moments.started_ns)),
            back_after_rounds: back.map(|(rounds, _)| rounds),
            after: share(self.speed(u64::midpoint(moments.stopped_ns, end), end)?),
        })
    }

    /// The first fast period. A period begins with the start of the log, or with a round. Returns the number of rounds
    /// before it, and its start. A single piece would not be enough: it may be fast or slow by chance.
    fn back(&self, moments: &Moments, before: f64) -> Option<(u32, u64)> {
        let begins = || std::iter::once(moments.started_ns).chain(moments.rounds_ns.iter().copied());
        let ends = begins().skip(1).chain([moments.stopped_ns]);
        let is_fast = |from, until| self.speed(from, until).is_some_and(|speed| speed >= BACK * before);
        (0..).zip(begins().zip(ends)).find(|&(_, (from, until))| is_fast(from, until)).map(|(at, (from, _))| (at, from))
    }

    /// Start times of the pieces within this period, one window apart.
    fn pieces(&self, from: u64, until: u64) -> impl Iterator<Item = u64> + use<> {
        let step = usize::try_from(self.window_ns.max(1)).unwrap_or(usize::MAX);
        (from..until.saturating_sub(PIECE).saturating_add(1)).step_by(step)
    }

    /// Accesses per second between two times. Partial windows count in proportion.
    pub(super) fn speed(&self, from: u64, until: u64) -> Option<f64> {
        let end = self.begin_ns + self.window_ns * self.accesses.len() as u64;
        let (from, until) = (from.max(self.begin_ns), until.min(end));
        if from >= until || self.window_ns == 0 {
            return None;
        }
        let mut sum = 0.0;
        let first = (from - self.begin_ns) / self.window_ns;
        for (window, &accesses) in (first..).zip(self.accesses.iter().skip(usize::try_from(first).ok()?)) {
            let start = self.begin_ns + window * self.window_ns;
            if start >= until {
                break;
            }
            let overlap = until.min(start + self.window_ns) - from.max(start);
            sum += accesses as f64 * overlap as f64 / self.window_ns as f64;
        }
        Some(sum * 1e9 / (until - from) as f64)
    }

    /// Speeds of `columns` parts of equal length, for a picture.
    pub(super) fn columns(&self, columns: usize) -> Vec<f64> {
        let whole = self.window_ns * self.accesses.len() as u64;
        let at = |column: usize| self.begin_ns + whole * column as u64 / columns.max(1) as u64;
        (0..columns).map(|column| self.speed(at(column), at(column + 1)).unwrap_or(0.0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Windows of 5 ms: a second at full speed, then `slow` windows at `speed`, then full speed again.
    fn curve(slow: usize, speed: u64) -> Curve {
        let mut accesses = vec![1000; 200];
        accesses.extend(vec![speed; slow]);
        accesses.extend(vec![1000; 600 - slow]);
        Curve { begin_ns: 7_000 * MS, window_ns: 5 * MS, accesses }
    }

    fn moments() -> Moments {
        let rounds_ns = vec![8_200 * MS, 8_400 * MS];
        Moments { started_ns: 8_000 * MS, rounds_ns, stopped_ns: 10_000 * MS }
    }

    #[test]
    fn speed_that_never_changes_is_back_at_once() {
        let shape = curve(0, 0).shape(&moments()).expect("is long enough");
        assert_eq!((shape.before, shape.worst_before, shape.worst, shape.mean, shape.after), (2e5, 1.0, 1.0, 1.0, 1.0));
        assert_eq!((shape.back_after_ns, shape.back_after_rounds), (Some(0), Some(0)));
    }

    #[test]
    fn worst_piece_and_the_way_back_are_found() {
        // 300 ms at a tenth.
        let shape = curve(60, 100).shape(&moments()).expect("is long enough");
        assert!((shape.worst - 0.1).abs() < 1e-9, "{shape:?}");
        assert!((shape.mean - (0.3 * 0.1 + 1.7) / 2.0).abs() < 1e-9, "{shape:?}");
        // Until the first round it is at a tenth, until the second at 55 %, and fast from then on.
        assert_eq!((shape.back_after_ns, shape.back_after_rounds), (Some(400 * MS), Some(2)));
        assert_eq!(shape.after, 1.0);
    }

    #[test]
    fn what_is_never_back_has_no_time_for_it() {
        let mut slow = curve(600, 100);
        slow.accesses.truncate(700);
        let shape = slow.shape(&moments()).expect("is long enough");
        assert_eq!((shape.back_after_ns, shape.back_after_rounds), (None, None));
        assert!((shape.after - 0.1).abs() < 1e-9);
    }

    #[test]
    fn parts_of_windows_count_in_part() {
        let curve = Curve { begin_ns: 0, window_ns: 10, accesses: vec![10, 30] };
        assert_eq!(curve.speed(5, 15), Some(20.0 * 1e9 / 10.0));
        assert_eq!(curve.speed(15, 99), Some(15.0 * 1e9 / 5.0));
        assert_eq!(curve.speed(20, 30), None);
        assert_eq!(curve.columns(2), [1e9, 3e9]);
        assert_eq!(Curve::default().columns(2), [0.0, 0.0]);
        assert_eq!(Curve::default().shape(&moments()), None);
    }
}

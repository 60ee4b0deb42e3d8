//! Timing two threads against each other on a busy computer.
//!
//! Wall-clock time over a second is useless if a core may be taken away at any moment. So work is cut into batches of
//! some microseconds. Before each batch the threads wait for each other. The thread that finishes first continues until
//! the other has finished too. A batch counts only if the other thread really ran at the same time. The result is the
//! lower quartile of the counted batches, because interruptions make batches longer, never shorter.
//!
//! Whether two threads have two cores is measured: see [`calibration`]. The effect of the cores on each other without
//! shared data is measured too: see [`control`](mod@control).

mod calibration;
mod control;
#[cfg(test)]
mod tests;

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

pub(super) use calibration::{Calibration, judge_on_free_cores};
pub(super) use control::control;

/// Runs an operation this number of times.
pub(super) type Side<'a> = &'a mut (dyn FnMut(u32) + Send);

/// Turns that are taken, those that must have figures, and those after which nothing is expected of the rest.
const TURNS: usize = 25;
const LEAST_TURNS: usize = 13;
const FIRST_TURNS: usize = 2;
/// A small number, so that compared measurements follow each other within milliseconds.
const BATCHES: u32 = 400;
/// Minimum number of counted batches for a figure.
const LEAST_BATCHES: usize = 100;
/// The share of a batch for which the other thread must have run.
const OVERLAP: f64 = 0.65;
/// Maximum factor by which one thread may take longer than usual, compared with the other: above it, the thread was
/// interrupted.
const MOST_LONGER: f64 = 4.0;
const MOST_TIME: Duration = Duration::from_millis(500);
/// The thread that finishes first continues in parts of this size until the other has finished.
const PARTS: u32 = 8;
/// Looks at a flag before the core is left to others.
const MOST_LOOKS: u32 = 20_000;
const OVER: u32 = u32::MAX;

/// When a thread did a batch, in nanoseconds since a moment that is the same for both.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Batch {
    start: f64,
    /// Its operations were done.
    end: f64,
    /// When it stopped working.
    until: f64,
}

/// Takes turns: `measure` measures everything to compare once, in an order that depends on the number of the turn.
/// Returns `None` if too many turns had no figures. Stops early if none has.
pub(super) fn in_turns<T>(mut measure: impl FnMut(usize) -> Option<T>) -> Option<Vec<T>> {
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        turns.extend(measure(turn));
        if turns.is_empty() && turn + 1 == FIRST_TURNS {
            break;
        }
    }
    (turns.len() >= LEAST_TURNS).then_some(turns)
}

/// Nanoseconds per operation of each side, while the other side runs. `None` if the two rarely ran at the same time.
pub(super) fn beside(first: Side<'_>, second: Side<'_>, operations: u32) -> Option<[f64; 2]> {
    let flags = Flags::default();
    let [first, second] =
        both(|| flags.batches(0, first, operations, true), || flags.batches(1, second, operations, true));
    let pairs = || first.iter().copied().zip(second.iter().copied());
    let of_first = lengths(pairs());
    let of_second = lengths(pairs().map(|(first, second)| (second, first)));
    Some([quartile(of_first, operations)?, quartile(of_second, operations)?])
}

/// Nanoseconds per operation while the other core only waits.
pub(super) fn alone(side: Side<'_>, operations: u32) -> Option<f64> {
    let flags = Flags::default();
    let [batches, _] =
        both(|| flags.batches(0, side, operations, false), || flags.batches(1, &mut |_| (), operations, false));
    quartile(batches.into_iter().map(Batch::length).collect(), operations)
}

/// Runs both at once, each on a core of its own if there are two.
fn both(first: impl FnOnce() -> Vec<Batch> + Send, second: impl FnOnce() -> Vec<Batch> + Send) -> [Vec<Batch>; 2] {
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            settle_on(0);
            first()
        });
        let second = scope.spawn(|| {
            settle_on(1);
            second()
        });
        [first, second].map(|thread| thread.join().unwrap_or_default())
    })
}

/// How far each thread is, in batches.
struct Flags {
    base: Instant,
    ready: [CachePadded<AtomicU32>; 2],
    done: [CachePadded<AtomicU32>; 2],
}

impl Default for Flags {
    fn default() -> Self {
        Self { base: Instant::now(), ready: Default::default(), done: Default::default() }
    }
}

impl Flags {
    fn nanos(&self) -> f64 {
        self.base.elapsed().as_secs_f64() * 1e9
    }

    fn batches(&self, who: usize, work: Side<'_>, operations: u32, is_beside: bool) -> Vec<Batch> {
        let mut all = Vec::with_capacity(BATCHES as usize);
        for round in 1..=BATCHES {
            let is_over = who == 0 && self.base.elapsed() > MOST_TIME;
            self.ready[who].store(if is_over { OVER } else { round }, Ordering::Release);
            if is_over || !self.other_is_ready(who, round) {
                break;
            }
            let start = self.nanos();
            work(operations);
            let end = self.nanos();
            self.done[who].store(round, Ordering::Release);
            while is_beside && self.done[1 - who].load(Ordering::Acquire) < round {
                work(operations.div_ceil(PARTS));
            }
            all.push(Batch { start, end, until: self.nanos() });
        }
        all
    }

    /// Waits for the other thread. Returns whether it continues.
    fn other_is_ready(&self, who: usize, round: u32) -> bool {
        let mut looks = 0_u32;
        loop {
            match self.ready[1 - who].load(Ordering::Acquire) {
                OVER => return false,
                other if other >= round => return true,
                _ if looks < MOST_LOOKS => spin_loop(),
                // It does not run at the moment; perhaps because we do.
                _ => thread::yield_now(),
            }
            looks = looks.saturating_add(1);
        }
    }
}

impl Batch {
    fn length(self) -> f64 {
        self.end - self.start
    }

    /// Whether `other` ran for most of this batch. Normally one takes `usual` times as long as the other.
    fn was_beside(self, other: Self, usual: f64) -> bool {
        let overlap = self.end.min(other.until) - self.start.max(other.start);
        let (length, others) = (self.length(), other.length());
        let expected = others * usual;
        overlap >= OVERLAP * length
            && length.max(expected) <= MOST_LONGER * length.min(expected)
            // The rest of the other's time, too, was spent working, not waiting for a core.
            && other.until - other.start <= MOST_LONGER * length.max(others)
    }
}

/// Lengths of those batches that count.
fn lengths(pairs: impl Iterator<Item = (Batch, Batch)> + Clone) -> Vec<f64> {
    let mut ratios: Vec<f64> = pairs.clone().map(|(batch, other)| batch.length() / other.length()).collect();
    ratios.sort_by(f64::total_cmp);
    let Some(&usual) = ratios.get(ratios.len() / 2) else { return Vec::new() };
    pairs.filter(|(batch, other)| batch.was_beside(*other, usual)).map(|(batch, _)| batch.length()).collect()
}

/// The lower quartile per operation, if enough batches count.
fn quartile(mut lengths: Vec<f64>, operations: u32) -> Option<f64> {
    lengths.sort_by(f64::total_cmp);
    (lengths.len() >= LEAST_BATCHES).then(|| lengths[lengths.len() / 4] / f64::from(operations))
}

/// Binds the thread to one core, a different one for each number, if there are enough and the kernel allows it.
fn settle_on(number: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    if let Some(core) = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).nth(number) {
        let mut only = CpuSet::new();
        only.set(core);
        // If it fails, the kernel chooses the core, and the calibration detects the effect.
        let _ = sched_setaffinity(None, &only);
    }
}

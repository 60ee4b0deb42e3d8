//! Writes to all of a large memory again and again, at a chosen rate, and tells each second how fast it was.
//!
//! Each page has a number, which is that of the pass, in its first word. A thread that writes a page's next number
//! looks for the last one, so a page that was lost, or is older than it was, is found.

use std::io::Write as _;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::Verdict;
use crate::affinity::{cpus, stay_on};
use crate::options::Options;

pub(crate) const OPTIONS: [&str; 4] = ["--mib", "--rate", "--threads", "--seconds"];

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const PAGES_OF_MIB: u64 = (1 << 20) / PAGE as u64;
/// How long the speed is averaged.
const WINDOW: Duration = Duration::from_millis(100);
/// Windows in a line.
const WINDOWS: usize = 10;
/// Pages between two looks at the clock.
const BATCH: usize = 16;
/// What a thread is behind more than this it does not make up for.
const ARREARS: Duration = Duration::from_millis(50);

/// What the threads share.
#[derive(Debug, Default)]
struct Shared {
    pages: AtomicU64,
    wrong: AtomicU64,
    over: AtomicBool,
}

/// Writes, and prints a line a second: pages written in each tenth of it, and pages found wrong since the beginning.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let (mib, threads) = (u64::from(options.number("--mib", 64)), options.number("--threads", 1));
    // In MiB a second, of all threads.
    let rate = options.number("--rate", u32::MAX);
    let seconds = options.number("--seconds", 10);
    let share = usize::try_from(mib * PAGES_OF_MIB / u64::from(threads))?;
    let rate_of_one = f64::from(rate) * PAGES_OF_MIB as f64 / f64::from(threads);

    let shared = Shared::default();
    // A thread that prints to a console may hold its CPU, with interrupts off, until the host has read. So it has a CPU
    // of its own, if there are enough.
    let cpus = cpus();
    let apart = cpus.split_last().filter(|(_, others)| others.len() >= threads as usize);
    let all_touched = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                if let Some((_, writing)) = apart {
                    stay_on(writing);
                }
                let memory = touched(share);
                all_touched.wait();
                write(&shared, memory, rate_of_one);
            });
        }
        if let Some((watching, _)) = apart {
            stay_on(&[*watching]);
        }
        all_touched.wait();
        let result = watch(&shared, Duration::from_secs(seconds.into()));
        shared.over.store(true, Ordering::Relaxed);
        result
    })
    .context("nobody hears how fast it is")?;
    let wrong = shared.wrong.load(Ordering::Relaxed);
    println!("writer pages={} wrong={wrong}", shared.pages.load(Ordering::Relaxed));
    Ok(if wrong == 0 { Verdict::Right } else { Verdict::Wrong })
}

/// So many pages. The kernel has mapped each of them already, or the first pass would measure its page faults.
fn touched(pages: usize) -> Vec<u64> {
    let mut memory = vec![0; pages * WORDS];
    memory.iter_mut().step_by(WORDS).for_each(|word| *std::hint::black_box(word) = 0);
    memory
}

/// One thread: writes to this memory again and again, so many pages a second.
fn write(shared: &Shared, mut memory: Vec<u64>, rate: f64) {
    let (mut pass, mut due) = (0, Instant::now());
    let pause = Duration::from_secs_f64(BATCH as f64 / rate);
    while !shared.over.load(Ordering::Relaxed) {
        for batch in memory.chunks_mut(BATCH * WORDS) {
            let mut wrong = 0;
            for word in batch.iter_mut().step_by(WORDS) {
                wrong += u64::from(std::hint::black_box(*word) != pass);
                *word = pass + 1;
            }
            shared.pages.fetch_add((batch.len() / WORDS) as u64, Ordering::Relaxed);
            shared.wrong.fetch_add(wrong, Ordering::Relaxed);
            let now = Instant::now();
            due = (due + pause).max(now.checked_sub(ARREARS).unwrap_or(now));
            if due > now {
                thread::sleep(due - now);
            }
            if shared.over.load(Ordering::Relaxed) {
                return;
            }
        }
        pass += 1;
    }
}

/// Prints how fast the others are, for so long.
fn watch(shared: &Shared, time: Duration) -> std::io::Result<()> {
    let started = Instant::now();
    let (mut seen, mut at) = (0, started);
    while started.elapsed() < time {
        let mut windows = Vec::new();
        for _ in 0..WINDOWS {
            thread::sleep((at + WINDOW).saturating_duration_since(Instant::now()));
            let (pages, now) = (shared.pages.load(Ordering::Relaxed), Instant::now());
            // Pages in 100 ms, if this window came out longer.
            let speed = (pages - seen) as f64 * WINDOW.as_secs_f64() / (now - at).as_secs_f64();
            windows.push(format!("{speed:.0}"));
            (seen, at) = (pages, now);
        }
        let wrong = shared.wrong.load(Ordering::Relaxed);
        let mut out = std::io::stdout();
        writeln!(out, "writer windows={} wrong={wrong}", windows.join(","))?;
        out.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_written_at_the_rate_that_was_asked_for() {
        let shared = Shared::default();
        thread::scope(|scope| {
            // Without a limit it would write millions.
            scope.spawn(|| write(&shared, touched(40), 1000.0));
            thread::sleep(Duration::from_millis(300));
            shared.over.store(true, Ordering::Relaxed);
        });
        let pages = shared.pages.load(Ordering::Relaxed);
        assert!((BATCH as u64..2000).contains(&pages), "{pages}");
        assert_eq!(shared.wrong.load(Ordering::Relaxed), 0);
    }
}

//! A storm of flushes: all threads of one process map, protect, discard and unmap memory as fast as they can.
//!
//! Each thread works on a region of its own, and checks after each step that every page has the right content. This
//! alone finds a stale translation only when the frame has a new owner. The [`Detector`], which all threads read in
//! between, finds every one of its own page.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fastrand::Rng;

use crate::Verdict;
use crate::interrupts::{Change, Interrupts};
use crate::latencies::Latencies;
use crate::memory::{Access, Region};
use crate::options::Options;
use crate::stale::Detector;

pub(crate) const OPTIONS: [&str; 2] = ["--threads", "--seconds"];

const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// Largest region. Linux flushes up to 33 pages one by one and more as a whole; both shall happen.
const MOST_PAGES: usize = 40;
/// Looks at the detector between two steps of the work.
const LOOKS: u64 = 32;

/// Runs the storm and prints its line.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let threads = options.number_or_cpus("--threads");
    let seconds = options.number("--seconds", 10);
    let before = Interrupts::show("before")?;

    let shared = Shared::new().context("no memory for the page that all threads read")?;
    let started = Instant::now();
    let whole = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|index| {
                scope.spawn({
                    let shared = &shared;
                    move || shared.work(index)
                })
            })
            .collect();
        shared.watch(started + Duration::from_secs(seconds.into()));
        let mut whole = Tally::new();
        for worker in workers {
            whole.add(&worker.join().expect("a worker returns what goes wrong")?);
        }
        Ok::<_, io::Error>(whole)
    })
    .context("a call that cannot fail has failed (no memory?)")?;
    let took = started.elapsed().as_secs_f64();

    let after = Interrupts::show("after")?;
    let operations = whole.flushes.count();
    println!(
        "storm threads={threads} seconds={took:.1} ops={operations} ops_per_second={:.0} stale={} {} wrong={} reads={} \
         remaps={} {}",
        operations as f64 / took,
        whole.stale,
        whole.flushes,
        whole.wrong,
        whole.looks,
        whole.replacements,
        Change { before, after },
    );
    Ok(if whole.stale + whole.wrong == 0 { Verdict::Right } else { Verdict::Wrong })
}

/// Data that all threads share.
struct Shared {
    detector: Detector,
    over: AtomicBool,
    /// For the progress only.
    operations: AtomicU64,
    mistakes: AtomicU64,
}

impl Shared {
    fn new() -> io::Result<Self> {
        Ok(Self {
            detector: Detector::new()?,
            over: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            mistakes: AtomicU64::new(0),
        })
    }

    /// Shows the progress until `end`, then stops all threads.
    fn watch(&self, end: Instant) {
        let started = Instant::now();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            thread::sleep(left.min(PROGRESS_EVERY));
            if left <= PROGRESS_EVERY || self.over.load(Ordering::Relaxed) {
                break;
            }
            let operations = self.operations.load(Ordering::Relaxed);
            let mistakes = self.mistakes.load(Ordering::Relaxed);
            eprintln!("storm {:.0} s: ops={operations} stale_or_wrong={mistakes}", started.elapsed().as_secs_f64());
        }
        self.over.store(true, Ordering::Relaxed);
    }

    /// One thread's part.
    fn work(&self, index: u32) -> io::Result<Tally> {
        let mut worker = Worker {
            shared: self,
            tally: Tally::new(),
            random: Rng::with_seed(index.into()),
            stamp: u64::from(index) << 40,
        };
        let result = worker.run();
        // If one thread fails, the whole run ends.
        if result.is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
        result.map(|()| worker.tally)
    }
}

/// Results of a thread.
struct Tally {
    /// Times of the calls that take translations away.
    flushes: Latencies,
    looks: u64,
    stale: u64,
    /// Pages of the thread's own region that held something else than they must.
    wrong: u64,
    replacements: u64,
}

impl Tally {
    fn new() -> Self {
        Self { flushes: Latencies::new(), looks: 0, stale: 0, wrong: 0, replacements: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.flushes.add(&other.flushes);
        self.looks += other.looks;
        self.stale += other.stale;
        self.wrong += other.wrong;
        self.replacements += other.replacements;
    }

    fn timed<R>(&mut self, call: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = call();
        self.flushes.record(started.elapsed());
        result
    }
}

struct Worker<'a> {
    shared: &'a Shared,
    tally: Tally,
    random: Rng,
    /// A number that no page of any thread has held before.
    stamp: u64,
}

impl Worker<'_> {
    fn run(&mut self) -> io::Result<()> {
        while !self.shared.over.load(Ordering::Relaxed) {
            let (operations, mistakes) = (self.tally.flushes.count(), self.tally.stale + self.tally.wrong);
            self.use_a_region()?;
            self.replace_the_shared_frame()?;
            self.shared.operations.fetch_add(self.tally.flushes.count() - operations, Ordering::Relaxed);
            self.shared.mistakes.fetch_add(self.tally.stale + self.tally.wrong - mistakes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Uses a region from mapping to unmapping, and reads the detector after each step.
    fn use_a_region(&mut self) -> io::Result<()> {
        let pages = self.random.usize(..MOST_PAGES) + 1;
        let mut region = Region::map(pages)?;
        let mut expected = vec![0; pages];
        self.check(&region, &expected);
        self.fill(&mut region, &mut expected);

        // Write-protects a part and makes it writable again. The pages are written again, so the right must be real.
        let part = part_of(&mut self.random, pages);
        self.tally.timed(|| region.protect(part.clone(), Access::Read))?;
        self.check(&region, &expected);
        self.tally.timed(|| region.protect(part, Access::ReadWrite))?;
        self.fill(&mut region, &mut expected);

        let part = part_of(&mut self.random, pages);
        self.tally.timed(|| region.discard(part.clone()))?;
        expected[part].fill(0);
        self.check(&region, &expected);

        self.fill(&mut region, &mut expected);
        self.tally.timed(|| drop(region));
        self.look();
        Ok(())
    }

    fn replace_the_shared_frame(&mut self) -> io::Result<()> {
        let Self { shared, tally, .. } = self;
        let replaced = shared.detector.replace(|show| tally.timed(show))?;
        tally.replacements += u64::from(replaced);
        self.look();
        Ok(())
    }

    /// Gives each page a new number.
    fn fill(&mut self, region: &mut Region, expected: &mut [u64]) {
        for (page, number) in expected.iter_mut().enumerate() {
            self.stamp += 1;
            *number = self.stamp;
            region.set_word(page, self.stamp);
        }
        self.check(region, expected);
    }

    fn check(&mut self, region: &Region, expected: &[u64]) {
        let wrong = expected.iter().enumerate().filter(|(page, number)| region.word(*page) != **number).count();
        self.tally.wrong += wrong as u64;
        self.look();
    }

    fn look(&mut self) {
        self.tally.looks += LOOKS;
        let stale = (0..LOOKS).filter(|_| !self.shared.detector.read()).count();
        self.tally.stale += stale as u64;
    }
}

/// Some of the pages from 0 to `pages`, at least one.
fn part_of(random: &mut Rng, pages: usize) -> std::ops::Range<usize> {
    let start = random.usize(..pages);
    start..start + 1 + random.usize(..pages - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_storm_of_several_threads_finds_nothing_wrong() {
        let shared = Shared::new().expect("memory is there");
        let whole = thread::scope(|scope| {
            let workers: Vec<_> = (0..3)
                .map(|index| {
                    scope.spawn({
                        let shared = &shared;
                        move || shared.work(index)
                    })
                })
                .collect();
            shared.watch(Instant::now() + Duration::from_millis(200));
            let mut whole = Tally::new();
            workers.into_iter().for_each(|worker| whole.add(&worker.join().expect("no panic").expect("no error")));
            whole
        });
        assert!(whole.flushes.count() > 0 && whole.looks > 0 && whole.replacements > 0);
        assert_eq!((whole.stale, whole.wrong), (0, 0));
    }

    #[test]
    fn a_page_that_holds_something_else_is_counted() {
        let shared = Shared::new().expect("memory is there");
        let mut worker = Worker { shared: &shared, tally: Tally::new(), random: Rng::with_seed(0), stamp: 0 };
        let mut region = Region::map(4).expect("memory is there");
        region.set_word(2, 1);
        worker.check(&region, &[0, 0, 0, 0]);
        assert_eq!(worker.tally.wrong, 1);
    }

    #[test]
    fn parts_are_never_empty_and_never_too_long() {
        let mut random = Rng::with_seed(7);
        for pages in (1..=MOST_PAGES).cycle().take(10_000) {
            let part = part_of(&mut random, pages);
            assert!(part.start < part.end && part.end <= pages);
        }
    }
}

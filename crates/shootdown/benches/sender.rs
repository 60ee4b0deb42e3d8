//! Cost of the sender: nanoseconds of one shootdown whose targets are not in their guests.
//!
//! `cargo bench -p dunlin-shootdown --bench sender [-- --json]`
//!
//! Samples of two implementations alternate, so that other work of the machine affects both:
//!
//! * *dunlin*: mailbox, presence and requests of a target share one cache line. The sender publishes all requests, then
//!   does one fence, then reads all presences.
//! * *naive*: each of the three has its own line, with a fence and a read after each request.
//!
//! Each is measured in two states: the targets' lines are in this CPU's caches, or another CPU has taken the requests
//! before, like vCPUs that were targets last time.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread;
use std::time::Instant;

use shootdown::{Flush, Pages, Presence, Requests};

/// Numbers of targets.
const TARGETS: [usize; 4] = [1, 8, 48, 512];
/// Targets of one sample, in several shootdowns: enough for the clock to measure.
const TARGETS_PER_SAMPLE: usize = 512;
const SAMPLES: usize = 1000;

/// The fields of a target that one shootdown touches, laid out as in the hypervisor.
#[repr(C, align(64))]
#[derive(Default)]
struct OneLine {
    mailbox: AtomicU64,
    presence: Presence,
    requests: Requests,
}

#[repr(align(64))]
#[derive(Default)]
struct Line<T>(T);

#[derive(Default)]
struct ThreeLines {
    mailbox: Line<AtomicU64>,
    presence: Line<Presence>,
    requests: Line<Requests>,
}

trait Target: Default + Sync {
    /// One shootdown of all `targets`.
    fn shoot_down(targets: &[Self], flush: Flush);
    /// What the target does before its next entry.
    fn settle(&self);
}

impl Target for OneLine {
    #[inline(never)]
    fn shoot_down(targets: &[Self], flush: Flush) {
        let publish = |target: &Self| {
            target.requests.ask(flush);
            target.mailbox.fetch_or(1, Ordering::AcqRel);
        };
        let kick = |cpus| {
            black_box(cpus);
        };
        black_box(shootdown::run(
            targets.iter(),
            |target| &target.presence,
            publish,
            kick,
            || {},
            |_| std::hint::spin_loop(),
        ));
    }

    fn settle(&self) {
        self.mailbox.swap(0, Ordering::AcqRel);
        let _ = black_box(self.requests.take());
    }
}

impl Target for ThreeLines {
    #[inline(never)]
    fn shoot_down(targets: &[Self], flush: Flush) {
        for target in targets {
            target.requests.0.ask(flush);
            target.mailbox.0.fetch_or(1, Ordering::AcqRel);
            fence(Ordering::SeqCst);
            black_box(target.presence.0.look().needs_kick());
        }
    }

    fn settle(&self) {
        self.mailbox.0.swap(0, Ordering::AcqRel);
        let _ = black_box(self.requests.0.take());
    }
}

/// Nanoseconds of one shootdown.
struct Cost {
    median: f64,
    /// The range of the middle half of the samples.
    middle: (f64, f64),
}

fn main() {
    let as_json = std::env::args().any(|argument| argument == "--json");
    if !as_json {
        println!("ns per shootdown, none in its guest: median (middle half) of {SAMPLES} samples");
        println!("{:>7}  {:>6}  {:>26}  {:>26}  {:>5}", "targets", "lines", "dunlin", "naive", "ratio");
    }
    for targets in TARGETS {
        for elsewhere in [false, true] {
            let [dunlin, naive] = measure(targets, elsewhere);
            let lines = if elsewhere { "remote" } else { "local" };
            if as_json {
                let fields = |cost: &Cost| {
                    format!(
                        "{{\"median_ns\":{:.2},\"p25_ns\":{:.2},\"p75_ns\":{:.2}}}",
                        cost.median, cost.middle.0, cost.middle.1
                    )
                };
                let (dunlin, naive) = (fields(&dunlin), fields(&naive));
                println!(
                    "{{\"bench\":\"sender\",\"targets\":{targets},\"lines\":\"{lines}\",\"samples\":{SAMPLES},\
                     \"dunlin\":{dunlin},\"naive\":{naive}}}"
                );
            } else {
                let field = |cost: &Cost| format!("{:.1} ({:.1} to {:.1})", cost.median, cost.middle.0, cost.middle.1);
                let ratio = naive.median / dunlin.median;
                println!("{targets:>7}  {lines:>6}  {:>26}  {:>26}  {ratio:>5.2}", field(&dunlin), field(&naive));
            }
        }
    }
}

/// Measures both implementations with this many targets, whose lines are here or `elsewhere`.
fn measure(targets: usize, elsewhere: bool) -> [Cost; 2] {
    let dunlin = sets_of::<OneLine>(targets);
    let naive = sets_of::<ThreeLines>(targets);
    let mut samples = [Vec::new(), Vec::new()];

    // Odd: the other thread must settle; even: it has done so; the highest value: it may end. Both spin, which keeps
    // them on different CPUs.
    let turn = AtomicU64::new(0);
    let wait_until = |done: &dyn Fn(u64) -> bool| {
        let mut spins = 0_u32;
        while !done(turn.load(Ordering::Acquire)) {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(1 << 16) {
                thread::yield_now();
            }
        }
    };
    let settle = || {
        dunlin.iter().flatten().for_each(OneLine::settle);
        naive.iter().flatten().for_each(ThreeLines::settle);
    };
    thread::scope(|scope| {
        if elsewhere {
            scope.spawn(|| {
                loop {
                    wait_until(&|turn| turn % 2 == 1);
                    if turn.load(Ordering::Acquire) == u64::MAX {
                        return;
                    }
                    settle();
                    turn.fetch_add(1, Ordering::AcqRel);
                }
            });
        }
        for sample in 0..SAMPLES {
            if elsewhere {
                turn.fetch_add(1, Ordering::AcqRel);
                wait_until(&|turn| turn % 2 == 0);
            } else {
                settle();
            }
            // Each goes first in half of the samples.
            if sample % 2 == 0 {
                samples[0].push(time(&dunlin));
                samples[1].push(time(&naive));
            } else {
                samples[1].push(time(&naive));
                samples[0].push(time(&dunlin));
            }
        }
        turn.store(u64::MAX, Ordering::Release);
    });
    samples.map(cost)
}

/// Targets for all shootdowns of one sample.
fn sets_of<T: Target>(targets: usize) -> Vec<Vec<T>> {
    let set = || (0..targets).map(|_| T::default()).collect();
    (0..TARGETS_PER_SAMPLE.div_ceil(targets)).map(|_| set()).collect()
}

/// Nanoseconds per shootdown, one for each set.
fn time<T: Target>(sets: &[Vec<T>]) -> f64 {
    let flush = black_box(Flush::Pages(Pages::new(0x7f00_0000_1000, 3)));
    let began = Instant::now();
    for set in sets {
        T::shoot_down(set, flush);
    }
    let taken = began.elapsed();
    taken.as_secs_f64() * 1e9 / sets.len() as f64
}

fn cost(mut samples: Vec<f64>) -> Cost {
    samples.sort_by(f64::total_cmp);
    let at = |share: usize| samples[(samples.len() - 1) * share / 100];
    Cost { median: at(50), middle: (at(25), at(75)) }
}

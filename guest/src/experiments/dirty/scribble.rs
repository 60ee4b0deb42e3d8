//! Random writes to random pages by all CPUs, until someone types `q` or for `iterations=` steps. A tool keeps a copy
//! of this memory meanwhile and checks it.
//!
//! Every tenth step reads. One of 64 lets the hypervisor write, on machines where that is possible: by an emulated
//! instruction with memory as its destination. Some addresses are runs on a few pages, others come from all of the
//! memory. So the guest writes pages before, during and after the tool's look at them.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::random::Random;
use spin::Mutex;

use super::{NO_MEMORY, PAGE, is_to_quit, memory};
use crate::arch::boot::MAX_CPUS;
use crate::arch::ram::Ram;
use crate::arch::tsc;
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// Steps between two checks for the end.
const BATCH: u64 = 256;
/// Batches on the same few pages.
const STAY: u64 = 4;
/// Pages of such a run.
const FEW: u64 = 16;

#[derive(Clone, Copy)]
struct Plan {
    memory: Ram,
    seed: u64,
    /// Steps of each CPU.
    steps: u64,
}

/// Counts of one CPU.
#[repr(align(128))]
struct Done {
    steps: AtomicU64,
    reads: AtomicU64,
    by_host: AtomicU64,
}

static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
static STOP: AtomicBool = AtomicBool::new(false);
static DONE: [Done; MAX_CPUS] =
    [const { Done { steps: AtomicU64::new(0), reads: AtomicU64::new(0), by_host: AtomicU64::new(0) } }; MAX_CPUS];

pub(in crate::experiments) fn run(context: &Context) -> Outcome {
    let settings = context.settings;
    let Some(memory) = memory(0, settings.memory) else { return NO_MEMORY };
    let cpus = cpu::count() as u64;
    let steps = settings.iterations.map_or(u64::MAX, |steps| steps.div_ceil(cpus));
    *PLAN.lock() = Some(Plan { memory, seed: settings.seed.unwrap_or(1), steps });
    STOP.store(false, Ordering::SeqCst);
    for done in &DONE {
        [&done.steps, &done.reads, &done.by_host].into_iter().for_each(|count| count.store(0, Ordering::SeqCst));
    }
    record!("begin", experiment = "scribble", cpus = cpus, pages = memory.bytes() / PAGE, ticks = tsc::now());

    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, scribble) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    scribble(0);
    let stuck = cpu::wait_for_all(tsc::seconds(settings.stall.unwrap_or(600)));
    tell("record");
    Outcome::Done {
        failures: stuck.map_or(0, |cpu| {
            record!("violation", experiment = "scribble", of = "end", cpu = cpu, expected = "finished", seen = "stuck");
            1
        }),
    }
}

fn scribble(cpu: usize) {
    let Some(plan) = *PLAN.lock() else { return };
    let mut random = Random::new(plan.seed, cpu as u64);
    let pages = plan.memory.bytes() / PAGE;
    let done = &DONE[cpu];
    let mut next_word = tsc::now() + tsc::seconds(1);
    let mut steps = 0;
    while steps < plan.steps && !STOP.load(Ordering::Relaxed) {
        // A few pages, or all.
        let is_run = random.below(2) == 0;
        let (first, count) = if is_run { (random.below(pages), FEW) } else { (0, pages) };
        for _ in 0..STAY {
            let (mut reads, mut by_host) = (0, 0);
            let batch = BATCH.min(plan.steps - steps);
            for _ in 0..batch {
                let bits = random.bits();
                let page = (first + random.below(count)) % pages;
                let offset = page * PAGE + (bits & 0x1ff) * 8;
                match (bits >> 16) % 640 {
                    0..64 => {
                        plan.memory.word(offset).load(Ordering::Relaxed);
                        reads += 1;
                    }
                    64..74 if plan.memory.written_by_host(offset, bits >> 32) => by_host += 1,
                    _ => plan.memory.word(offset).store(bits, Ordering::Relaxed),
                }
            }
            steps += batch;
            done.steps.store(steps, Ordering::Relaxed);
            done.reads.fetch_add(reads, Ordering::Relaxed);
            done.by_host.fetch_add(by_host, Ordering::Relaxed);
        }
        if cpu == 0 && tsc::now() > next_word {
            next_word = tsc::now() + tsc::seconds(1);
            tell("progress");
            if is_to_quit() {
                STOP.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Writes a record of that kind with the counts of all CPUs so far.
fn tell(kind: &str) {
    let sum = |of: fn(&Done) -> &AtomicU64| DONE.iter().map(|done| of(done).load(Ordering::Relaxed)).sum::<u64>();
    let (steps, reads, by_host) = (sum(|done| &done.steps), sum(|done| &done.reads), sum(|done| &done.by_host));
    match kind {
        "progress" => record!("progress", experiment = "scribble", steps = steps),
        _ => record!("record", experiment = "scribble", steps = steps, reads = reads, written_by_host = by_host),
    }
}

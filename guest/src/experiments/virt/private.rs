//! Pages of one CPU alone. All CPUs use the same addresses, each with its own tables, and flush them by instructions
//! that act on one CPU only. A hypervisor may move a vCPU to another pCPU, or run two vCPUs in turn on one pCPU. It
//! must make sure that neither uses a translation of the other, or one that it flushed on another pCPU.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::random::Random;

use crate::arch::boot::MAX_CPUS;
use crate::arch::private::{self, PAGES};
use crate::arch::{control, controller, interrupts, remap, tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::interrupt::TIMER;
use crate::record::record;

/// Frames that the pages take turns among.
const FRAMES: usize = 8;

static END: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);
static OMIT_FLUSH: AtomicBool = AtomicBool::new(false);

/// Counts of one CPU.
#[repr(align(128))]
struct Done {
    reads: AtomicU64,
    moves: AtomicU64,
    halts: AtomicU64,
    wrong: AtomicU64,
}

static DONE: [Done; MAX_CPUS] = [const {
    Done { reads: AtomicU64::new(0), moves: AtomicU64::new(0), halts: AtomicU64::new(0), wrong: AtomicU64::new(0) }
}; MAX_CPUS];

fn total(what: impl Fn(&Done) -> &AtomicU64) -> u64 {
    DONE.iter().map(|done| what(done).load(Ordering::Relaxed)).sum()
}

pub(super) fn run(context: &Context) -> Outcome {
    let_all_work(context, context.settings.seconds.unwrap_or(2), "private-pages")
}

pub(super) fn storm(context: &Context) -> Outcome {
    let_all_work(context, context.settings.seconds.unwrap_or(10), "private-storm")
}

/// A machine may drop translations at any time, so that nothing was noticed is reported and is no failure.
pub(super) fn selftest(context: &Context) -> Outcome {
    OMIT_FLUSH.store(true, Ordering::SeqCst);
    let_all_work(context, context.settings.seconds.unwrap_or(2), "private-selftest");
    OMIT_FLUSH.store(false, Ordering::SeqCst);
    let wrong = total(|done| &done.wrong);
    record!("record", experiment = "private-selftest", stale_reads = wrong, noticed = wrong > 0);
    Outcome::Done { failures: 0 }
}

fn let_all_work(context: &Context, seconds: u64, name: &str) -> Outcome {
    for counter in DONE.iter().flat_map(|done| [&done.reads, &done.moves, &done.halts, &done.wrong]) {
        counter.store(0, Ordering::SeqCst);
    }
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    END.store(tsc::now() + tsc::seconds(seconds), Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, work) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    work(0);
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    let wrong = total(|done| &done.wrong);
    record!(
        "record",
        experiment = name,
        cpus = cpu::count(),
        reads = total(|done| &done.reads),
        moves = total(|done| &done.moves),
        halts = total(|done| &done.halts),
        stale_reads = wrong,
    );
    Outcome::Done { failures: wrong + u64::from(stuck.is_some()) }
}

/// The job of each CPU.
fn work(cpu: usize) {
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    let mark = |version: u64| (cpu as u64 + 1) << 48 | version;
    let done = &DONE[cpu];
    let add = |counter: &AtomicU64| counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let omit = OMIT_FLUSH.load(Ordering::Relaxed);

    // The frame of each page, and the contents of the frames.
    let mut frames: [usize; PAGES] = core::array::from_fn(|page| page);
    let mut contents: [u64; FRAMES] = core::array::from_fn(|frame| mark(frame as u64));
    for (frame, content) in contents.iter().enumerate() {
        remap::fill(remap::frame(cpu, frame), *content);
        private::point(cpu, frame, frame);
    }
    private::enter(cpu);
    interrupts::enable();

    let mut version = FRAMES as u64;
    while tsc::now() < END.load(Ordering::Relaxed) {
        for _ in 0..random.below(64) {
            let page = random.index(PAGES);
            let seen = remap::load(private::address(page));
            add(&done.reads);
            if seen != contents[frames[page]] {
                add(&done.wrong);
                if done.wrong.load(Ordering::Relaxed) < 5 && !omit {
                    record!(
                        "violation",
                        experiment = "private-pages",
                        cpu = cpu,
                        page = page,
                        expected = format_args!("{:#x}", contents[frames[page]]),
                        seen = format_args!("{seen:#x}"),
                    );
                }
            }
        }
        match random.below(8) {
            0..5 => {
                let (page, frame) = (random.index(PAGES), random.index(FRAMES));
                private::clear(cpu, page);
                if !omit {
                    tlb::flush_page(private::address(page));
                }
                version += 1;
                contents[frame] = mark(version);
                remap::fill(remap::frame(cpu, frame), contents[frame]);
                private::point(cpu, page, frame);
                frames[page] = frame;
                add(&done.moves);
            }
            5 => control::leave(),
            _ => {
                interrupts::disable();
                controller::arm_once(TIMER, tsc::ticks(20 + random.below(400)));
                interrupts::sleep();
                controller::disarm();
                interrupts::enable();
                add(&done.halts);
            }
        }
    }
    interrupts::disable();
    controller::disarm();
    private::leave();
}

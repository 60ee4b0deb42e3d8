//! Memory of this VM alone. The guest fills pages with contents made from `seed`, and reads them repeatedly at the same
//! addresses.
//!
//! Several VMs with different seeds run side by side. They use the same virtual addresses, the same tables and the same
//! physical addresses. If one VM uses a translation of another, it reads contents that it has never written.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::random::Random;

use super::{Context, Outcome};
use crate::arch::boot::MAX_CPUS;
use crate::arch::{control, controller, interrupts, remap, tlb, tsc};
use crate::cpu;
use crate::interrupt::TIMER;
use crate::record::record;

/// Pages that are read.
const PAGES: usize = 64;

static END: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);

/// Reads and foreign contents, by CPU.
#[repr(align(128))]
struct Seen {
    reads: AtomicU64,
    foreign: AtomicU64,
}

static SEEN: [Seen; MAX_CPUS] = [const { Seen { reads: AtomicU64::new(0), foreign: AtomicU64::new(0) } }; MAX_CPUS];

fn content(page: usize) -> u64 {
    SEED.load(Ordering::Relaxed).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ page as u64
}

pub(super) fn run(context: &Context) -> Outcome {
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    for page in 0..PAGES {
        let frame = remap::frame(page / 8, page % 8);
        remap::fill(frame, content(page));
        remap::point(remap::RANGE + page, frame, remap::Kind::Plain);
    }
    for seen in &SEEN {
        seen.reads.store(0, Ordering::SeqCst);
        seen.foreign.store(0, Ordering::SeqCst);
    }
    END.store(tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(5)), Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, work) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    work(0);
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    let sum = |what: fn(&Seen) -> &AtomicU64| SEEN.iter().map(|seen| what(seen).load(Ordering::Relaxed)).sum::<u64>();
    let foreign = sum(|seen| &seen.foreign);
    record!("record", experiment = "own-data", cpus = cpu::count(), reads = sum(|seen| &seen.reads), foreign = foreign);
    Outcome::Done { failures: foreign + u64::from(stuck.is_some()) }
}

/// The job of each CPU: reads, with exits, halts and flushes of its own in between.
fn work(cpu: usize) {
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    let seen = &SEEN[cpu];
    interrupts::enable();
    while tsc::now() < END.load(Ordering::Relaxed) {
        for _ in 0..random.below(256) {
            let page = random.index(PAGES);
            let found = remap::load(remap::address(remap::RANGE + page));
            seen.reads.store(seen.reads.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            if found != content(page) && seen.foreign.fetch_add(1, Ordering::Relaxed) < 5 {
                record!(
                    "violation",
                    experiment = "own-data",
                    cpu = cpu,
                    page = page,
                    expected = format_args!("{:#x}", content(page)),
                    seen = format_args!("{found:#x}"),
                );
            }
        }
        match random.below(8) {
            0..3 => control::leave(),
            3 => tlb::flush_all(),
            4 => tlb::flush_page(remap::address(remap::RANGE + random.index(PAGES))),
            _ => {
                interrupts::disable();
                controller::arm_once(TIMER, tsc::ticks(20 + random.below(400)));
                interrupts::sleep();
                controller::disarm();
                interrupts::enable();
            }
        }
    }
    interrupts::disable();
    controller::disarm();
}

//! The time to write one word to each of many pages, in one pass after the other.
//!
//! Between two passes the guest waits for a byte: [`NEXT`] begins another pass, [`QUIT`] ends. So a tool can
//! write-protect the pages in between, and the additional time of the next pass is the cost of its faults. The first
//! pass accesses the pages for the first time.
//!
//! Under QEMU's `-icount shift=0` the clock counts instructions, and the figures are exact.

use core::sync::atomic::Ordering;

use super::{NEXT, NO_MEMORY, PAGE, QUIT, memory};
use crate::arch::ram::Ram;
use crate::arch::{serial, tsc};
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// Pages between two readings of the clock. The median of these batches excludes disturbed ones.
const BATCH: u64 = 64;
/// Batches that are kept.
const BATCHES: usize = 1024;
/// Memory that is touched, in MiB, unless something else is asked for.
const USUAL: u64 = 16;

pub(in crate::experiments) fn run(context: &Context) -> Outcome {
    let settings = context.settings;
    let Some(memory) = memory(0, Some(settings.memory.unwrap_or(USUAL))) else { return NO_MEMORY };
    for pass in 0.. {
        measure(memory, pass);
        if !is_to_go_on(tsc::now().saturating_add(tsc::seconds(settings.stall.unwrap_or(600)))) {
            break;
        }
    }
    Outcome::Done { failures: 0 }
}

fn measure(memory: Ram, pass: u64) {
    let pages = memory.bytes() / PAGE;
    let mut batches = [0_u64; BATCHES];
    let mut count = 0;
    let mut total = 0;
    for first in (0..pages).step_by(64) {
        let end = pages.min(first + BATCH);
        let start = tsc::now();
        for page in first..end {
            memory.word(page * PAGE + (page % 512) * 8).store(pass, Ordering::Relaxed);
        }
        let ticks = tsc::now() - start;
        total += ticks;
        if count < BATCHES && end - first == BATCH {
            batches[count] = ticks;
            count += 1;
        }
    }
    let batches = &mut batches[..count];
    batches.sort_unstable();
    let of_a_page = |at: usize| batches.get(at).map_or(0, |ticks| ticks / BATCH);
    record!(
        "record",
        experiment = "faults",
        pass = pass,
        pages = pages,
        ticks = total,
        median_per_page = of_a_page(count / 2),
        min_per_page = of_a_page(0),
        max_per_page = of_a_page(count.saturating_sub(1)),
    );
}

/// Waits until `deadline` for a byte that says whether to continue.
fn is_to_go_on(deadline: u64) -> bool {
    while tsc::now() < deadline {
        match serial::receive() {
            Some(NEXT) => return true,
            Some(QUIT) => return false,
            // Reading the port is an exit, so pause in between.
            _ => tsc::pause_until(tsc::now() + tsc::ticks(1_000)),
        }
    }
    false
}

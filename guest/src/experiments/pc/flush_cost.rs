//! The cost of one flush hypercall, in ticks, without the loop around it: of the caller alone, and of all CPUs while
//! the others are halted. The input is already in its page; only the call is measured.
//!
//! Under QEMU's `-icount shift=0` the TSC counts instructions, and the figures are exact and repeatable. (Experiment
//! `cpuid` with `iterations=` shows the cost of a steady entry, and whether it flushes.)

use core::sync::atomic::Ordering;

use guest_model::batches::{BATCHES, Batches, per_iteration};
use guest_model::hypercall::{self, ALL_PROCESSORS, Control, FLUSH_LIST, FLUSH_SPACE, NON_GLOBAL};

use crate::arch::{cpu_local, hyperv, remap, remote, tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

pub(super) fn run(context: &Context) -> Outcome {
    if !remote::is_offered() {
        return Outcome::Unsupported("the Hyper-V interface does not offer flushes");
    }
    let Some(own) = hyperv::vp_index(cpu_local::index()).filter(|index| *index < 64) else {
        return Outcome::Unsupported("this CPU's VP index is beyond a mask");
    };
    let iterations = context.settings.iterations.unwrap_or(1000);
    let mut failures = 0;
    for (whom, flags, mask) in [("self", 0, 1 << own), ("all-halted", ALL_PROCESSORS, 0)] {
        if whom == "all-halted" && cpu::count() < 2 {
            continue;
        }
        // Time for the others to halt.
        tsc::pause_until(tsc::now() + tsc::ticks(20_000));
        for (what, pages) in [("1", 1), ("33", 33), ("whole", 0)] {
            failures += measure(iterations, whom, what, flags, mask, pages);
        }
    }
    Outcome::Done { failures }
}

/// `pages` of zero is the whole space.
fn measure(iterations: u64, whom: &str, what: &str, flags: u64, mask: u64, pages: u64) -> u64 {
    let page = hyperv::input_page(cpu_local::index());
    let flags = if pages == 0 { flags | NON_GLOBAL } else { flags };
    let list = hypercall::ranges(remap::address(remap::RANGE), pages);
    let words = [tlb::root(), flags, mask].into_iter().chain(list);
    page.words().iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::SeqCst));
    let entries = pages.div_ceil(hypercall::PAGES_PER_ENTRY);
    let control = if pages == 0 { Control::simple(FLUSH_SPACE) } else { Control::rep(FLUSH_LIST, entries) };

    let mut wrong = 0;
    let full = Batches::measure(|| {
        time(iterations, || {
            let result = hyperv::call(control.0, page.address(), 0);
            wrong += u64::from(result != entries << 32);
        })
    });
    let mut nothing = 0;
    let empty = Batches::measure(|| {
        time(iterations, || {
            let result = core::hint::black_box(entries << 32);
            nothing += u64::from(result != entries << 32);
        })
    });
    let empty = empty.median();
    record!(
        "record",
        experiment = "hypercall-flush",
        targets = whom,
        pages = what,
        cpus = cpu::count(),
        iterations = iterations,
        ticks_per_iteration = per_iteration(full.median(), empty, iterations),
        min = per_iteration(full.min(), empty, iterations),
        max = per_iteration(full.max(), empty, iterations),
        empty_loop_ticks = empty,
        batches = BATCHES,
        refused = wrong,
    );
    wrong
}

fn time(iterations: u64, mut step: impl FnMut()) -> u64 {
    let start = tsc::now();
    for _ in 0..iterations {
        step();
    }
    tsc::now() - start
}

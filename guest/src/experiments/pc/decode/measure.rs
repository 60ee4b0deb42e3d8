//! The cost of one access to a device register, depending on its code: at one address or many, while the guest writes
//! the code's page, and while it writes page tables.
//!
//! The loops are machine code made at run time, in pages mapped for it; see `arch::encode`. The experiment also
//! measures the loop without accesses and subtracts it. `iterations=` is the number of accesses in each batch. The
//! figure is the median of the batches.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use guest_model::batches::{BATCHES, Batches, per_iteration};
use guest_model::command_line::Register;

use super::{NEEDS_TWO, NEEDS_XAPIC, TASK_PRIORITY, io_apic_window, local_apic};
use crate::arch::boot::MAX_CPUS;
use crate::arch::code_pages::{self, ALL, PAGES};
use crate::arch::encode::{self, Access, LOOP_PAGES, Rewrite};
use crate::arch::{apic, tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// The loop without accesses lies behind the loop with them.
const EMPTY_PAGE: usize = LOOP_PAGES;

/// The accessed register, and the form of the access.
#[derive(Clone, Copy)]
struct Target {
    name: &'static str,
    at: u64,
    access: Access,
}

impl Target {
    /// The register that was asked for, or `usual`.
    fn of(context: &Context, usual: Register) -> Option<Self> {
        const ID: u64 = 0x20;
        let register = context.settings.device.unwrap_or(usual);
        let at = match register {
            Register::Id => local_apic(ID),
            Register::Version => local_apic(apic::VERSION),
            Register::TaskPriority => local_apic(TASK_PRIORITY),
            Register::EndOfInterrupt => local_apic(apic::EOI),
            // Its version.
            Register::IoApic => io_apic_window(1)?,
        };
        let access = if register == Register::EndOfInterrupt { Access::Store } else { Access::Load };
        Some(Self { name: register.name(), at, access })
    }
}

const NO_IO_APIC: Outcome = Outcome::Unsupported("there is no I/O APIC");

fn accesses(context: &Context) -> u64 {
    context.settings.iterations.unwrap_or(1000)
}

/// Results of one CPU.
struct Figures {
    full: [AtomicU64; 3],
    empty: AtomicU64,
    finished: AtomicBool,
}

static FIGURES: [Figures; MAX_CPUS] = [const {
    Figures { full: [const { AtomicU64::new(0) }; 3], empty: AtomicU64::new(0), finished: AtomicBool::new(false) }
}; MAX_CPUS];

/// Parameters of the CPUs: passes of the loop and of the empty one, the register, RBX for both.
static PASSES: AtomicU64 = AtomicU64::new(0);
static DEVICE: AtomicU64 = AtomicU64::new(0);
static RBX: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// CPUs that take part, and those that are ready.
static WANTED: AtomicUsize = AtomicUsize::new(0);
static READY: AtomicUsize = AtomicUsize::new(0);

/// Maps the pages of both loops, for all CPUs.
fn map_loops() {
    code_pages::clear(0);
    for page in 0..2 * LOOP_PAGES {
        code_pages::point(0, page, code_pages::frame(0, page) | ALL);
    }
    tlb::flush_all();
}

/// Makes the loop without accesses like the other, then moves it behind that one.
fn move_to_empty_page() {
    for offset in (0..code_pages::PAGE).step_by(8) {
        let word = code_pages::word(code_pages::frame(0, 0), offset);
        code_pages::write(code_pages::frame(0, EMPTY_PAGE), offset, &word.to_le_bytes());
    }
}

/// Runs both loops on this CPU, at the same time as the other CPUs that take part.
fn measure(cpu: usize) {
    tlb::flush_all();
    READY.fetch_add(1, Ordering::SeqCst);
    let last = tsc::now() + tsc::seconds(5);
    while READY.load(Ordering::SeqCst) < WANTED.load(Ordering::SeqCst) && tsc::now() < last {
        core::hint::spin_loop();
    }

    let (passes, device) = (PASSES.load(Ordering::SeqCst), DEVICE.load(Ordering::SeqCst));
    let [rbx, empty_rbx] = [0, 1].map(|at: usize| RBX[at].load(Ordering::SeqCst));
    let full = Batches::measure(|| encode::run(code_pages::address(0, 0), passes, device, rbx));
    let empty = Batches::measure(|| encode::run(code_pages::address(0, EMPTY_PAGE), passes, device, empty_rbx));
    let figures = &FIGURES[cpu];
    for (place, value) in figures.full.iter().zip([full.median(), full.min(), full.max()]) {
        place.store(value, Ordering::SeqCst);
    }
    figures.empty.store(empty.median(), Ordering::SeqCst);
    figures.finished.store(true, Ordering::SeqCst);
}

/// Lets CPU 0, and if `all` the others, run the loops that are written. Answers those that did not finish.
fn measure_on(all: bool, passes: u64, target: Target, rbx: [u64; 2], stall: u64) -> u64 {
    let others = if all { cpu::up().without(0) } else { cpu::up().iter().filter(|_| false).collect() };
    FIGURES.iter().for_each(|figures| figures.finished.store(false, Ordering::SeqCst));
    PASSES.store(passes, Ordering::SeqCst);
    DEVICE.store(target.at, Ordering::SeqCst);
    for (place, value) in RBX.iter().zip(rbx) {
        place.store(value, Ordering::SeqCst);
    }
    READY.store(0, Ordering::SeqCst);
    WANTED.store(others.iter().count() + 1, Ordering::SeqCst);

    let refused = others.iter().filter(|index| !cpu::give(*index, measure)).count() as u64;
    measure(0);
    let stuck = all && cpu::wait_for_all(tsc::seconds(stall)).is_some();
    refused + u64::from(stuck)
}

/// A record for each CPU that measured. `per_pass` accesses were made in each pass.
fn report(name: &str, target: Target, passes: u64, per_pass: u64, rips: usize, forms: &str, about: &str) {
    let all = passes * per_pass;
    for (cpu, figures) in FIGURES.iter().enumerate().filter(|(_, figures)| figures.finished.load(Ordering::SeqCst)) {
        let [median, min, max] = [0, 1, 2].map(|at: usize| figures.full[at].load(Ordering::SeqCst));
        let empty = figures.empty.load(Ordering::SeqCst);
        record!(
            "record",
            experiment = name,
            cpu = cpu,
            device = target.name,
            about = about,
            rips = rips,
            forms = forms,
            every = per_pass,
            iterations = all,
            ticks_per_iteration = per_iteration(median, empty, all),
            min = per_iteration(min, empty, all),
            max = per_iteration(max, empty, all),
            ticks = median,
            empty_loop_ticks = empty,
            batches = BATCHES,
        );
    }
}

/// Accesses from `rips=N` addresses, of one form or of many, on one CPU or on all.
pub(in crate::experiments::pc) fn steady(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let Some(target) = Target::of(context, Register::Version) else { return NO_IO_APIC };
    let failures = run_steady(context, target, "decode-loop", "steady");
    Outcome::Done { failures }
}

fn run_steady(context: &Context, target: Target, name: &str, about: &str) -> u64 {
    let settings = context.settings;
    let rips = settings.rips.unwrap_or(1);
    let passes = accesses(context).div_ceil(rips as u64);

    map_loops();
    encode::write_loop(0, target.access, 0, false, target.at);
    move_to_empty_page();
    encode::write_loop(0, target.access, rips, settings.many_forms, target.at);

    let failures = measure_on(settings.all_cpus, passes, target, [0; 2], settings.stall.unwrap_or(30));
    let forms = if settings.many_forms { "many" } else { "one" };
    report(name, target, passes, rips as u64, rips, forms, about);
    failures
}

/// Loads by one instruction. After each `every=N` loads the guest writes the instruction, or data beside it.
pub(in crate::experiments::pc) fn rewriting(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let settings = context.settings;
    let Some(target) = Target::of(context, Register::Version) else { return NO_IO_APIC };
    if target.access == Access::Store {
        return Outcome::Unsupported("only loads are rewritten; choose another device");
    }
    let rewrite = if settings.write_beside { Rewrite::Beside } else { Rewrite::Instruction };
    let every = settings.every.unwrap_or(1);
    let passes = accesses(context).div_ceil(every);
    let Ok(count) = u32::try_from(every) else { return Outcome::Unsupported("every=N is too large") };

    map_loops();
    // The empty loop writes to its own page, which has no accesses.
    let moved = code_pages::address(0, EMPTY_PAGE) - code_pages::address(0, 0);
    let empty_rbx = encode::write_rewriting_loop(0, rewrite, count, false) + moved;
    move_to_empty_page();
    let rbx = encode::write_rewriting_loop(0, rewrite, count, true);

    let failures = measure_on(false, passes, target, [rbx, empty_rbx], settings.stall.unwrap_or(30));
    let about = if settings.write_beside { "beside" } else { "instruction" };
    report("decode-smc", target, passes, every, 1, "one", about);
    Outcome::Done { failures }
}

static STOP: AtomicBool = AtomicBool::new(false);
/// Changes of leaves, and of upper entries.
static CHANGES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Loads on CPU 0, while the other CPUs write to the page tables that translate the code's address, but to other
/// entries.
pub(in crate::experiments::pc) fn churn(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let others = cpu::up().without(0);
    if others.iter().next().is_none() {
        return NEEDS_TWO;
    }
    let Some(target) = Target::of(context, Register::Version) else { return NO_IO_APIC };
    let mut failures = 0;
    for (about, job) in [("leaves", change_leaves as cpu::Job), ("tables", change_tables), ("both", change_both)] {
        STOP.store(false, Ordering::SeqCst);
        CHANGES.iter().for_each(|counter| counter.store(0, Ordering::SeqCst));
        let start = tsc::now();
        for index in others.iter() {
            failures += u64::from(!cpu::give(index, job));
        }
        let quiet = Context {
            settings: &guest_model::command_line::Settings { all_cpus: false, ..*context.settings },
            ..*context
        };
        failures += run_steady(&quiet, target, "decode-churn", about);
        STOP.store(true, Ordering::SeqCst);
        let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
        failures += u64::from(stuck.is_some());
        record!(
            "record",
            experiment = "decode-churn",
            changed = about,
            leaf_changes = CHANGES[0].load(Ordering::SeqCst),
            table_changes = CHANGES[1].load(Ordering::SeqCst),
            microseconds = tsc::microseconds(tsc::now() - start),
        );
    }
    Outcome::Done { failures }
}

fn change_leaves(cpu: usize) {
    change(cpu, true, false);
}

fn change_tables(cpu: usize) {
    change(cpu, false, true);
}

fn change_both(cpu: usize) {
    change(cpu, true, true);
}

fn change(cpu: usize, leaves: bool, tables: bool) {
    // Each CPU has entries of its own in the upper half of the table.
    let page = PAGES / 2 + cpu;
    let mut round = 0;
    while !STOP.load(Ordering::Relaxed) {
        round += 1;
        if leaves {
            code_pages::point(0, page, if round & 1 == 0 { 0 } else { code_pages::frame(cpu, 0) | ALL });
            CHANGES[0].fetch_add(1, Ordering::Relaxed);
        }
        if tables {
            code_pages::use_nobodys_table(cpu, round & 1 == 1);
            CHANGES[1].fetch_add(1, Ordering::Relaxed);
        }
    }
}

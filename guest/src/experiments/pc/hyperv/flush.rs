//! C: a flush reaches all its targets before it returns, in every form of the call.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::cpu_set::CpuSet;
use guest_model::hypercall::{
    ALL_PROCESSORS, ALL_SPACES, Control, EXTENDED_RANGES, FLUSH_LIST, FLUSH_SPACE, INVALID_PARAMETER, NON_GLOBAL,
};

use super::watch::{Mapping, Seen, Watch};
use super::{
    Answer, Cases, Context, FLUSH_WITHHELD, NEEDS_TWO, NO_INTERFACE, Outcome, ShownAnswer, at, bit, by_memory,
    flush_sets, place,
};
use crate::arch::boot::{self, MAX_CPUS};
use crate::arch::{attempt, control, hyperv, interrupts, remap, tlb, tsc};
use crate::cpu;
use crate::interrupt::taken;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    let Some(features) = hyperv::features() else { return NO_INTERFACE };
    if !features.flush() {
        return Outcome::Unsupported(FLUSH_WITHHELD);
    }
    if cpu::count() < 2 {
        return Outcome::Unsupported(NEEDS_TWO);
    }
    let mut cases = Cases::new(context, "hv-flush");
    spaces(&mut cases);
    lists(&mut cases, features);
    flush_sets::run(&mut cases, features);
    halted_target(&mut cases);
    overcommitted(&mut cases);
    other_space(&mut cases);
    each_other(&mut cases);
    emulated_store(&mut cases);
    cases.skip("C35", "flush racing the targets' migration", "experiment stale");
    cases.skip("C36", "flush racing an ASID wrap", "experiment stale, in a VM whose tags are limited");
    cases.skip("C38", "the hypervisor unmaps a guest page meanwhile", "the guest cannot make it do so");
    cases.done()
}

/// CPUs 1 and 2, and the last one, whose VP index may be beyond 64.
pub(super) fn watchers() -> CpuSet {
    [1, 2, cpu::count() - 1].into_iter().filter(|index| *index > 0 && cpu::is_up(*index)).collect()
}

/// The mask of these CPUs and CPU 0, without those beyond a mask's range.
fn mask(cpus: &CpuSet) -> u64 {
    cpus.iter().map(bit).fold(bit(0), |mask, bit| mask | bit)
}

pub(super) fn space(flags: u64, mask: u64) -> Answer {
    by_memory(Control::simple(FLUSH_SPACE), &[0, flags, mask])
}

fn list(flags: u64, mask: u64, entries: &[u64]) -> Answer {
    let mut words = [0; 512];
    words[1] = flags;
    words[2] = mask;
    words.iter_mut().skip(3).zip(entries).for_each(|(word, entry)| *word = *entry);
    by_memory(Control::rep(FLUSH_LIST, entries.len() as u64), &words)
}

/// A case that must answer `expected`, and be seen by all watchers and the caller.
pub(super) fn seen_by_all(cases: &mut Cases, name: &str, about: &str, expected: u64, seen: Seen) {
    cases.check(
        name,
        about,
        "success, seen by all",
        format_args!("{} missed by {} seen by the caller {}", ShownAnswer(seen.answer), seen.missed, seen.caller),
        seen.answer == Ok(expected) && seen.missed == 0 && seen.caller,
    );
}

fn spaces(cases: &mut Cases) {
    // Watchers that a mask can name, so that each call reaches all of them.
    let reachable: CpuSet = watchers().iter().filter(|index| bit(*index) != 0).collect();
    let mut watch = Watch::start(&reachable, cases.patience());
    let all = mask(watch.watchers());

    let seen = watch.see(|_| space(ALL_SPACES, all));
    seen_by_all(cases, "C1", "0x0002, all spaces, targets running", 0, seen);
    let seen = watch.see(|_| space(ALL_SPACES, bit(0)));
    cases.check(
        "C4",
        "0x0002, mask of the caller only",
        "status 0, the caller sees",
        format_args!("{} seen by the caller {}", ShownAnswer(seen.answer), seen.caller),
        seen.answer == Ok(0) && seen.caller,
    );
    let some = mask(&watch.watchers().iter().take(1).collect());
    cases.result("C5", "0x0002, mask without some vCPUs (the host counts the kicks)", 0, space(ALL_SPACES, some));
    let seen = watch.see(|_| space(ALL_SPACES | ALL_PROCESSORS, 0xdead_beef_dead_beef));
    seen_by_all(cases, "C6", "0x0002, all processors, garbage in the mask", 0, seen);

    let present = (0..cpu::count()).map(bit).fold(0, |mask, bit| mask | bit);
    let about = "0x0002, mask of absent VPs only";
    if present == u64::MAX {
        cases.skip("C7", about, "all of the first 64 VPs exist");
    } else {
        cases.result("C7", about, 0, space(ALL_SPACES, !present));
    }
    cases.status("C8", "0x0002, mask 0", &[INVALID_PARAMETER], space(ALL_SPACES, 0));
    for (name, bit) in [("C9a", 4), ("C9b", 8), ("C9c", 63)] {
        cases.status(name, "0x0002, a reserved flag", &[INVALID_PARAMETER], space(ALL_SPACES | 1 << bit, all));
    }
    let seen = watch.see(|_| by_memory(Control::simple(FLUSH_SPACE), &[tlb::root() | 0x7ff << 52 | 0xabc, 0, all]));
    seen_by_all(cases, "C10", "0x0002, PCID and reserved bits in the address space", 0, seen);

    watch.remap(Mapping::Global);
    let seen = watch.see(|_| space(ALL_SPACES | NON_GLOBAL, all));
    seen_by_all(cases, "C12", "0x0002, NON_GLOBAL, the page is global: flushed nevertheless", 0, seen);
    let seen = watch.see(|page| list(ALL_SPACES, all, &[page]));
    seen_by_all(cases, "C13", "0x0003, the page is global", 1 << 32, seen);
    finish(cases, watch);
}

/// Ends the watchers. A watcher that does not return fails its last case.
pub(super) fn finish(cases: &mut Cases, watch: Watch) {
    if !watch.stop() {
        cases.check("C", "the watchers come back", "all", format_args!("not all"), false);
    }
}

fn lists(cases: &mut Cases, features: hyperv::Features) {
    let reachable: CpuSet = watchers().iter().filter(|index| bit(*index) != 0).collect();
    let mut watch = Watch::start(&reachable, cases.patience());
    let all = mask(watch.watchers());

    let answer = list(ALL_SPACES | NON_GLOBAL, all, &[watch.address()]);
    cases.result("C14", "0x0003 with NON_GLOBAL", u64::from(INVALID_PARAMETER), answer);
    let seen = watch.see(|page| list(ALL_SPACES, all, &[page]));
    seen_by_all(cases, "C15a", "0x0003, entry for the page alone", 1 << 32, seen);
    let seen = watch.see(|page| list(0, all, &[(page - 4095 * 4096) | 4095]));
    seen_by_all(cases, "C15b", "0x0003, entry of 4096 pages that ends with it", 1 << 32, seen);

    let mut microseconds = 0;
    let seen = watch.see(|page| {
        let entries: [u64; 5] = core::array::from_fn(|at| (page + (at as u64) * (4096 << 12)) | 0xfff);
        let start = tsc::now();
        let answer = list(ALL_SPACES, all, &entries);
        microseconds = tsc::microseconds(tsc::now() - start);
        answer
    });
    cases.check(
        "C16",
        "0x0003, 5 entries of 4096 pages: done as a whole, not page by page",
        "status 0 reps 5, seen, quick",
        format_args!("{} missed by {} after {microseconds} us", ShownAnswer(seen.answer), seen.missed),
        seen.answer == Ok(5 << 32) && seen.missed == 0,
    );
    let seen = watch.see(|page| {
        let entries: [u64; 509] = core::array::from_fn(|at| page + (508 - at as u64) * 0x10_0000);
        list(ALL_SPACES, all, &entries)
    });
    seen_by_all(cases, "C17", "0x0003, 509 entries", 509 << 32, seen);
    let seen = watch.see(|page| list(ALL_SPACES, all, &[page + (1 << 30), 0x8000_0000_0000_0000 | page, page]));
    seen_by_all(cases, "C19", "0x0003, a non-canonical entry between two good ones", 3 << 32, seen);
    let seen = watch.see(|page| list(ALL_SPACES, all, &[u64::MAX, page]));
    seen_by_all(cases, "C20", "0x0003, entry 0xFFFFFFFFFFFFFFFF", 2 << 32, seen);

    watch.remap(Mapping::Large);
    let seen = watch.see(|page| list(ALL_SPACES, all, &[page ^ 0x1_0000]));
    seen_by_all(cases, "C18", "0x0003, entry for another 4 KiB of the page's 2 MiB", 1 << 32, seen);
    watch.remap(Mapping::Small);

    let (offered, withheld) = ("0x0003, extended format, 8 large pages", "0x0003, extended format where not offered");
    if features.extended_ranges() {
        watch.remap(Mapping::Large);
        let seen = watch.see(|page| list(ALL_SPACES | EXTENDED_RANGES, all, &[page & !0x1f_ffff | 1 << 11 | 7]));
        seen_by_all(cases, "C21", offered, 1 << 32, seen);
        watch.remap(Mapping::Small);
        cases.skip("C22", withheld, "it is offered to this VM");
    } else {
        cases.skip("C21", offered, "it is not offered to this VM");
        let answer = list(ALL_SPACES | EXTENDED_RANGES, all, &[watch.address()]);
        cases.status("C22", withheld, &[INVALID_PARAMETER], answer);
    }
    cases.status("C23", "0x0002, extended format", &[INVALID_PARAMETER], space(ALL_SPACES | EXTENDED_RANGES, all));
    finish(cases, watch);
}

/// Steps by which CPU 0 and the target wait for each other, and what the target has read.
static STEP: AtomicU64 = AtomicU64::new(0);
static READ: AtomicU64 = AtomicU64::new(0);

fn reach(step: u64) {
    STEP.store(step, Ordering::SeqCst);
}

fn has_reached(patience: u64, step: u64) -> bool {
    cpu::wait_until(patience, || STEP.load(Ordering::SeqCst) >= step)
}

/// Points the watched page at a frame that holds `value`.
fn show(value: u64) {
    let frame = remap::frame(0, usize::from(value & 1 != 0));
    remap::fill(frame, value);
    remap::point(remap::WATCHED, frame, remap::Kind::Plain);
}

/// Reads the page, halts until step 2 with interrupts on, and reads it again.
fn halt_and_read(_cpu: usize) {
    READ.store(remap::load(remap::address(remap::WATCHED)), Ordering::SeqCst);
    reach(1);
    while STEP.load(Ordering::SeqCst) < 2 {
        interrupts::sleep();
    }
    READ.store(remap::load(remap::address(remap::WATCHED)), Ordering::SeqCst);
    reach(3);
}

fn halted_target(cases: &mut Cases) {
    let about = "0x0002, the target is halted";
    show(10);
    reach(0);
    if !cpu::give(1, halt_and_read) {
        cases.skip("C2", about, "CPU 1 is busy");
        return;
    }
    let patience = cases.patience();
    let began = has_reached(patience, 1) && READ.load(Ordering::SeqCst) == 10;
    // Time to halt.
    tsc::pause_until(tsc::now() + tsc::ticks(20_000));
    let interrupts = || taken(1).wake.load(Ordering::SeqCst) + taken(1).unexpected.load(Ordering::SeqCst);
    let before = interrupts();
    show(11);
    let start = tsc::now();
    let answer = space(ALL_SPACES, bit(1));
    let microseconds = tsc::microseconds(tsc::now() - start);
    tsc::pause_until(tsc::now() + tsc::ticks(5_000));
    let woken = interrupts() - before;
    reach(2);
    crate::arch::apic::send(cpu::hardware_id(1), crate::interrupt::WAKE);
    let ended = has_reached(patience, 3);
    let read = READ.load(Ordering::SeqCst);
    cpu::wait_for_all(patience);
    cases.check(
        "C2",
        about,
        "status 0, no wake-up, seen when it goes on",
        format_args!("{} after {microseconds} us, woken {woken} times, seen {}", ShownAnswer(answer), read == 11),
        answer == Ok(0) && began && ended && woken == 0 && read == 11,
    );
}

static STOP: AtomicBool = AtomicBool::new(false);
static RAN: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Spins, and stores the share of the time in which its vCPU ran, in 1/1000.
fn spin_and_count(cpu: usize) {
    let (start, before) = (tsc::now(), hyperv::runtime().unwrap_or(0));
    while !STOP.load(Ordering::Relaxed) {
        SPINS[cpu].fetch_add(1, Ordering::Relaxed);
    }
    let ran = hyperv::runtime().unwrap_or(0).saturating_sub(before);
    let wall = tsc::microseconds(tsc::now() - start).saturating_mul(10);
    RAN[cpu].store(ran.saturating_mul(1000) / wall.max(1), Ordering::SeqCst);
}

/// Calls of C3.
const CALLS: u32 = 100;
/// How often each CPU has gone round in [`spin_and_count`].
static SPINS: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// C3: with more busy vCPUs than pCPUs some targets are always off their CPU.
fn overcommitted(cases: &mut Cases) {
    let about = "0x0002, targets descheduled: the call does not wait for their turn";
    STOP.store(false, Ordering::SeqCst);
    let given = (1..cpu::count()).all(|index| !cpu::is_up(index) || cpu::give(index, spin_and_count));
    let input = place(&[0, ALL_SPACES | ALL_PROCESSORS, 0]);
    let mut all_good = given;
    let mut before_somebody_ran = 0;
    let mut spins = [0; MAX_CPUS];
    for _ in 0..CALLS {
        tsc::pause_until(tsc::now() + tsc::ticks(500));
        let others = || (1..cpu::count()).filter(|&index| cpu::is_up(index));
        others().for_each(|index| spins[index] = SPINS[index].load(Ordering::SeqCst));
        all_good &= at(Control::simple(FLUSH_SPACE), input) == Ok(0);
        before_somebody_ran += u32::from(others().any(|index| spins[index] == SPINS[index].load(Ordering::SeqCst)));
    }
    STOP.store(true, Ordering::SeqCst);
    let finished = cpu::wait_for_all(cases.patience()).is_none();
    let least = (1..cpu::count()).map(|index| RAN[index].load(Ordering::SeqCst)).min().unwrap_or(1000);
    if hyperv::runtime().is_none() || least > 850 {
        cases.skip("C3", about, "every vCPU has a pCPU of its own");
        return;
    }
    // A call that had to wait for all its targets would never return before each of them has spun. How many do depends
    // on what else the computer does: 9 of 100 when it was very busy.
    cases.check(
        "C3",
        about,
        "calls return although some target has not run meanwhile",
        format_args!("{before_somebody_ran} of {CALLS}; a target ran {least}/1000 of the time"),
        all_good && finished && before_somebody_ran > CALLS / 50,
    );
}

/// Reads the page, switches to another root, waits for step 2 there, switches back, and reads it again.
fn leave_space(_cpu: usize) {
    let home = attempt::read_cr3();
    READ.store(remap::load(remap::address(remap::WATCHED)), Ordering::SeqCst);
    let moved = attempt::write_cr3(remap::second_root()).is_ok();
    reach(1);
    while STEP.load(Ordering::SeqCst) < 2 {
        core::hint::spin_loop();
    }
    let back = moved && attempt::write_cr3(home).is_ok();
    READ.store(if back { remap::load(remap::address(remap::WATCHED)) } else { 0 }, Ordering::SeqCst);
    reach(3);
}

fn other_space(cases: &mut Cases) {
    let about = "0x0002 for one space while the target runs in another";
    show(20);
    reach(0);
    if !cpu::give(1, leave_space) {
        cases.skip("C11", about, "CPU 1 is busy");
        return;
    }
    let patience = cases.patience();
    let began = has_reached(patience, 1);
    show(21);
    let answer = by_memory(Control::simple(FLUSH_SPACE), &[tlb::root(), 0, bit(1)]);
    reach(2);
    let ended = has_reached(patience, 3);
    let read = READ.load(Ordering::SeqCst);
    cpu::wait_for_all(patience);
    let way = if control::has_pcid() { "PCIDs are not in use" } else { "there are no PCIDs" };
    cases.check(
        "C11",
        about,
        "status 0, seen after the way back",
        format_args!("{} seen {}; {way}, so the way back flushes too", ShownAnswer(answer), read == 21),
        answer == Ok(0) && began && ended && read == 21,
    );
}

static ROUNDS: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Flushes the other of CPUs 0 and 1 over and over, with interrupts off.
fn flush_the_other(cpu: usize) {
    let words = [0, ALL_SPACES, bit(1 - cpu.min(1))];
    for _ in 0..ROUNDS.load(Ordering::SeqCst) {
        if by_memory(Control::simple(FLUSH_SPACE), &words) != Ok(0) {
            FAILED.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn each_other(cases: &mut Cases) {
    let about = "two vCPUs with interrupts off flush each other";
    let rounds = cases.context.settings.iterations.unwrap_or(2000);
    ROUNDS.store(rounds, Ordering::SeqCst);
    FAILED.store(0, Ordering::SeqCst);
    if !cpu::give(1, flush_the_other) {
        cases.skip("C34", about, "CPU 1 is busy");
        return;
    }
    flush_the_other(0);
    let finished = cpu::wait_for_all(cases.patience()).is_none();
    let failed = FAILED.load(Ordering::SeqCst);
    cases.check(
        "C34",
        about,
        "both come to an end",
        format_args!("{rounds} each, {failed} failed, finished {finished}"),
        finished && failed == 0,
    );
}

/// What the target stores, and what CPU 0 stores, in a device register of eight bits.
const OF_TARGET: u32 = 0xaa;
const OF_CALLER: u32 = 0x55;

/// Stores to the page, which is a device register now and memory then.
fn store_to_page(_cpu: usize) {
    while !STOP.load(Ordering::Acquire) {
        if attempt::store_u32(remap::address(remap::WATCHED), OF_TARGET).is_err() {
            FAILED.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// C37. The page first maps the I/O APIC, so the hypervisor emulates the target's stores; then it maps memory. After
/// the flush no store may reach the device, not even one that the hypervisor had begun.
fn emulated_store(cases: &mut Cases) {
    let about = "the page was a device's, and the hypervisor is carrying out a store to it";
    let frame = remap::frame(0, 0);
    STOP.store(false, Ordering::SeqCst);
    FAILED.store(0, Ordering::SeqCst);
    remap::point(remap::WATCHED, frame, remap::Kind::Plain);
    let Some(device) = boot::io_apic().filter(|_| cpu::give(1, store_to_page)) else {
        cases.skip("C37", about, "no I/O APIC");
        return;
    };
    // The register that selects others: reads return the written value.
    let holds = |value: u32| attempt::load_u32(device) == Ok(value);
    let rounds = cases.context.settings.iterations.unwrap_or(100).min(200);
    let (mut late, mut refused, mut silent) = (0u64, 0u64, 0u64);
    for _ in 0..rounds {
        remap::point(remap::WATCHED, device, remap::Kind::Plain);
        refused += u64::from(space(ALL_SPACES, bit(0) | bit(1)) != Ok(0));
        silent += u64::from(!cpu::wait_until(cases.patience(), || holds(OF_TARGET)));

        remap::point(remap::WATCHED, frame, remap::Kind::Plain);
        refused += u64::from(space(ALL_SPACES, bit(0) | bit(1)) != Ok(0));
        let written = attempt::store_u32(device, OF_CALLER).is_ok();
        late += u64::from(!written || !(0..4).all(|_| holds(OF_CALLER)));
        if silent > 0 {
            break;
        }
    }
    STOP.store(true, Ordering::SeqCst);
    let finished = cpu::wait_for_all(cases.patience()).is_none();
    let faults = FAILED.load(Ordering::SeqCst);
    cases.check(
        "C37",
        about,
        "no store arrives after the call",
        format_args!("{late} of {rounds} late, {refused} refused, {silent} never arrived, {faults} faults"),
        finished && (late, refused, silent, faults) == (0, 0, 0, 0),
    );
}

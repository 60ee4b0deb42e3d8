//! D: interrupts by hypercall.
//!
//! Receivers count their interrupts. A short wait shows that no more arrive.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::cpu_set::CpuSet;
use guest_model::hypercall::{
    ACCESS_DENIED, Control, EVERYBODY, INVALID_CODE, INVALID_INPUT, INVALID_PARAMETER, LONG_SPIN, SEND_IPI,
    SEND_IPI_EX, SPARSE, SUCCESS, sparse, status,
};

use super::{
    Answer, Cases, Context, NEEDS_TWO, NO_INTERFACE, Outcome, SETS_WITHHELD, ShownAnswer, bit, by_memory, by_registers,
};
use crate::arch::{apic, hyperv, interrupts, tsc};
use crate::cpu;
use crate::interrupt::{COUNTED, taken};

const VECTOR: u64 = COUNTED as u64;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    let Some(features) = hyperv::features() else { return NO_INTERFACE };
    let mut cases = Cases::new(context, "hv-ipi");
    long_spin(&mut cases);
    if !features.cluster_ipi() {
        let answer = by_memory(Control::simple(SEND_IPI), &[VECTOR, bit(0)]);
        cases.status("D1w", "0x000B where it is withheld", &[ACCESS_DENIED, INVALID_CODE], answer);
        let answer = by_memory(Control::simple(SEND_IPI_EX), &[VECTOR, EVERYBODY, 0]);
        cases.status("D8w", "0x0015 where it is withheld", &[ACCESS_DENIED, INVALID_CODE], answer);
        cases.skip("D1-D11", "interrupts by hypercall", "withheld from this VM");
    } else if cpu::count() < 2 {
        cases.skip("D1-D11", "interrupts by hypercall", NEEDS_TWO);
    } else {
        one_target(&mut cases);
        vectors(&mut cases);
        self_and_nobody(&mut cases);
        sets(&mut cases, features);
        twice(&mut cases);
    }
    cases.skip("D12", "target in a read of GUEST_IDLE", "the MSR is not offered");
    cases.skip("D14", "0x009A", "the call is not offered");
    cases.skip("D15", "Linux boots and uses the calls", "a test of its own");
    cases.skip("D16", "FreeBSD boots", "a test of its own");
    cases.done()
}

fn long_spin(cases: &mut Cases) {
    let control = Control::simple(LONG_SPIN);
    cases.result("D13a", "0x0008 fast", u64::from(SUCCESS), by_registers(control, &[1000, 0]));
    cases.result("D13b", "0x0008 fast, count 0xFFFFFFFF", u64::from(SUCCESS), by_registers(control, &[0xffff_ffff, 0]));
    let rep = Control::rep(LONG_SPIN, 1);
    cases.status("D13c", "0x0008 with rep count 1", &[INVALID_INPUT], by_registers(rep, &[1000, 0]));
}

fn counted(cpu: usize) -> u64 {
    taken(cpu).counted.load(Ordering::SeqCst)
}

/// Runs `send`, and returns its result. Also returns the smallest and the largest number of interrupts that one of
/// `receivers` took, and the number that all other CPUs took.
fn delivered(cases: &Cases, receivers: &CpuSet, send: impl FnOnce() -> Answer) -> (Answer, u64, u64, u64) {
    let before: [u64; crate::arch::boot::MAX_CPUS] = core::array::from_fn(counted);
    let gained = |index: usize| counted(index) - before[index];
    let answer = send();
    cpu::wait_until(cases.patience(), || receivers.iter().all(|index| gained(index) > 0));
    // Time for one too many.
    let late = tsc::now() + tsc::ticks(5_000);
    cpu::wait_until(tsc::ticks(10_000), || tsc::now() >= late);
    let least = receivers.iter().map(gained).min().unwrap_or(0);
    let most = receivers.iter().map(gained).max().unwrap_or(0);
    let strangers = (0..cpu::count()).filter(|index| !receivers.contains(*index)).map(gained).sum();
    (answer, least, most, strangers)
}

/// A case in which each of `receivers` takes exactly one interrupt, and no other CPU takes one.
fn one_each(cases: &mut Cases, name: &str, about: &str, receivers: &CpuSet, send: impl FnOnce() -> Answer) {
    let (answer, least, most, strangers) = delivered(cases, receivers, send);
    let wanted = u64::from(!receivers.is_empty());
    cases.check(
        name,
        about,
        "status 0, one interrupt each",
        format_args!("{} receivers took {least} to {most}, others {strangers}", ShownAnswer(answer)),
        answer == Ok(0) && (least, most, strangers) == (wanted, wanted, 0),
    );
}

/// One CPU, other than 0, that a mask reaches.
fn target() -> (usize, CpuSet) {
    let target = (1..cpu::count()).find(|index| bit(*index) != 0).unwrap_or(1);
    (target, [target].into_iter().collect())
}

fn one_target(cases: &mut Cases) {
    let (target, set) = target();
    let simple = Control::simple(SEND_IPI);
    one_each(cases, "D1", "0x000B in memory, one target", &set, || by_memory(simple, &[VECTOR, bit(target)]));
    one_each(cases, "D2", "0x000B fast", &set, || by_registers(simple, &[VECTOR, bit(target)]));
    // The target sleeps with interrupts on whenever it has no job.
    tsc::pause_until(tsc::now() + tsc::ticks(20_000));
    one_each(cases, "D11", "0x000B, the target is halted", &set, || by_registers(simple, &[VECTOR, bit(target)]));
}

fn vectors(cases: &mut Cases) {
    let (target, _) = target();
    let simple = Control::simple(SEND_IPI);
    let fast = |first: u64, mask: u64| by_registers(simple, &[first, mask]);
    let allowed = [INVALID_PARAMETER, INVALID_INPUT];
    cases.status("D3", "0x000B fast, RDX bit 32 set", &allowed, fast(VECTOR | 1 << 32, bit(target)));
    // Sent to no CPU: the receiver's use of these vectors is another question.
    cases.status("D4a", "0x000B, vector 0x0F", &[INVALID_PARAMETER], fast(0x0f, 0));
    cases.status("D4b", "0x000B, vector 0x10", &[SUCCESS], fast(0x10, 0));
    cases.status("D4c", "0x000B, vector 0xFF", &[SUCCESS], fast(0xff, 0));
    cases.status("D4d", "0x000B, vector 0x100", &[INVALID_PARAMETER], fast(0x100, 0));
    let memory = |first: u64| by_memory(simple, &[first, bit(target)]);
    cases.status("D5a", "0x000B, target VTL 1", &[INVALID_PARAMETER], memory(VECTOR | 0x11 << 32));
    cases.status("D5b", "0x000B, reserved byte 5", &[INVALID_PARAMETER], memory(VECTOR | 1 << 40));
    cases.status("D5c", "0x000B, reserved byte 7", &[INVALID_PARAMETER], memory(VECTOR | 1 << 56));
}

/// Takes no interrupts until CPU 0 allows it.
fn refuse_interrupts(_cpu: usize) {
    apic::accept(false);
    STEP.store(1, Ordering::SeqCst);
    while STEP.load(Ordering::SeqCst) < 2 {
        core::hint::spin_loop();
    }
    apic::accept(true);
}

static STEP: AtomicU64 = AtomicU64::new(0);
static TOOK: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn self_and_nobody(cases: &mut Cases) {
    let (target, _) = target();
    let simple = Control::simple(SEND_IPI);
    let both: CpuSet = [0, target].into_iter().collect();
    one_each(cases, "D6", "0x000B, mask with the caller in it", &both, || {
        by_memory(simple, &[VECTOR, bit(0) | bit(target)])
    });
    one_each(cases, "D7a", "0x000B, empty mask", &CpuSet::EMPTY, || by_memory(simple, &[VECTOR, 0]));

    let present = (0..cpu::count()).map(bit).fold(0, |mask, bit| mask | bit);
    let about = "0x000B, mask of absent VPs only";
    if present == u64::MAX {
        cases.skip("D7b", about, "all of the first 64 VPs exist");
    } else {
        one_each(cases, "D7b", about, &CpuSet::EMPTY, || by_memory(simple, &[VECTOR, !present]));
    }

    let about = "0x000B, the target's APIC is disabled";
    STEP.store(0, Ordering::SeqCst);
    if !cpu::give(target, refuse_interrupts) {
        cases.skip("D7c", about, "the target is busy");
        return;
    }
    cpu::wait_until(cases.patience(), || STEP.load(Ordering::SeqCst) == 1);
    let before = counted(target);
    let answer = by_memory(simple, &[VECTOR, bit(target)]);
    STEP.store(2, Ordering::SeqCst);
    let finished = cpu::wait_for_all(cases.patience()).is_none();
    tsc::pause_until(tsc::now() + tsc::ticks(5_000));
    let took = counted(target) - before;
    cases.check(
        "D7c",
        about,
        "status 0, nothing",
        format_args!("{} took {took}", ShownAnswer(answer)),
        answer == Ok(0) && finished && took == 0,
    );
}

fn sets(cases: &mut Cases, features: hyperv::Features) {
    if !features.ex_sets() {
        cases.skip("D8-D9", "interrupts to sets", SETS_WITHHELD);
        return;
    }
    let send = |format: u64, valid: u64, banks: &[u64]| {
        let mut words = [0; 80];
        words[..3].copy_from_slice(&[VECTOR, format, valid]);
        words.iter_mut().skip(3).zip(banks).for_each(|(word, bank)| *word = *bank);
        by_memory(Control::simple(SEND_IPI_EX).variable(banks.len() as u64), &words)
    };
    let about = "0x0015, sparse set of VP 65 alone";
    match (1..cpu::count()).find(|index| hyperv::vp_index(*index) == Some(65)) {
        Some(index) => {
            let set = [index].into_iter().collect();
            one_each(cases, "D8a", about, &set, || send(SPARSE, 2, &[1 << 1]));
        }
        None => cases.skip("D8a", about, "there are not more than 65 vCPUs"),
    }
    let ends: CpuSet = [1, cpu::count() - 1].into_iter().collect();
    let processors: CpuSet = ends.iter().filter_map(hyperv::vp_index).collect();
    let (valid, banks) = sparse(&processors);
    one_each(cases, "D8b", "0x0015, sparse set of the first and the last", &ends, || send(SPARSE, valid, banks));
    one_each(cases, "D8c", "0x0015, everybody", &cpu::up(), || send(EVERYBODY, 0, &[]));
    one_each(cases, "D8d", "0x0015, the empty set", &CpuSet::EMPTY, || send(SPARSE, 0, &[]));
    cases.status("D9a", "0x0015, format 2", &[INVALID_PARAMETER], send(2, 1, &[1]));
    cases.status("D9b", "0x0015, a bank less than listed", &[INVALID_INPUT], send(SPARSE, 3, &[1]));
    cases.status("D9c", "0x0015, a bank more than listed", &[INVALID_INPUT], send(SPARSE, 1, &[1, 0]));
}

/// Holds interrupts off until two have been sent, lets them in, then waits for a third.
fn take_late(cpu: usize) {
    STEP.store(1, Ordering::SeqCst);
    while STEP.load(Ordering::SeqCst) < 2 {
        core::hint::spin_loop();
    }
    let before = counted(cpu);
    interrupts::drain();
    TOOK[0].store(counted(cpu) - before, Ordering::SeqCst);
    STEP.store(3, Ordering::SeqCst);
    interrupts::enable();
    while STEP.load(Ordering::SeqCst) < 4 || counted(cpu) - before < 2 && tsc::now() < LAST.load(Ordering::SeqCst) {
        core::hint::spin_loop();
    }
    interrupts::disable();
    TOOK[1].store(counted(cpu) - before, Ordering::SeqCst);
}

static LAST: AtomicU64 = AtomicU64::new(0);

fn twice(cases: &mut Cases) {
    let about = "0x000B twice before the target takes it, once after";
    let (target, _) = target();
    STEP.store(0, Ordering::SeqCst);
    if !cpu::give(target, take_late) {
        cases.skip("D10", about, "the target is busy");
        return;
    }
    let patience = cases.patience();
    let send = || by_registers(Control::simple(SEND_IPI), &[VECTOR, bit(target)]);
    cpu::wait_until(patience, || STEP.load(Ordering::SeqCst) == 1);
    let mut all_good = [send(), send()] == [Ok(0), Ok(0)];
    STEP.store(2, Ordering::SeqCst);
    cpu::wait_until(patience, || STEP.load(Ordering::SeqCst) == 3);
    all_good &= send().is_ok_and(|result| status(result) == SUCCESS);
    LAST.store(tsc::now() + tsc::seconds(5), Ordering::SeqCst);
    STEP.store(4, Ordering::SeqCst);
    let finished = cpu::wait_for_all(patience).is_none();
    let took = [&TOOK[0], &TOOK[1]].map(|took| took.load(Ordering::SeqCst));
    cases.check(
        "D10",
        about,
        "one of the two, and the third",
        format_args!("took {} at first, {} in all", took[0], took[1]),
        all_good && finished && took == [1, 2],
    );
}

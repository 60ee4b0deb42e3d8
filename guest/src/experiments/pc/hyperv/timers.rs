//! E: synthetic timers, in direct mode and by messages (TLFS, "Timers" and "Inter-Partition Communication").
//!
//! All of it is this CPU's own: its message page, its sources, its timers.

use core::sync::atomic::{AtomicU64, Ordering};

use super::{Cases, Context, NO_INTERFACE, Outcome};
use crate::arch::attempt::{Fault, rdmsr, wrmsr};
use crate::arch::hyperv::{self, ENABLE, msr};
use crate::arch::{cpu_local, interrupts, tsc};
use crate::cpu;
use crate::interrupt::{COUNTED, taken};

const PERIODIC: u64 = 1 << 1;
const AUTO_ENABLE: u64 = 1 << 3;
const DIRECT: u64 = 1 << 12 | (COUNTED as u64) << 4;
/// The source that messages go to.
const SINT: u64 = 2;
const TO_SINT: u64 = SINT << 16;

const TIMER_EXPIRED: u64 = 0x8000_0010;
/// Another message waits: bit 0 of the sixth byte of a slot.
const PENDING: u64 = 1 << 40;

/// 1 ms in units of the reference time.
const MILLISECOND: u64 = 10_000;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    let Some(features) = hyperv::features() else { return NO_INTERFACE };
    if !features.timers() {
        return Outcome::Unsupported("no synthetic timers");
    }
    let mut cases = Cases::new(context, "hv-timers");
    direct(&mut cases);
    periodic(&mut cases);
    halted(&mut cases);
    messages(&mut cases);
    bad_values(&mut cases);
    let registers = (0..8).map(|number| msr::STIMER0_CONFIG + number);
    let off = registers.chain([msr::SCONTROL, msr::SIMP]).all(|number| wrmsr(number, 0).is_ok());
    cases.check("E10", "all off again", "no fault", format_args!("{off}"), off);
    cases.done()
}

fn counted() -> u64 {
    taken(cpu_local::index()).counted.load(Ordering::SeqCst)
}

fn time() -> u64 {
    rdmsr(msr::TIME_REF_COUNT).unwrap_or(0)
}

fn config(timer: u32) -> u32 {
    msr::STIMER0_CONFIG + 2 * timer
}

fn set(timer: u32, how: u64, count: u64) -> bool {
    wrmsr(config(timer), how).is_ok() && wrmsr(config(timer) + 1, count).is_ok()
}

/// Waits until the vector was taken `wanted` times since it had been `before`, and answers how often and when it was.
fn wait_for(cases: &Cases, before: u64, wanted: u64) -> (u64, u64) {
    cpu::wait_until(cases.patience(), || counted() - before >= wanted);
    (counted() - before, time())
}

/// Time for an interrupt too many, with interrupts on.
fn let_pass(milliseconds: u64) {
    cpu::wait_until(tsc::ticks(1000 * milliseconds), || false);
}

fn direct(cases: &mut Cases) {
    let before = counted();
    let wanted = time() + 5 * MILLISECOND;
    let is_set = set(0, AUTO_ENABLE | DIRECT, wanted);
    let (_, at) = wait_for(cases, before, 1);
    let_pass(2);
    let (times, left) = (counted() - before, rdmsr(config(0)));
    cases.check(
        "E1",
        "STIMER0 in direct mode, started by its count",
        "one interrupt, not before its time; not enabled any more",
        format_args!(
            "{times} interrupts, {} units after its time, configuration {:#x}",
            at.wrapping_sub(wanted),
            left.unwrap_or(u64::MAX)
        ),
        is_set && times == 1 && at >= wanted && left == Ok(AUTO_ENABLE | DIRECT),
    );

    let before = counted();
    let is_set = set(0, AUTO_ENABLE | DIRECT, 1);
    let (times, _) = wait_for(cases, before, 1);
    cases.check(
        "E2",
        "STIMER0 at a time that has passed",
        "an interrupt at once",
        format_args!("{times} interrupts"),
        is_set && times == 1,
    );

    let before = counted();
    let is_set = set(0, AUTO_ENABLE | DIRECT, time() + 5 * MILLISECOND) && wrmsr(config(0) + 1, 0).is_ok();
    let_pass(10);
    let (times, left) = (counted() - before, rdmsr(config(0)));
    cases.check(
        "E3",
        "STIMER0 stopped by a count of 0",
        "no interrupt, not enabled",
        format_args!("{times} interrupts, configuration {:#x}", left.unwrap_or(u64::MAX)),
        is_set && times == 0 && left == Ok(AUTO_ENABLE | DIRECT),
    );
}

fn periodic(cases: &mut Cases) {
    let before = counted();
    let start = time();
    let is_set = wrmsr(config(3) + 1, 2 * MILLISECOND).is_ok() && wrmsr(config(3), ENABLE | PERIODIC | DIRECT).is_ok();
    let (times, at) = wait_for(cases, before, 5);
    let stopped = wrmsr(config(3), 0).is_ok();
    let (passed, after) = (at.saturating_sub(start), counted());
    let_pass(5);
    let more = counted() - after;
    cases.check(
        "E4",
        "STIMER3 every 2 ms, then off",
        "five interrupts take 10 ms or more; none when it is off",
        format_args!("{times} interrupts in {passed} units, {more} later"),
        is_set && stopped && times >= 5 && passed >= 10 * MILLISECOND && more == 0,
    );
}

fn halted(cases: &mut Cases) {
    let before = counted();
    let wanted = time() + 20 * MILLISECOND;
    let is_set = set(1, AUTO_ENABLE | DIRECT, wanted);
    let patience = tsc::now() + cases.patience();
    while counted() == before && tsc::now() < patience {
        interrupts::sleep();
    }
    let (times, at) = (counted() - before, time());
    cases.check(
        "E5",
        "STIMER1 while the CPU is halted",
        "one interrupt, not before its time",
        format_args!("{times} interrupts, {} units after its time", at.wrapping_sub(wanted)),
        is_set && times == 1 && at >= wanted,
    );
}

/// The words of the slot: type, size and flags; sender; timer; expiration; delivery.
fn slot() -> &'static [AtomicU64] {
    let words = hyperv::spare_page().words();
    let first = usize::try_from(SINT).unwrap_or(0) * 32;
    words.get(first..first + 5).unwrap_or(&[])
}

fn word(number: usize) -> u64 {
    slot().get(number).map_or(0, |word| word.load(Ordering::SeqCst))
}

/// Frees the slot as a kernel does. Answers whether another message waits.
fn free() -> bool {
    let old = slot().first().map_or(0, |word| word.fetch_and(!0xffff_ffff, Ordering::SeqCst));
    old & PENDING != 0
}

fn messages(cases: &mut Cases) {
    for word in hyperv::spare_page().words() {
        word.store(0, Ordering::SeqCst);
    }
    let sint = msr::SINT0 + u32::try_from(SINT).unwrap_or(0);
    let is_up = wrmsr(sint, u64::from(COUNTED)).is_ok()
        && wrmsr(msr::SIMP, hyperv::spare_page().address() | ENABLE).is_ok()
        && wrmsr(msr::SCONTROL, ENABLE).is_ok();
    let before = counted();
    let wanted = time() + 3 * MILLISECOND;
    let is_set = set(0, AUTO_ENABLE | TO_SINT, wanted);
    let (times, at) = wait_for(cases, before, 1);
    let (kind, timer, expired, delivered) = (word(0), word(2), word(3), word(4));
    cases.check(
        "E6",
        "STIMER0 by a message to SINT2",
        "type 80000010, 24 bytes, timer 0, its expiration, delivered between then and now",
        format_args!("{times} interrupts, first word {kind:#x}, timer {timer}, {expired} of {wanted}, {delivered}"),
        is_up
            && is_set
            && times == 1
            && kind == TIMER_EXPIRED | 24 << 32
            && timer == 0
            && expired == wanted
            && (wanted..=at).contains(&delivered),
    );

    // The slot is occupied: the next message waits, and says so.
    let before = counted();
    let is_set = set(1, AUTO_ENABLE | TO_SINT, time() + MILLISECOND);
    let flagged = cpu::wait_until(cases.patience(), || word(0) & PENDING != 0);
    let early = counted() - before;
    let (first, waits) = (word(2), free());
    let_pass(2);
    let silent = word(0) & 0xffff_ffff;
    let told = wrmsr(msr::EOM, 0).is_ok();
    let (times, _) = wait_for(cases, before, 1);
    cases.check(
        "E7",
        "STIMER1 while the slot is occupied, then EOM",
        "the slot says that a message waits; it comes with EOM, not before",
        format_args!(
            "flagged {flagged}, {early} interrupts too early, timer {first} then {}, {times} interrupts, before EOM {silent:#x}",
            word(2),
        ),
        is_set && flagged && waits && told && early == 0 && first == 0 && silent == 0 && word(2) == 1 && times == 1,
    );
    let waits = free();
    cases.check("E8", "the last message", "nothing waits", format_args!("waits {waits}"), !waits);
}

fn bad_values(cases: &mut Cases) {
    let gp = |result: Result<(), Fault>| result.is_err_and(|fault| fault.vector == Fault::GP);
    let refused = [
        gp(wrmsr(config(2), 1 << 13)),
        gp(wrmsr(config(2), 1 << 63)),
        gp(wrmsr(config(2), 1 << 12 | 15 << 4)),
        gp(wrmsr(msr::SVERSION, 1)),
        gp(wrmsr(msr::SINT0 + 3, 15)),
        gp(rdmsr(msr::SINT0 + 16).map(|_| ())),
    ];
    let count = refused.iter().filter(|refused| **refused).count();
    // To source 0, which no timer can send to: it stays off.
    let stays_off = set(2, ENABLE, 1) && rdmsr(config(2)) == Ok(0);
    cases.check(
        "E9",
        "reserved bits, vectors of exceptions, the version, a SINT too many; a timer to SINT0",
        "#GP for each; off",
        format_args!("{count} of {} refused, off {stays_off}", refused.len()),
        count == refused.len() && stays_off,
    );
}

//! Starts and ends traces, and writes and reads events.

use alloc::vec::Vec;

use abi::counters::ExitReason;
use abi::trace::{Event, Events, RunEnd, What};
use crossbeam_utils::CachePadded;
use spin::Once;

use super::longest;
use super::ring::{OutOfMemory, Ring};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::cpu::{self, scheduler};
use crate::sync::{AtomicBool, AtomicU64, Ordering, per_host};

per_host! {
    /// Whether a trace runs.
    static IS_ON: CachePadded<AtomicBool> = CachePadded::new(AtomicBool::new(false));
    /// The time of the last request for events, in host ticks.
    static ASKED_AT: AtomicU64 = AtomicU64::new(0);
    static RINGS: Once<Vec<Ring>> = Once::new();
}
/// A trace ends after this time without a request for its events: its reader has ended.
const FORGOTTEN_SECONDS: u64 = 10;

/// Whether a trace runs.
#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Whether somebody looks at each exit: a trace runs, or [stretches without interrupts](super::longest) are measured.
#[inline]
pub(crate) fn looks() -> bool {
    is_on() || longest::is_on()
}

/// Starts a trace; drops unread events of an earlier one.
///
/// # Errors
/// At the first time: too little memory for the rings.
pub(crate) fn start() -> Result<(), OutOfMemory> {
    let rings = match RINGS.get() {
        Some(rings) => rings,
        None => {
            let rings = (0..cpu::count()).map(|_| Ring::new(preemption_point)).collect::<Result<Vec<_>, _>>()?;
            RINGS.call_once(|| rings)
        }
    };
    rings.iter().for_each(Ring::forget);
    ASKED_AT.store(Machine::now(), Ordering::Relaxed);
    IS_ON.store(true, Ordering::SeqCst);
    // vCPUs with pCPUs of their own would not notice for a long time.
    scheduler::runners().for_each(|cpu| Machine::kick(cpu.id));
    Ok(())
}

/// Ends the trace. Its events can still be read.
pub(crate) fn stop() {
    IS_ON.store(false, Ordering::SeqCst);
}

/// Whether a trace runs and has a reader. Ends a trace without one.
pub(crate) fn goes_on() -> bool {
    if is_on() && Machine::now().wrapping_sub(ASKED_AT.load(Ordering::Relaxed)) > FORGOTTEN_SECONDS * Machine::hz() {
        stop();
    }
    is_on()
}

/// The oldest events of a pCPU. `None` if there is no such pCPU.
pub(crate) fn read(pcpu: u32) -> Option<Events> {
    if pcpu as usize >= cpu::count() {
        return None;
    }
    ASKED_AT.store(Machine::now(), Ordering::Relaxed);
    let ring = RINGS.get().and_then(|rings| rings.get(pcpu as usize));
    Some(ring.map_or(Events { lost: 0, events: Vec::new() }, Ring::take))
}

/// This pCPU begins to run a vCPU.
pub(crate) fn run_began(vm: u32, vcpu: u32) {
    push(Machine::now(), What::RunBegan { vm, vcpu });
}

/// This pCPU stops running the vCPU.
pub(crate) fn run_ended(end: RunEnd) {
    push(Machine::now(), What::RunEnded(end));
}

/// The guest was left `at` this time, and its exit has been handled.
pub(crate) fn exit(at: u64, reason: ExitReason) {
    push(at, What::Exit { reason, ticks: short(Machine::now().wrapping_sub(at)) });
}

/// This pCPU kicks this many others, beginning with `first`.
#[inline]
pub(crate) fn kicked(pcpus: u32, first: u32) {
    if is_on() {
        push(Machine::now(), What::Kicked { pcpus, first });
    }
}

/// The running vCPU has flushed TLBs of others, which it began `at` this time.
#[inline]
pub(crate) fn flushed(at: u64, targets: u32, kicked: u32) {
    if is_on() {
        push(at, What::Flushed { targets, kicked, ticks: short(Machine::now().wrapping_sub(at)) });
    }
}

#[cold]
fn push(at: u64, what: What) {
    let cpu = cpu::this().id.index();
    if is_on()
        && let Some(ring) = RINGS.get().and_then(|rings| rings.get(cpu))
    {
        ring.push(Event { at, what });
    }
}

fn short(ticks: u64) -> u32 {
    u32::try_from(ticks).unwrap_or(u32::MAX)
}

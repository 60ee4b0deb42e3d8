//! Which pCPUs run vCPUs, and which of them run vCPUs of one VM at a time: the threads of a core, with `smt=core`.
//!
//! Such *mates* have one run queue, that of the one with the lowest number, their *leader*. With another `smt` each
//! pCPU is its own leader.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

use log::info;
use sched::{CpuId, CpuSet, Smt};
use spin::Once;

use crate::arch::{Arch, Machine};
use crate::cpu::{PerCpu, all, by_id};
use crate::mutants::{self, Mutant};
use crate::sync::per_host;

per_host! {
    /// Who is used how, for each way: whoever asks first finds out for all.
    static USED: [Once<Used>; WAYS.len()] = [const { Once::new() }; WAYS.len()];
    /// The way that was chosen.
    static SMT: AtomicUsize = AtomicUsize::new(0);
}

const WAYS: [Smt; 3] = [Smt::On, Smt::Off, Smt::Core];

struct Used {
    runners: CpuSet,
    /// The mates of each pCPU, itself among them.
    mates: Box<[CpuSet]>,
    /// Whether some pCPU has others.
    by_core: bool,
}

/// Sets how vCPUs use the threads of a core, as the option `smt` says. Must be called before there are VMs.
pub(crate) fn choose(smt: Option<&str>) {
    let way = match smt {
        Some("off") => Smt::Off,
        Some("core") => Smt::Core,
        _ => Smt::On,
    };
    SMT.store(WAYS.iter().position(|other| *other == way).unwrap_or(0), Ordering::Relaxed);
}

/// How they use them.
pub(crate) fn chosen() -> Smt {
    WAYS[SMT.load(Ordering::Relaxed)]
}

/// Says what that makes of this machine.
pub(crate) fn report() {
    let (used, cores) = (runners().count(), leaders().count());
    match chosen() {
        Smt::On => {}
        Smt::Off => info!("smt=off: {used} of {} pCPUs run vCPUs", all().len()),
        Smt::Core if by_core() => info!("smt=core: {used} pCPUs run vCPUs, on {cores} cores with one VM at a time"),
        Smt::Core => info!("smt=core: no core has two threads that run vCPUs"),
    }
}

/// Nobody waits for another here.
fn used() -> &'static Used {
    let way = SMT.load(Ordering::Relaxed);
    USED[way].get().unwrap_or_else(|| find(way))
}

#[cold]
fn find(way: usize) -> &'static Used {
    let smt = WAYS[way];
    let cores = || all().iter().map(|cpu| Machine::core_of(cpu));
    let runners = sched::runners(cores(), Machine::spares_first_cpu(), smt);
    let mates: Vec<CpuSet> = all().iter().map(|cpu| sched::mates(cpu.id, cores(), runners, smt)).collect();
    let by_core = mates.iter().any(|mates| mates.len() > 1);
    let found = Used { runners, mates: mates.into(), by_core };
    USED[way].call_once(|| found)
}

/// Whether a pCPU runs vCPUs: all do, except the first if the machine requires that, and threads that are not used.
pub(super) fn runs_vcpus(cpu: &PerCpu) -> bool {
    used().runners.contains(cpu.id)
}

/// The pCPUs that run vCPUs.
pub(crate) fn runners() -> impl DoubleEndedIterator<Item = &'static PerCpu> + Clone {
    all().iter().map(|cpu| &**cpu).filter(|cpu| runs_vcpus(cpu))
}

/// Whether there are pCPUs that run vCPUs of one VM at a time.
pub(crate) fn by_core() -> bool {
    used().by_core
}

/// The pCPUs that run vCPUs of one VM at a time with this one, itself among them.
pub(super) fn mates(cpu: CpuId) -> CpuSet {
    used().mates[cpu.index()]
}

/// The one of them that has the run queue.
pub(super) fn leader(cpu: &PerCpu) -> &'static PerCpu {
    let first = mates(cpu.id).first().filter(|_| !mutants::is(Mutant::QueueForEachThread));
    by_id(first.unwrap_or(cpu.id))
}

/// The pCPUs that have run queues.
pub(super) fn leaders() -> impl Iterator<Item = &'static PerCpu> + Clone {
    runners().filter(|cpu| mates(cpu.id).first() == Some(cpu.id))
}

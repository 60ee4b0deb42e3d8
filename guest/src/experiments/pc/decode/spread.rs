//! Code that accesses a device, on pages all over the memory. Half of the CPUs execute it, the others write beside it,
//! until someone types `q` or for `seconds=`.
//!
//! A hypervisor that write-protects cached code protects each executed page, and makes the page writable again on a
//! write. Writes come from the guest and, through emulated instructions, from the hypervisor itself. The experiment is
//! for a tool that changes the mappings meanwhile: a dirty log that begins and ends.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::random::Random;

use super::{NEEDS_XAPIC, local_apic};
use crate::arch::boot::MAX_CPUS;
use crate::arch::encode::{END, LOAD_RDI};
use crate::arch::probe::{self, Level, RAX, RDI, Registers};
use crate::arch::ram::{LARGE_BYTES, Ram};
use crate::arch::{apic, tlb, tsc};
use crate::cpu;
use crate::experiments::dirty::{NO_MEMORY, is_to_quit, memory};
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// Executions on one page.
const EXECUTIONS: u64 = 16;
/// Bytes that a CPU writes to one page before it looks where another one executes.
const BYTES: u64 = 256;

/// The page that each CPU executes.
static PAGES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];
static STOP: AtomicBool = AtomicBool::new(false);
static SEED: AtomicU64 = AtomicU64::new(0);
/// The local APIC's version, which the code loads.
static VERSION: AtomicU64 = AtomicU64::new(0);
/// When it is over, whether `q` is typed or not.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Counts of one CPU.
#[repr(align(128))]
struct Done {
    executions: AtomicU64,
    wrong: AtomicU64,
}

static DONE: [Done; MAX_CPUS] = [const { Done { executions: AtomicU64::new(0), wrong: AtomicU64::new(0) } }; MAX_CPUS];

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let settings = context.settings;
    let Some(memory) = memory(0, settings.memory) else { return NO_MEMORY };
    let mut code = [END; 8];
    code[..LOAD_RDI.len()].copy_from_slice(LOAD_RDI);
    for page in 0..count(memory) {
        memory.word(offset(page)).store(u64::from_le_bytes(code), Ordering::SeqCst);
    }
    for done in &DONE {
        done.executions.store(0, Ordering::SeqCst);
        done.wrong.store(0, Ordering::SeqCst);
    }
    VERSION.store(apic::read(apic::VERSION).into(), Ordering::SeqCst);
    SEED.store(settings.seed.unwrap_or(1), Ordering::SeqCst);
    LAST.store(settings.seconds.map_or(u64::MAX, |seconds| tsc::now() + tsc::seconds(seconds)), Ordering::SeqCst);
    STOP.store(false, Ordering::SeqCst);
    record!("begin", experiment = "decode-spread", cpus = cpu::count(), pages = count(memory));

    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, work) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    work(0);
    let stuck = cpu::wait_for_all(tsc::seconds(settings.stall.unwrap_or(60)));
    let sum = |of: fn(&Done) -> &AtomicU64| DONE.iter().map(|done| of(done).load(Ordering::Relaxed)).sum::<u64>();
    let (executions, wrong) = (sum(|done| &done.executions), sum(|done| &done.wrong));
    record!("record", experiment = "decode-spread", executions = executions, wrong = wrong);
    Outcome::Done { failures: wrong + u64::from(stuck.is_some()) }
}

fn count(memory: Ram) -> u64 {
    memory.bytes() / LARGE_BYTES
}

/// Where the code on page `number` begins.
fn offset(number: u64) -> u64 {
    number * LARGE_BYTES
}

fn work(cpu: usize) {
    let Some(memory) = memory(0, None) else { return };
    tlb::flush_all();
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    while !STOP.load(Ordering::Relaxed) {
        if cpu.is_multiple_of(2) {
            let page = random.below(count(memory));
            PAGES[cpu].store(page, Ordering::Relaxed);
            (0..EXECUTIONS).for_each(|_| execute(cpu, memory, page));
        } else {
            let executing = random.index(cpu::count().div_ceil(2)) * 2;
            write(memory, PAGES[executing].load(Ordering::Relaxed), random.bits());
        }
        if cpu == 0 && (is_to_quit() || tsc::now() > LAST.load(Ordering::Relaxed)) {
            STOP.store(true, Ordering::Relaxed);
        }
    }
}

fn execute(cpu: usize, memory: Ram, page: u64) {
    let rip = core::ptr::from_ref(memory.word(offset(page))) as u64;
    let start = Registers::at(rip).with(RDI, local_apic(apic::VERSION));
    let seen = probe::run(&start, Level::Kernel).value(RAX);
    let done = &DONE[cpu];
    done.executions.fetch_add(1, Ordering::Relaxed);
    done.wrong.fetch_add(u64::from(seen != Ok(VERSION.load(Ordering::Relaxed))), Ordering::Relaxed);
}

/// Writes behind the code: a word by the guest, the bytes behind it by the hypervisor.
fn write(memory: Ram, page: u64, bits: u64) {
    let beside = offset(page) + 64;
    memory.word(beside).store(bits, Ordering::Relaxed);
    memory.filled_by_host(beside + 8, BYTES);
}

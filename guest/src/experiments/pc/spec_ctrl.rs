//! SPEC_CTRL belongs to a vCPU: each CPU reads what it has written, whoever runs in between on the same pCPU.
//!
//! All CPUs write values that no two of them share for long, leave the guest in several ways, sleep, and read. Run more
//! vCPUs than pCPUs, and VMs with different seeds beside each other. Half of the time a CPU keeps the register at zero
//! for a while, as kernels do.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_model::random::Random;

use crate::arch::attempt;
use crate::arch::control::{self, cpuid};
use crate::arch::{controller, interrupts, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::interrupt::TIMER;
use crate::record::record;

const SPEC_CTRL: u32 = 0x48;
const PRED_CMD: u32 = 0x49;
const PRED_CMD_IBPB: u64 = 1;

static SEED: AtomicU64 = AtomicU64::new(0);
static BITS: AtomicU64 = AtomicU64::new(0);
static IS_OVER: AtomicBool = AtomicBool::new(false);
static READS: AtomicU64 = AtomicU64::new(0);
static FOREIGN: AtomicU64 = AtomicU64::new(0);

/// The bits of SPEC_CTRL that CPUID shows: IBRS, STIBP, SSBD, PSFD, by Intel's leaf or by AMD's.
pub(super) fn bits() -> u64 {
    let (seven, later, extended) = (cpuid(7, 0).edx, cpuid(7, 2).edx, cpuid(0x8000_0008, 0).ebx);
    let bit = |is_shown: bool, bit: u32| u64::from(is_shown) << bit;
    let has = |register: u32, bit: u32| register >> bit & 1 != 0;
    bit(has(seven, 26) || has(extended, 14), 0)
        | bit(has(seven, 27) || has(extended, 15), 1)
        | bit(has(seven, 31) || has(extended, 24), 2)
        | bit(has(later, 0) || has(extended, 28), 7)
}

/// Whether CPUID shows PRED_CMD.
pub(super) fn has_commands() -> bool {
    cpuid(7, 0).edx >> 26 & 1 != 0 || cpuid(0x8000_0008, 0).ebx >> 12 & 1 != 0
}

pub(super) fn run(context: &Context) -> Outcome {
    let bits = bits();
    if bits == 0 {
        return Outcome::Unsupported("no SPEC_CTRL");
    }
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    BITS.store(bits, Ordering::SeqCst);
    IS_OVER.store(false, Ordering::SeqCst);
    let at_start = attempt::rdmsr(SPEC_CTRL);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, work) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    let mut random = context.random(0);
    let mut own = 0;
    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(3));
    while tsc::now() < end {
        turn(0, &mut random, &mut own);
    }
    IS_OVER.store(true, Ordering::SeqCst);
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    let _ = attempt::wrmsr(SPEC_CTRL, 0);

    let foreign = FOREIGN.load(Ordering::SeqCst);
    record!(
        "record",
        experiment = "spec-ctrl",
        bits = format_args!("{bits:#x}"),
        cpus = cpu::count(),
        reads = READS.load(Ordering::SeqCst),
        foreign = foreign,
    );
    let seen = at_start.map_or(u64::MAX, |value| value);
    let wrong = context.expect("spec-ctrl", format_args!("start"), 0, format_args!("{seen:#x}"), seen == 0);
    Outcome::Done { failures: foreign + u64::from(stuck.is_some()) + wrong }
}

/// The job of the other CPUs.
fn work(cpu: usize) {
    let mut random = Random::new(SEED.load(Ordering::Relaxed), cpu as u64);
    let mut own = 0;
    while !IS_OVER.load(Ordering::Relaxed) {
        turn(cpu, &mut random, &mut own);
    }
    let _ = attempt::wrmsr(SPEC_CTRL, 0);
}

/// Writes, leaves the guest, and reads.
fn turn(cpu: usize, random: &mut Random, own: &mut u64) {
    if random.below(4) == 0 {
        let value = if random.below(2) == 0 { 0 } else { random.bits() & BITS.load(Ordering::Relaxed) };
        if attempt::wrmsr(SPEC_CTRL, value).is_ok() {
            *own = value;
        } else {
            told(cpu, value, "refused");
        }
    }
    if has_commands() && random.below(8) == 0 && attempt::wrmsr(PRED_CMD, PRED_CMD_IBPB).is_err() {
        told(cpu, PRED_CMD_IBPB, "IBPB-refused");
    }
    for _ in 0..random.below(4) {
        control::leave();
    }
    if random.below(4) == 0 {
        interrupts::disable();
        controller::arm_once(TIMER, tsc::ticks(20 + random.below(400)));
        interrupts::sleep();
        controller::disarm();
    }
    READS.fetch_add(1, Ordering::Relaxed);
    match attempt::rdmsr(SPEC_CTRL) {
        Ok(seen) if seen == *own => {}
        Ok(seen) => {
            let expected = *own;
            told(cpu, expected, "another");
            *own = seen;
        }
        Err(_) => told(cpu, *own, "unreadable"),
    }
}

fn told(cpu: usize, value: u64, seen: &str) {
    if FOREIGN.fetch_add(1, Ordering::Relaxed) < 5 {
        let of = format_args!("cpu{cpu}");
        record!("violation", experiment = "spec-ctrl", of = of, expected = format_args!("{value:#x}"), seen = seen);
    }
}

//! CPU 0 patches code while the others execute it, as kernels do: first an INT3 for a moment, then the new instruction.
//!
//! A CPU that executes the INT3 tries again. After each patch all CPUs must get past it. A CPU that does not still
//! executes an instruction that is no longer in memory.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::arch::boot::MAX_CPUS;
use crate::arch::code_pages::{self, ALL};
use crate::arch::encode::{END, NOP};
use crate::arch::probe::{self, Level, Registers};
use crate::arch::{tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// How often each CPU got past the patched instruction.
static PASSES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];
static STOP: AtomicBool = AtomicBool::new(false);

/// Maximum time of the INT3: 100 µs.
const STAYS_PER_SECOND: u64 = 10_000;

pub(super) fn run(context: &Context) -> Outcome {
    let up = cpu::up();
    let others = || up.iter().filter(|&cpu| cpu != 0);
    if others().count() == 0 {
        return Outcome::Unsupported("needs two CPUs");
    }
    let frame = code_pages::frame(0, 0);
    code_pages::clear(0);
    code_pages::point(0, 0, frame | ALL);
    code_pages::write(frame, 0, &[NOP, END]);
    STOP.store(false, Ordering::SeqCst);
    let patience = tsc::seconds(context.settings.stall.unwrap_or(10));
    let passes = |cpu: usize| PASSES[cpu].load(Ordering::SeqCst);
    let hired = others().filter(|&cpu| cpu::give(cpu, work)).count();

    let mut random = context.random(0);
    let last = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(5));
    let (mut patches, mut stuck) = (0u64, None);
    while stuck.is_none() && tsc::now() < last {
        code_pages::write(frame, 0, &[END]);
        let until = tsc::now() + random.below(tsc::seconds(1) / STAYS_PER_SECOND);
        while tsc::now() < until {
            core::hint::spin_loop();
        }
        code_pages::write(frame, 0, &[NOP]);
        patches += 1;

        let before: [u64; MAX_CPUS] = core::array::from_fn(passes);
        // The pass that is under way may have begun before.
        let are_past = || others().all(|cpu| passes(cpu) > before[cpu] + 1);
        if !cpu::wait_until(patience, are_past) {
            stuck = others().find(|&cpu| passes(cpu) <= before[cpu] + 1);
        }
    }

    STOP.store(true, Ordering::SeqCst);
    // Another write, so that a stuck CPU continues nevertheless.
    code_pages::write(frame, 0, &[NOP, END]);
    cpu::wait_for_all(patience);
    record!("record", experiment = "patched-code", cpus = hired + 1, patches = patches);
    let failures = stuck.map_or(0, |cpu| {
        let seen = format_args!("\"CPU {cpu} executes what was there before patch {patches}\"");
        context.expect("patched-code", format_args!("code"), "\"what is in memory\"", seen, false)
    });
    Outcome::Done { failures }
}

/// What the other CPUs do.
fn work(cpu: usize) {
    tlb::flush_all();
    let rip = code_pages::address(0, 0);
    while !STOP.load(Ordering::SeqCst) {
        let end = probe::run(&Registers::at(rip), Level::Kernel);
        // Behind the END; the INT3 would have ended it one byte before.
        if end.registers.rip == rip + 2 {
            PASSES[cpu].fetch_add(1, Ordering::SeqCst);
        }
    }
}

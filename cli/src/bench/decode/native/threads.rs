//! One vCPU alone, and beside another one that does the same on another core.
//!
//! The second thread runs all the time in which the first is timed, and stands still while the first is timed alone. Both
//! have their own vCPU; the VM, with its memory and its write-protect cache, is the same for both, or, for comparison, one
//! for each.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};

use super::emulator::{Emulator, Vm};
use super::machine::FORMS;
use super::{OPERATIONS, Operation, ROUNDS, cycle, nanos};
use crate::args::Setting;
use crate::bench::Spread;

/// Operations of the second thread between two looks at what it shall do.
const STRETCH: u32 = 200;
/// When to give up waiting for rounds in which both threads run.
const MOST_ROUNDS: usize = 4 * ROUNDS;

/// Cycles of one thread, alone and beside another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scaling {
    pub(super) name: String,
    /// Whether the two threads share a VM in which something is remembered, and so whether anything was promised.
    pub(super) is_promised: bool,
    alone: Spread,
    together: Spread,
    pub(super) ratio: Spread,
}

/// Measures all settings; `None` where the second thread did not get a core to run on.
pub(super) fn all() -> Vec<Option<Scaling>> {
    let shared = Setting::ALL.map(|setting| {
        let vm = Arc::new(Vm::new(setting));
        // With nothing remembered there is nothing that two could be in each other's way at.
        measure(setting.name(), setting != Setting::Off, setting, [Arc::clone(&vm), vm])
    });
    let apart = [Setting::Off; 2].map(|setting| Arc::new(Vm::new(setting)));
    let apart = measure("off, a VM for each thread (nothing shared)", false, Setting::Off, apart);
    shared.into_iter().chain([apart]).collect()
}

fn measure(name: &str, is_promised: bool, setting: Setting, vms: [Arc<Vm>; 2]) -> Option<Scaling> {
    let [mut first, mut second] = vms.map(|vm| {
        let mut emulator = Emulator::new(setting, vm);
        let operation: Operation = Box::new(move || {
            black_box(emulator.emulate(FORMS[0]));
        });
        operation
    });
    let (wanted, running, over) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
    let done_by_second = AtomicU32::new(0);
    let rounds = thread::scope(|scope| {
        scope.spawn(|| {
            settle_on(1);
            while !over.load(Ordering::Relaxed) {
                let is_wanted = wanted.load(Ordering::Relaxed);
                running.store(is_wanted, Ordering::Relaxed);
                if is_wanted {
                    // Long enough that the look at the flags does not count.
                    (0..STRETCH).for_each(|_| second());
                    done_by_second.fetch_add(STRETCH, Ordering::Relaxed);
                } else {
                    thread::yield_now();
                }
            }
        });
        let timed = scope.spawn(|| {
            settle_on(0);
            let switch = |to: bool| {
                wanted.store(to, Ordering::Relaxed);
                while running.load(Ordering::Relaxed) != to {
                    thread::yield_now();
                }
            };
            let mut rounds = Vec::new();
            for round in 0..MOST_ROUNDS {
                let alone = cycles(&mut first);
                switch(true);
                let before = done_by_second.load(Ordering::Relaxed);
                let together = cycles(&mut first);
                let beside = done_by_second.load(Ordering::Relaxed).wrapping_sub(before);
                switch(false);
                // The first round warms up. A round in which the other thread hardly got to run says nothing.
                if round > 0 && beside >= OPERATIONS / 2 {
                    rounds.push((alone, together));
                }
                if rounds.len() == ROUNDS {
                    break;
                }
            }
            over.store(true, Ordering::Relaxed);
            rounds
        });
        timed.join().unwrap_or_default()
    });
    if rounds.len() < ROUNDS {
        return None;
    }
    let spread = |value: fn(&(f64, f64)) -> f64| Spread::of(&rounds.iter().map(value).collect::<Vec<_>>());
    Some(Scaling {
        name: name.to_string(),
        is_promised,
        alone: spread(|(alone, _)| *alone)?,
        together: spread(|(_, together)| *together)?,
        ratio: spread(|(alone, together)| together / alone)?,
    })
}

/// Cycles per operation, the loop around it included.
fn cycles(operation: &mut Operation) -> f64 {
    let cycle = cycle();
    nanos(operation) / cycle
}

/// Keeps the thread on one core, a different one for each number, if there are so many and the kernel allows it.
fn settle_on(number: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    if let Some(core) = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).nth(number) {
        let mut only = CpuSet::new();
        only.set(core);
        // Where it fails, the kernel places the thread as it likes.
        let _ = sched_setaffinity(None, &only);
    }
}

impl Scaling {
    pub(super) fn columns() -> String {
        format!("{:46}{:>9}{:>12}{:>9}   least-greatest", "setting", "alone", "beside one", "ratio")
    }

    pub(super) fn json(&self) -> Value {
        json!({ "part": "native_threads", "emulated": false, "name": self.name, "shared": self.is_promised,
            "alone_cycles": self.alone.median, "together_cycles": self.together.median,
            "ratio": self.ratio.median, "ratio_min": self.ratio.least, "ratio_max": self.ratio.greatest })
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, alone, together, ratio, .. } = self;
        write!(
            f,
            "{name:46}{:>9.1}{:>12.1}{:>9.2}   {:.2}-{:.2}",
            alone.median, together.median, ratio.median, ratio.least, ratio.greatest
        )
    }
}

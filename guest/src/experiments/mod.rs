//! The experiments, by name.
//!
//! Those in this list run on every machine. Experiments for one kind of machine are in a folder of their own, with
//! their own list: `pc` for x86-64, `virt` for AArch64.

mod cases;
mod compete;
mod console;
mod dirty;
mod idle_vectors;
mod misbehave;
pub(crate) mod mixed;
mod one_clock;
mod own_data;
#[cfg(machine = "pc")]
mod pc;
mod round_trip;
mod shootdown;
mod stale;
#[cfg(machine = "virt")]
mod virt;

use core::fmt;

use guest_model::command_line::Settings;

use crate::record::record;

/// What an experiment gets for the run.
pub(crate) struct Context<'a> {
    /// The command line.
    pub(crate) settings: &'a Settings<'a>,
    /// Whether a hypervisor is below, so that a deviation from the architecture is a failure.
    pub(crate) judged: bool,
}

/// How an experiment ended.
pub(crate) enum Outcome {
    /// It ran.
    Done {
        /// Number of deviations.
        failures: u64,
    },
    /// The machine lacks something, named here.
    Unsupported(&'static str),
}

/// One experiment.
pub(crate) struct Experiment {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// One line for a person.
    pub(crate) about: &'static str,
    /// Whether it runs when the command line names none.
    pub(crate) by_default: bool,
    /// Runs it, on CPU 0 with interrupts off.
    pub(crate) run: fn(&Context) -> Outcome,
}

impl Context<'_> {
    /// Random numbers for CPU `cpu`.
    pub(crate) fn random(&self, cpu: usize) -> guest_model::random::Random {
        guest_model::random::Random::new(self.settings.seed.unwrap_or(1), cpu as u64)
    }

    /// Compares the result with the architecture. Returns 1 for a failure, 0 otherwise.
    pub(crate) fn expect(
        &self,
        experiment: &str,
        of: fmt::Arguments<'_>,
        expected: impl fmt::Display,
        seen: fmt::Arguments<'_>,
        matches: bool,
    ) -> u64 {
        if matches {
            return 0;
        }
        record!("violation", experiment = experiment, of = of, expected = expected, seen = seen, judged = self.judged);
        u64::from(self.judged)
    }
}

/// Why an experiment cannot flush in the requested way.
const NOT_OFFERED: &str = "this machine does not offer such flushes";

const fn by_default(name: &'static str, about: &'static str, run: fn(&Context) -> Outcome) -> Experiment {
    Experiment { name, about, by_default: true, run }
}

const fn on_request(name: &'static str, about: &'static str, run: fn(&Context) -> Outcome) -> Experiment {
    Experiment { name, about, by_default: false, run }
}

/// The experiments of this kind of machine.
#[cfg(machine = "pc")]
use pc::EXPERIMENTS as OF_THIS_MACHINE;
#[cfg(machine = "virt")]
use virt::EXPERIMENTS as OF_THIS_MACHINE;

/// All experiments, in the order in which they run by default.
pub(crate) fn all() -> impl Iterator<Item = &'static Experiment> {
    OF_THIS_MACHINE.iter().chain(&EXPERIMENTS)
}

/// Those that every machine has.
const EXPERIMENTS: [Experiment; 27] = [
    by_default("empty", "one pass of an empty loop: what all others are compared with", round_trip::empty),
    by_default("page-fault", "a page fault of the guest's own, which should cost no exit", round_trip::page_fault),
    by_default(
        "mixed",
        "all CPUs at once: IPIs, timers, halts, page faults, exits, registers, all checked",
        mixed::run,
    ),
    on_request("fresh-pages", "first touch of so many pages (iterations=N, 4096)", round_trip::fresh_pages),
    on_request(
        "idle-vectors",
        "vector registers used now and then by one CPU that sleeps, for seconds=N (3)",
        idle_vectors::run,
    ),
    on_request("write-nowhere", "loads and stores where there is no memory", misbehave::write_nowhere),
    on_request("timer-storm", "the timer as fast as it goes, for a second; work must go on", misbehave::timer_storm),
    on_request("halt-cli", "CPU 1 halts for ever with interrupts off; the others go on", misbehave::halt_cli),
    on_request("spin-cli", "all CPUs spin with interrupts off, for seconds=N (2; 0 is for ever)", misbehave::spin_cli),
    on_request("shootdown", "how long a remote TLB flush takes, by each approach in turn", shootdown::run),
    on_request("flush-storm", "all CPUs flush all CPUs as fast as they can, for seconds=N (5)", shootdown::storm),
    on_request("stale", "all CPUs move and flush pages: none is ever read through an old translation", stale::run),
    on_request("stale-selftest", "the same without a flush: can a stale translation be seen here?", stale::selftest),
    on_request(
        "own-data",
        "memory that only this VM has, for seconds=N (5): run VMs with different seed=N",
        own_data::run,
    ),
    on_request("one-clock", "all CPUs read the counter in turn, for seconds=N (3): it never goes back", one_clock::run),
    on_request(
        "compute",
        "all CPUs compute, for seconds=N (5; 0 is for ever): how much in each second",
        compete::compute,
    ),
    on_request("naps", "all CPUs sleep and wake as fast as they can, for seconds=N (5; 0 is for ever)", compete::naps),
    on_request("wake-ups", "naps of 3 ms, for seconds=N (5): nanoseconds from the timer to the CPU", compete::wake_ups),
    on_request("flood", "all CPUs write to the console as fast as they can, for seconds=N (5)", console::flood),
    on_request("chatter", "a line on the console each second, for seconds=N (5)", console::chatter),
    on_request("stride", "writes to page after page, for seconds=N (5): how much in each moment", dirty::stride::run),
    on_request("scribble", "random writes everywhere until q is typed, or for iterations=N", dirty::scribble::run),
    on_request(
        "faults",
        "one write to each page of memory=N MiB (16), pass by pass (n next, q end)",
        dirty::faults::run,
    ),
    on_request("unexpected-exception", "an invalid opcode: a record, and the end", misbehave::unexpected_exception),
    on_request("panic", "the guest's own panic: a record, and the end", misbehave::panic),
    on_request("power-off", "powers off at once", misbehave::power_off),
    on_request("reset", "asks for a reset", misbehave::reset),
];

//! The measuring guest: one small bare-metal kernel with a list of named experiments. It writes records.
//!
//! It boots by PVH on x86-64 and as a Linux Image on AArch64. QEMU's `-kernel` and our hypervisor start both; Xen and
//! Firecracker start the former. The guest starts the CPUs in the firmware tables and runs the experiments on its
//! command line. It writes one line per record to the first serial port, and powers off.
//!
//! It is linked for the start of memory and needs 20 MiB of it.
//!
//! | record | when |
//! |---|---|
//! | `hello` | once, with what the guest found |
//! | `record`, `progress` | what an experiment measured |
//! | `case` | how a conformance case ended: `name=`, `about=`, `outcome=pass`, `fail` or `skipped`, `why=` |
//! | `violation` | something was not as the architecture has it: `expected=` and `seen=` |
//! | `unsupported` | this machine lacks what the experiment needs |
//! | `error`, `exception`, `panic` | the guest could not go on, or not with all it was asked for |
//! | `result` | after each experiment |
//! | `done` | once, at the end |
//!
//! A violation counts as a failure under a hypervisor only. QEMU's own CPU emulation lets some violations pass; it is a
//! tool here, not the subject of the test.

// What `cargo check` looks at for the host has std: libraries may bring it there, with a panic handler of its own.
#![cfg_attr(target_os = "none", no_std)]
#![no_main]

mod arch;
mod cpu;
mod experiments;
mod interrupt;
mod record;
mod shootdown;

use core::fmt;
use core::panic::PanicInfo;

use guest_model::command_line::{Mistake, Settings, nearest};

use arch::boot::{BootInfo, MAX_CPUS};
use arch::{control, controller, cpu_local, power, remote, serial, tsc};
use experiments::{Context, Experiment, Outcome};
use record::{Text, record};

/// CPU 0, in long mode, with its own tables loaded.
fn main(info: &BootInfo) -> ! {
    serial::prepare();
    let mut failures = 0;
    let settings = Settings::parse(info.command_line(), |mistake| {
        failures += 1;
        report(mistake);
    });

    // Early, as in kernels, so that each CPU can read its index when it comes up.
    let remote = remote::bring_up();
    remote::prepare_cpu(0);

    let tsc_source = tsc::calibrate(settings.tsc_khz);
    controller::prepare(info, settings.force_xapic);
    failures += cpu::start_all(info, settings.cpus.unwrap_or(MAX_CPUS)) as u64;

    if remote {
        shootdown::choose(remote::APPROACH);
    }
    shootdown::name_one_by_one(settings.by_mask);

    let hypervisor = control::hypervisor();
    let context = Context { judged: control::is_judged(), settings: &settings };
    record!(
        "hello",
        guest = "dunlin-guest",
        cpus = cpu::count(),
        apic = controller::name(),
        tsc_khz = tsc::khz(),
        tsc_source = tsc_source,
        apic_timer_khz = controller::timer_khz(),
        tsc_deadline = controller::has_deadline(),
        cpu = control::maker(),
        hypervisor = Shown(hypervisor),
        hypercalls = remote,
        shootdown = shootdown::chosen().name(),
        judged = context.judged,
    );

    let mut run = 0;
    match settings.experiments {
        Some("list") => experiments::all().for_each(describe),
        Some(names) => {
            for name in names.split(',').filter(|name| !name.is_empty()) {
                run += 1;
                failures += match experiments::all().find(|experiment| experiment.name == name) {
                    Some(experiment) => perform(experiment, &context),
                    None => unknown(name),
                };
            }
        }
        None => {
            for experiment in experiments::all().filter(|experiment| experiment.by_default) {
                run += 1;
                failures += perform(experiment, &context);
            }
        }
    }

    record!("done", experiments = run, failures = failures);
    power::off(failures == 0)
}

/// Runs one experiment and returns its number of failures.
fn perform(experiment: &Experiment, context: &Context) -> u64 {
    let start = tsc::now();
    let outcome = (experiment.run)(context);
    let microseconds = tsc::microseconds(tsc::now() - start);
    match outcome {
        Outcome::Done { failures } => {
            record!("result", experiment = experiment.name, failures = failures, microseconds = microseconds);
            failures
        }
        Outcome::Unsupported(why) => {
            record!("unsupported", experiment = experiment.name, why = Text(why));
            0
        }
    }
}

fn describe(experiment: &Experiment) {
    record!("experiment", name = experiment.name, default = experiment.by_default, about = Text(experiment.about));
}

fn unknown(name: &str) -> u64 {
    let nearest = nearest(name, experiments::all().map(|experiment| experiment.name)).unwrap_or("");
    record!("error", about = "unknown-experiment", name = Text(name), nearest = nearest);
    1
}

fn report(mistake: Mistake<'_>) {
    match mistake {
        Mistake::UnknownKey { key, nearest } => {
            record!("error", about = "unknown-key", key = Text(key), nearest = nearest);
        }
        Mistake::BadValue { key, value } => record!("error", about = "bad-value", key = key, value = Text(value)),
    }
}

/// An optional name; `none` without.
struct Shown<T>(Option<T>);

impl<T: fmt::Display> fmt::Display for Shown<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(name) => name.fmt(f),
            None => f.write_str("none"),
        }
    }
}

#[cfg_attr(target_os = "none", panic_handler)]
#[cfg_attr(not(target_os = "none"), expect(dead_code, reason = "the standard library has one"))]
fn panic(info: &PanicInfo<'_>) -> ! {
    let (file, line) = info.location().map_or(("", 0), |at| (at.file(), at.line()));
    record!(
        "panic",
        cpu = cpu_local::index(),
        file = file,
        line = line,
        message = format_args!("\"{}\"", info.message())
    );
    power::off(false)
}

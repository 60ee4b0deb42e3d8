//! `dunlin`: runs virtual machines on the Dunlin hypervisor and shows their costs.
//!
//! `dunlin run` reads a file of VMs (`config`), checks and packs their files (`assets`, `payload`), and starts the
//! hypervisor in QEMU (`qemu`). It follows the run to its end (`session`) over the control port (`control`). `exec`
//! handles a guest's command and its answer, `console` the terminal, and `summary` the results. `bench` measures by
//! such runs. `dunlin list`, `stats`, `top`, `metrics`, `trace`, `pause`, `resume` and `dirty` reach a running host
//! through the `dunlin run` that started it (`share`); so do `create`, `start`, `stop`, `destroy` and `host` (`vms`),
//! `save` and `restore` (`saved`).
//! `dunlin image` writes a file that any PC starts from (`image`), `dunlin payload` what GRUB of an installed machine
//! passes to the hypervisor, and `dunlin check` tells whether this machine can start it (`check`).

mod args;
mod assets;
mod bench;
mod check;
mod config;
mod console;
mod control;
mod dirty;
mod exec;
mod failure;
mod host;
mod image;
mod layout;
mod metrics;
mod pages;
mod payload;
mod port;
mod progress;
mod qemu;
mod quantity;
mod records;
mod report;
mod saved;
mod session;
mod share;
mod stats;
mod summary;
mod top;
mod trace;
mod vms;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, RunArgs, Verb};
use crate::failure::Failure;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == qemu::BECOME) {
        return fail(&qemu::become_qemu(words));
    }
    end_well_on_panic();

    let result = match Args::parse().verb {
        None => session::run(&RunArgs::default()),
        Some(Verb::Run(args)) => session::run(&args),
        Some(Verb::Image(args)) => image::run(&args).map(|()| 0),
        Some(Verb::Payload(args)) => payload::run(&args).map(|()| 0),
        Some(Verb::Check(args)) => check::run(&args),
        Some(Verb::List(args)) => stats::run_list(&args).map(|()| 0),
        Some(Verb::Stats(args)) => stats::run_stats(&args).map(|()| 0),
        Some(Verb::Top(args)) => top::run(&args).map(|()| 0),
        Some(Verb::Metrics(args)) => metrics::run(&args).map(|()| 0),
        Some(Verb::Host(args)) => vms::run_host(&args).map(|()| 0),
        Some(Verb::Create(args)) => vms::run_create(&args).map(|()| 0),
        Some(Verb::Start(args)) => vms::run_start(&args).map(|()| 0),
        Some(Verb::Stop(args)) => vms::run_stop(&args).map(|()| 0),
        Some(Verb::Destroy(args)) => vms::run_destroy(&args).map(|()| 0),
        Some(Verb::Save(args)) => saved::run_save(&args).map(|()| 0),
        Some(Verb::Restore(args)) => saved::run_restore(&args).map(|()| 0),
        Some(Verb::Pause(args)) => dirty::run_pause(&args).map(|()| 0),
        Some(Verb::Resume(args)) => dirty::run_resume(&args).map(|()| 0),
        Some(Verb::Dirty(args)) => dirty::run(&args),
        Some(Verb::Trace(args)) => trace::run(&args).map(|()| 0),
        Some(Verb::Layout(args)) => layout::run(&args),
        Some(Verb::Bench(args)) => bench::run(&args),
        Some(Verb::Report(args)) => report::run(&args).map(|()| 0),
        Some(Verb::Pages(args)) => pages::run(&args).map(|()| 0),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => fail(&failure),
    }
}

fn fail(failure: &Failure) -> ExitCode {
    eprintln!("{failure}");
    ExitCode::from(failure.status)
}

/// Status of a process that wrote to a closed pipe, as in shells: 128 + SIGPIPE.
const NOBODY_READS: i32 = 141;

/// A panic ends the process without unwinding, so the hook restores the terminal. A closed pipe is not an error:
/// `println!` panics when the reader has ended (`dunlin bench exits | head`).
fn end_well_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // If there is no terminal to restore, that is as well.
        let _ = crossterm::terminal::disable_raw_mode();
        let text = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(NOBODY_READS);
        }
        report(info);
    }));
}

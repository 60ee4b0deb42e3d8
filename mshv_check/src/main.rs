//! Tries `/dev/mshv` in a parent VM, call by call, without a VMM.
//!
//! It runs in an unmodified Linux that has the device, and knows nothing of the hypervisor below. Each check makes
//! partitions of its own. They are in order of difficulty: each check relies on the ones before it.
//!
//! * [`system`]: system calls, with all unsafe code.
//! * [`device`]: the device's calls.
//! * [`message`]: what a guest did.
//! * [`guest`]: guests of a few bytes.
//! * [`running`]: VPs in threads of their own.
//! * [`balance`]: whether the kernel has as much memory as before, and has logged no problem.
//! * [`checks`]: the checks.
//!
//! A run ends with one line on standard output; progress goes to standard error. The status is 0 if all was right, 1 if
//! not, 2 for wrong arguments.

mod balance;
mod checks;
mod device;
mod guest;
mod message;
mod options;
mod running;
mod system;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use checks::Figures;
use options::Options;

const HELP: &str = "\
mshv-check CHECK [--json] [--time-limit S] [OPTION..]

Tries /dev/mshv, the device of Linux for a hypervisor that lets it be a parent.

  open                                 the device is there
  life    [--rounds N]                 N partitions (1000) come and go; the last ones with VPs and memory
  vp                                   a VP's pages are as they should be, and it waits to be started
  run     [--rounds N]                 N guests (1) of 13 bytes write to a port, read from it, and halt
  interrupts [--rounds N]              N guests (1) take interrupts of a PC's old controller, and NMIs
  cost    [--rounds N]                 N exits (2000) of a guest that reads a port: time of each, in the parent's time
  signal  [--rounds N]                 signals (1000) end the runs of guests that halt, loop, or exit all the time
  memory  [--invalidations N] [--vps N]
                                       N times (100000) pages are taken away from running VPs (2) and given back
  hyperv  [--invalidations N] [--vps N]
                                       the same (20000) with pages that the hypervisor reads and writes for guests (2)
  kill    [--rounds N]                 N processes (500) with running guests are killed at random moments
  input                                calls with wrong numbers, and in the wrong order, are refused
  fuzz    [--calls N] [--seed S] [--trace N]
                                       N random hypercalls (1000000), as far as the kernel passes them on; shows each
                                       one from number N on before it is made
  all                                  all of these, with small numbers
  reclaim [--invalidations N] [--vps N]
                                       as memory (20000, 2), while the kernel also swaps the pages to zram, merges equal
                                       ones (KSM), and makes huge pages of them; only with CONFIG_KSM and CONFIG_ZRAM
  largest                              a partition with 256 VPs and 96 MiB of small pages, mapped twice, makes the largest
                                       requests there are; takes 200 MiB
  stats                                debugfs shows counters of this VM and of a guest, which count what both do;
                                       only with CONFIG_DEBUG_FS

  --seed S        of all that is random (1)
  --time-limit S  seconds until the check counts as hung (3600)
  --json          the result as one line of JSON
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let options = match Options::parse(&words) {
        Ok(options) => options,
        Err(error) => {
            eprint!("mshv-check: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = system::allow_interrupts() {
        eprintln!("mshv-check: no handler for signals: {error}");
        return ExitCode::FAILURE;
    }
    let checks: Vec<(&'static str, Options)> = match options.check {
        "all" => options::CHECKS.iter().map(|name| (*name, options.small(name))).collect(),
        name => vec![(name, options)],
    };
    let mut code = ExitCode::SUCCESS;
    for (name, options) in checks {
        watch(name, options.json, Duration::from_secs(options.time_limit));
        let started = Instant::now();
        let result = checks::run(name, &options);
        if tell(name, options.json, started.elapsed(), &result) == Verdict::Wrong {
            code = ExitCode::FAILURE;
        }
    }
    code
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    Wrong,
}

/// Prints the line of a result.
fn tell(name: &str, as_json: bool, took: Duration, result: &Result<Figures>) -> Verdict {
    let seconds = took.as_secs_f64();
    if as_json {
        let line = match result {
            Ok(figures) => json!({ "check": name, "ok": true, "seconds": seconds, "figures": figures }),
            Err(error) => json!({ "check": name, "ok": false, "seconds": seconds, "why": format!("{error:#}") }),
        };
        println!("{line}");
    } else {
        match result {
            Ok(figures) => println!("mshv-check {name}: ok, {seconds:.1} s{}", shown(figures)),
            Err(error) => println!("mshv-check {name}: FAILED, {seconds:.1} s: {error:#}"),
        }
    }
    if result.is_ok() { Verdict::Right } else { Verdict::Wrong }
}

fn shown(figures: &Figures) -> String {
    let one = |(name, value): (&String, &Value)| format!(", {} {value}", name.replace('_', " "));
    figures.iter().map(one).collect()
}

/// Ends the process if a check does not end. A thread in a device call cannot be ended otherwise.
fn watch(name: &'static str, as_json: bool, limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        let hung = Err(anyhow::anyhow!("hung: not done after {} s", limit.as_secs()));
        tell(name, as_json, limit, &hung);
        std::process::exit(1);
    });
}

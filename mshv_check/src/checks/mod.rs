//! The checks. Each makes partitions of its own, and says in one sentence what was wrong.

mod cost;
mod fuzz;
mod hyperv;
mod input;
mod interrupts;
mod kill;
mod largest;
mod life;
mod memory;
mod reclaim;
mod run;
mod signal;
mod stats;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use crate::device::Device;
use crate::options::{LARGEST, Options, RECLAIM, STATS, VICTIM};

/// What a check has counted.
pub(crate) type Figures = Map<String, Value>;

/// Runs the check with this name.
pub(crate) fn run(name: &str, options: &Options) -> Result<Figures> {
    let device = Device::open().context("cannot open /dev/mshv")?;
    match name {
        "open" => Ok(Figures::new()),
        "life" => life::run(&device, options.count(1000)),
        "vp" => life::pages(&device),
        "run" => run::run(&device, options.count(1)),
        "cost" => cost::run(&device, options.count(2000)),
        "signal" => signal::run(&device, options.count(1000), options.seed),
        "memory" => memory::run(&device, options.count(100_000), options.vps, options.seed),
        RECLAIM => reclaim::run(&device, options.count(20_000), options.vps, options.seed),
        "hyperv" => hyperv::run(&device, options.count(20_000), options.vps, options.seed),
        "kill" => kill::run(&device, options.count(500), options.seed),
        VICTIM => kill::victim(&device, options.vps),
        STATS => stats::run(&device),
        LARGEST => largest::run(&device),
        "interrupts" => interrupts::run(&device, options.count(1)),
        "input" => input::run(&device),
        "fuzz" => fuzz::run(&device, options.count(1_000_000), options.seed, options.trace.unwrap_or(u64::MAX)),
        _ => anyhow::bail!("no check `{name}`"),
    }
}

/// Figures by name.
fn figures<const COUNT: usize>(named: [(&str, u64); COUNT]) -> Figures {
    named.into_iter().map(|(name, number)| (name.to_owned(), number.into())).collect()
}

/// Shows the progress of a long check, ten times.
fn tell(what: &str, done: u64, of: u64) {
    if of >= 100 && done.is_multiple_of(of / 10) {
        eprintln!("mshv-check: {done} of {of} {what}");
    }
}

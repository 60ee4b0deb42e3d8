//! Mixed load for a long time, checked by the guest itself.
//!
//! Interrupts, IPIs, timers, halts, page faults and exits, with constant checks of registers: see the experiment
//! `mixed` of the measuring guest. It runs for a time by its own clock. To reach a number of exits, the tool runs it
//! again with other random numbers, until the host's counters add up to it.

use std::collections::BTreeMap;

use super::{dunlin_run_vms, only_vm, progress};
use crate::args::SoakArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::quantity::show_count;
use crate::records::{Class, Content, Figure, Ground, Log};

/// Default number of exits to reach.
const EXITS: u64 = 10_000_000;
/// Length in seconds of the first round, which determines the rate of exits.
const FIRST_ROUND: u32 = 20;
/// Minimum and maximum length of a later round.
const ROUND: (u64, u64) = (5, 600);

pub(crate) fn run(args: &SoakArgs, log: &Log) -> Result<u8, Failure> {
    let mut sum = Sum::default();
    if let Some(seconds) = args.seconds {
        sum.round(args, seconds, log)?;
    } else {
        let wanted = args.exits.unwrap_or(EXITS);
        let mut seconds = FIRST_ROUND;
        while sum.clean && sum.exits < wanted {
            sum.round(args, seconds, log)?;
            seconds = next_round(wanted.saturating_sub(sum.exits), sum.exits, sum.seconds);
        }
    }

    let names =
        ["irq_exits", "irq_window_exits", "halt_exits", "pause_exits", "msr_write_exits", "mmio_exits", "hypercalls"];
    println!("exits {} in {} s of guest time on {} vCPUs", show_count(sum.exits), sum.seconds, args.vcpus);
    for (name, count) in names.into_iter().zip(names.map(|name| sum.by_reason.get(name).copied().unwrap_or(0))) {
        println!("  {name:18} {:>14}", show_count(count));
    }
    let others: u64 =
        sum.by_reason.iter().filter(|(name, _)| !names.contains(&name.as_str())).map(|(_, count)| count).sum();
    println!("  {:18} {:>14}", "others", show_count(others));
    let verdict = if sum.clean { "clean: no interrupt lost, no vCPU stuck, no register changed" } else { "NOT CLEAN" };
    println!("{verdict}");
    let what = "mixed load: no interrupt lost, no vCPU stuck, no register changed".to_string();
    let figures = format!("{} exits", show_count(sum.exits));
    log.write(Ground::Emulated, None, Content::Promise { what, figures, met: Some(sum.clean) });
    Ok(u8::from(!sum.clean))
}

/// Length of the guest's bursts of exits. On AArch64 a spinning CPU makes no exits, so there would be few without them.
const fn burst(arch: Arch) -> u32 {
    match arch {
        Arch::X86_64 => 1,
        Arch::Aarch64 => 256,
    }
}

/// Length of the next round, if `exits` took `seconds` and `missing` are left.
fn next_round(missing: u64, exits: u64, seconds: u64) -> u32 {
    let per_second = (exits / seconds.max(1)).max(1);
    let needed = (missing / per_second).saturating_add(1).clamp(ROUND.0, ROUND.1);
    u32::try_from(needed).unwrap_or(FIRST_ROUND)
}

/// The sum of the rounds.
#[derive(Debug)]
struct Sum {
    rounds: u32,
    seconds: u64,
    exits: u64,
    by_reason: BTreeMap<String, u64>,
    clean: bool,
}

impl Default for Sum {
    fn default() -> Self {
        Self { rounds: 0, seconds: 0, exits: 0, by_reason: BTreeMap::new(), clean: true }
    }
}

impl Sum {
    fn round(&mut self, args: &SoakArgs, seconds: u32, log: &Log) -> Result<(), Failure> {
        self.rounds += 1;
        progress(&format!("round {}: mixed load on {} vCPUs for {seconds} s", self.rounds, args.vcpus));
        let toml = format!(
            "[host]\narch = \"{}\"\npcpus = {}\n[[vm]]\nname = \"soak\"\nvcpus = {}\nmemory = \"64M\"\nkernel = \"measuring-guest\"\n\
             initrd = \"none\"\ncmdline = \"experiments=mixed seconds={seconds} seed={} burst={}\"\n",
            args.arch.name(),
            args.pcpus,
            args.vcpus,
            self.rounds,
            burst(args.arch)
        );
        // A stuck vCPU must end the run, not hang it.
        let limit = format!("--time-limit={}s", seconds.saturating_mul(2).saturating_add(60));
        let run = dunlin_run_vms(&toml, &[&limit])?;
        let vm = only_vm(&run);

        let output = vm["output"].as_str().unwrap_or_default();
        for line in output.lines().filter(|line| line.starts_with("record ") || line.starts_with("violation ")) {
            println!("{line}");
        }
        self.clean &= is_clean(output);
        self.seconds += u64::from(seconds);
        let exits = vm["counters"]["exits_total"].as_u64().filter(|&exits| exits > 0);
        let exits = exits.ok_or_else(|| Failure::failed(format!("no exits were counted: {vm}")))?;
        let figure = Figure::new("exits of mixed load", Class::Count, "exits", [exits as f64]).at("seconds", seconds);
        log.emulated(&run, figure.at("vcpus", args.vcpus).at("pcpus", args.pcpus));
        self.exits += exits;
        for (name, count) in vm["counters"]["exits"].as_object().into_iter().flatten() {
            *self.by_reason.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
        Ok(())
    }
}

/// Whether a guest that wrote this has finished, and found nothing wrong.
pub(super) fn is_clean(output: &str) -> bool {
    output.lines().last().is_some_and(|last| last.starts_with("done ") && last.trim_end().ends_with(" failures=0"))
        && !output.lines().any(|line| line.starts_with("violation "))
}

#[cfg(test)]
mod tests {
    use super::{is_clean, next_round};

    #[test]
    fn guest_that_did_not_finish_is_not_clean() {
        assert!(is_clean("hello\r\ndone experiments=1 failures=0\r\n"));
        assert!(!is_clean("hello\nrecord failures=0\n"));
        assert!(!is_clean("done experiments=1 failures=10\n"));
        assert!(!is_clean("violation of=x\ndone experiments=1 failures=0\n"));
        assert!(!is_clean(""));
    }

    #[test]
    fn rounds_stay_within_bounds_whatever_was_counted() {
        assert_eq!(next_round(1_000_000, 1_000_000, 20), 21);
        assert_eq!(next_round(u64::MAX, 1, 0), 600);
        assert_eq!(next_round(0, u64::MAX, 1), 5);
    }
}

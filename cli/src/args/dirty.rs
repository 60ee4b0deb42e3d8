//! `dunlin dirty`, `pause` and `resume`: their options.

use abi::payload::{DirtyLogging, DirtySource, Split};
use clap::{Args as ClapArgs, Subcommand};

use super::HostArgs;
use super::setting;

pub(super) const HELP: &str = "\
A dirty log records which pages of a VM were written since the last harvest. Live migration and backups
of running VMs need it. A typical session:

  dunlin dirty start      record writes from now on; at first every page counts as written
  dunlin dirty round      harvest: print the number of pages written since the last round, and clear them
  dunlin dirty round      ... any number of rounds
  dunlin dirty stop       end the log; the hypervisor joins the split large pages again

The log records pages of 4 KiB, but memory is mapped by pages of 2 MiB. --split (key `split`) decides
when these are split:
  adaptive   at the first write to a large page; its other small pages then cost as little as --source allows
  eager      all of them when the log starts, at most --rate per second
  lazy       at the first write to a large page; each of its small pages then faults once more
--source (key `dirty_source`) decides what records writes; by default the first that the machine has:
  pml             the processor, in the page's entry and in a list, as Intel's do: no search, and no faults
  hardware        the processor, in the page's entry: writes do not fault, but for one in 2 MiB after a pause
  write-protect   the hypervisor: pages are read-only until their first write

`dunlin stats` shows the cost for each vCPU: dirty_faults, dirty_splits, stage2_broadcasts,
stage2_local_flushes, and stage2_stall, the time for which vCPUs were stopped.

With --mirror the host keeps a copy of the memory and updates it in each round, as a migration would. It
needs memory for that (key `memory` of [host]). To check that no write is lost:

  dunlin dirty start --mirror; dunlin dirty round; dunlin dirty round
  dunlin pause; dunlin dirty round; dunlin dirty compare; dunlin resume

`rate` and `watch` start a log if there is none, and stop it at their end. If a log is active they
harvest it; later rounds do not report those pages again.

VM is a name or a number, as in `dunlin list`; a host with one VM needs none.";

/// `dunlin dirty`.
#[derive(Debug, ClapArgs)]
pub(crate) struct DirtyArgs {
    /// The action
    #[command(subcommand)]
    pub(crate) what: DirtyVerb,
}

/// An action on a log.
#[derive(Debug, Subcommand)]
pub(crate) enum DirtyVerb {
    /// Start to record which pages a VM writes
    Start(StartArgs),
    /// Harvest once: print the number of pages written since the last round
    Round(RoundArgs),
    /// End the log
    Stop(WhichArgs),
    /// Show the state of the log, and its cost
    Info(WhichArgs),
    /// Compare a paused VM's memory with its mirror
    Compare(WhichArgs),
    /// Harvest every second, and print the pages written per second
    Rate(RateArgs),
    /// The same as a live picture (q quits)
    Watch(RateArgs),
}

/// The choice of a VM and its host.
#[derive(Debug, ClapArgs)]
pub(crate) struct WhichArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// The VM (name or number) [default: the only one]
    #[arg(value_name = "VM")]
    pub(crate) vm: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How to log.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub(crate) struct HowArgs {
    /// When to split large pages [default: the VM's setting]
    #[arg(long, value_name = "WHEN", value_parser = setting::<Split>())]
    pub(crate) split: Option<Split>,
    /// What records writes [default: the VM's setting]
    #[arg(long, value_name = "WHO", value_parser = setting::<DirtySource>())]
    pub(crate) source: Option<DirtySource>,
    /// Maximum number of large pages to split per second [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Option<u32>,
}

impl HowArgs {
    /// `None` without any option: the VM's own settings apply. With some options, the others have their defaults.
    pub(crate) fn logging(self) -> Option<DirtyLogging> {
        let Self { split, source, rate } = self;
        if split.is_none() && source.is_none() && rate.is_none() {
            return None;
        }
        Some(DirtyLogging { split: split.unwrap_or(Split::Adaptive), source, splits_per_second: rate })
    }
}

/// `dunlin dirty start`.
#[derive(Debug, ClapArgs)]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) which: WhichArgs,
    #[command(flatten)]
    pub(crate) how: HowArgs,
    /// Keep a copy of the VM's memory on the host, and update it in each round
    #[arg(long)]
    pub(crate) mirror: bool,
}

/// `dunlin dirty round`.
#[derive(Debug, ClapArgs)]
pub(crate) struct RoundArgs {
    #[command(flatten)]
    pub(crate) which: WhichArgs,
    /// Simulate a broken connection: discard the copied pages, which are dirty again
    #[arg(long)]
    pub(crate) lose: bool,
}

/// `dunlin dirty rate` and `watch`.
#[derive(Debug, ClapArgs)]
pub(crate) struct RateArgs {
    #[command(flatten)]
    pub(crate) which: WhichArgs,
    #[command(flatten)]
    pub(crate) how: HowArgs,
    /// Time between two rounds
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    pub(crate) delay: String,
    /// Exit after N rounds
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) iterations: Option<u64>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        how: HowArgs,
    }

    fn how(options: &[&str]) -> Result<HowArgs, clap::Error> {
        Line::try_parse_from([&["x"], options].concat()).map(|line| line.how)
    }

    #[test]
    fn nothing_said_leaves_it_to_the_vm_and_something_said_to_the_defaults() {
        assert_eq!(how(&[]).expect("is good").logging(), None);
        let logging = how(&["--rate=9"]).expect("is good").logging().expect("something was said");
        assert_eq!(logging, DirtyLogging { split: Split::Adaptive, source: None, splits_per_second: Some(9) });
        let logging = how(&["--split=lazy", "--source=write-protect"]).expect("is good").logging();
        let source = Some(DirtySource::WriteProtect);
        assert_eq!(logging, Some(DirtyLogging { split: Split::Lazy, source, splits_per_second: None }));
    }

    #[test]
    fn names_that_mean_nothing_are_answered_with_those_that_do() {
        let text = how(&["--split=sometimes"]).expect_err("means nothing").to_string();
        assert!(text.contains("[possible values: adaptive, eager, lazy]"), "{text}");
        let text = how(&["--source=guest"]).expect_err("means nothing").to_string();
        assert!(text.contains("[possible values: pml, hardware, write-protect]"), "{text}");
        assert!(how(&["--rate=0"]).is_err());
    }
}

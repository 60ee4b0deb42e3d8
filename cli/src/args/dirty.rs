//! `dunlin dirty`, `pause` and `resume`: their options.

use abi::payload::{DirtyLogging, DirtySource, Split};
use clap::{Args as ClapArgs, Subcommand};

use super::HostArgs;
use crate::config::stage2;

pub(super) const HELP: &str = "\
A dirty log says which pages of a VM were written since somebody last looked: what live migration and
backups of running VMs are made with. It goes like this:

  dunlin dirty start      from now on, writes are recorded; every page counts as written at first
  dunlin dirty round      harvest: how many pages were written since the last round; they are recorded anew
  dunlin dirty round      ... as often as you like
  dunlin dirty stop       no more; the large pages that were split come back by and by

A page of 4 KiB is what is recorded, while memory is mapped by pages of 2 MiB. When these are split is
--split (key `split`):
  adaptive   at the first write to one; the rest of its small pages then costs as little as --source allows
  eager      all of them when the log starts, --rate in a second
  lazy       at the first write to one; each small page then faults once more, as it used to be
and who records writes is --source (key `dirty_source`):
  hardware        the processor, in the page's entry: writes do not fault
  write-protect   the hypervisor: pages are read-only until their first write

What it costs the VM is counted for each vCPU (`dunlin stats`): dirty_faults, dirty_splits,
stage2_broadcasts, stage2_local_flushes, and stage2_stall, the time that vCPUs were held up.

With --mirror the host keeps a copy of the memory, which each round brings up to date, as a migration
would; it needs room for that (key `memory` of [host]). To see that nothing is ever lost:

  dunlin dirty start --mirror; dunlin dirty round; dunlin dirty round
  dunlin pause; dunlin dirty round; dunlin dirty compare; dunlin resume

`rate` and `watch` need no log: they start one if none runs, and stop it at their end. If one runs they
harvest it, so whoever else makes rounds does not see those pages.

VM is a name or a number, as in `dunlin list`; a host with one VM needs none.";

/// `dunlin dirty`.
#[derive(Debug, ClapArgs)]
pub(crate) struct DirtyArgs {
    /// What to do
    #[command(subcommand)]
    pub(crate) what: DirtyVerb,
}

/// What to do with a log.
#[derive(Debug, Subcommand)]
pub(crate) enum DirtyVerb {
    /// Begin to record which pages a VM writes
    Start(StartArgs),
    /// Harvest once: how many pages were written since the last time
    Round(RoundArgs),
    /// End the log
    Stop(WhichArgs),
    /// Show how the log stands, and what it has cost
    Info(WhichArgs),
    /// Compare a paused VM's memory with its mirror
    Compare(WhichArgs),
    /// Harvest every second: pages written per second
    Rate(RateArgs),
    /// The same as a picture, live (q quits)
    Watch(RateArgs),
}

/// Which VM, of which host.
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
    /// When large pages are split: adaptive, eager or lazy [default: as the VM's file has it]
    #[arg(long, value_name = "WHEN", value_parser = split)]
    pub(crate) split: Option<Split>,
    /// Who records writes: hardware or write-protect [default: as the VM's file has it]
    #[arg(long, value_name = "WHO", value_parser = source)]
    pub(crate) source: Option<DirtySource>,
    /// Most large pages that are split in a second [default: any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Option<u32>,
}

impl HowArgs {
    /// `None` if nothing was said: the VM's own settings. What was not said beside something else is the default.
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
    /// Keep a copy of the VM's memory on the host, which each round brings up to date
    #[arg(long)]
    pub(crate) mirror: bool,
}

/// `dunlin dirty round`.
#[derive(Debug, ClapArgs)]
pub(crate) struct RoundArgs {
    #[command(flatten)]
    pub(crate) which: WhichArgs,
    /// Lose what was copied, as a broken connection would: these pages are dirty again
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
    /// End after N rounds
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) iterations: Option<u64>,
}

/// When large pages are split, by its name.
pub(super) fn split(text: &str) -> Result<Split, String> {
    stage2::split(text).map_err(one_of)
}

/// Who records writes, by its name.
pub(super) fn source(text: &str) -> Result<DirtySource, String> {
    stage2::source(text).map_err(one_of)
}

fn one_of(names: &[&str]) -> String {
    format!("one of {}", names.join(", "))
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
        assert!(text.contains("one of adaptive, eager, lazy"), "{text}");
        let text = how(&["--source=guest"]).expect_err("means nothing").to_string();
        assert!(text.contains("one of hardware, write-protect"), "{text}");
        assert!(how(&["--rate=0"]).is_err());
    }
}

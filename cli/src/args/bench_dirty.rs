//! `dunlin bench dirty`: its options.

use std::path::PathBuf;

use abi::payload::{DirtySource, Split};
use clap::{Args as ClapArgs, ValueEnum};

use super::dirty::{source, split};

pub(super) const HELP: &str = "\
What it costs a VM that its writes are logged, in the worst case: every vCPU writes to one page of its
memory after the other, as fast as it can, while a dirty log is started, harvested and stopped.

What the columns say (shares are of the speed before the log was started):
  worst         the slowest 100 ms while the log ran; in parentheses the slowest 100 ms before it was
                started: what the emulator and this computer do anyway
  mean          the whole time in which the log ran
  recovered     from the start of the log, or from a round, to the next round at 90 % of the speed before
  after         the last half of the time after the log was stopped
  faults, splits, broadcasts, local
                counted for the vCPUs while the log ran: writes that the log stopped, large pages that were
                split in such faults, flushes of all pCPUs and of the own one; ahead are splits by the host
  tables        most memory in stage-2 tables

One run has three parts (--part):
  curve         the table above; --picture draws the speed over time
  instructions  instructions of one fault, counted exactly (QEMU -icount, 1 vCPU)
  sparse        writes to 10 % of the large pages only: tables and splits, adaptive and eager
and ends with which targets were met.

Examples:
  dunlin bench dirty                                        some minutes
  dunlin bench dirty --vcpus 2 --split adaptive,lazy --picture dirty.svg
  dunlin bench dirty --arch aarch64 --cpu max,neoverse-n1   splitting with and without FEAT_BBM level 2
  dunlin bench dirty --full --json > dirty.jsonl            hours on a small computer";

/// `dunlin bench dirty`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct DirtyBenchArgs {
    /// Architecture of the host: x86_64 or aarch64
    #[arg(long, value_name = "ARCH", default_value = "x86_64", value_parser = ["x86_64", "aarch64"])]
    pub(crate) arch: String,
    /// Models of QEMU's CPUs, such as max,neoverse-n1 [default: what `dunlin run` uses]
    #[arg(long, value_name = "CPU,..", value_delimiter = ',')]
    pub(crate) cpu: Vec<String>,
    /// vCPUs of the guest, such as 1,2,8 [default: 1,2]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) vcpus: Vec<u32>,
    /// Memory that is written [default: 256M]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// When large pages are split [default: adaptive,eager,lazy]
    #[arg(long, value_name = "WHEN,..", value_delimiter = ',', value_parser = split)]
    pub(crate) split: Vec<Split>,
    /// Who records writes [default: hardware,write-protect, but for lazy, which is as it used to be]
    #[arg(long, value_name = "WHO,..", value_delimiter = ',', value_parser = source)]
    pub(crate) source: Vec<DirtySource>,
    /// Large pages that eager splits in a second, such as 0,1000; 0 is any number [default: 0]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) rate: Vec<u32>,
    /// Time between two rounds
    #[arg(long, value_name = "TIME", default_value = "500ms")]
    pub(crate) interval: String,
    /// Rounds while the log runs
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// How often, all settings in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) runs: u32,
    /// 1, 2, 8 and 48 vCPUs, 1 GiB, with and without a rate
    #[arg(long, conflicts_with_all = ["vcpus", "memory", "rate"])]
    pub(crate) full: bool,
    /// Only these parts [default: all]
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    pub(crate) part: Vec<DirtyPart>,
    /// Draw the speed over time to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DirtyPart {
    /// Speed over time
    Curve,
    /// Instructions of one fault
    Instructions,
    /// Writes to a tenth of the memory
    Sparse,
}

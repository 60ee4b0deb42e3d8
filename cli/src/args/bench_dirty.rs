//! `dunlin bench dirty`: its options.

use std::path::PathBuf;

use abi::payload::{DirtySource, Split};
use clap::{Args as ClapArgs, ValueEnum};

use super::setting;
use crate::config::Arch;

pub(super) const HELP: &str = "\
Measures the cost of a dirty log for a VM in the worst case: every vCPU writes to all pages of its memory
in turn, at full speed, while a log is started, harvested and stopped.

Columns (speeds are relative to the speed before the log):
  worst         the slowest 100 ms during the log; in parentheses the slowest 100 ms before it, which
                the emulator and this computer cause
  mean          mean speed during the log
  recovered     time from the start of the log, or from a round, until 90 % of the speed before
  after         speed in the last half of the time after the log
  faults, splits, broadcasts, local
                counters of the vCPUs during the log: write faults by the log, large pages split in such
                faults, flushes of all pCPUs and of the local pCPU; `ahead` are splits by the host
  tables        maximum memory in stage-2 tables

A run has three parts (--part):
  curve         the table above; --picture draws the speed over time
  instructions  the exact number of instructions of a fault (QEMU -icount, 1 vCPU)
  sparse        writes to 10 % of the large pages only: tables and splits, adaptive and eager
Then it prints which targets were met.

Examples:
  dunlin bench dirty                                        some minutes
  dunlin bench dirty --vcpus 2 --split adaptive,lazy --picture dirty.svg
  dunlin bench dirty --arch aarch64 --cpu max,neoverse-n1   splitting with and without FEAT_BBM level 2
  dunlin bench dirty --full --json > dirty.jsonl            hours on a small computer";

/// `dunlin bench dirty`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct DirtyBenchArgs {
    /// Architecture of the host
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// CPU models of QEMU, such as max,neoverse-n1 [default: the model of `dunlin run`]
    #[arg(long, value_name = "CPU,..", value_delimiter = ',')]
    pub(crate) cpu: Vec<String>,
    /// vCPUs of the guest, such as 1,2,8 [default: 1,2]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) vcpus: Vec<u32>,
    /// Memory to write [default: 256M]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// When to split large pages [default: adaptive,eager,lazy]
    #[arg(long, value_name = "WHEN,..", value_delimiter = ',', value_parser = setting::<Split>())]
    pub(crate) split: Vec<Split>,
    /// What records writes [default: hardware,write-protect; lazy only with write-protect]
    #[arg(long, value_name = "WHO,..", value_delimiter = ',', value_parser = setting::<DirtySource>())]
    pub(crate) source: Vec<DirtySource>,
    /// Large pages that eager splits per second, such as 0,1000; 0 means no limit [default: 0]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) rate: Vec<u32>,
    /// Time between two rounds
    #[arg(long, value_name = "TIME", default_value = "500ms")]
    pub(crate) interval: String,
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Number of runs of each setting, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) runs: u32,
    /// 1, 2, 8 and 48 vCPUs, 1 GiB, with and without a rate
    #[arg(long, conflicts_with_all = ["vcpus", "memory", "rate"])]
    pub(crate) full: bool,
    /// Run only these parts [default: all]
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

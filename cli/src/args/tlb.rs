//! `dunlin bench tlb`: its options.

use std::fmt;
use std::str::FromStr;

use clap::{Args as ClapArgs, ValueEnum};

pub(super) const HELP: &str = "\
Measures the time of a shootdown: a flush of the TLBs of all vCPUs of a VM, by the guest's own IPIs
and by hypercall. The measuring guest alternates between the two within one run.

Columns:
  mean, p50, p99, p99.9   time of one shootdown on the caller's clock
  net ...                 the same without the time in which the caller's vCPU was off its pCPU. A
                          caller that spins for IPIs loses its pCPU to other vCPUs, so its net time
                          is short even if the wait is long: compare net times only with net times
  IPI/HC                  time by IPI divided by time by hypercall
  others                  share of this computer that other processes used at the same time

A run has three parts (--part):
  latency        the table above
  exits          exits, kicks and injections per shootdown: the difference of runs of 2N and of N
  instructions   the exact number of instructions per shootdown (QEMU -icount, 1 pCPU)
Then it prints a calculation for real hardware, KVM's figures, and which targets were met.

--macro measures Debian instead: threads that map and unmap memory, one thread that removes rights
from pages while all others compute, and a parallel compile of C sources. It alternates between
flush = \"ipi\" and \"hypercall\".

Examples:
  dunlin bench tlb                                        some minutes
  dunlin bench tlb --vcpus 8 --overcommit 1,4 --pages 1 --part latency
  dunlin bench tlb --full --json > tlb.jsonl              hours on a small computer
  dunlin bench tlb --macro --vcpus 4 --overcommit 2";

/// `dunlin bench tlb`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct TlbArgs {
    /// vCPUs of the guest, such as 2,4,16 [default: some sizes from 2 to 48]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) vcpus: Vec<u32>,
    /// vCPUs per pCPU, such as 1,4; only divisors of the number of vCPUs are used [default: 1,2,4,8]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) overcommit: Vec<u32>,
    /// Pages of one flush: 1 to 64, or whole
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8,33,whole")]
    pub(crate) pages: Vec<Extent>,
    /// Load of the flushed vCPUs: busy reads pages, idle halts [default: busy for all sizes, idle for some]
    #[arg(long, value_name = "WHAT,..", value_delimiter = ',')]
    pub(crate) targets: Vec<Targets>,
    /// The whole matrix: 2,4,8,16,48,96 vCPUs, overcommit 1,2,4,8, busy and idle
    #[arg(long, conflicts_with_all = ["vcpus", "overcommit", "targets"])]
    pub(crate) full: bool,
    /// Maximum number of shootdowns of each kind
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(5..=20_000))]
    pub(crate) iterations: u32,
    /// Maximum number of seconds for the shootdowns of each kind
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(crate) seconds: u32,
    /// Run only these parts [default: all]
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    pub(crate) part: Vec<Part>,
    /// For the calculation: cost of an exit on real hardware, in nanoseconds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(crate) exit_ns: u32,
    /// Measure Debian's kernel under load instead
    #[arg(long = "macro", conflicts_with_all = ["full", "pages", "targets", "part", "iterations", "exit_ns"])]
    pub(crate) debian: bool,
    /// With --macro: number of runs of each setting, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100),
        requires = "debian")]
    pub(crate) pairs: u32,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

/// Load of the flushed vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Targets {
    /// Read pages, over and over
    Busy,
    /// Halt
    Idle,
}

impl Targets {
    /// Its name in the guest and in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Idle => "idle",
        }
    }
}

/// The extent of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Extent {
    /// This number of pages.
    Pages(u8),
    /// The whole address space.
    Whole,
}

/// The measuring guest has this number of pages to flush.
const MOST_PAGES: u8 = 64;

impl FromStr for Extent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(pages @ 1..=MOST_PAGES) => Ok(Self::Pages(pages)),
            _ if text == "whole" => Ok(Self::Whole),
            _ => Err(format!("a flush covers 1 to {MOST_PAGES} pages, or whole")),
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(pages) => pages.fmt(f),
            Self::Whole => f.pad("whole"),
        }
    }
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Time of shootdowns
    Latency,
    /// Exits of one shootdown
    Exits,
    /// Instructions of one shootdown
    Instructions,
}

//! `dunlin bench tlb`: its options.

use std::fmt;
use std::str::FromStr;

use clap::{Args as ClapArgs, ValueEnum};

pub(super) const HELP: &str = "\
How long one shootdown takes: a flush of the TLBs of all vCPUs of a VM, by interrupts of the guest's
own (IPI) and by hypercall. The measuring guest alternates between the two within one run.

What the columns say:
  mean, p50, p99, p99.9   time of one shootdown on the caller's clock
  net ...                 the same without the time in which the caller's own vCPU was off its pCPU.
                          A caller that waits for IPIs gives its pCPU away while it spins, so its net
                          time is short however long it waits: compare net times with themselves only
  IPI/HC                  how many times longer the IPI takes
  others                  share of this computer that other processes used meanwhile

One run has three parts (--part):
  latency        the table above
  exits          exits, kicks and injections per shootdown: counters of a run of N and one of 2N, subtracted
  instructions   the same for instructions, counted exactly (QEMU -icount, 1 pCPU)
and ends with a calculation for real hardware, KVM's figures, and which targets were met.

--macro measures Debian instead: threads that map and unmap memory, one thread that takes rights
away from pages while all others compute, and a parallel compile of C sources, with
flush = \"ipi\" and \"hypercall\" in turn.

Examples:
  dunlin bench tlb                                        some minutes
  dunlin bench tlb --vcpus 8 --overcommit 1,4 --pages 1 --part latency
  dunlin bench tlb --full --json > tlb.jsonl              hours on a small computer
  dunlin bench tlb --macro --vcpus 4 --overcommit 2";

/// `dunlin bench tlb`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct TlbArgs {
    /// vCPUs of the guest, such as 2,4,16; the default is a choice of sizes from 2 to 48
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) vcpus: Vec<u32>,
    /// vCPUs per pCPU, such as 1,4; what a number of vCPUs cannot be divided by is left out [default: 1,2,4,8]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) overcommit: Vec<u32>,
    /// Pages of one flush: 1 to 64, or whole
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8,33,whole")]
    pub(crate) pages: Vec<Extent>,
    /// What the flushed vCPUs do: busy reads pages, idle halts [default: busy for all sizes, idle for some]
    #[arg(long, value_name = "WHAT,..", value_delimiter = ',')]
    pub(crate) targets: Vec<Targets>,
    /// The whole matrix: 2,4,8,16,48,96 vCPUs, overcommit 1,2,4,8, busy and idle
    #[arg(long, conflicts_with_all = ["vcpus", "overcommit", "targets"])]
    pub(crate) full: bool,
    /// Most shootdowns of each kind
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(5..=20_000))]
    pub(crate) iterations: u32,
    /// Most seconds for shootdowns of each kind
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(crate) seconds: u32,
    /// Only these parts [default: all]
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    pub(crate) part: Vec<Part>,
    /// For the calculation: what one exit costs on real hardware, in nanoseconds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(crate) exit_ns: u32,
    /// Measure Debian's kernel under load instead
    #[arg(long = "macro", conflicts_with_all = ["full", "pages", "targets", "part", "iterations", "exit_ns"])]
    pub(crate) debian: bool,
    /// With --macro: how often, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100),
        requires = "debian")]
    pub(crate) pairs: u32,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

/// What the flushed vCPUs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Targets {
    /// Read pages, over and over
    Busy,
    /// Halt
    Idle,
}

impl Targets {
    /// As the guest and the tables call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Idle => "idle",
        }
    }
}

/// What one flush covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Extent {
    /// So many pages.
    Pages(u8),
    /// The whole address space.
    Whole,
}

/// The measuring guest has no more pages to flush.
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
    /// How long shootdowns take
    Latency,
    /// How many exits one costs
    Exits,
    /// How many instructions one costs
    Instructions,
}

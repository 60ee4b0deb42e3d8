//! `dunlin bench storms`: its options.

use clap::Args as ClapArgs;

use super::setting::setting;
use crate::config::Arch;

pub(super) const HELP: &str = "\
Two VMs of equal weight share one pCPU. One does one thing as fast as it can, for which the
hypervisor has to work: exits, interrupts, flushes, a timer that has always expired, output without
end, writes while dirty logs run. The other computes. How much of its work is lost, compared with a
neighbour that computes, too?

QEMU's clocks count instructions here, so each run repeats exactly; not with dirty logs, which this
tool harvests when the computer lets it. What a storm does to caches, and to pCPUs that it does not
run on, does not show.

The status is 1 if a neighbour loses more than 10 %.

Examples:
  dunlin bench storms                         some minutes
  dunlin bench storms --arch aarch64
  dunlin bench storms --only timer,flushes --json";

/// `dunlin bench storms`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct StormsArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Only these storms [default: all]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// For how long the neighbour computes, in seconds of its clock; the first is not counted
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=60))]
    pub(crate) seconds: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

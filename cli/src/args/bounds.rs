//! `dunlin bench bounds`: its options.

use clap::Args as ClapArgs;

use super::setting::setting;
use crate::config::Arch;

pub(super) const HELP: &str = "\
How long does a pCPU work for guests and for commands before it takes an interrupt? A VM of 512
vCPUs on one pCPU asks for the most that it can: flushes and interrupts to all, calls with the
longest lists, its own end. Then commands create such a VM, pause it, log its writes, save and
restore it, end it. With --parent, a parent that owns the machine's devices makes the largest calls
about a guest of 256 VPs, too. The longest stretch of each kind of work is shown.

QEMU's clocks count instructions here, one in a nanosecond. What commands cost may differ a little
from run to run, because they come when they come.

The status is 1 if a stretch is longer than 50 000 instructions.

Examples:
  dunlin bench bounds                  both parts, about a minute
  dunlin bench bounds --parent         and the third, half a minute more; after `make parent`
  dunlin bench bounds --arch aarch64
  dunlin bench bounds --json";

/// `dunlin bench bounds`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct BoundsArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// A parent's calls, too
    #[arg(long)]
    pub(crate) parent: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

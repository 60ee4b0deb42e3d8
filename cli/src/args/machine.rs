//! `dunlin bench machine`: its options.

use clap::{Args as ClapArgs, ValueEnum};

pub(super) const HELP: &str = "\
Runs the same Linux with the same disks and network cards twice: on Dunlin, in a VM that has all of
the machine's devices, and without Dunlin. Both run on the same emulated machine, with the same
drivers, kernel, initrd and command line. The two take turns.

Parts (--part):
  boot   from the start of QEMU to user space. Each run of the others measures it as well
  disk   fio on a virtio disk, an NVMe disk and an AHCI disk: random accesses of 4 KiB with 16 in
         flight, and sequential ones of 128 KiB
  net    16 MiB from a process outside and to one, over a virtio card and an e1000e, by QEMU's user
         network

By time, an exit costs more in the emulator than on a processor: QEMU drops its TLB at each, and fills
it again by nested walks. With --by instructions the machine's clocks count its instructions instead,
one in 8 ns, so a second is 125 million of them, the hypervisor's included. A boot is measured by time
only.

The summary comes first. 'make parent' must have been run. All of it takes about ten minutes.

Examples:
  dunlin bench machine
  dunlin bench machine --part boot --pairs 5
  dunlin bench machine --part disk --seconds 10 --json
  dunlin bench machine --part disk,net --by instructions";

/// `dunlin bench machine`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct MachineBenchArgs {
    /// Run only these parts [default: all]
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    pub(crate) part: Vec<MachinePart>,
    /// Number of runs with and without Dunlin, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) pairs: u32,
    /// Time of each of the 12 runs of fio, in seconds
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(crate) seconds: u32,
    /// What the machine's clocks follow
    #[arg(long, value_name = "WHAT", default_value = "time")]
    pub(crate) by: MachineClock,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What an emulated machine's clocks follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MachineClock {
    /// The computer's clock
    Time,
    /// The machine's instructions
    Instructions,
}

impl MachineClock {
    /// As it is written.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Instructions => "instructions",
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MachinePart {
    /// Boots
    Boot,
    /// Accesses to disks
    Disk,
    /// Streams over networks
    Net,
}

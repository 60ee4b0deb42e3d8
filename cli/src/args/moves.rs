//! `dunlin bench move`: its options.

use clap::Args as ClapArgs;

pub(super) const HELP: &str = "\
A guest of QEMU writes to its memory and checks it, and moves to another host meanwhile. Both hosts
are emulated machines with two CPUs, whose network cards are joined. On Dunlin each host's parent
owns the card and runs QEMU with /dev/mshv, and guest-move moves the guest; on KVM each host is
Debian's newest kernel for clouds, and QEMU moves the guest by itself. QEMU and the guest are the
same. The two take turns. The hosts' clocks count instructions, one in 8 ns (QEMU's -icount), so
what else this computer does takes no time of a guest. Since 8.1, QEMU gives a host's CPUs their
turns fairly; with an older one, the worst 100 ms may be its own.

The guest tells how many pages it has written in each 100 ms, before, while and after it moves. How
long it stands still is the time from the source's QEMU that has stopped it to the target's QEMU
that lets it go on, by the clock outside of both machines: what else this computer does adds to it.

Some moves on KVM fail on these hosts. Such a move is told and tried again, twice at most; one on Dunlin
is not. The summary comes first. 'make parent' must have been run. A pair takes two and a half minutes,
with more memory longer.

Examples:
  dunlin bench move
  dunlin bench move --rate 0 --slow-down          as fast as it can, and QEMU slows it down
  dunlin bench move --memory 1024 --pairs 1 --json
  dunlin bench move --record moves.jsonl          then 'dunlin report moves.jsonl' draws the moves";

/// `dunlin bench move`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct MoveBenchArgs {
    /// Number of moves on each, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) pairs: u32,
    /// Memory that the guest writes to, in MiB. It has 128 MiB more
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) memory: u32,
    /// MiB that it writes each second; 0: as many as it can, with one thread
    #[arg(long, value_name = "MIB", default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub(crate) rate: u32,
    /// vCPUs of the guest
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) vcpus: u32,
    /// Let QEMU slow the guest down if it writes faster than QEMU sends (its auto-converge)
    #[arg(long)]
    pub(crate) slow_down: bool,
    /// Seconds until a move counts as hung
    #[arg(long, value_name = "S", default_value_t = 400, value_parser = clap::value_parser!(u64).range(60..=7200))]
    pub(crate) limit: u64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

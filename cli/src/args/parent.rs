//! `dunlin bench parent`: its options.

use clap::{Args as ClapArgs, ValueEnum};

pub(super) const HELP: &str = "\
Runs the same QEMU with the same guests on two hosts: on Dunlin, in a parent VM with /dev/mshv, and
on KVM, in Debian's newest kernel for clouds. Both hosts run in the same emulated machine with SVM,
from the same files; only kernel and hypervisor differ. Dunlin and KVM take turns.

Parts (--part):
  port   instructions of a port exit to QEMU and back, exact (QEMU -icount, 1 pCPU), and for Dunlin
         where they go
  boot   Debian's kernel on 4 vCPUs to user space, microvm and q35: seconds, and exits to QEMU
  access accesses to QEMU's devices in the boot of a q35, by device: once on each host
  disk   fio in the guest: random reads and writes of 4 KiB on a virtio disk in memory
  net    a stream from the guest to a process beside QEMU, by QEMU's user network
  tlb    time of a TLB flush with 8 busy vCPUs on 2 pCPUs; KVM's guest once more with hv-tlbflush

The summary comes first. 'make parent' must have been run. All of it takes about half an hour.

Examples:
  dunlin bench parent
  dunlin bench parent --part port                 two minutes
  dunlin bench parent --part boot --pairs 5 --json";

/// `dunlin bench parent`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ParentBenchArgs {
    /// Run only these parts [default: all]
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    pub(crate) part: Vec<ParentPart>,
    /// Number of runs on each host, in turn. `port` is exact, and runs once
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) pairs: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ParentPart {
    /// Instructions of a port exit
    Port,
    /// Boots
    Boot,
    /// Accesses to devices in a boot
    Access,
    /// Random accesses to a disk
    Disk,
    /// A stream over the network
    Net,
    /// TLB flushes
    Tlb,
}

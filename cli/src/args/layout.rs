//! `dunlin layout` and `dunlin bench layout`: their options.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::setting;
use crate::config::Arch;

pub(super) const HELP: &str = "\
Each vCPU, pCPU and VM has one block of data. Its fields are ordered by writer. If two cores write
to the same cache line, the line moves between their caches, even if they write different words. So
no line holds fields of two classes, and no line belongs to two blocks. The compiler proves this.

Classes:
  owner     only the pCPU that runs the vCPU writes it (in a pCPU's block: that pCPU). The lines
            stay in that core's cache. The most frequent exits write only to owner lines
  mailbox   all pCPUs write it, with atomic operations or under a lock in it: posted interrupts,
            pending work, flush requests. The owner reads it before each entry
  frozen    not written after creation, so every core may keep a copy
  cold      any pCPU may write it, but too rarely to matter

After a summary it prints every field of each block, like pahole:
  offset    bytes from the start of the block; an indented field is within the struct above it
  bytes     its size; `(gap)` marks unused bytes
  line      its cache line, or the first and the last
  class     its class, and its writer
A rule separates lines of different classes. After each block it prints the block's size, its lines
by class and its gaps.

The command starts a host without VMs and asks it. With --host it asks a running host, and also
prints the addresses of the blocks, and whether two blocks share a line.

--write writes docs/layout.txt and, with --arch aarch64, docs/layout-aarch64.txt. With --check the
command prints the differences from such a file; the exit status is 1 if there are any. It is also 1
if fields of two classes or two blocks share a line.

Examples:
  dunlin layout | less
  dunlin layout --check docs/layout.txt      fails if a field has moved, and prints it
  dunlin layout --write docs/layout.txt      after a check of what has moved
  dunlin layout --host --json                with the addresses of all blocks";

pub(super) const BENCH_HELP: &str = "\
Native part: two threads on two cores of this computer act as two vCPUs. Their data is packed
(fields in no particular order, vCPUs in an array) or laid out by writer (see `dunlin layout`):

  run loop                   the writes from one entry into the guest to the next
  run loop, posting          the same; every 64 passes also a post into the other's mailbox
  run loop, statistics read  the same; every 64 passes also a read of all counters of the other
  statistics                 a counter of the VM, and one for each vCPU
  VT-x                       the state of VT-x: an array for each field, or a record for each vCPU
  plain                      an addition to a word of a record of 8, 24 or 136 bytes per vCPU, and
                             a write elsewhere, as in real code
  plain, nothing else        only the addition: cores combine consecutive writes to a line
  locked                     the same addition as an atomic operation
  presence                   the word that says whether a vCPU is in its guest: next to its mailbox,
                             or on a line of its owner; by passes of the other vCPU per post

Figures are cycles per operation: the lower quartile of short batches in which both threads ran,
then the median of 25 turns, with minimum and maximum. Before and after each comparison a test
checks that there are two free cores. If not, the comparison is repeated some times; after that its
target is `not judged`, which is no failure.

QEMU part, with 2 vCPUs on 2 pCPUs: loops with a known number of exits, to show that the counters
are exact.

Examples:
  dunlin bench layout                      about 20 seconds
  dunlin bench layout --native             no emulator is started
  dunlin bench layout --native --only locked
  dunlin bench layout --json > layout.jsonl";

/// `dunlin layout`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct LayoutArgs {
    /// Architecture of the host to start
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>(), conflicts_with = "host")]
    pub(crate) arch: Arch,
    /// Ask a running host instead of starting one: the host of process PID, or the only one
    #[arg(long, value_name = "PID", num_args = 0..=1)]
    pub(crate) host: Option<Option<u32>>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the text to this file instead of printing it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "check"])]
    pub(crate) write: Option<PathBuf>,
    /// Print the differences from this file, line by line; fail if there are any
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) check: Option<PathBuf>,
    /// Draw a vCPU's block to this file, as SVG
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "check", "write"])]
    pub(crate) picture: Option<PathBuf>,
    /// QEMU to use for the host that is started [default: qemu-system-x86_64 or -aarch64]
    #[arg(long, value_name = "PATH", conflicts_with = "host")]
    pub(crate) qemu: Option<PathBuf>,
}

/// `dunlin bench layout`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct LayoutBenchArgs {
    /// Architecture of the emulated host
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Run only the native part, without an emulator
    #[arg(long, conflicts_with = "emulated")]
    pub(crate) native: bool,
    /// Run only the QEMU part
    #[arg(long)]
    pub(crate) emulated: bool,
    /// Run only the native measurements whose names begin with this text
    #[arg(long, value_name = "NAME", conflicts_with = "emulated")]
    pub(crate) only: Option<String>,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

impl LayoutBenchArgs {
    /// Whether to run the native measurement with this name.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.starts_with(only))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Layout {
        #[command(flatten)]
        args: LayoutArgs,
    }

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        args: LayoutBenchArgs,
    }

    fn layout(options: &[&str]) -> Result<LayoutArgs, clap::Error> {
        Layout::try_parse_from([&["x"], options].concat()).map(|line| line.args)
    }

    fn bench(options: &[&str]) -> Result<LayoutBenchArgs, clap::Error> {
        Bench::try_parse_from([&["x"], options].concat()).map(|line| line.args)
    }

    #[test]
    fn a_running_host_is_named_or_the_only_one() {
        let host = |options: &[&str]| layout(options).expect("is good").host;
        assert_eq!([host(&[]), host(&["--host"]), host(&["--host", "7"])], [None, Some(None), Some(Some(7))]);
        assert!(layout(&["--host", "x"]).is_err());
        assert!(layout(&["--host", "--qemu", "q"]).is_err(), "no host is started, so no QEMU");
    }

    #[test]
    fn there_is_one_thing_to_do_with_the_text() {
        assert!(layout(&["--write", "f", "--check", "f"]).is_err());
        assert!(layout(&["--write", "f", "--json"]).is_err());
        assert!(layout(&["--check", "f", "--json"]).is_err());
        assert!(layout(&["--picture", "f", "--write", "f"]).is_err());
        assert!(layout(&["--check", "f", "--host"]).is_ok());
    }

    #[test]
    fn what_is_timed_is_chosen_by_the_beginning_of_its_name() {
        let only = bench(&["--native", "--only", "run loop"]).expect("is good");
        assert!(only.wants("run loop") && only.wants("run loop, posting") && !only.wants("plain"));
        assert!(bench(&[]).expect("is good").wants("plain"));
        assert!(bench(&["--native", "--emulated"]).is_err());
        assert!(bench(&["--emulated", "--only", "plain"]).is_err());
    }
}

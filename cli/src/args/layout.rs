//! `dunlin layout` and `dunlin bench layout`: their options.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::config::Arch;

pub(super) const HELP: &str = "\
What belongs to a vCPU, a pCPU and a VM is in one block each, laid out by who writes it: two
cores that write to one cache line take it from each other, even if they write different words
of it. So no line holds fields of two classes, no line belongs to two blocks, and the compiler
proves it.

Classes:
  owner     written by the pCPU that runs the vCPU (of a pCPU's block: by that pCPU) alone. Its
            lines stay in that core's cache; the most frequent exits write nothing but these
  mailbox   written by everybody, by atomic operations or under a lock in it: posted interrupts,
            pending work, requests to flush. The owner meets it before each entry
  frozen    written by nobody after creation, so every core may keep a copy
  cold      written by anybody, but so seldom that it does not matter

What it prints, after a summary: of each block, as pahole would, every field with
  offset    bytes from the start of the block; what is indented is within the struct above it
  bytes     its size; `(gap)` stands for bytes that are nobody's
  line      the cache line that it is on, or the first and the last
  class     as above, and who writes it
A ruled line begins where lines of another class begin. After each block: its bytes, its lines
by class, its gaps.

It starts a host without VMs and asks it; with --host a host that runs, and then it also tells
where the blocks are, and whether two of them share a line.

docs/layout.txt and, with --arch aarch64, docs/layout-aarch64.txt are what --write writes. The status is 1 if --check finds anything else, and it
says what; it is also 1 if lines of two classes, or of two blocks, are found.

Examples:
  dunlin layout | less
  dunlin layout --check docs/layout.txt      fails when a field has moved, and shows which
  dunlin layout --write docs/layout.txt      after a look at what has moved
  dunlin layout --host --json                with the addresses of all blocks";

pub(super) const BENCH_HELP: &str = "\
Natively, on two cores of this computer, two threads play two vCPUs. Their state is packed
(fields in the order in which they come to mind, vCPUs in an array) or laid out by who writes it
(see `dunlin layout`):

  run loop                   what is written from one entry into the guest to the next
  run loop, posting          the same, and every 64 passes a post into the other's mailbox
  run loop, statistics read  the same, and every 64 passes a look at all of the other's counts
  statistics                 one count for the VM, and one for each vCPU
  plain                      an addition to a word of a record of 8, 24 or 136 bytes per vCPU, and
                             a write elsewhere, as code usually has it
  plain, nothing else        without that: cores combine what they write to a line without break
  locked                     the same addition in one step
  presence                   the word that says whether a vCPU is in its guest, beside its mailbox
                             and on a line of its owner; by passes of the other vCPU per post

Figures are cycles per operation: the lower quartile of short batches in which both threads
truly ran, then the median of 25 turns, with the least and the greatest of them. Before, and after
each comparison, the cores are tried: they must be two, and free. If they are not, it is made
again, some times; after that a target is `not judged`, which is no failure.

In QEMU, on 2 vCPUs and 2 pCPUs: loops of exits whose number is known, to show that counts are
exact.

Examples:
  dunlin bench layout                      about 20 seconds
  dunlin bench layout --native             no emulator is started
  dunlin bench layout --native --only locked
  dunlin bench layout --json > layout.jsonl";

/// `dunlin layout`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct LayoutArgs {
    /// Architecture of the host that is started
    #[arg(long, value_name = "ARCH", default_value = "x86_64", conflicts_with = "host")]
    pub(crate) arch: Arch,
    /// Ask a running host instead of starting one: that of process PID, or the only one
    #[arg(long, value_name = "PID", num_args = 0..=1)]
    pub(crate) host: Option<Option<u32>>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the text to this file instead of printing it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "check"])]
    pub(crate) write: Option<PathBuf>,
    /// Print what differs from this file, line by line; fail if anything does
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
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    pub(crate) arch: Arch,
    /// Only time packed and laid out state on this computer; no emulator is started
    #[arg(long, conflicts_with = "emulated")]
    pub(crate) native: bool,
    /// Only count on the emulated host
    #[arg(long)]
    pub(crate) emulated: bool,
    /// Of what is timed, only that whose name begins so
    #[arg(long, value_name = "NAME", conflicts_with = "emulated")]
    pub(crate) only: Option<String>,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

impl LayoutBenchArgs {
    /// Whether what is timed under this name is wanted.
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

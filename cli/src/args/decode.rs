//! `dunlin bench decode`: its options.

use abi::payload::DecodeCache;
use clap::Args as ClapArgs;

use super::setting;

pub(super) const HELP: &str = "\
A guest accesses an emulated device with ordinary loads and stores. For each access the hypervisor
must fetch the instruction through the guest's page tables, and decode it. A cache can save that
work. This command compares the kinds of cache (key `decode_cache` of a VM):

  off                    no cache
  write-protect          instructions by address; a write to the code's page drops them
  write-protect-tables   the same, with write-protected page tables too, as in bhyve (2015)
  bytes                  instructions by their bytes; no entry can become wrong

Parts:
  Loops    the measuring guest accesses registers of its local APIC (as memory: xAPIC) and I/O
           APIC from 1 to 512 instructions. First the exact number of instructions of an access,
           in guest and hypervisor (QEMU -icount, 1 vCPU); then the ticks of an access without
           -icount, settings in turn: median (minimum-maximum)
  Changes  the guest writes to its code, next to it, or to its page tables, with two vCPUs:
           lookups, hits, insertions and dropped entries
  Native   cycles of the emulator's code on this computer: fetch, decode, hit, whole emulation,
           on one thread and on two
Then it prints published or measured figures of other systems, and which targets were met.

Columns:
  lookups   instructions to emulate         hits      found in the cache
  inserted  added to the cache              replaced  removed for other entries
  code      dropped because of a write to the page of the code
  tables    dropped because of a write to a page table that leads to the code
  walks     dropped because of a walk of such a table, which nested paging treats as a write
  faults    stage-2 faults on protected pages: the cost of protection for writers
  walks done   walks of the guest's page tables by the emulator, to instructions and operands

--macro measures Debian's kernel instead, with the local APIC as memory: a shell that starts
programs, and a parallel compile of C sources.

The exit status is 1 if a target was missed, a guest found an error, or a run failed.

Examples:
  dunlin bench decode                      about 3 minutes
  dunlin bench decode --quick              fewer loops, about a minute
  dunlin bench decode --native             some seconds; no emulator is started
  dunlin bench decode --macro --rounds 1
  dunlin bench decode --setting off,bytes --json > decode.jsonl";

/// `dunlin bench decode`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct DecodeArgs {
    /// Measure only these settings [default: all; with --macro all but write-protect-tables]
    #[arg(long = "setting", value_name = "NAME,..", value_delimiter = ',', value_parser = setting::<DecodeCache>())]
    pub(crate) settings: Vec<DecodeCache>,
    /// Run fewer loops, and fewer rounds of each
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure only native code on this computer, without an emulator
    #[arg(long, conflicts_with_all = ["debian", "quick", "settings", "rounds"])]
    pub(crate) native: bool,
    /// Measure Debian's kernel with real programs instead
    #[arg(long = "macro", conflicts_with = "quick")]
    pub(crate) debian: bool,
    /// Number of timed rounds, settings in turn [default: 5; 3 with --quick or --macro]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

/// All settings, those that are compared with others first.
pub(crate) const SETTINGS: [DecodeCache; 4] =
    [DecodeCache::Off, DecodeCache::WriteProtect, DecodeCache::WriteProtectTables, DecodeCache::Bytes];

impl DecodeArgs {
    /// The settings to compare.
    pub(crate) fn settings(&self) -> Vec<DecodeCache> {
        let usual = |setting: &DecodeCache| !self.debian || *setting != DecodeCache::WriteProtectTables;
        if self.settings.is_empty() {
            return SETTINGS.into_iter().filter(usual).collect();
        }
        SETTINGS.into_iter().filter(|setting| self.settings.contains(setting)).collect()
    }

    /// Number of timed rounds.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick || self.debian { 3 } else { 5 })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DecodeArgs,
    }

    fn parse(options: &[&str]) -> Result<DecodeArgs, clap::Error> {
        Line::try_parse_from([&["x"], options].concat()).map(|line| line.args)
    }

    #[test]
    fn settings_are_called_as_in_files() {
        for setting in SETTINGS {
            let args = parse(&["--setting", setting.name()]).expect("is a name");
            assert_eq!(args.settings(), [setting]);
        }
        assert!(parse(&["--setting", "on"]).is_err());
    }

    #[test]
    fn settings_are_compared_in_one_order_and_each_once() {
        assert_eq!(
            parse(&["--setting=bytes,off,bytes"]).expect("is good").settings(),
            [DecodeCache::Off, DecodeCache::Bytes]
        );
        assert_eq!(parse(&[]).expect("is good").settings(), SETTINGS);
        assert_eq!(
            parse(&["--macro"]).expect("is good").settings(),
            [DecodeCache::Off, DecodeCache::WriteProtect, DecodeCache::Bytes]
        );
    }

    #[test]
    fn rounds_are_fewer_where_one_takes_long() {
        let rounds = |options: &[&str]| parse(options).expect("is good").rounds();
        assert_eq!([rounds(&[]), rounds(&["--quick"]), rounds(&["--macro"]), rounds(&["--rounds=7"])], [5, 3, 3, 7]);
        assert!(parse(&["--rounds=0"]).is_err());
        assert!(parse(&["--native", "--macro"]).is_err());
    }
}

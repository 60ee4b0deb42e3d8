//! `dunlin bench decode`: its options.

use clap::{Args as ClapArgs, ValueEnum};

pub(super) const HELP: &str = "\
A guest reaches an emulated device by ordinary loads and stores. For each of them the hypervisor
must find out what the instruction was: fetch it through the guest's page tables, and decode it.
What it remembers of that is the key `decode_cache` of a VM; this command compares its settings:

  off                    nothing
  write-protect          the instruction at an address, while nobody writes to its page
  write-protect-tables   the same with page tables protected too, as published of bhyve in 2015
  bytes                  what certain bytes mean, which nothing that a guest does can make wrong

What it prints:
  Loops    the measuring guest accesses registers of its local APIC (as memory: xAPIC) and I/O
           APIC from 1 to 512 places of code. Instructions of one access, guest and hypervisor,
           counted exactly (QEMU -icount, 1 vCPU); then ticks of one access without counting,
           the settings in turn: median (least-greatest)
  Changes  the guest writes to its code, beside it, or to its page tables, with two vCPUs:
           what was looked up, known, remembered, and forgotten, and why
  Native   the emulator's code on this computer, in cycles: fetch, decode, hit, whole emulation,
           on one thread and on two
and beside it what was published or measured of others, and which targets were met.

What the columns say:
  lookups   instructions to emulate         hits      those that were known already
  inserted  those that were remembered      replaced  those that made room for others
  code      forgotten because somebody wrote to the page of the code
  tables    forgotten because somebody wrote to a page table on the way to it
  walks     forgotten because one of these was walked: nested paging takes a walk for a write
  faults    stage-2 faults on protected pages: what protection costs whoever writes
  walks done   walks of the guest's page tables by the emulator, to instructions and operands

--macro measures Debian's kernel instead, which must use the local APIC as memory: a shell that
starts programs, and a parallel compile of C sources.

The status is 1 when a target was missed, a guest found something wrong, or a run failed.

Examples:
  dunlin bench decode                      about 3 minutes
  dunlin bench decode --quick              fewer loops, about a minute
  dunlin bench decode --native             some seconds; no emulator is started
  dunlin bench decode --macro --rounds 1
  dunlin bench decode --setting off,bytes --json > decode.jsonl";

/// `dunlin bench decode`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct DecodeArgs {
    /// Only these settings [default: all; with --macro all but write-protect-tables]
    #[arg(long = "setting", value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) settings: Vec<Setting>,
    /// Fewer loops, each in fewer rounds
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only time the code on this computer; no emulator is started
    #[arg(long, conflicts_with_all = ["debian", "quick", "settings", "rounds"])]
    pub(crate) native: bool,
    /// Measure Debian's kernel with programs instead
    #[arg(long = "macro", conflicts_with = "quick")]
    pub(crate) debian: bool,
    /// How often what is timed is repeated, settings in turn [default: 5, with --quick or --macro 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object per line, as soon as it is known
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is remembered of emulated instructions: the key `decode_cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Setting {
    /// Nothing
    Off,
    /// Instructions at addresses, while nobody writes to their pages
    WriteProtect,
    /// The same with page tables protected too
    WriteProtectTables,
    /// What certain bytes mean
    Bytes,
}

impl Setting {
    /// All of them, those that are compared with others first.
    pub(crate) const ALL: [Self; 4] = [Self::Off, Self::WriteProtect, Self::WriteProtectTables, Self::Bytes];

    /// As the key `decode_cache` takes it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::WriteProtect => "write-protect",
            Self::WriteProtectTables => "write-protect-tables",
            Self::Bytes => "bytes",
        }
    }
}

impl DecodeArgs {
    /// The settings that are compared.
    pub(crate) fn settings(&self) -> Vec<Setting> {
        let usual = |setting: &Setting| !self.debian || *setting != Setting::WriteProtectTables;
        if self.settings.is_empty() {
            return Setting::ALL.into_iter().filter(usual).collect();
        }
        Setting::ALL.into_iter().filter(|setting| self.settings.contains(setting)).collect()
    }

    /// How often what is timed is repeated.
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
        for setting in Setting::ALL {
            let args = parse(&["--setting", setting.name()]).expect("is a name");
            assert_eq!(args.settings(), [setting]);
        }
        assert!(parse(&["--setting", "on"]).is_err());
    }

    #[test]
    fn settings_are_compared_in_one_order_and_each_once() {
        assert_eq!(parse(&["--setting=bytes,off,bytes"]).expect("is good").settings(), [Setting::Off, Setting::Bytes]);
        assert_eq!(parse(&[]).expect("is good").settings(), Setting::ALL);
        assert_eq!(
            parse(&["--macro"]).expect("is good").settings(),
            [Setting::Off, Setting::WriteProtect, Setting::Bytes]
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

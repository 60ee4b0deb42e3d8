//! `cargo xtask vms-soak`: creates, starts and destroys VMs for as long as wished, while two others are at work.
//!
//! `make test` does this 30 times; a leak of a page now and then, or a race, wants more.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, Arch, Places, Wanted, run};

/// Rounds that show a leak of any kind.
const ROUNDS: u32 = 1000;

const HELP: &str = "\
cargo xtask vms-soak [--arch x86_64|aarch64] [--guest measuring|linux] [--rounds N] [--help]

Creates, starts and destroys a VM again and again on a host where two VMs work and check what they see. After each round
the host must have what it had before: memory, heap, stage-2 tables, TLB tags.

  --arch ARCH    only on this machine; both otherwise
  --guest GUEST  measuring: the measuring guest, a few seconds a round, the usual one
                 linux: Debian's kernel, destroyed at once, in its boot, or when it is up
  --rounds N     how often (1000)

Shows every tenth round. Ends with one line of figures, before and after, for each machine; the status is 0 if they are
the same and the two VMs have found nothing wrong.
";

/// Runs the command.
pub(crate) fn command(places: &Places, arguments: &[String]) -> Result<ExitCode> {
    let mut archs = vec![Arch::X86_64, Arch::Aarch64];
    let (mut guest, mut rounds) = ("measuring", ROUNDS);
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let (name, joined) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let mut value = || joined.or_else(|| words.next()).with_context(|| format!("{name} wants a value"));
        match name {
            "--help" | "-h" => {
                print!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            "--arch" => archs = vec![Arch::named(value()?)?],
            "--guest" => guest = value()?,
            "--rounds" => rounds = value()?.parse().context("--rounds wants a number")?,
            _ => bail!("no argument `{word}`\n\n{HELP}"),
        }
    }
    if !["measuring", "linux"].contains(&guest) {
        bail!("no guest `{guest}`: measuring or linux");
    }

    for arch in archs {
        let test = match arch {
            Arch::X86_64 => {
                artifacts::build(places, Wanted::ForDefaultVm)?;
                "soak::on_x86_64"
            }
            Arch::Aarch64 => {
                artifacts::build_aarch64(places, Wanted::ForDefaultVm)?;
                "soak::on_aarch64"
            }
        };
        let mut soak = places.cargo(&["test", "--release", "--quiet", "--package", "dunlin-system-tests"]);
        soak.args(["--test", "vms", "--", "--ignored", "--exact", "--nocapture", test]);
        soak.env("DUNLIN_SOAK_ROUNDS", rounds.to_string()).env("DUNLIN_SOAK_GUEST", guest);
        run(&mut soak)?;
    }
    Ok(ExitCode::SUCCESS)
}

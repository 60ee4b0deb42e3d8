//! Moves a guest of QEMU with `/dev/mshv`, in a parent VM: to another host, or to a file and from it.
//!
//! QEMU 11.1 migrates such a guest's memory, by the dirty log of the hypervisor, and its devices. But it leaves out
//! parts of its vCPUs, without which the guest does not go on ([`state`]). This program lets QEMU do its part, by its
//! own commands, and carries the rest. Kernel, QEMU and guest are not changed, and need no option but a monitor.
//!
//! * [`system`]: system calls, with all unsafe code.
//! * [`guest`]: the calls of the device for a guest of another process.
//! * [`state`]: what QEMU leaves out.
//! * [`qmp`]: QEMU's monitor.
//! * [`rcu`]: short waits of Linux while QEMU stops a guest.
//! * [`peer`]: the other host.
//! * [`moving`]: the commands.

mod guest;
mod kicks;
mod moving;
mod peer;
mod qmp;
mod rcu;
mod state;
mod system;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use moving::{Sending, Vm};
use qmp::{Pace, Qmp};

const HELP: &str = "\
guest-move COMMAND --pid PID [--qmp SOCKET] [OPTION..]

Moves a guest of QEMU with -accel mshv. QEMU was started with -qmp unix:SOCKET,server=on,wait=off, and has the number
PID. Its descriptors are copied, so this program needs the right to trace it: root has it.

  send ADDRESS:PORT [--bandwidth BYTES] [--downtime MS] [--limit S] [--slow-down] [--compare]
               moves the guest while it runs to the host where `receive` waits. Ends QEMU then. If anything fails, or
               Ctrl-C ends it, the guest goes on here. A paused guest is paused there. At most so many bytes a second
               (QEMU's usual number); stopped for so long at most, as QEMU reckons (300): for an eighth of it
               if the first round leaves little enough, for twice as long after each further round; given up after so
               many seconds, if the guest writes faster than QEMU sends (never). With --slow-down QEMU slows such a
               guest down (its auto-converge)
  receive ADDRESS:PORT [--compare]
               takes one guest. QEMU was started like the source, with -incoming defer -S besides, and ends if nothing
               comes of it. With --compare, which both need, the memory is compared before the guest goes on: a test,
               for guests with at most 2 GiB
  save FILE [--stay [--downtime MS]]
               stops the guest and saves it to FILE. With --stay it is saved while it runs, and goes on
  load FILE    loads it, as often as wanted, and lets it run. QEMU was started as for `receive`

  stay         ends a migration, and lets the guest go on here: for one that was left stopped because this program was
               killed, or the other host lost, and does not run there
  status       what QEMU says of the guest (running, paused, inmigrate), and of its migration, if there was one

For others that save and load, such as libvirt; without --qmp:

  save-vcpus FILE [--wait]
               saves only what QEMU leaves out, of a guest that is stopped. With --wait the guest may still run: this
               waits until QEMU has stopped it, has saved or moved the rest, and has ended
  load-vcpus FILE
               loads it, after QEMU has loaded the guest and before it runs

While a guest is sent or saved, and while save-vcpus waits, /sys/kernel/rcu_expedited is greater by 1: QEMU stops the
guest's devices much faster then.

A result is one line of JSON on standard output. The status is 0 if all went well, 1 if not, 2 for wrong arguments.
";

/// The command line.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    command: Command,
    pid: u32,
    qmp: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
enum Command {
    Send(Sending),
    Receive { at: String, compares: bool },
    Save { file: PathBuf, stays: bool, downtime: u64 },
    Load { file: PathBuf },
    SaveVcpus { file: PathBuf, waits: bool },
    LoadVcpus { file: PathBuf },
    Stay,
    Status,
}

impl Options {
    fn parse(words: &[String]) -> Result<Self> {
        let (mut plain, mut pid, mut qmp) = (Vec::new(), None, None);
        let (mut bandwidth, mut downtime, mut limit) = (None, Pace::DOWNTIME, None);
        let (mut stays, mut compares, mut slows_down, mut waits) = (false, false, false, false);
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let flag = match word.as_str() {
                "--stay" => Some(&mut stays),
                "--compare" => Some(&mut compares),
                "--slow-down" => Some(&mut slows_down),
                "--wait" => Some(&mut waits),
                _ => None,
            };
            if let Some(flag) = flag {
                *flag = true;
                continue;
            }
            if !word.starts_with("--") {
                plain.push(word.as_str());
                continue;
            }
            let value = words.next().with_context(|| format!("{word} wants a value"))?;
            match word.as_str() {
                "--pid" => pid = Some(value.parse().context("--pid wants a number")?),
                "--qmp" => qmp = Some(PathBuf::from(value)),
                "--bandwidth" => bandwidth = Some(value.parse().context("--bandwidth wants a number")?),
                "--downtime" => downtime = value.parse().context("--downtime wants a number")?,
                "--limit" => limit = Some(Duration::from_secs(value.parse().context("--limit wants a number")?)),
                _ => bail!("no option `{word}`"),
            }
        }
        if matches!(plain[..], ["status" | "stay"]) {
            plain.push("");
        }
        let [command, argument] = plain[..] else { bail!("a command and its argument are wanted") };
        let file = || PathBuf::from(argument);
        let command = match command {
            "send" => {
                let pace = Pace { bandwidth, downtime, slows_down };
                Command::Send(Sending { to: argument.to_owned(), pace, limit, compares })
            }
            "receive" => Command::Receive { at: argument.to_owned(), compares },
            "save" => Command::Save { file: file(), stays, downtime },
            "load" => Command::Load { file: file() },
            "save-vcpus" => Command::SaveVcpus { file: file(), waits },
            "load-vcpus" => Command::LoadVcpus { file: file() },
            "stay" => Command::Stay,
            "status" => Command::Status,
            other => bail!("no command `{other}`"),
        };
        let is_by_qemu = !matches!(command, Command::SaveVcpus { .. } | Command::LoadVcpus { .. });
        if is_by_qemu != qmp.is_some() {
            bail!("{}", if is_by_qemu { "--qmp is wanted" } else { "this command needs no --qmp" });
        }
        Ok(Self { command, pid: pid.context("--pid is wanted")?, qmp })
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--help" || word == "-h") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let options = match Options::parse(&words) {
        Ok(options) => options,
        Err(error) => {
            eprint!("guest-move: {error:#}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match carry_out(&options) {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("guest-move: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(options: &Options) -> Result<Value> {
    let vm = || -> Result<Vm> {
        let socket: &Path = options.qmp.as_deref().context("--qmp is wanted")?;
        Ok(Vm { pid: options.pid, qmp: Qmp::connect(socket, options.pid)? })
    };
    match &options.command {
        Command::Send(how) => moving::send(&mut vm()?, how),
        Command::Receive { at, compares } => moving::receive(&mut vm()?, at, *compares),
        Command::Save { file, stays, downtime } => moving::save(&mut vm()?, file, *stays, *downtime),
        Command::Load { file } => moving::load(&mut vm()?, file),
        Command::SaveVcpus { file, waits } => moving::save_vcpus(options.pid, file, *waits),
        Command::LoadVcpus { file } => moving::load_vcpus(options.pid, file),
        Command::Stay => {
            let qmp = &mut vm()?.qmp;
            qmp.cancel()?;
            qmp.go_on_here()?;
            qmp.report()
        }
        Command::Status => vm()?.qmp.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn what_is_said_about_a_move_is_understood() {
        let options = parse("receive [::]:4000 --compare --pid 7 --qmp /tmp/q").expect("is right");
        assert_eq!(options.command, Command::Receive { at: "[::]:4000".into(), compares: true });
        let options = parse("send host:4000 --slow-down --limit 9 --pid 7 --qmp /tmp/q").expect("is right");
        let limit = Some(Duration::from_secs(9));
        let pace = Pace { bandwidth: None, downtime: Pace::DOWNTIME, slows_down: true };
        let how = Sending { to: "host:4000".into(), pace, limit, compares: false };
        assert_eq!(options.command, Command::Send(how));
    }

    #[test]
    fn lines_that_lack_something_are_refused() {
        for line in [
            "",
            "send",
            "send host:1 --pid 7",
            "send host:1 --qmp /tmp/q",
            "save /tmp/a --pid x --qmp /tmp/q",
            "save-vcpus /tmp/a --pid 7 --qmp /tmp/q",
            "steal /tmp/a --pid 7 --qmp /tmp/q",
            "save /tmp/a --pid 7 --qmp /tmp/q --fast 1",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("save /tmp/a --stay --pid 7 --qmp /tmp/q").is_ok());
        assert!(parse("load-vcpus /tmp/a --pid 7").is_ok());
        let options = parse("save-vcpus /tmp/a --pid 7 --wait").expect("is right");
        assert_eq!(options.command, Command::SaveVcpus { file: "/tmp/a".into(), waits: true });
        assert!(parse("status --pid 7 --qmp /tmp/q").is_ok());
    }
}

//! Bounds: how long a pCPU works before it takes an interrupt, at most.
//!
//! The hypervisor measures it itself (`bounds` on its command line) and logs the longest stretch of each kind of work
//! when it ends. Under `-icount shift=0` an instruction takes a nanosecond.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::progress;
use super::target::Target;
use crate::args::BoundsArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::quantity::show_count;
use crate::records::{Class, Figure, Log};

/// The most instructions without a chance for an interrupt: 50 us, at one in a nanosecond.
const MOST: u64 = 50_000;
/// The most that a VM can have.
const VCPUS: u32 = 512;
/// With these arguments QEMU's clocks count instructions, and the hypervisor measures.
const QEMU: [&str; 8] =
    ["-icount", "shift=0,sleep=off", "-seed", "7", "-rtc", "base=2026-01-01,clock=vm", "-append", "log=info bounds"];
/// How long a host may take until it answers, and a command until it is done.
const PATIENCE: Duration = Duration::from_secs(120);

/// The longest stretch of each kind of work, in instructions.
type Stretches = BTreeMap<String, u64>;

pub(crate) fn run(args: &BoundsArgs, log: &Log) -> Result<u8, Failure> {
    let directory = tempfile::tempdir().map_err(|error| failed("a temporary folder", &error))?;
    progress(&format!("a VM of {VCPUS} vCPUs asks for the most that it can"));
    let (by_guest, run) = by_guest(args.arch, directory.path())?;
    progress(&format!("commands about a VM of {VCPUS} vCPUs"));
    let (by_commands, _) = by_commands(args.arch, directory.path())?;

    let mut all = merge(by_guest, by_commands);
    if args.parent {
        progress("a parent makes the largest calls about a guest of 256 VPs");
        all = merge(all, by_parent(args.arch, directory.path())?);
    }
    let mut all: Vec<(String, u64)> = all.into_iter().collect();
    all.sort_by_key(|(_, instructions)| std::cmp::Reverse(*instructions));
    for (work, instructions) in &all {
        let figure =
            Figure::new("longest work without interrupts", Class::Count, "instructions", [*instructions as f64]);
        log.emulated(&run, figure.at("work", work.as_str()).at("vcpus", VCPUS).at("pcpus", 1));
    }
    let Some((work, longest)) = all.first() else {
        return Err(Failure::failed("the hypervisor has measured nothing"));
    };
    let what = "a pCPU takes its interrupts after 50 000 instructions at the latest";
    let target = Target::new(what, format!("{}, {work}", show_count(*longest)), *longest <= MOST);
    target.record(log);
    if args.json {
        let work: Vec<Value> = all.iter().map(|(work, most)| json!({ "work": work, "instructions": most })).collect();
        println!("{:#}", json!({ "arch": args.arch.name(), "vcpus": VCPUS, "most": MOST, "longest": work }));
    } else {
        println!("{target}\n\n{:36} {:>12}", "work", "instructions");
        all.iter().for_each(|(work, most)| println!("{work:36} {:>12}", show_count(*most)));
        println!("\nThe longest stretch of each kind without a chance for an interrupt. Emulated by QEMU.");
    }
    Ok(u8::from(target.is_missed()))
}

fn failed(what: &str, why: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("{what}: {why}"))
}

fn merge(mut all: Stretches, more: Stretches) -> Stretches {
    for (work, instructions) in more {
        let most = all.entry(work).or_default();
        *most = instructions.max(*most);
    }
    all
}

fn vm(name: &str, vcpus: u32, memory: &str, experiments: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nvcpus = {vcpus}\nmemory = \"{memory}\"\nkernel = \"measuring-guest\"\n\
         initrd = \"none\"\ncmdline = \"experiments={experiments}\"\n"
    )
}

fn by_guest(arch: Arch, directory: &Path) -> Result<(Stretches, Value), Failure> {
    let experiments = match arch {
        Arch::X86_64 => "cpuid,port-out,self-ipi-icr,hv-ipi,hv-flush,hv-abi,pin-to-all,init-self-other",
        Arch::Aarch64 => "hvc,self-sgi,mixed,flush-storm,call-fuzz,mmio-fuzz,icc-fuzz,off-and-on",
    };
    let toml = format!("[host]\narch = \"{}\"\npcpus = 1\n", arch.name())
        + &vm("big", VCPUS, "256M", &format!("{experiments} iterations=10 seconds=1"));
    Host::start(directory, &toml)?.end()
}

fn by_commands(arch: Arch, directory: &Path) -> Result<(Stretches, Value), Failure> {
    let toml = format!("[host]\narch = \"{}\"\npcpus = 1\nmemory = \"2G\"\n", arch.name())
        + &vm("small", 1, "256M", "stride seconds=600");
    let big = directory.join("big.toml");
    // All of its vCPUs are awake again and again.
    fs::write(&big, vm("big", VCPUS, "512M", "naps seconds=0")).map_err(|error| failed("a temporary file", &error))?;
    let (saved, traced) = (directory.join("big.vm"), directory.join("trace.json"));
    let (big, saved, traced) = (big.to_string_lossy(), saved.to_string_lossy(), traced.to_string_lossy());

    let host = Host::start(directory, &toml)?;
    host.wait_until_it_answers()?;
    let mut commands = vec![
        // It writes to all of its memory.
        vec!["dirty", "start", "small"],
        vec!["dirty", "round", "small"],
        vec!["dirty", "round", "small"],
        vec!["dirty", "stop", "small"],
        // Meanwhile its large pages come back.
        vec!["trace", "--time", "2s", "--output", &traced],
        vec!["create", &big, "--start"],
        vec!["list"],
        vec!["stats", "--vm", "big"],
        vec!["host"],
        vec!["pause", "big"],
        vec!["resume", "big"],
        vec!["dirty", "start", "big", "--mirror"],
        vec!["dirty", "round", "big"],
        vec!["pause", "big"],
        vec!["dirty", "round", "big"],
        vec!["dirty", "compare", "big"],
        vec!["resume", "big"],
        vec!["dirty", "stop", "big"],
    ];
    if arch == Arch::X86_64 {
        commands.extend([vec!["save", "big", &saved], vec!["restore", &saved]]);
    }
    commands.extend([vec!["destroy", "big"], vec!["stop", "small"]]);
    for command in commands {
        host.obey(&command)?;
    }
    host.end()
}

/// A parent that owns the machine's devices: it asks for the most that it can.
fn by_parent(arch: Arch, directory: &Path) -> Result<Stretches, Failure> {
    if arch != Arch::X86_64 {
        return Err(Failure::bad_input("--parent: only x86_64 has parents").help("leave out --arch, or --parent"));
    }
    let toml = "[host]\npcpus = 1\n[[vm]]\nname = \"parent\"\nrole = \"parent\"\ndevices = \"all\"\nvcpus = 1\n\
                memory = \"1G\"\nkernel = \"parent\"\ninitrd = \"parent\"\n";
    // The status of the run is that of the check.
    let (stretches, _) = Host::start_with(directory, toml, &["--exec", "mshv-check largest"])?.end()?;
    Ok(stretches)
}

/// `dunlin run`, on its way.
struct Host {
    child: Child,
    stdout: Option<ChildStdout>,
    log: thread::JoinHandle<String>,
}

impl Host {
    fn start(directory: &Path, toml: &str) -> Result<Self, Failure> {
        Self::start_with(directory, toml, &[])
    }

    fn start_with(directory: &Path, toml: &str, more: &[&str]) -> Result<Self, Failure> {
        let file = directory.join("host.toml");
        fs::write(&file, toml).map_err(|error| failed("a temporary file", &error))?;
        let mut child = this_program()?
            .arg("run")
            .arg(&file)
            .args(["--json", "--log", "--accel=tcg", "--time-limit=10m"])
            .args(QEMU.map(|argument| format!("--qemu-arg={argument}")))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed("cannot start a run", &error))?;
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        Ok(Self { child, stdout, log: thread::spawn(move || stderr.map(read).unwrap_or_default()) })
    }

    fn wait_until_it_answers(&self) -> Result<(), Failure> {
        let since = Instant::now();
        while let Err(failure) = self.obey(&["list"]) {
            if since.elapsed() > PATIENCE {
                return Err(failure);
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn obey(&self, command: &[&str]) -> Result<(), Failure> {
        let output = this_program()?
            .args(command)
            .args(["--host", &self.child.id().to_string()])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| failed("cannot start a command", &error))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Failure::failed(format!("dunlin {}: {}\n{}", command.join(" "), output.status, said.trim_end())))
    }

    /// Waits for its end. Returns what it has measured, and its JSON.
    fn end(mut self) -> Result<(Stretches, Value), Failure> {
        let mut json = Vec::new();
        if let Some(mut stdout) = self.stdout.take() {
            stdout.read_to_end(&mut json).map_err(|error| failed("a run", &error))?;
        }
        let status = self.child.wait().map_err(|error| failed("a run", &error))?;
        let said = std::mem::replace(&mut self.log, thread::spawn(String::new)).join().unwrap_or_default();
        let run: Option<Value> = serde_json::from_slice(&json).ok().filter(|_| status.success());
        let stretches = stretches(&said);
        match run {
            Some(run) if !stretches.is_empty() => Ok((stretches, run)),
            _ => {
                let last: Vec<&str> = said.lines().rev().take(12).collect();
                let last: Vec<&str> = last.into_iter().rev().collect();
                Err(Failure::failed(format!("dunlin run: {status}\n{}", last.join("\n"))))
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It has ended, unless something went wrong.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn this_program() -> Result<Command, Failure> {
    let path = std::env::current_exe().map_err(|error| failed("this program's own file", &error))?;
    Ok(Command::new(path))
}

fn read(stderr: ChildStderr) -> String {
    let lines = BufReader::new(stderr).split(b'\n').map_while(Result::ok);
    lines.map(|line| String::from_utf8_lossy(&line).into_owned() + "\n").collect()
}

/// What the log tells: `without interrupts for 123 ns: hypercalls`.
fn stretches(log: &str) -> Stretches {
    let found = log.lines().filter_map(|line| {
        let (nanos, work) = line.split_once("without interrupts for ")?.1.split_once(" ns: ")?;
        Some((work.trim_end().to_string(), nanos.parse().ok()?))
    });
    found.fold(Stretches::new(), |all, one| merge(all, Stretches::from([one])))
}

#[cfg(test)]
mod tests {
    use super::stretches;

    #[test]
    fn longest_stretch_of_each_work_is_read_from_the_log() {
        let log = "[ 1.0] cpu0 info  without interrupts for 123 ns: hypercalls\r\n[ 1.0] cpu0 info  hello\n\
                   [ 1.0] cpu0 info  without interrupts for 5 ns: save of a VM\n\
                   [ 1.0] cpu1 info  without interrupts for 124 ns: hypercalls\n";
        let found: Vec<_> = stretches(log).into_iter().collect();
        assert_eq!(found, [("hypercalls".to_string(), 124), ("save of a VM".to_string(), 5)]);
    }
}

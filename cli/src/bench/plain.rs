//! A Linux directly on QEMU, without a hypervisor, whose agent runs one command: to compare with.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::since;
use crate::exec::{self, Agent};
use crate::failure::Failure;
use crate::qemu;
use crate::stats::printable;

/// What runs, and on what. The machine has no devices but these.
#[derive(Debug)]
pub(super) struct Plain<'a> {
    /// For messages: "KVM".
    pub(super) name: &'a str,
    pub(super) kernel: &'a Path,
    /// Archives that the kernel unpacks one after the other. The first is ours, with the agent.
    pub(super) initrd: &'a [PathBuf],
    pub(super) cmdline: &'a str,
    pub(super) cpus: u32,
    pub(super) memory: &'a str,
    /// Seconds until it counts as hung.
    pub(super) limit: u64,
    /// More arguments for QEMU.
    pub(super) more: &'a [String],
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Ended {
    /// What the command printed.
    pub(super) output: String,
    /// Seconds from the start of QEMU to user space.
    pub(super) booted: f64,
}

impl Plain<'_> {
    /// Starts it, lets it run `script`, and ends it.
    ///
    /// # Errors
    /// The command has failed, or has not ended.
    pub(super) fn run(&self, script: &str) -> Result<Ended, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("a host with {}: {error}", self.name));
        let directory = tempfile::tempdir().map_err(cannot)?;
        let [agent, console, errors] = ["agent", "console", "errors"].map(|name| directory.path().join(name));
        let mut command = self.command(directory.path(), script, &joined("-serial file:", &agent))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&errors).map_err(cannot)?);

        let start = Instant::now();
        let qemu = Killed(command.spawn().map_err(cannot)?);
        let said = wait_for_end(qemu, &agent, start, Duration::from_secs(self.limit)).map_err(cannot)?;
        match said {
            Said { output, booted: Some(booted), status: Some(0) } => Ok(Ended { output, booted }),
            Said { output, status, .. } => {
                let status = status.map_or("the host did not end".to_string(), |status| format!("status {status}"));
                let errors = fs::read_to_string(&errors).unwrap_or_default();
                let console = fs::read_to_string(&console).unwrap_or_default();
                let said = printable([output, errors, console].concat().trim_end());
                let command = script.lines().next().unwrap_or_default();
                Err(Failure::failed(format!("{command} on {}: {status}\n{said}", self.name)))
            }
        }
    }

    /// The command that starts it. What the agent says, `script`'s output among it, goes to standard output. Its other
    /// files are in `directory`.
    pub(super) fn piped(&self, directory: &Path, script: &str) -> Result<Command, Failure> {
        let agent = ["-chardev", "stdio,id=agent,signal=off", "-serial", "chardev:agent"].map(OsString::from);
        self.command(directory, script, &agent)
    }

    fn command(&self, directory: &Path, script: &str, agent: &[OsString]) -> Result<Command, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("a host with {}: {error}", self.name));
        let [initrd, console] = ["initrd", "console"].map(|name| directory.join(name));
        let mut archive = Vec::new();
        for file in self.initrd {
            exec::append(&mut archive, &fs::read(file).map_err(cannot)?);
        }
        exec::add_script(&mut archive, script).map_err(cannot)?;
        fs::write(&initrd, archive).map_err(cannot)?;

        let mut command = qemu::ends_with_us("qemu-system-x86_64".as_ref(), Signal::KILL).map_err(cannot)?;
        command.args(["-machine", "q35", "-cpu", "max", "-smp", &self.cpus.to_string(), "-m", self.memory]);
        command.args(["-display", "none", "-monitor", "none", "-no-reboot", "-nodefaults", "-no-user-config"]);
        command.args(joined("-serial file:", &console)).args(agent);
        command.arg("-kernel").arg(self.kernel).arg("-initrd").arg(&initrd).args(["-append", self.cmdline]);
        command.args(self.more);
        Ok(command)
    }
}

/// Two arguments: an option, and its value that ends in a path.
fn joined(option: &str, path: &Path) -> [OsString; 2] {
    let (option, value) = option.split_once(' ').unwrap_or((option, ""));
    let mut joined = OsString::from(value);
    joined.push(path);
    [option.into(), joined]
}

/// The intervals between looks at the agent's line: before its greeting, whose time counts, and after.
const LOOK: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(50)];

/// What the agent's line says.
struct Said {
    output: String,
    /// Seconds until its greeting.
    booted: Option<f64>,
    /// The command's, if it has ended.
    status: Option<u8>,
}

fn wait_for_end(mut qemu: Killed, agent: &Path, start: Instant, limit: Duration) -> std::io::Result<Said> {
    let mut booted = None;
    loop {
        let has_ended = qemu.0.try_wait()?.is_some();
        let mut reader = Agent::default();
        let mut output = Vec::new();
        if let Ok(file) = File::open(agent) {
            for line in BufReader::new(file).split(b'\n') {
                output.extend(reader.push(&[line?, b"\n".to_vec()].concat()));
            }
        }
        if reader.hello().is_some() {
            booted.get_or_insert_with(|| since(start));
        }
        if has_ended || reader.status().is_some() || start.elapsed() > limit {
            let status = reader.status();
            output.extend(reader.finish());
            return Ok(Said { output: String::from_utf8_lossy(&output).into_owned(), booted, status });
        }
        sleep(LOOK[usize::from(booted.is_some())]);
    }
}

/// A process that does not outlive this value.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_belongs_to_the_value_of_its_option() {
        assert_eq!(joined("-serial file:", Path::new("/a b")), ["-serial", "file:/a b"].map(OsString::from));
    }
}

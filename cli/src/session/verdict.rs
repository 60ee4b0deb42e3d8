//! The end of a run: failures, the exit status that follows from them, and the report.
//!
//! A failure of the host comes first, because it explains the state of the VMs. Then the tool judges each VM by its
//! role. A VM with a command must report the command's status; any other must not have crashed.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use abi::control::StopReason;
use abi::exit_code::{CLEAN, HARDWARE_ERROR, PANIC, REFUSED, qemu_status, told_status};

use super::{Cut, Followed, LAST_WORDS, Purpose, Role, Session, write_out};
use crate::failure::{FAILED, Failure, TIMED_OUT};
use crate::host::Files;
use crate::progress::{last_lines, last_lines_of};
use crate::stats::printable;
use crate::summary::VmRecord;

impl Session<'_> {
    /// The status to end with, and all that went wrong.
    pub(super) fn judge(&mut self, files: &Files) -> (u8, Vec<Failure>) {
        let mut failures = Vec::new();
        failures.extend(self.judge_host(files));
        let host_failed = !failures.is_empty();

        let mut status = 0;
        for (record, followed) in self.record.vms.iter_mut().zip(&self.vms) {
            record.exit_status = record.exit_status.or(followed.agent.status());
            match judge_vm(record, followed, &self.purpose, self.left) {
                Ok(0) => {}
                Ok(own) if status == 0 => status = own,
                Ok(_) => {}
                // That a VM did not finish is no news when the host did not.
                Err(_) if host_failed && !record.is_over() => {}
                Err(failure) => failures.push(failure),
            }
        }
        if let Some(first) = failures.first() {
            status = first.status;
        }
        (status, failures)
    }

    /// The failure of the host, if there is one.
    fn judge_host(&mut self, files: &Files) -> Option<Failure> {
        let Files { log, messages, .. } = files;
        match self.phase.cut() {
            Some(Cut::TimeLimit) => {
                let limit = self.deadline.map_or(Duration::ZERO, |(_, limit)| limit);
                let what =
                    format!("the time limit of {:.1} s ended the run{}", limit.as_secs_f64(), self.whereabouts());
                return Some(Failure::failed(what).with_status(TIMED_OUT).help("for a longer one: --time-limit 5m"));
            }
            Some(Cut::Signal(signal)) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                let status = u8::try_from(128 + signal).unwrap_or(FAILED);
                return Some(Failure::failed(format!("ended by {name}")).with_status(status));
            }
            Some(Cut::Closed) => {
                return Some(Failure::failed(format!("the hypervisor closed the control port{}", quote(log))));
            }
            // Everything was done, or the user has ended the run.
            Some(Cut::Stuck) => {
                self.progress.say("the host did not end by itself and was killed");
                return None;
            }
            None => {}
        }

        let status = self.process.wait(LAST_WORDS)?;
        let done = self.phase.is_told();
        // A machine without an exit status prints it in its log.
        let told = || last_lines(log, 1).first().and_then(|line| told_status(line));
        let code = match status.code() {
            Some(0) => told().or(Some(0)),
            code => code,
        };
        match code {
            Some(code) if code == qemu_status(CLEAN) => None,
            Some(code) if code == qemu_status(PANIC) => {
                Some(Failure::failed(format!("the hypervisor panicked{}", quote(log))))
            }
            Some(code) if code == qemu_status(HARDWARE_ERROR) => {
                Some(Failure::failed(format!("the host's hardware failed{}", quote(log))))
            }
            Some(code) if code == qemu_status(REFUSED) => {
                Some(Failure::failed(format!("the hypervisor refused to start{}", quote(log))))
            }
            Some(0) if done => None,
            Some(0) => Some(
                Failure::failed(format!("the host was reset{}", quote(log)))
                    .help("a triple fault does this: a fault that the hypervisor cannot report"),
            ),
            _ => {
                let failure = Failure::failed(format!("QEMU ended with {}{}", words(status), quote(messages)));
                let has_crashed = status.signal() == Some(signal_hook::consts::SIGSEGV);
                Some(if has_crashed { failure.help(IF_QEMU_CRASHES) } else { failure })
            }
        }
    }

    /// How far the VMs got, for a run that did not finish.
    fn whereabouts(&self) -> String {
        if self.record.host.is_none() {
            return "; the hypervisor had not started yet".to_string();
        }
        let unfinished = self.record.vms.iter().zip(&self.vms).filter(|(record, _)| !record.is_over());
        unfinished
            .map(|(record, followed)| {
                let how_far = match (&record.started_ns, &record.hello) {
                    (None, _) => "was not started yet",
                    (_, None) if followed.role == Role::Watch => "was running",
                    (_, None) => "had not reached user space",
                    (_, Some(_)) => "was in user space",
                };
                let tail = indented(&last_lines_of(&followed.tail, 4));
                format!("; vm \"{}\" {how_far}{tail}", record.name)
            })
            .collect()
    }

    /// Reports the end of the run.
    pub(super) fn report(&self, status: u8, failures: &[Failure]) {
        let texts: Vec<String> = self.record.vms.iter().map(VmRecord::text).collect();
        // Without a host there is no summary.
        let summary = if self.record.host.is_some() { texts.concat() } else { String::new() };
        match self.purpose {
            _ if self.json => self.progress.print(&summary),
            Purpose::Script => write_out(&mut io::stdout(), summary.as_bytes()),
            Purpose::Console => self.progress.print(&summary),
            Purpose::Exec(_) if self.verbose => self.progress.print(&summary),
            Purpose::Exec(_) => {}
        }
        for failure in failures {
            self.progress.print(&format!("dunlin: {failure}"));
        }
        if self.json {
            let errors: Vec<_> = failures.iter().map(ToString::to_string).collect();
            println!("{}", self.record.json(status, self.progress.elapsed(), &errors));
        }
    }
}

/// The status of a VM's run, or its failure.
fn judge_vm(record: &VmRecord, followed: &Followed, purpose: &Purpose, left: bool) -> Result<u8, Failure> {
    let name = &record.name;
    if let Some(why) = &record.failed {
        return Err(Failure::failed(format!("vm \"{name}\" could not be created: {}", printable(why))));
    }
    match (followed.role, record.exit_status) {
        (Role::Command, Some(0)) => return Ok(0),
        (Role::Command, Some(status)) if *purpose == Purpose::Script => {
            return Err(Failure::failed(format!("vm \"{name}\": the fixed script ended with status {status}")));
        }
        (Role::Command, Some(status)) => return Ok(status),
        _ => {}
    }

    let tail = indented(&telling_lines(&followed.tail));
    let Some((reason, detail, _)) = &record.stopped else {
        return if left {
            Ok(0)
        } else {
            Err(Failure::failed(format!("vm \"{name}\" was still running when the host ended{tail}")))
        };
    };
    let (why, detail) = (reason.name(), printable(detail));
    let colon = if detail.is_empty() { "" } else { ": " };
    match (followed.role, reason) {
        (Role::Command, _) => {
            let what = if record.hello.is_some() { "its command had" } else { "it reached user space" };
            Err(Failure::failed(format!(
                "vm \"{name}\" ended before {what}{}: {why}{colon}{detail}{tail}",
                if record.hello.is_some() { " finished" } else { "" }
            )))
        }
        (_, StopReason::TripleFault | StopReason::Unsupported | StopReason::Halted | StopReason::HardwareError) => {
            Err(Failure::failed(format!("vm \"{name}\" crashed: {why}{colon}{detail}{tail}")))
        }
        (_, StopReason::PowerOff | StopReason::Reset | StopReason::Commanded | StopReason::Saved) => Ok(0),
    }
}

/// The last lines of a console. If the kernel panicked earlier, the line with the reason as well.
fn telling_lines(console: &[u8]) -> Vec<String> {
    const SHOWN: usize = 8;
    let all = last_lines_of(console, usize::MAX);
    let last = all.len().saturating_sub(SHOWN);
    let panic = all[..last].iter().rposition(|line| line.contains("Kernel panic"));
    panic.into_iter().chain(last..all.len()).map(|at| all[at].clone()).collect()
}

/// The last lines of a file, to follow a sentence.
fn quote(path: &Path) -> String {
    let lines = last_lines(path, 12);
    if lines.is_empty() { " without any output".to_string() } else { indented(&lines) }
}

fn indented(lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!(":\n    {}", lines.join("\n    ")) }
}

/// What a user can do about it.
const IF_QEMU_CRASHES: &str = "this is a fault of QEMU's. That of 7.2 crashes now and then where a VM owns devices: one \
                               CPU moves their registers while another uses its own. `--accel=tcg-single` avoids that, \
                               as does a newer QEMU";

fn words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => signal_hook::low_level::signal_name(signal).unwrap_or("a signal").to_string(),
        (None, None) => "an unknown status".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_is_shown_even_when_a_long_trace_follows() {
        let trace: String = (0..20).map(|n| format!("frame {n}\n")).collect();
        let lines = telling_lines(format!("boot\nKernel panic - not syncing: test\n{trace}").as_bytes());
        assert_eq!(lines.len(), 9);
        assert_eq!((lines[0].as_str(), lines[1].as_str()), ("Kernel panic - not syncing: test", "frame 12"));
        assert_eq!(telling_lines(b"one\nKernel panic\n"), ["one", "Kernel panic"]);
        assert!(telling_lines(b"").is_empty());
    }
}

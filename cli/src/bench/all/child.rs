//! A step as a process: started in its own process group, read, and ended with all its children.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::failure::{FAILED, Failure};
use crate::stats::printable;

/// Polling interval.
const LOOK: Duration = Duration::from_millis(100);
/// Time limit for a process to end after a signal.
const PATIENCE: Duration = Duration::from_secs(10);
/// Last words that are kept.
const KEPT_LINES: usize = 8;

/// One `dunlin bench`.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    lines: Receiver<String>,
    last: VecDeque<String>,
    ended: Option<ExitStatus>,
}

impl Child {
    /// Starts `dunlin bench` with these words, its records going to `path`.
    pub(super) fn start(words: &[&str], path: &Path) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("a step cannot be started: {error}"));
        let mut process = Command::new(std::env::current_exe().map_err(cannot)?)
            .arg("bench")
            .args(words)
            .arg("--record")
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C is for us; we pass it on.
            .process_group(0)
            .spawn()
            .map_err(cannot)?;
        let (sender, lines) = channel();
        if let Some(stderr) = process.stderr.take() {
            thread::spawn(move || {
                for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                    // If there is no receiver any more, the line is dropped.
                    let _ = sender.send(printable(String::from_utf8_lossy(&line).trim()));
                }
            });
        }
        Ok(Self { process, lines, last: VecDeque::new(), ended: None })
    }

    /// Waits a moment; whether it has ended.
    pub(super) fn has_ended(&mut self) -> Result<bool, Failure> {
        match self.lines.recv_timeout(LOOK) {
            Ok(line) => self.keep(line),
            Err(RecvTimeoutError::Timeout) => {}
            // Its output is closed, but the process may still run.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK),
        }
        let ended = self.process.try_wait();
        self.ended = ended.map_err(|error| Failure::failed(format!("a step cannot be waited for: {error}")))?;
        if self.ended.is_some() {
            while let Ok(line) = self.lines.recv_timeout(LOOK) {
                self.keep(line);
            }
        }
        Ok(self.ended.is_some())
    }

    fn keep(&mut self, line: String) {
        if !line.is_empty() {
            self.last.push_back(line);
        }
        if self.last.len() > KEPT_LINES {
            self.last.pop_front();
        }
    }

    /// Its last line of output.
    pub(super) fn says(&self) -> Option<String> {
        self.last.back().cloned()
    }

    /// If it failed: the reason, with its last lines of output.
    pub(super) fn died(&self) -> Option<String> {
        let status = self.ended?;
        // A missed target, or a failure that has its record.
        if status.success() || status.code() == Some(i32::from(FAILED)) {
            return None;
        }
        let how = match status.signal() {
            Some(signal) => format!("the step was ended by signal {signal}"),
            None => format!("the step ended with {status}"),
        };
        let words: Vec<&str> = self.last.iter().map(String::as_str).collect();
        Some(if words.is_empty() { how } else { format!("{how}: {}", words.join(" / ")) })
    }

    /// Ends it, and all that it has started.
    pub(super) fn interrupt(&mut self) {
        let Some(group) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) else { return };
        for signal in [Signal::INT, Signal::KILL] {
            // The process may have ended already.
            let _ = kill_process_group(group, signal);
            let deadline = Instant::now() + PATIENCE;
            while Instant::now() < deadline {
                let _ = self.process.try_wait();
                if test_kill_process_group(group).is_err() {
                    return;
                }
                thread::sleep(LOOK);
            }
        }
    }
}

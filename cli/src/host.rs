//! A host in QEMU: its files, its start, and the connection to its control port.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::control;
use crate::failure::Failure;
use crate::progress::last_lines;
use crate::qemu::{Machine, Process, Qemu};

/// Interval between checks whether the host has connected.
const TICK: Duration = Duration::from_millis(10);

/// The files of a host, in a directory of their own. They are deleted when dropped.
#[derive(Debug)]
pub(crate) struct Files {
    directory: tempfile::TempDir,
    /// The payload.
    pub(crate) payload: PathBuf,
    /// The hypervisor's log.
    pub(crate) log: PathBuf,
    /// The socket of the control port.
    pub(crate) control: PathBuf,
    /// QEMU's own messages.
    pub(crate) messages: PathBuf,
}

impl Files {
    /// A directory for a host; its name begins with `prefix`.
    pub(crate) fn new(prefix: &str) -> io::Result<Self> {
        let directory = tempfile::Builder::new().prefix(prefix).tempdir()?;
        let [payload, log, control, messages] =
            ["payload", "hypervisor.log", "control", "qemu.log"].map(|name| directory.path().join(name));
        Ok(Self { directory, payload, log, control, messages })
    }

    /// One more file of the host.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Keeps what may explain a failure; the payload would only fill the disk.
    pub(crate) fn keep(self) {
        let _ = self.directory.keep();
        let _ = fs::remove_file(self.payload);
        let _ = fs::remove_file(self.control);
    }

    /// `failure`, with the end of the logs if it has no better help.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        let said: Vec<String> = [&self.log, &self.messages].into_iter().flat_map(|path| last_lines(path, 5)).collect();
        if failure.has_help() || said.is_empty() {
            return failure;
        }
        failure.help(format!("its last messages:\n  {}", said.join("\n  ")))
    }
}

/// Starts QEMU with `machine` and `payload`, and waits until it has connected the control port.
pub(crate) fn start(
    qemu: &Qemu,
    machine: &Machine<'_>,
    payload: &[u8],
    patience: Duration,
) -> Result<(Process, UnixStream), Failure> {
    let failed = |error: io::Error| Failure::failed(format!("cannot start a host: {error}"));
    let files = machine.files;
    fs::write(&files.payload, payload).map_err(failed)?;
    let listener = UnixListener::bind(&files.control).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;

    let mut process = Process::start(qemu, &machine.arguments(), &files.messages)?;
    let stream = match accept(&listener, &mut process, patience) {
        Ok(stream) => stream,
        Err(why) => {
            process.kill();
            return Err(files.explain(Failure::failed(format!("the host did not start: {why}"))));
        }
    };
    control::limit_patience(&stream).map_err(failed)?;
    Ok((process, stream))
}

fn accept(listener: &UnixListener, process: &mut Process, patience: Duration) -> Result<UnixStream, String> {
    let deadline = Instant::now() + patience;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                return stream.set_nonblocking(false).map(|()| stream).map_err(|error| error.to_string());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.to_string()),
        }
        if let Some(status) = process.ended() {
            return Err(format!("QEMU has ended ({status})"));
        }
        if Instant::now() > deadline {
            return Err(format!("QEMU did not connect within {} s", patience.as_secs()));
        }
        std::thread::sleep(TICK);
    }
}

//! A host without VMs, started to answer requests.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use abi::control::{Command, HostInfo, Message};
use abi::payload::Builder;

use crate::assets::Assets;
use crate::config::{Accel, Arch, Place, Placed};
use crate::control::{self, Client};
use crate::failure::Failure;
use crate::progress::last_lines;
use crate::qemu::{Acceleration, Loader, Machine, Process, Qemu};
use crate::quantity::MIB;

/// Memory of the machine: a host without VMs needs little.
const MEMORY: u64 = 128 * MIB;
/// Time limit for its start, and for its end.
const PATIENCE: Duration = Duration::from_secs(30);
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Interval between checks whether it has started.
const TICK: Duration = Duration::from_millis(10);

/// The host; it ends when this is dropped, if not before.
pub(super) struct Host {
    client: Client,
    info: HostInfo,
    process: Process,
    files: Files,
}

/// Its files, deleted when dropped.
struct Files {
    directory: tempfile::TempDir,
}

impl Host {
    /// Starts it, by this QEMU if one is named, and waits until it is up.
    pub(super) fn start(arch: Arch, qemu: Option<&PathBuf>) -> Result<Self, Failure> {
        let hypervisor = Assets::locate().of(arch).hypervisor()?;
        let named = qemu.map(|path| Placed { value: path.clone(), place: Place::Option("--qemu") });
        let qemu = Qemu::find(arch, named.as_ref())?;
        let acceleration = Acceleration::choose(arch, &Placed { value: Accel::Auto, place: Place::Option("--accel") })?;

        let failed = |error: io::Error| Failure::failed(format!("cannot start a host: {error}"));
        let files = Files { directory: tempfile::Builder::new().prefix("dunlin-layout-").tempdir().map_err(failed)? };
        let [payload, log, control, messages] =
            ["payload", "hypervisor.log", "control", "qemu.log"].map(|name| files.path(name));
        let nothing = Builder::new(false).finish().map_err(|error| failed(io::Error::other(error.to_string())))?;
        fs::write(&payload, nothing).map_err(failed)?;
        let listener = UnixListener::bind(&control).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let machine = Machine {
            arch,
            acceleration,
            pcpus: 1,
            memory: MEMORY,
            loader: Loader::Qemu,
            hypervisor: &hypervisor,
            payload: &payload,
            log: &log,
            control: &control,
            more: &[],
        };
        let mut process = Process::start(&qemu, &machine.arguments(), &messages)?;
        match greet(&listener, &mut process) {
            Ok((info, stream)) => Ok(Self { client: Client::new(stream).map_err(failed)?, info, process, files }),
            Err(why) => {
                process.kill();
                Err(files.explain(Failure::failed(format!("the host did not start: {why}"))))
            }
        }
    }

    /// To ask it.
    pub(super) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// `failure`, with the host's last messages.
    pub(super) fn explain(&self, failure: Failure) -> Failure {
        self.files.explain(failure)
    }

    /// Ends the host. Returns its description.
    pub(super) fn end(mut self) -> HostInfo {
        // If it does not end by itself, it is killed.
        let _ = self.client.ask(Command::PowerOff);
        self.process.wait(LAST_WORDS);
        self.info
    }
}

/// Waits for the host to connect, and to say that it is up.
fn greet(listener: &UnixListener, process: &mut Process) -> Result<(HostInfo, UnixStream), String> {
    let text = |error: io::Error| error.to_string();
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(text(error)),
        }
        if let Some(status) = process.ended() {
            return Err(format!("QEMU has ended ({status})"));
        }
        if Instant::now() > deadline {
            return Err(format!("QEMU did not connect within {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(TICK);
    };
    stream.set_nonblocking(false).map_err(text)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(text)?;
    let mut said = None;
    let received = control::receive(&mut stream, |message| match message {
        Ok(Message::Up(info)) => {
            said = Some(Ok(info));
            false
        }
        Ok(_) => true,
        Err(error) => {
            said = Some(Err(format!("it sent an invalid message: {error}")));
            false
        }
    });
    match (said, received) {
        (Some(Ok(info)), _) => Ok((info, stream)),
        (Some(Err(why)), _) => Err(why),
        (None, Ok(())) => Err("it has ended".to_string()),
        (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(format!("it sent nothing within {} s", PATIENCE.as_secs()))
        }
        (None, Err(error)) => Err(text(error)),
    }
}

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn explain(&self, failure: Failure) -> Failure {
        let said = ["hypervisor.log", "qemu.log"].into_iter().flat_map(|name| last_lines(&self.path(name), 5));
        let said: Vec<String> = said.collect();
        if said.is_empty() { failure } else { failure.help(format!("its last messages:\n  {}", said.join("\n  "))) }
    }
}

//! A host without VMs, started to answer requests.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use abi::control::{Command, HostInfo, Message};
use abi::payload::Builder;

use crate::assets::Assets;
use crate::config::{Accel, Arch, Place, Placed};
use crate::control::{self, Client};
use crate::failure::Failure;
use crate::host::{self, Files};
use crate::qemu::{Acceleration, Loader, Machine, Process, Qemu};
use crate::quantity::MIB;

/// Memory of the machine: a host without VMs needs little.
const MEMORY: u64 = 128 * MIB;
/// Time limit for its start, and for its end.
const PATIENCE: Duration = Duration::from_secs(30);
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The host; it ends when this is dropped, if not before.
pub(super) struct Host {
    client: Client,
    info: HostInfo,
    process: Process,
    files: Files,
}

impl Host {
    /// Starts it, by this QEMU if one is named, and waits until it is up.
    pub(super) fn start(arch: Arch, qemu: Option<&PathBuf>) -> Result<Self, Failure> {
        let hypervisor = Assets::locate().of(arch).hypervisor()?;
        let named = qemu.map(|path| Placed { value: path.clone(), place: Place::Option("--qemu") });
        let qemu = Qemu::find(arch, named.as_ref())?;
        let acceleration = Acceleration::choose(arch, &Placed { value: Accel::Auto, place: Place::Option("--accel") })?;

        let failed = |error: io::Error| Failure::failed(format!("cannot start a host: {error}"));
        let files = Files::new("dunlin-layout-").map_err(failed)?;
        let nothing = Builder::new(false).finish().map_err(|error| failed(io::Error::other(error.to_string())))?;
        let machine = Machine {
            arch,
            acceleration,
            pcpus: 1,
            memory: MEMORY,
            loader: Loader::Qemu,
            hypervisor: &hypervisor,
            files: &files,
            more: &[],
        };
        let (mut process, stream) = host::start(&qemu, &machine, &nothing, PATIENCE)?;
        match greet(stream) {
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

/// Waits until the host says that it is up.
fn greet(mut stream: UnixStream) -> Result<(HostInfo, UnixStream), String> {
    let text = |error: io::Error| error.to_string();
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

//! The tool's end of the control port: requests out, messages in.
//!
//! The peer is a hypervisor under test or another version of this tool, so the tool does not trust it. [`abi::control`]
//! splits and checks frames. A frame that does not decode arrives here as an error to report.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use abi::control::{Answer, Command, FrameError, Message, Receiver, Refusal, Request, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::port::Port;

/// Time limit for a peer to read a message, and to answer a request.
const PATIENCE: Duration = Duration::from_secs(10);

/// As [`PATIENCE`], for slow commands: memory is zeroed or read as a whole, or a VM ends.
const LONG_PATIENCE: Duration = Duration::from_secs(120);
/// Number of requests that may be sent before the first answer arrives.
const AHEAD: usize = 8;

/// Writes one frame.
pub(crate) fn send<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    let frame = encode(message).map_err(|error| io::Error::other(error.to_string()))?;
    stream.write_all(&frame)
}

/// Reads frames until the peer hangs up, and passes each to `deliver`, which returns whether to continue.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &mut impl Read,
    mut deliver: impl FnMut(Result<T, FrameError>) -> bool,
) -> io::Result<()> {
    let mut receiver = Receiver::default();
    let mut bytes = [0; 16384];
    loop {
        let count = match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        for &byte in &bytes[..count] {
            if let Some(message) = receiver.push(byte)
                && !deliver(message)
            {
                return Ok(());
            }
        }
    }
}

/// Starts a thread that delivers messages from `stream` to `events`, and `end` after the last message.
pub(crate) fn listen<T, E>(
    mut stream: UnixStream,
    events: Sender<E>,
    wrap: impl Fn(Result<T, FrameError>) -> E + Send + 'static,
    end: E,
) where
    T: DeserializeOwned,
    E: Send + 'static,
{
    thread::spawn(move || {
        // How the peer hung up makes no difference.
        let _ = receive(&mut stream, |message| events.send(wrap(message)).is_ok());
        let _ = events.send(end);
    });
}

/// Makes writes to a peer that does not read fail in the end, instead of waiting forever.
pub(crate) fn limit_patience(stream: &UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))
}

/// Where requests go and replies come from.
#[derive(Debug)]
enum Stream {
    /// A `dunlin run` of this user, or QEMU.
    Socket(UnixStream),
    /// The hypervisor, from inside of a parent.
    Port(Port),
}

impl Stream {
    /// Opens a port that is closed.
    fn wake(&mut self) -> Result<(), Failure> {
        match self {
            Self::Socket(_) => Ok(()),
            Self::Port(port) => port.wake(),
        }
    }

    fn set_read_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Socket(stream) => stream.set_read_timeout(Some(timeout)),
            Self::Port(port) => {
                port.set_read_timeout(timeout);
                Ok(())
            }
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Socket(stream) => stream.try_clone().map(Self::Socket),
            Self::Port(port) => port.try_clone().map(Self::Port),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.read(into),
            Self::Port(port) => port.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.write(bytes),
            Self::Port(port) => port.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Socket(stream) => stream.flush(),
            Self::Port(port) => port.flush(),
        }
    }
}

/// A connection on which one question is asked at a time.
#[derive(Debug)]
pub(crate) struct Client {
    stream: Stream,
    next_id: u32,
}

impl Client {
    /// Speaks on `stream`.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        limit_patience(&stream)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream: Stream::Socket(stream), next_id: 1 })
    }

    /// Speaks by the port at this path, and waits for its turn there.
    pub(crate) fn on_port(path: PathBuf) -> Result<Self, Failure> {
        let mut stream = Stream::Port(Port::at(path, PATIENCE));
        stream.wake()?;
        Ok(Self { stream, next_id: 1 })
    }

    /// The next question comes later: lets others speak where only one can at a time.
    pub(crate) fn rest(&mut self) {
        if let Stream::Port(port) = &mut self.stream {
            port.rest();
        }
    }

    /// Sends all requests, some before the earlier answers arrive, and waits for the last answer. Calls `heard` with
    /// the number of answers. Stops at the first refusal.
    pub(crate) fn ask_all(
        &mut self,
        commands: impl IntoIterator<Item = Command>,
        mut heard: impl FnMut(usize),
    ) -> Result<Result<(), Refusal>, Failure> {
        let mut done = 0;
        self.ask_all_for(commands, |_| {
            done += 1;
            heard(done);
        })
    }

    /// The same; calls `heard` with each answer, in the order of the requests.
    pub(crate) fn ask_all_for(
        &mut self,
        commands: impl IntoIterator<Item = Command>,
        mut heard: impl FnMut(Answer),
    ) -> Result<Result<(), Refusal>, Failure> {
        self.stream.wake()?;
        let first = self.next_id;
        let mut commands = commands.into_iter();
        let mut stream = self.stream.try_clone().map_err(lost)?;
        let mut next_id = self.next_id;
        // Returns whether there was another request to send.
        let mut send_next = |stream: &mut Stream| match commands.next() {
            None => Ok(false),
            Some(command) => {
                let id = next_id;
                next_id = next_id.wrapping_add(1);
                send(stream, &Request { id, command }).map(|()| true)
            }
        };
        let mut waiting = 0;
        while waiting < AHEAD && send_next(&mut stream).map_err(lost)? {
            waiting += 1;
        }

        let mut result = Ok(Ok(()));
        let received = if waiting == 0 {
            Ok(())
        } else {
            receive(&mut self.stream, |message| {
                match message {
                    Ok(Message::Reply { id, result: Ok(answer) }) if id.wrapping_sub(first) < u32::MAX / 2 => {
                        waiting -= 1;
                        heard(answer);
                        match send_next(&mut stream) {
                            Ok(true) => waiting += 1,
                            Ok(false) => {}
                            Err(error) => {
                                result = Err(lost(error));
                                return false;
                            }
                        }
                    }
                    Ok(Message::Reply { result: Err(refusal), .. }) => {
                        result = Ok(Err(refusal));
                        return false;
                    }
                    Ok(Message::Refused(error)) => {
                        result = Err(refused(error));
                        return false;
                    }
                    Ok(Message::Bye) => {
                        result = Err(Failure::failed("the host has ended"));
                        return false;
                    }
                    Ok(_) | Err(_) => {}
                }
                waiting > 0
            })
        };
        self.next_id = next_id;
        received.map_err(lost)?;
        match result {
            Ok(Ok(())) if waiting > 0 => Err(Failure::failed("the host has ended")),
            result => result,
        }
    }

    /// As [`Self::ask`], for slow commands.
    pub(crate) fn ask_patiently(&mut self, command: Command) -> Result<Result<Answer, Refusal>, Failure> {
        self.stream.set_read_timeout(LONG_PATIENCE).map_err(lost)?;
        let answer = self.ask(command);
        self.stream.set_read_timeout(PATIENCE).map_err(lost)?;
        answer
    }

    /// Asks and waits for the answer.
    pub(crate) fn ask(&mut self, command: Command) -> Result<Result<Answer, Refusal>, Failure> {
        self.stream.wake()?;
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        send(&mut self.stream, &Request { id, command }).map_err(lost)?;

        let mut answer = Err(Failure::failed("the host has ended"));
        let received = receive(&mut self.stream, |message| match message {
            Ok(Message::Reply { id: of, result }) if of == id => {
                answer = Ok(result);
                false
            }
            Ok(Message::Bye) => false,
            Ok(Message::Refused(error)) => {
                answer = Err(refused(error));
                false
            }
            Ok(_) => true,
            Err(FrameError::Version(version)) => {
                let error = FrameError::Version(version);
                answer = Err(Failure::failed(format!("the host speaks another {error}"))
                    .help("use the `dunlin` that started it"));
                false
            }
            Err(_) => true,
        });
        received.map_err(lost)?;
        answer
    }
}

fn lost(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Failure::failed("the host did not answer in time"),
        _ => Failure::failed(format!("the host is gone: {error}")),
    }
}

fn refused(error: FrameError) -> Failure {
    Failure::failed(format!("the host rejected the request: {error}"))
}

/// The text for a refusal.
pub(crate) fn refusal(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::NoSuchVm => "there is no such VM",
        Refusal::NotRunning => "the VM has ended",
        Refusal::NoSuchVcpu => "the VM has no such vCPU",
        Refusal::NoSuchLayout => "the host has no such kind of block",
        Refusal::NoMemoryThere => "the VM has no memory there",
        Refusal::Busy => "the VM's last command has not finished yet",
        Refusal::Logging => "a dirty log is already active, or large pages of the last one are still being joined",
        Refusal::NotLogging => "no dirty log is active",
        Refusal::NoMirror => "the dirty log has no mirror (start it with --mirror)",
        Refusal::NotPaused => "the VM is not paused",
        Refusal::OutOfMemory => "the host has too little memory left (key `memory` of [host])",
        Refusal::NoSuchPcpu => "this host has no such pCPU",
        Refusal::Child => "the VM belongs to a parent VM (use the virtual machine monitor that runs it there)",
        Refusal::Own => "a program in a VM cannot stop, pause or destroy that VM (power it off instead)",
        Refusal::NotStarted => "the VM was not started yet (dunlin start)",
        Refusal::AlreadyStarted => "the VM was already started",
        Refusal::NameTaken => "this host already has a VM with that name",
        Refusal::TooManyVms => "the host has the maximum number of VMs (dunlin destroy)",
        Refusal::NoSuchUpload => "the host does not know what we send it",
        Refusal::Invalid => "the host cannot create such a VM",
        Refusal::OwnsDevices => "the VM owns devices, and a dirty log would miss what they write",
        Refusal::NotSaving => {
            "the VM has gone on meanwhile (somebody has resumed it, or nothing was read for too long)"
        }
        Refusal::NoHardwareLog => "the machine does not record writes in stage 2 (use --source write-protect)",
        Refusal::NoPml => "the processor does not list the pages that it writes, as Intel's do (use --source hardware)",
    }
}

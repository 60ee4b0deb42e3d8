//! The control port of a running host: for tests that need more, or more frequent, requests than the tool's commands.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use abi::control::{Answer, Command, Line, Message, Receiver, Refusal, Request, STATS_CHUNK, VmState, encode};
use abi::counters::VcpuCounters;
use abi::dirty::{Comparison, DirtyInfo, Round};
use abi::payload::DirtyLogging;

use crate::{Host, until};

/// How long an answer may take: more than anything takes on a busy computer.
const PATIENCE: Duration = Duration::from_secs(120);

/// The first VM of a host, and its connection.
pub struct Port {
    stream: UnixStream,
    receiver: Receiver,
    next_id: u32,
}

impl Port {
    /// Connects, as soon as the VM runs.
    ///
    /// # Panics
    /// When it does not run within half a minute.
    #[must_use]
    pub fn of(host: &Host) -> Self {
        let path = directory().join(format!("{}.sock", host.pid()));
        until("a VM that runs", || {
            let stream = UnixStream::connect(&path).ok()?;
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            let mut port = Self { stream, receiver: Receiver::default(), next_id: 1 };
            match port.ask(Command::List { first: 0 }) {
                Ok(Answer::Vms(vms)) if vms.first().is_some_and(|vm| vm.state == VmState::Running) => Some(port),
                _ => None,
            }
        })
    }

    /// Sends a request, and waits for the answer.
    ///
    /// # Panics
    /// There is none.
    pub fn ask(&mut self, command: Command) -> Result<Answer, Refusal> {
        let id = self.next_id;
        self.next_id += 1;
        let what = format!("{command:?}");
        let frame = encode(&Request { id, command }).expect("commands are short");
        self.stream.write_all(&frame).unwrap_or_else(|error| panic!("{what}: the host is gone: {error}"));
        let mut byte = [0];
        loop {
            self.stream.read_exact(&mut byte).unwrap_or_else(|error| panic!("{what}: no answer: {error}"));
            match self.receiver.push::<Message>(byte[0]) {
                Some(Ok(Message::Reply { id: of, result })) if of == id => return result,
                Some(Err(error)) => panic!("{what}: {error}"),
                _ => {}
            }
        }
    }

    /// Asks all of it at once, for something that has no answer but that it is done.
    ///
    /// # Panics
    /// When it is not.
    pub fn all_done(&mut self, commands: impl IntoIterator<Item = Command>) {
        let first = self.next_id;
        for command in commands {
            let frame = encode(&Request { id: self.next_id, command }).expect("commands are short");
            self.next_id += 1;
            self.stream.write_all(&frame).expect("the host is there");
        }
        let mut byte = [0];
        let mut done = first;
        while done < self.next_id {
            self.stream.read_exact(&mut byte).expect("answers come");
            match self.receiver.push::<Message>(byte[0]) {
                Some(Ok(Message::Reply { id, result })) if id >= first => {
                    assert_eq!(result, Ok(Answer::Done));
                    done += 1;
                }
                Some(Err(error)) => panic!("{error}"),
                _ => {}
            }
        }
    }

    /// Asks for something that has no answer but that it is done.
    ///
    /// # Panics
    /// When it is not.
    pub fn done(&mut self, command: Command) {
        let what = format!("{command:?}");
        assert_eq!(self.ask(command), Ok(Answer::Done), "{what}");
    }

    /// Starts a log, as soon as the large pages of the last one are back. Returns `false` if the machine cannot record
    /// writes.
    ///
    /// # Panics
    /// It is refused for another reason.
    pub fn start_log(&mut self, how: DirtyLogging, mirror: bool) -> bool {
        until("a log", || match self.ask(Command::DirtyStart { vm: 0, how: Some(how), mirror }) {
            Ok(Answer::Done) => Some(true),
            Err(Refusal::NoHardwareLog | Refusal::NoPml) => Some(false),
            Err(Refusal::Logging) => None,
            other => panic!("{how:?}: {other:?}"),
        })
    }

    /// Harvests.
    ///
    /// # Panics
    /// It is refused.
    pub fn round(&mut self, lose: bool) -> Round {
        match self.ask(Command::DirtyRound { vm: 0, lose }) {
            Ok(Answer::Round(round)) => round,
            other => panic!("round: {other:?}"),
        }
    }

    /// State of the log.
    ///
    /// # Panics
    /// It is refused.
    pub fn info(&mut self) -> DirtyInfo {
        match self.ask(Command::DirtyInfo { vm: 0 }) {
            Ok(Answer::Dirty(info)) => info,
            other => panic!("info: {other:?}"),
        }
    }

    /// Compares the paused VM's memory with the log's mirror.
    ///
    /// # Panics
    /// It is refused.
    pub fn compare(&mut self) -> Comparison {
        match self.ask(Command::DirtyCompare { vm: 0 }) {
            Ok(Answer::Compared(comparison)) => comparison,
            other => panic!("compare: {other:?}"),
        }
    }

    /// Sum of the counters of its `vcpus`.
    ///
    /// # Panics
    /// It is refused.
    pub fn counters(&mut self, vcpus: u32) -> VcpuCounters {
        self.counters_of(0, vcpus)
    }

    /// The same of another VM.
    ///
    /// # Panics
    /// It is refused.
    pub fn counters_of(&mut self, vm: u32, vcpus: u32) -> VcpuCounters {
        let mut sum = VcpuCounters::default();
        for first in (0..vcpus).step_by(STATS_CHUNK) {
            match self.ask(Command::Stats { vm, first }) {
                Ok(Answer::Stats { vcpus, .. }) => vcpus.iter().for_each(|counters| sum.add(counters)),
                other => panic!("counters: {other:?}"),
            }
        }
        sum
    }

    /// Ticks of the host's clock per second.
    ///
    /// # Panics
    /// It is refused.
    pub fn clock_hz(&mut self) -> f64 {
        match self.ask(Command::Hello) {
            Ok(Answer::Host(info)) => info.clock_hz as f64,
            other => panic!("host: {other:?}"),
        }
    }

    /// Types on the console.
    ///
    /// # Panics
    /// When the guest has no room for it.
    pub fn type_keys(&mut self, keys: &[u8]) {
        let answer = self.ask(Command::Input { vm: 0, line: Line::Console, bytes: keys.to_vec() });
        assert_eq!(answer, Ok(Answer::Accepted(u32::try_from(keys.len()).expect("few keys"))));
    }
}

/// Where the tool leaves its sockets.
fn directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory).join("dunlin"),
        _ => {
            let user = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
            std::env::temp_dir().join(format!("dunlin-{user}"))
        }
    }
}

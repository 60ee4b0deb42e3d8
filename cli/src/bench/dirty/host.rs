//! A host with one VM that runs the measuring guest, controlled by the tool itself: it sends requests while it reads
//! the guest's output. Each message of the guest has the time at which the host received it.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use abi::control::{
    Answer, Command, FrameError, HostInfo, Line, Message, Refusal, Request, STATS_CHUNK, StopReason, VmEvent,
};
use abi::counters::VcpuCounters;
use abi::dirty::DirtyInfo;
use serde_json::{Value, json};

use crate::args::RunArgs;
use crate::assets::Assets;
use crate::bench::record::Record;
use crate::config::Config;
use crate::control::{self, refusal};
use crate::failure::Failure;
use crate::host::{self, Files};
use crate::payload::{self, Payload, Start};
use crate::qemu::{Acceleration, Loader, Machine, Process, Qemu, cpu_model};

/// Time limit for the start of a host, and for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The host; it ends when this is dropped, if not before.
pub(super) struct Host {
    process: Process,
    files: Files,
    stream: UnixStream,
    events: Receiver<Event>,
    next_id: u32,
    vcpus: u32,
    /// Its description.
    pub(super) info: HostInfo,
    /// QEMU, how it runs the host, and on which CPUs.
    emulator: Value,
    /// Unread lines of the guest's output, each with the time of the message in which it began.
    lines: VecDeque<(u64, String)>,
    partial: Option<(u64, Vec<u8>)>,
    /// All that the guest wrote, for a report.
    said: String,
    stopped: Option<(StopReason, String)>,
}

enum Event {
    Message(Result<Message, FrameError>),
    Closed,
}

impl Host {
    /// Starts a host as `toml` describes it, with its one VM of `vcpus`.
    pub(super) fn start(toml: &str, vcpus: u32, qemu_arguments: &[String]) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::failed(format!("cannot start a host: {error}"));
        let files = Files::new("dunlin-bench-").map_err(failed)?;
        let file = files.path("vms.toml");
        fs::write(&file, toml).map_err(failed)?;

        let config = Config::load(&RunArgs { file: Some(file), ..RunArgs::default() })?;
        let arch = config.host.arch.value;
        let assets = Assets::locate().of(arch);
        let hypervisor = assets.hypervisor()?;
        let Payload { bytes, host_memory } = payload::pack(&config, &assets, None, Start::Here)?;
        let qemu = Qemu::find(arch, None)?;
        let acceleration = Acceleration::choose(arch, &config.host.accel)?;
        let machine = Machine {
            arch,
            acceleration,
            pcpus: config.host.pcpus.value,
            memory: host_memory,
            loader: Loader::Qemu,
            hypervisor: &hypervisor,
            files: &files,
            more: qemu_arguments,
        };
        let machine_arguments = machine.arguments();
        let (process, stream) = host::start(&qemu, &machine, &bytes, PATIENCE)?;
        let (sender, events) = channel();
        control::listen(stream.try_clone().map_err(failed)?, sender, Event::Message, Event::Closed);
        let mut host = Self {
            process,
            files,
            stream,
            events,
            next_id: 1,
            vcpus,
            info: HostInfo {
                version: String::new(),
                arch: String::new(),
                pcpus: 0,
                memory_bytes: 0,
                clock_hz: 0,
                processor: String::new(),
            },
            emulator: json!({ "qemu": qemu.version, "accel": acceleration.name(),
                "cpu_model": cpu_model(&machine_arguments), "arch": arch.name() }),
            lines: VecDeque::new(),
            partial: None,
            said: String::new(),
            stopped: None,
        };
        match host.ask(Command::Hello)? {
            Ok(Answer::Host(info)) => host.info = info,
            other => return Err(host.unexpected(other)),
        }
        Ok(host)
    }

    /// Sends a request and waits for the answer. Output of the guest in between is kept.
    pub(super) fn ask(&mut self, command: Command) -> Result<Result<Answer, Refusal>, Failure> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let what = format!("{command:?}");
        control::send(&mut self.stream, &Request { id, command })
            .map_err(|error| self.explain(Failure::failed(format!("the host is gone: {error}"))))?;
        let deadline = Instant::now() + PATIENCE;
        while let Some(message) = self.message(deadline)? {
            match message {
                Message::Reply { id: of, result } if of == id => return Ok(result),
                other => self.note(other),
            }
        }
        Err(self.explain(Failure::failed(format!("the host did not answer {what} within {} s", PATIENCE.as_secs()))))
    }

    /// Asks for something that is done and has no answer.
    pub(super) fn done(&mut self, command: Command) -> Result<(), Failure> {
        match self.ask(command)? {
            Ok(Answer::Done) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// The state of the log.
    pub(super) fn dirty_info(&mut self) -> Result<DirtyInfo, Failure> {
        match self.ask(Command::DirtyInfo { vm: 0 })? {
            Ok(Answer::Dirty(info)) => Ok(info),
            other => Err(self.unexpected(other)),
        }
    }

    /// The sum of its vCPUs' counters.
    pub(super) fn counters(&mut self) -> Result<VcpuCounters, Failure> {
        let mut sum = VcpuCounters::default();
        for first in (0..self.vcpus).step_by(STATS_CHUNK) {
            match self.ask(Command::Stats { vm: 0, first })? {
                Ok(Answer::Stats { vcpus, .. }) => vcpus.iter().for_each(|counters| sum.add(counters)),
                other => return Err(self.unexpected(other)),
            }
        }
        Ok(sum)
    }

    /// Types a byte on the guest's console.
    pub(super) fn type_byte(&mut self, byte: u8) -> Result<(), Failure> {
        match self.ask(Command::Input { vm: 0, line: Line::Console, bytes: vec![byte] })? {
            Ok(Answer::Accepted(1)) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// The guest's next record of that kind, with the time at which the host heard it; others are passed over.
    pub(super) fn record(&mut self, kind: &str, within: Duration) -> Result<(u64, Record), Failure> {
        self.record_all("", kind, within, &mut Vec::new())
    }

    /// The same; records of other kinds before it are appended to `others`.
    pub(super) fn record_all(
        &mut self,
        other: &str,
        kind: &str,
        within: Duration,
        others: &mut Vec<Record>,
    ) -> Result<(u64, Record), Failure> {
        let deadline = Instant::now() + within;
        loop {
            while let Some((at_ns, line)) = self.lines.pop_front() {
                let complaint = ["violation", "error", "exception", "panic", "unsupported"];
                if complaint.iter().any(|word| line.starts_with(word)) {
                    return Err(self.explain(Failure::failed(format!("the measuring guest reports: {line}"))));
                }
                let Some(record) = Record::parse(&line) else { continue };
                match line.split(' ').next() {
                    Some(word) if word == kind => return Ok((at_ns, record)),
                    Some(word) if word == other => others.push(record),
                    _ => {}
                }
            }
            if let Some((reason, detail)) = &self.stopped {
                let what = format!("the VM ended ({}: {detail}) without a record '{kind}'", reason.name());
                return Err(self.explain(Failure::failed(what)));
            }
            match self.message(deadline)? {
                Some(message) => self.note(message),
                None => {
                    let what = format!("the guest wrote no record '{kind}' within {} s", within.as_secs());
                    return Err(self.explain(Failure::failed(what)));
                }
            }
        }
    }

    /// Waits for this time; output in between is kept.
    pub(super) fn wait(&mut self, time: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + time;
        while let Some(message) = self.message(deadline)? {
            self.note(message);
        }
        Ok(())
    }

    /// Its description in records.
    pub(super) fn run(&self) -> Value {
        let mut run = self.emulator.clone();
        run["host"] = json!({ "version": self.info.version });
        run
    }

    /// Ends it.
    pub(super) fn end(mut self) {
        // If it does not end by itself, it is killed.
        let _ = control::send(&mut self.stream, &Request { id: 0, command: Command::PowerOff });
        self.process.wait(LAST_WORDS);
    }

    /// The failure for an answer that does not match the request.
    pub(super) fn unexpected(&self, answer: Result<Answer, Refusal>) -> Failure {
        let what = match answer {
            Ok(answer) => format!("the answer does not match the request: {answer:?}"),
            Err(why) => format!("the host refuses: {}", refusal(why)),
        };
        self.explain(Failure::failed(what))
    }

    /// The next message before `deadline`.
    fn message(&mut self, deadline: Instant) -> Result<Option<Message>, Failure> {
        match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::Message(Ok(message))) => Ok(Some(message)),
            Ok(Event::Message(Err(error))) => {
                Err(self.explain(Failure::failed(format!("a frame of the host cannot be used: {error}"))))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Ok(Event::Closed) | Err(RecvTimeoutError::Disconnected) => {
                Err(self.explain(Failure::failed("the host has ended")))
            }
        }
    }

    fn note(&mut self, message: Message) {
        match message {
            Message::Console { at_ns, bytes, .. } => self.hear(at_ns, &bytes),
            Message::Vm { event: VmEvent::Stopped { reason, detail }, .. } => self.stopped = Some((reason, detail)),
            Message::Vm { event: VmEvent::Failed(why), .. } => self.stopped = Some((StopReason::Unsupported, why)),
            _ => {}
        }
    }

    fn hear(&mut self, at_ns: u64, bytes: &[u8]) {
        self.said.push_str(&String::from_utf8_lossy(bytes));
        for &byte in bytes {
            let (began, line) = self.partial.get_or_insert((at_ns, Vec::new()));
            if byte == b'\n' {
                let text = String::from_utf8_lossy(line).trim_end().to_string();
                self.lines.push_back((*began, text));
                self.partial = None;
            } else {
                line.push(byte);
            }
        }
    }

    fn explain(&self, failure: Failure) -> Failure {
        let last: Vec<&str> = self.said.lines().rev().take(3).collect();
        let said = last.into_iter().rev().map(|line| line.chars().take(200).collect::<String>());
        let said = said.collect::<Vec<_>>().join("\n  ");
        self.files.explain(if said.is_empty() {
            failure
        } else {
            failure.help(format!("the guest's last output:\n  {said}"))
        })
    }
}

//! One `dunlin run`, from the file to the exit status.
//!
//! [`run`] checks everything before it starts anything. Then one loop ([`Session::follow`]) handles all events:
//! messages of the hypervisor, keys, signals, requests of other tools, the end of QEMU, timeouts. Other threads only
//! wait for one of these events and pass it on, so they share nothing.

mod phase;
mod verdict;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use abi::control::{
    Answer, CONSOLE_CHUNK, Command, FrameError, HostInfo, Line, Message, Refusal, Request, STATS_CHUNK, VmEvent,
};
use abi::counters::VcpuCounters;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{Firmware, RunArgs};
use crate::assets::Assets;
use crate::config::{Arch, Config};
use crate::console::{self, RawTerminal, Typed};
use crate::control;
use crate::exec::{Agent, FIXED_SCRIPT};
use crate::failure::Failure;
use crate::host::Files;
use crate::image;
use crate::payload::{self, Payload, Start};
use crate::progress::{Follower, Progress};
use crate::qemu::{self, Acceleration, Loader, Machine, Process, Qemu};
use crate::quantity::{MIB, seconds, show_size};
use crate::share::{Asked, Share};
use crate::stats::{Snapshot, printable};
use crate::summary::{Record, VmRecord};
use phase::{Cut, Phase};

/// Time limit of a run without a terminal.
const UNWATCHED_LIMIT: Duration = Duration::from_secs(120);
/// How long the host may take for the last counters, and for ending itself.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Interval of the loop's periodic checks.
const TICK: Duration = Duration::from_millis(50);
/// Bytes of each console that are kept for the report of a failure.
const TAIL_BYTES: usize = 8192;
/// Maximum number of output bytes that are kept for JSON, and of typed bytes that wait for the guest.
const KEPT_BYTES: usize = 1 << 20;

/// Runs a host as `args` specify, and returns the exit status.
pub(crate) fn run(args: &RunArgs) -> Result<u8, Failure> {
    // All that can be wrong is found before anything is started.
    let config = Config::load(args)?;
    let purpose = Purpose::of(args, &config)?;
    let arch = config.host.arch.value;
    let assets = Assets::locate().of(arch);
    let hypervisor = assets.hypervisor()?;
    let Payload { bytes, host_memory } = payload::pack(&config, &assets, purpose.script(), Start::Here)?;
    let qemu = Qemu::find(arch, config.host.qemu.as_ref())?;
    let acceleration = Acceleration::choose(arch, &config.host.accel)?;

    let failed = |what: &str, error: io::Error| Failure::failed(format!("{what}: {error}"));
    let files = Files::new("dunlin-run-").map_err(|error| failed("no directory for the run", error))?;
    let [image, variables] = ["image", "variables"].map(|name| files.path(name));
    let (loader, firmwares_memory) = match args.firmware {
        None => (Loader::Qemu, 0),
        Some(_) if arch != Arch::X86_64 => {
            return Err(config.host.arch.place.bad("--firmware is for x86_64 only, so far"));
        }
        Some(Firmware::Bios) => (Loader::Grub { image: &image, variables: None }, 64 * MIB),
        Some(Firmware::Uefi) => (Loader::Grub { image: &image, variables: Some(&variables) }, 256 * MIB),
    };
    let machine = Machine {
        arch,
        acceleration,
        pcpus: config.host.pcpus.value,
        memory: host_memory + firmwares_memory,
        loader,
        hypervisor: &hypervisor,
        files: &files,
        more: &args.qemu_arg,
    };
    let arguments = machine.arguments();
    if args.dry_run {
        println!("{}", qemu::quoted(&qemu, &arguments));
        return Ok(0);
    }

    let progress = Progress::new();
    progress.say(&format!("host: {}", qemu::introduce(&qemu, acceleration)));
    match loader {
        Loader::Qemu => {
            let path = &files.payload;
            std::fs::write(path, bytes).map_err(|error| failed(&path.display().to_string(), error))?;
        }
        Loader::Grub { image: path, variables } => {
            let menu = image::MENU_AT_ONCE.to_string();
            let contents = image::Contents { hypervisor: &hypervisor, payloads: vec![bytes], menu };
            image::write(arch, &assets, &contents, path, &progress)?;
            if let Some(variables) = variables {
                std::fs::copy(qemu::UEFI[1], variables)
                    .map_err(|error| failed(qemu::UEFI[1], error).help(qemu::UEFI_INSTALL))?;
            }
        }
    }

    // Signals are caught before there is a QEMU that a signal could leave behind.
    let (sender, events) = channel();
    catch_signals(&sender).map_err(|error| failed("signals cannot be caught", error))?;
    let path = &files.control;
    let listener = UnixListener::bind(path).map_err(|error| failed(&path.display().to_string(), error))?;
    accept(listener, sender.clone());
    let process = Process::start(&qemu, &arguments, &files.messages)?;

    let record = Record {
        accel: acceleration.name().to_string(),
        qemu: qemu.version.clone(),
        cpu_model: qemu::cpu_model(&arguments),
        arch: arch.name(),
        host: None,
        vms: config.vms.iter().map(VmRecord::of).collect(),
    };
    let mut session = Session::new(args, &config, purpose, record, progress, &files.log, sender, process);
    session.follow(&events);

    let (status, failures) = session.judge(&files);
    session.report(status, &failures);
    if !failures.is_empty() {
        let log = files.log.display().to_string();
        session.progress.print(&format!("The hypervisor's log: {log}"));
        files.keep();
    }
    Ok(status)
}

/// The purpose of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Purpose {
    /// A user works at the console of the only VM.
    Console,
    /// A command of the user's.
    Exec(String),
    /// The fixed script, and a summary.
    Script,
}

impl Purpose {
    fn of(args: &RunArgs, config: &Config) -> Result<Self, Failure> {
        if let Some(command) = &args.exec {
            return match config.vms.iter().find(|vm| !payload::has_agent(vm)) {
                None => Ok(Self::Exec(command.clone())),
                Some(vm) => Err(vm
                    .initrd
                    .place
                    .bad(format!("--exec needs Dunlin's initrd, but vm \"{}\" does not use it", vm.name.value))
                    .help("the agent that runs commands is part of the initrd \"dunlin\"; use it, or omit --exec")),
            };
        }
        match config.vms.as_slice() {
            [_] if !args.json && console::has_terminal() => Ok(Self::Console),
            _ => Ok(Self::Script),
        }
    }

    /// The script for our initrd.
    fn script(&self) -> Option<&str> {
        match self {
            Self::Console => None,
            Self::Exec(command) => Some(command),
            Self::Script => Some(FIXED_SCRIPT),
        }
    }
}

impl VmRecord {
    fn of(vm: &crate::config::VmConfig) -> Self {
        Self { name: vm.name.value.clone(), vcpus: vm.vcpus.value, memory_bytes: vm.memory.value, ..Self::default() }
    }
}

/// All events of the loop.
#[derive(Debug)]
enum Event {
    /// QEMU has connected the control port.
    Connected(UnixStream),
    /// The hypervisor sent a message, or an invalid frame.
    Host(Result<Message, FrameError>),
    /// The control port is closed.
    Closed,
    /// The user typed.
    Typed(Typed),
    /// We received a signal.
    Signal(i32),
    /// Another tool asks.
    Asked(Asked),
}

fn catch_signals(events: &Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let events = events.clone();
    thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

fn accept(listener: UnixListener, events: Sender<Event>) {
    thread::spawn(move || {
        if let Ok((stream, _)) = listener.accept() {
            let _ = events.send(Event::Connected(stream));
        }
    });
}

/// The use of a VM's serial lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Its console is our terminal.
    Console,
    /// It runs a command and reports its status.
    Command,
    /// It does as it likes; its console is copied out.
    Watch,
}

/// A VM while it is followed.
#[derive(Debug)]
struct Followed {
    role: Role,
    agent: Agent,
    /// When the first byte of the agent line arrived.
    first_word_ns: Option<u64>,
    /// The end of the console output.
    tail: Vec<u8>,
    /// Whether counters were asked for when the command ended.
    asked_at_end: bool,
    /// Output that is not a whole line yet, when lines are labelled.
    partial: Vec<u8>,
}

/// A VM that a command has created on this host.
#[derive(Debug)]
struct Guest {
    name: String,
    is_running: bool,
    /// Output that is not a whole line yet.
    partial: Vec<u8>,
    agent: Agent,
}

/// Maximum number of VMs created by commands that the session follows, whatever a host claims.
const MOST_GUESTS: usize = 4096;

/// The receiver of a reply.
#[derive(Debug)]
enum Asker {
    /// The counters of that number.
    Counters(u32),
    /// So many keys.
    Keys(usize),
    /// Another tool, which knows its question under this id.
    Tool(UnixStream, u32),
}

/// Counters that arrive in pieces.
#[derive(Debug)]
struct Gathering {
    vm: usize,
    /// Whether it was begun because the guest had just reached user space.
    at_hello: bool,
    at_ns: u64,
    vcpus: Vec<Option<VcpuCounters>>,
}

/// The connection to the hypervisor.
#[derive(Debug)]
enum Link {
    /// QEMU has not connected the control port yet.
    Awaited,
    Up(UnixStream),
    Closed {
        since: Instant,
    },
}

/// A run while it is followed.
struct Session<'a> {
    purpose: Purpose,
    json: bool,
    verbose: bool,
    record: Record,
    progress: Progress,
    /// The VMs of the file; their numbers are their places here.
    vms: Vec<Followed>,
    /// VMs that came later, by number.
    guests: BTreeMap<u32, Guest>,
    deadline: Option<(Instant, Duration)>,
    log: Option<Follower>,
    events: Sender<Event>,
    process: Process,
    link: Link,
    share: Option<Share>,
    next_id: u32,
    asked: HashMap<u32, Asker>,
    gatherings: HashMap<u32, Gathering>,
    next_gathering: u32,
    terminal: Option<RawTerminal>,
    keys: VecDeque<u8>,
    keys_after: Instant,
    phase: Phase,
    /// Whether the user left the console.
    left: bool,
    waiting_was_told: bool,
    log_path: &'a Path,
}

impl<'a> Session<'a> {
    #[expect(clippy::too_many_arguments, reason = "called once; a struct for these would be the session itself")]
    fn new(
        args: &RunArgs,
        config: &Config,
        purpose: Purpose,
        record: Record,
        progress: Progress,
        log_path: &'a Path,
        events: Sender<Event>,
        process: Process,
    ) -> Self {
        let vms = config.vms.iter().map(|vm| Followed {
            role: match purpose {
                Purpose::Console => Role::Console,
                _ if payload::has_agent(vm) => Role::Command,
                _ => Role::Watch,
            },
            agent: Agent::default(),
            first_word_ns: None,
            tail: Vec::new(),
            asked_at_end: false,
            partial: Vec::new(),
        });
        let limit = config.host.time_limit.or((!console::has_terminal()).then_some(UNWATCHED_LIMIT));
        Self {
            vms: vms.collect(),
            guests: BTreeMap::new(),
            purpose,
            json: args.json,
            verbose: args.verbose,
            record,
            progress,
            deadline: limit.map(|limit| (Instant::now() + limit, limit)),
            log: args.log.then(|| Follower::new(log_path)),
            events,
            process,
            link: Link::Awaited,
            share: None,
            next_id: 1,
            asked: HashMap::new(),
            gatherings: HashMap::new(),
            next_gathering: 0,
            terminal: None,
            keys: VecDeque::new(),
            keys_after: Instant::now(),
            phase: Phase::Running,
            left: false,
            waiting_was_told: false,
            log_path,
        }
    }

    /// Follows the run until QEMU has ended or was killed.
    fn follow(&mut self, events: &Receiver<Event>) {
        while self.process.ended().is_none() && self.phase.cut().is_none() {
            match events.recv_timeout(self.patience()) {
                Ok(event) => self.meet(event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            self.look_around();
        }

        // The last messages of the hypervisor may still be on their way from the thread that reads them.
        if self.phase.cut().is_none() {
            let deadline = Instant::now() + LAST_WORDS;
            while matches!(self.link, Link::Up(_)) {
                match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(event) => self.meet(event),
                    Err(_) => break,
                }
            }
        }
        self.process.kill();
        self.share = None;
        self.show_log();
        self.terminal = None;
        self.progress.set_raw(false);
        for vm in 0..self.vms.len() {
            self.flush_output(vm);
        }
    }

    fn patience(&self) -> Duration {
        match self.deadline {
            Some((deadline, _)) if self.phase.has_limit() => {
                TICK.min(deadline.saturating_duration_since(Instant::now()))
            }
            _ => TICK,
        }
    }

    /// Does what is due without an event.
    fn look_around(&mut self) {
        self.show_log();
        self.send_keys();

        let now = Instant::now();
        let is_late = self.deadline.is_some_and(|(deadline, _)| now >= deadline);
        if is_late && self.phase.cut_soon(Cut::TimeLimit, now) {
            self.gather_last();
        }
        let closed = match self.link {
            Link::Closed { since } => Some(since),
            Link::Awaited | Link::Up(_) => None,
        };
        self.phase.look(self.gatherings.is_empty(), closed, now);
        if self.record.host.is_none() && !self.waiting_was_told && self.progress.elapsed() > Duration::from_secs(15) {
            self.waiting_was_told = true;
            self.progress.say(&format!("still waiting for the hypervisor; its log: {}", self.log_path.display()));
        }

        // The host ends when the last counters of the last VM are here, or overdue.
        let has_guests = self.guests.values().any(|guest| guest.is_running);
        let is_over = self.record.vms.iter().all(VmRecord::is_over) && !has_guests;
        if is_over && self.phase.over(self.gatherings.is_empty(), now) {
            self.end_host();
        }
    }

    fn meet(&mut self, event: Event) {
        match event {
            Event::Connected(stream) => self.connect(stream),
            Event::Host(Ok(message)) => self.hear(message),
            Event::Host(Err(error)) => {
                self.progress.say(&format!("invalid frame from the hypervisor: {error}"));
            }
            Event::Closed => self.close(),
            Event::Typed(Typed::Keys(bytes)) => {
                if self.keys.len() + bytes.len() <= KEPT_BYTES {
                    self.keys.extend(bytes);
                }
            }
            Event::Typed(Typed::Leave) => {
                self.left = true;
                self.progress.print("\n");
                self.progress.say("leaving: ending the host");
                for vm in 0..self.vms.len() {
                    self.gather(vm, false);
                }
                self.end_host();
            }
            Event::Signal(signal) => {
                if self.phase.signal(signal, Instant::now()) {
                    self.gather_last();
                }
            }
            Event::Asked(Asked { request, asker }) => {
                self.ask(request.command, Asker::Tool(asker, request.id));
            }
        }
    }

    /// Asks for the last counters of the running VMs, because the run will be cut.
    fn gather_last(&mut self) {
        for vm in 0..self.vms.len() {
            if self.record.vms[vm].started_ns.is_some() && !self.record.vms[vm].is_over() {
                self.gather(vm, false);
            }
        }
    }

    /// The control port is of no use any more.
    fn close(&mut self) {
        if !matches!(self.link, Link::Closed { .. }) {
            self.link = Link::Closed { since: Instant::now() };
        }
    }

    fn connect(&mut self, stream: UnixStream) {
        let reader = control::limit_patience(&stream).and_then(|()| stream.try_clone());
        match reader {
            Ok(reader) => {
                control::listen(reader, self.events.clone(), Event::Host, Event::Closed);
                self.link = Link::Up(stream);
                // Other tools may connect from now on; earlier no host could answer.
                match Share::open(&self.events, Event::Asked) {
                    Ok(share) => self.share = Some(share),
                    Err(error) => self.progress.say(&format!("other tools cannot reach this host: {error}")),
                }
            }
            Err(error) => {
                self.progress.say(&format!("cannot use the control port: {error}"));
                self.close();
            }
        }
    }

    /// Handles a message of the hypervisor.
    fn hear(&mut self, message: Message) {
        match message {
            Message::Up(info) => self.introduce(info),
            Message::Reply { id, result } => self.deliver(id, result),
            Message::Console { vm, line, at_ns, bytes } => match self.known(vm) {
                Some(vm) => self.print(vm, line, at_ns, &bytes),
                None => self.print_guest(vm, line, &bytes),
            },
            Message::Vm { vm, at_ns, event } => match self.known(vm) {
                Some(vm) => self.note(vm, at_ns, event),
                None => self.note_guest(vm, event),
            },
            Message::Refused(error) => {
                self.progress.say(&format!("the hypervisor rejected one of our frames: {error}"));
            }
            // QEMU's end follows.
            Message::Bye => {}
        }
    }

    fn known(&self, vm: u32) -> Option<usize> {
        usize::try_from(vm).ok().filter(|&vm| vm < self.vms.len())
    }

    fn introduce(&mut self, info: HostInfo) {
        let processor = printable(&info.processor);
        let memory = show_size(info.memory_bytes >> 20 << 20);
        let version = printable(&info.version);
        self.progress.say(&format!("hypervisor {version}: {} pCPUs, {memory} for VMs, {processor}", info.pcpus));
        self.record.host = Some(info);
    }

    fn note(&mut self, vm: usize, at_ns: u64, event: VmEvent) {
        let record = &mut self.record.vms[vm];
        let name = record.name.clone();
        match event {
            VmEvent::Creating => record.creating_ns = Some(at_ns),
            VmEvent::Started => {
                record.started_ns = Some(at_ns);
                let (vcpus, memory) = (record.vcpus, show_size(record.memory_bytes));
                self.progress.say(&format!("vm \"{name}\": started, {vcpus} vCPUs, {memory}"));
                if self.vms[vm].role == Role::Console {
                    self.open_terminal();
                }
            }
            VmEvent::Failed(why) => {
                self.progress.say(&format!("vm \"{name}\": cannot be created: {}", printable(&why)));
                record.failed.get_or_insert(why);
            }
            // A VM ends once, whatever the host reports.
            VmEvent::Stopped { .. } if record.stopped.is_some() => {}
            VmEvent::Stopped { reason, detail } => {
                let followed = &mut self.vms[vm];
                record.exit_status = followed.agent.status();
                let rest = followed.agent.finish();
                let shown = printable(&detail);
                let colon = if shown.is_empty() { "" } else { ": " };
                record.stopped = Some((reason, detail, at_ns));
                self.output(vm, &rest);
                self.flush_output(vm);
                self.progress.say(&format!("vm \"{name}\": ended, {}{colon}{shown}", reason.name()));
                self.gather(vm, false);
            }
            // The VM has ended, and is reported as ended.
            VmEvent::Created { .. } | VmEvent::Destroyed => {}
        }
    }

    /// Records the events of a VM that a command has created.
    fn note_guest(&mut self, vm: u32, event: VmEvent) {
        if let VmEvent::Created { name } = event {
            if self.guests.len() < MOST_GUESTS {
                let name = printable(&name);
                self.progress.say(&format!("vm \"{name}\": created by a command, number {vm}"));
                let guest = Guest { name, is_running: false, partial: Vec::new(), agent: Agent::default() };
                self.guests.insert(vm, guest);
            }
            return;
        }
        let Some(guest) = self.guests.get_mut(&vm) else { return };
        let name = guest.name.clone();
        match event {
            VmEvent::Started => {
                guest.is_running = true;
                // The run is not over, even if all earlier VMs have ended.
                self.phase.go_on();
                self.progress.say(&format!("vm \"{name}\": started by a command"));
            }
            VmEvent::Stopped { reason, detail } => {
                guest.is_running = false;
                let rest = std::mem::take(&mut guest.partial);
                if !rest.is_empty() {
                    self.write_output(&[format!("{name}| ").as_bytes(), &rest, b"\n"].concat());
                }
                let shown = printable(&detail);
                let colon = if shown.is_empty() { "" } else { ": " };
                self.progress.say(&format!("vm \"{name}\": ended, {}{colon}{shown}", reason.name()));
            }
            VmEvent::Destroyed => {
                self.guests.remove(&vm);
                self.progress.say(&format!("vm \"{name}\": destroyed"));
            }
            VmEvent::Created { .. } | VmEvent::Creating | VmEvent::Failed(_) => {}
        }
    }

    /// Prints serial output of a VM that a command has created: line by line, with its name.
    fn print_guest(&mut self, vm: u32, line: Line, bytes: &[u8]) {
        let Some(guest) = self.guests.get_mut(&vm) else { return };
        let bytes = if line == Line::Agent { guest.agent.push(bytes) } else { bytes.to_vec() };
        let labelled = labelled(&guest.name, &mut guest.partial, &bytes);
        self.write_output(&labelled);
    }

    fn open_terminal(&mut self) {
        if self.terminal.is_some() {
            return;
        }
        self.progress.say("this is its console; Ctrl-] ends the VM");
        match RawTerminal::open(&self.events, Event::Typed) {
            Ok(terminal) => {
                self.terminal = Some(terminal);
                self.progress.set_raw(true);
            }
            Err(error) => self.progress.say(&format!("cannot read keys from the terminal: {error}")),
        }
    }

    /// Handles serial output of a guest.
    fn print(&mut self, vm: usize, line: Line, at_ns: u64, bytes: &[u8]) {
        let followed = &mut self.vms[vm];
        match (line, followed.role) {
            (Line::Agent, Role::Console | Role::Command) => {
                let first_word = *followed.first_word_ns.get_or_insert(at_ns);
                let output = followed.agent.push(bytes);
                self.greet(vm, first_word);
                if self.vms[vm].role == Role::Command {
                    self.output(vm, &output);
                }
                // The counters of a VM may be gone with it, so they are asked for while it powers off, too.
                let followed = &mut self.vms[vm];
                if followed.agent.status().is_some() && !followed.asked_at_end {
                    followed.asked_at_end = true;
                    self.gather(vm, false);
                }
            }
            (Line::Agent, Role::Watch) => self.output(vm, bytes),
            (Line::Console, role) => {
                followed.tail.extend_from_slice(bytes);
                let surplus = followed.tail.len().saturating_sub(TAIL_BYTES);
                followed.tail.drain(..surplus);
                match role {
                    Role::Console => write_out(&mut io::stdout(), bytes),
                    Role::Watch => self.output(vm, bytes),
                    Role::Command if self.verbose => write_out(&mut io::stderr(), bytes),
                    Role::Command => {}
                }
            }
        }
    }

    fn greet(&mut self, vm: usize, at_ns: u64) {
        let record = &mut self.record.vms[vm];
        if let (None, Some(hello)) = (&record.hello, self.vms[vm].agent.hello()) {
            record.hello = Some((hello.clone(), at_ns));
            record.hello_after = Some(self.progress.elapsed());
            let (name, kernel, cpus) = (&record.name, &hello.kernel, hello.cpus);
            let after = record.boot_ns().map_or(String::new(), |ns| format!(", {:.2} s after its start", seconds(ns)));
            let text = format!("vm \"{name}\": Linux {kernel}, {cpus} CPUs online, user space reached{after}");
            self.progress.say(&text);
            self.gather(vm, true);
        }
    }

    /// Output of a VM: kept for JSON, shown with the VM's name when there are several.
    fn output(&mut self, vm: usize, bytes: &[u8]) {
        let kept = &mut self.record.vms[vm].output;
        if self.json {
            kept.extend_from_slice(&bytes[..bytes.len().min(KEPT_BYTES.saturating_sub(kept.len()))]);
        }
        if self.vms.len() == 1 {
            return self.write_output(bytes);
        }
        let labelled = labelled(&self.record.vms[vm].name, &mut self.vms[vm].partial, bytes);
        self.write_output(&labelled);
    }

    fn flush_output(&mut self, vm: usize) {
        if !self.vms[vm].partial.is_empty() {
            self.vms[vm].partial.push(b'\n');
            let line = std::mem::take(&mut self.vms[vm].partial);
            let label = format!("{}| ", self.record.vms[vm].name);
            self.write_output(&[label.as_bytes(), &line].concat());
        }
    }

    fn write_output(&self, bytes: &[u8]) {
        if self.json {
            write_out(&mut io::stderr(), bytes);
        } else {
            write_out(&mut io::stdout(), bytes);
        }
    }

    fn show_log(&mut self) {
        if let Some(lines) = self.log.as_mut().and_then(Follower::lines) {
            self.progress.print(&lines);
        }
    }

    /// Asks the hypervisor; the reply goes to `asker`.
    fn ask(&mut self, command: Command, asker: Asker) {
        let Link::Up(link) = &mut self.link else {
            if let Asker::Tool(stream, _) = asker {
                // Closing the connection is the answer: the host is gone. The other side may have closed it already.
                let _ = stream.shutdown(Shutdown::Both);
            }
            return;
        };
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        match control::send(link, &Request { id, command }) {
            Ok(()) => {
                self.asked.insert(id, asker);
            }
            Err(_) => {
                // A request cut short would spoil the next; nothing more is sent.
                self.close();
            }
        }
    }

    fn deliver(&mut self, id: u32, result: Result<Answer, Refusal>) {
        match (self.asked.remove(&id), result) {
            (Some(Asker::Tool(mut stream, id)), result) => {
                // If the other side has closed the connection, the answer has no receiver.
                let _ = control::send(&mut stream, &Message::Reply { id, result });
            }
            (Some(Asker::Keys(_)), Ok(Answer::Accepted(count))) => {
                let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.keys.len());
                self.keys.drain(..count);
                if count == 0 {
                    self.keys_after = Instant::now() + TICK;
                }
                self.send_keys();
            }
            (Some(Asker::Keys(count)), _) => {
                self.keys.drain(..count.min(self.keys.len()));
            }
            (Some(Asker::Counters(number)), Ok(Answer::Stats { first, at_ns, vcpus, .. })) => {
                self.collect(number, first, at_ns, vcpus);
            }
            (Some(Asker::Counters(number)), _) => {
                self.gatherings.remove(&number);
            }
            (None, _) => {}
        }
    }

    /// Sends typed bytes, one request at a time: the guest may accept fewer than were sent.
    fn send_keys(&mut self) {
        let busy = self.asked.values().any(|asker| matches!(asker, Asker::Keys(_)));
        let running = self.record.vms.iter().all(|vm| vm.started_ns.is_some() && !vm.is_over());
        if self.keys.is_empty() || busy || !running || Instant::now() < self.keys_after {
            return;
        }
        let bytes: Vec<u8> = self.keys.iter().copied().take(CONSOLE_CHUNK).collect();
        let count = bytes.len();
        self.ask(Command::Input { vm: 0, line: Line::Console, bytes }, Asker::Keys(count));
    }

    /// Asks for all counters of a VM. Those of the moment of its hello (`at_hello`) are kept separately.
    fn gather(&mut self, vm: usize, at_hello: bool) {
        if !matches!(self.link, Link::Up(_)) {
            return;
        }
        let number = self.next_gathering;
        self.next_gathering = self.next_gathering.wrapping_add(1);
        let vcpus = self.record.vms[vm].vcpus;
        let room = vec![None; usize::try_from(vcpus).unwrap_or(0)];
        self.gatherings.insert(number, Gathering { vm, at_hello, at_ns: 0, vcpus: room });
        for first in (0..vcpus).step_by(STATS_CHUNK) {
            let vm = u32::try_from(vm).unwrap_or(u32::MAX);
            self.ask(Command::Stats { vm, first }, Asker::Counters(number));
        }
    }

    fn collect(&mut self, number: u32, first: u32, at_ns: u64, counters: Vec<VcpuCounters>) {
        let Some(gathering) = self.gatherings.get_mut(&number) else { return };
        gathering.at_ns = at_ns;
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        for (slot, counters) in gathering.vcpus.iter_mut().skip(first).zip(counters) {
            *slot = Some(counters);
        }
        if let Some(vcpus) = gathering.vcpus.iter().copied().collect::<Option<Vec<_>>>() {
            let record = &mut self.record.vms[gathering.vm];
            let place = if gathering.at_hello { &mut record.counters_at_hello } else { &mut record.counters };
            *place = Some(Snapshot { at_ns, vcpus });
            self.gatherings.remove(&number);
        }
    }

    fn end_host(&mut self) {
        if !self.phase.tell(Instant::now()) {
            return;
        }
        let Link::Up(link) = &mut self.link else { return };
        // If this fails, the time limit ends, and QEMU is killed.
        let _ = control::send(link, &Request { id: 0, command: Command::PowerOff });
    }
}

/// The complete lines of `partial` followed by `bytes`, each with the name in front. The rest remains in `partial`.
fn labelled(name: &str, partial: &mut Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    let mut labelled = Vec::new();
    for &byte in bytes {
        partial.push(byte);
        if byte == b'\n' || partial.len() >= CONSOLE_CHUNK {
            labelled.extend_from_slice(name.as_bytes());
            labelled.extend_from_slice(b"| ");
            labelled.append(partial);
            if byte != b'\n' {
                labelled.push(b'\n');
            }
        }
    }
    labelled
}

fn write_out(stream: &mut impl Write, bytes: &[u8]) {
    // A reader that has gone (`| head`) is no reason to leave the guest half way.
    let _ = stream.write_all(bytes).and_then(|()| stream.flush());
}

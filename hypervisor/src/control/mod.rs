//! The hypervisor's side of the control port: reports events and executes commands.
//!
//! Only the first pCPU uses the port ([`poll`], from its housekeeping). The other pCPUs put their messages into
//! [`EVENTS`]. Nothing here waits for the other side. Messages without room in the port's buffers stay here, console
//! output stays in its VM, and a guest whose console is full waits alone.
//!
//! Without a port, the machine's own consoles are a terminal for the VMs ([`Terminal`]), and the first pCPU polls them
//! for input.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::{
    Answer, CONSOLE_CHUNK, Command, HostInfo, Line, Message, PLACES_CHUNK, Receiver, Refusal, Request, STATS_CHUNK,
    VmEvent, VmInfo, VmState, encode,
};
use abi::counters::VcpuCounters;
use abi::dirty::DirtyInfo;
use abi::exit_code;
use abi::payload::{DirtyLogging, VmConfig};
use addr::Gpa;
use crossbeam_utils::CachePadded;
use log::{error, info, warn};

use crate::arch::control_port::ControlPort;
use crate::arch::{platform, power, tsc, virtualization};
use crate::output::Turns;
use crate::sync::{Mutex, per_host};
use crate::terminal::{Key, Terminal};
use crate::vm::dirty::session::{self, Done, Session, StartError};
use crate::vm::{Ending, LINES, Vm};
use crate::{cpu, frames, layout, trace};

/// Bytes that may wait for the port before consoles are left where they are.
const OUTGOING_LIMIT: usize = 64 * 1024;
/// Without a port: bytes that one turn of a console writes to the log's UART. This is enough for most lines, so that
/// they stay whole. At 115 200 Bd they take 22 ms.
const LOG_CHUNK: usize = 256;
/// Without a port: maximum number of bytes per poll, for a faster UART.
const LOG_LIMIT: usize = 4096;
/// Time between two polls for input, in nanoseconds: short enough that a user does not notice, long enough that a
/// register read of 1 µs costs nothing. While the user types it polls more often: a UART holds 16 bytes, which arrive
/// in 1.4 ms.
const TYPED_NANOS: u64 = 5_000_000;
const TYPING_NANOS: u64 = 500_000;
/// How long after a key the user counts as typing, in nanoseconds.
const TYPING_LASTS_NANOS: u64 = 50_000_000;
/// Maximum number of input bytes taken at a time.
const TYPED_CHUNK: usize = 64;
/// Time of a byte at 38 400 Bd, for the self-test: an emulated guest writes faster.
const SLOW_BYTE_NANOS: u64 = 1_000_000_000 / 3_840;
/// How long the last words may take, in seconds.
const FAREWELL_SECONDS: u64 = 2;
/// How long the first pCPU works on requests at a time.
const WORK_NANOS: u64 = 500_000;

per_host! {
    /// Messages of other pCPUs.
    static EVENTS: CachePadded<Mutex<VecDeque<Message>>> = CachePadded::new(Mutex::new(VecDeque::new()));
    static CONTROL: CachePadded<Mutex<Option<Control>>> = CachePadded::new(Mutex::new(None));
}

struct Control {
    port: Option<ControlPort>,
    /// Without a port: the terminal on the machine's own consoles.
    terminal: Option<Terminal>,
    /// Time of the next poll for input there, and until when the user counts as typing.
    look_at: u64,
    typing_until: u64,
    /// The console whose turn is next.
    turns: Turns,
    /// Without a port: guests' output waits until then, so that the UARTs take half of this pCPU's time at most.
    log_rests_until: u64,
    /// The self-test treats the log's UART as slow as a real one.
    log_is_slow: bool,
    receiver: Receiver,
    outgoing: VecDeque<u8>,
    vms: Vec<Slot>,
    exit_when_idle: bool,
    /// The log says that all VMs have ended, and the machine stays on.
    has_told_idle: bool,
    /// All VMs of the payload were created or have failed.
    complete: bool,
}

struct Slot {
    config: VmConfig,
    state: SlotState,
}

enum SlotState {
    Running(Box<Active>),
    Ended { ending: Ending, counters: Vec<VcpuCounters> },
    Failed,
}

/// A running VM, and the requests that are being served for it.
struct Active {
    vm: Arc<Vm>,
    session: Option<Session>,
    /// The request that [`Session`] is at work on.
    awaited: Option<u32>,
    /// The request that waits for all vCPUs to have stopped.
    pausing: Option<u32>,
}

/// Takes over the port, if the machine has one, and says hello. `slow_log`: uses no port, and treats the log's UART as
/// slow as a real one.
pub(crate) fn init(vms: &[VmConfig], exit_when_idle: bool, slow_log: bool) {
    let port = if slow_log { None } else { ControlPort::take() };
    let terminal = port.is_none().then(|| {
        info!("no control port (virtio console): VMs have their consoles here; Ctrl-] ? tells the keys");
        Terminal::new(vms.iter().map(|vm| vm.name.as_str()))
    });
    *CONTROL.lock() = Some(Control {
        port,
        terminal,
        look_at: 0,
        typing_until: 0,
        turns: Turns::new(),
        log_rests_until: 0,
        log_is_slow: slow_log,
        receiver: Receiver::default(),
        outgoing: VecDeque::new(),
        vms: Vec::new(),
        exit_when_idle,
        has_told_idle: false,
        complete: false,
    });
    tell(Message::Up(host_info()));
}

/// Something to say, from any pCPU.
fn tell(message: Message) {
    EVENTS.lock().push_back(message);
}

/// The creation of the VM with the next number begins.
pub(crate) fn vm_creating(number: u32) {
    tell(Message::Vm { vm: number, at_ns: tsc::nanos(), event: VmEvent::Creating });
}

/// It was created.
pub(crate) fn vm_started(vm: &Arc<Vm>) {
    let active = Active { vm: vm.clone(), session: None, awaited: None, pausing: None };
    add(Slot { config: vm.config.clone(), state: SlotState::Running(Box::new(active)) });
    tell(Message::Vm { vm: vm.number, at_ns: tsc::nanos(), event: VmEvent::Started });
}

/// It cannot be created; the other VMs continue.
pub(crate) fn vm_failed(number: u32, config: VmConfig, why: String) {
    error!("{}: {why}", config.name);
    add(Slot { config, state: SlotState::Failed });
    if let Some(Control { terminal: Some(terminal), .. }) = &mut *CONTROL.lock() {
        terminal.ended(number as usize);
    }
    tell(Message::Vm { vm: number, at_ns: tsc::nanos(), event: VmEvent::Failed(why) });
}

fn add(slot: Slot) {
    if let Some(control) = &mut *CONTROL.lock() {
        control.vms.push(slot);
    }
}

/// All VMs were created or have failed.
pub(crate) fn payload_complete() {
    if let Some(control) = &mut *CONTROL.lock() {
        control.complete = true;
    }
}

/// The last vCPU of `vm` has left the guest for good.
pub(crate) fn vm_ended(vm: &Arc<Vm>, ending: &Ending) {
    info!("{}: {}: {}", vm.name(), ending.reason.name(), ending.detail);
    let counters = vm.vcpus().iter().map(|vcpu| vcpu.counters().snapshot()).collect();
    let mut control = CONTROL.lock();
    let slot = control.as_mut().and_then(|control| control.vms.get_mut(vm.number as usize));
    let Some(slot) = slot else { return };
    let last_reference = core::mem::replace(&mut slot.state, SlotState::Ended { ending: ending.clone(), counters });
    // The guest's last output goes out before the report of its end.
    if let (Some(control), SlotState::Running(active)) = (&mut *control, &last_reference) {
        for id in active.awaited.into_iter().chain(active.pausing) {
            control.say(&Message::Reply { id, result: Err(Refusal::NotRunning) });
        }
        while LINES.into_iter().any(|line| control.console_output(vm, line, CONSOLE_CHUNK) != 0) {}
        if let Some(terminal) = &mut control.terminal {
            terminal.ended(vm.number as usize);
        }
        control.say(&Message::Vm {
            vm: vm.number,
            at_ns: tsc::nanos(),
            event: VmEvent::Stopped { reason: ending.reason, detail: ending.detail.clone() },
        });
    }
}

/// Receives, sends, and works on requests, without waiting. Only the first pCPU calls this. Returns whether there is
/// more to do.
pub(crate) fn poll() -> bool {
    let Some(mut guard) = CONTROL.try_lock() else { return false };
    let Some(control) = &mut *guard else { return false };

    control.listen();
    let mut has_more = control.typed();
    has_more |= control.work();
    has_more |= control.consoles();
    for message in EVENTS.lock().drain(..) {
        control.say(&message);
    }
    control.transmit();

    if control.complete && control.is_idle() {
        control.idle();
    }
    has_more
}

impl Control {
    /// Takes received bytes.
    fn listen(&mut self) {
        let Some(port) = &mut self.port else { return };
        let mut bytes = [0; 512];
        let mut requests = Vec::new();
        loop {
            let count = port.receive(&mut bytes);
            requests.extend(bytes[..count].iter().filter_map(|&byte| self.receiver.push::<Request>(byte)));
            if count < bytes.len() {
                break;
            }
        }
        for request in requests {
            let message = match request {
                Ok(Request { id, command }) => match self.obey(id, command) {
                    Ok(None) => continue,
                    Ok(Some(answer)) => Message::Reply { id, result: Ok(answer) },
                    Err(refusal) => Message::Reply { id, result: Err(refusal) },
                },
                Err(error) => {
                    warn!("control port: {error}; refused");
                    Message::Refused(error)
                }
            };
            self.say(&message);
        }
    }

    /// Takes input from the machine's own consoles. Returns whether more may come soon.
    fn typed(&mut self) -> bool {
        let Some(terminal) = &mut self.terminal else { return false };
        let now = tsc::now();
        if now >= self.look_at {
            let mut bytes = [0; TYPED_CHUNK];
            let count = crate::log::receive(&mut bytes);
            if count != 0 {
                self.typing_until = now + tsc::nanos_to_ticks(TYPING_LASTS_NANOS);
            }
            for &byte in &bytes[..count] {
                match terminal.typed(byte) {
                    Key::Taken => {}
                    Key::Guest(guest, byte) => {
                        if let Some(vm) = self.vms.get(guest).and_then(Slot::running) {
                            // A guest that does not read loses bytes for which its UART has no room.
                            let _ = vm.type_on(Line::Console, &[byte]);
                        }
                    }
                    Key::PowerOff => self.exit_when_idle = true,
                }
            }
            let pause = if now < self.typing_until { TYPING_NANOS } else { TYPED_NANOS };
            self.look_at = now + tsc::nanos_to_ticks(pause);
        }
        now < self.typing_until
    }

    /// Executes a command. A long command has no answer yet.
    fn obey(&mut self, id: u32, command: Command) -> Result<Option<Answer>, Refusal> {
        match command {
            Command::Pause { vm } => self.active(vm)?.pause(id),
            Command::Resume { vm } => self.active(vm)?.resume(),
            Command::DirtyStart { vm, how, mirror } => self.active(vm)?.start_log(how, mirror),
            Command::DirtyRound { vm, lose } => self.active(vm)?.begin_round(id, lose),
            Command::DirtyCompare { vm } => self.active(vm)?.begin_comparison(id),
            Command::DirtyStop { vm } => self.active(vm)?.stop_log(),
            Command::DirtyInfo { vm } => Ok(Some(Answer::Dirty(self.active(vm)?.log_info()))),
            at_once => self.answer(at_once).map(Some),
        }
    }

    fn answer(&mut self, command: Command) -> Result<Answer, Refusal> {
        match command {
            Command::Hello => Ok(Answer::Host(host_info())),
            Command::List => Ok(Answer::Vms(self.vms.iter().map(Slot::info).collect())),
            Command::Stop { vm } => {
                commanded_stop(self.running(vm)?);
                Ok(Answer::Done)
            }
            Command::Stats { vm, first } => self.stats(vm, first),
            Command::Input { vm, line, bytes } => {
                let taken = self.running(vm)?.type_on(line, &bytes);
                Ok(Answer::Accepted(u32::try_from(taken).unwrap_or(u32::MAX)))
            }
            Command::Write { vm, gpa, bytes } => {
                let is_written = self.running(vm)?.memory.write(Gpa(gpa), &bytes);
                if is_written { Ok(Answer::Done) } else { Err(Refusal::NoMemoryThere) }
            }
            Command::Layout { kind } => layout::kind(kind).map(Answer::Layout).ok_or(Refusal::NoSuchLayout),
            Command::Places { first } => {
                let all = layout::places(self.vms.iter().filter_map(Slot::running)).into_iter();
                Ok(Answer::Places(all.skip(first as usize).take(PLACES_CHUNK).collect()))
            }
            Command::TraceStart => match trace::start() {
                Ok(()) => Ok(Answer::Done),
                Err(_) => Err(Refusal::OutOfMemory),
            },
            Command::TraceRead { pcpu } => trace::read(pcpu).map(Answer::Events).ok_or(Refusal::NoSuchPcpu),
            Command::TraceStop => {
                trace::stop();
                Ok(Answer::Done)
            }
            Command::PowerOff => {
                self.exit_when_idle = true;
                for slot in &self.vms {
                    if let SlotState::Running(vm) = &slot.state {
                        commanded_stop(&vm.vm);
                    }
                }
                Ok(Answer::Done)
            }
            // Step by step, the work loop does the others.
            Command::Pause { .. }
            | Command::Resume { .. }
            | Command::DirtyStart { .. }
            | Command::DirtyRound { .. }
            | Command::DirtyCompare { .. }
            | Command::DirtyStop { .. }
            | Command::DirtyInfo { .. } => Err(Refusal::Busy),
        }
    }

    fn slot(&self, number: u32) -> Result<&Slot, Refusal> {
        self.vms.get(number as usize).ok_or(Refusal::NoSuchVm)
    }

    fn running(&self, number: u32) -> Result<&Arc<Vm>, Refusal> {
        match &self.slot(number)?.state {
            SlotState::Running(active) => Ok(&active.vm),
            _ => Err(Refusal::NotRunning),
        }
    }

    fn active(&mut self, number: u32) -> Result<&mut Active, Refusal> {
        match &mut self.vms.get_mut(number as usize).ok_or(Refusal::NoSuchVm)?.state {
            SlotState::Running(active) => Ok(active),
            _ => Err(Refusal::NotRunning),
        }
    }

    /// Continues with long commands. Returns whether there is more to do.
    fn work(&mut self) -> bool {
        let until = tsc::now() + tsc::nanos_to_ticks(WORK_NANOS);
        let mut replies = Vec::new();
        let mut has_more = false;
        for slot in &mut self.vms {
            if let SlotState::Running(active) = &mut slot.state {
                has_more |= active.work(until, &mut replies);
            }
        }
        has_more |= trace::goes_on();
        for (id, answer) in replies {
            self.say(&Message::Reply { id, result: Ok(answer) });
        }
        has_more
    }

    fn stats(&self, number: u32, first: u32) -> Result<Answer, Refusal> {
        let slot = self.slot(number)?;
        if first >= slot.config.vcpus {
            return Err(Refusal::NoSuchVcpu);
        }
        let wanted = (first as usize)..(first as usize + STATS_CHUNK).min(slot.config.vcpus as usize);
        let vcpus = match &slot.state {
            SlotState::Running(active) => {
                active.vm.vcpus()[wanted].iter().map(|vcpu| vcpu.counters().snapshot()).collect()
            }
            SlotState::Ended { counters, .. } => counters[wanted].to_vec(),
            SlotState::Failed => return Err(Refusal::NotRunning),
        };
        Ok(Answer::Stats { vm: number, first, at_ns: tsc::nanos(), vcpus })
    }

    /// Takes guests' output, in turn, while there is room. Returns whether there is more for the log.
    fn consoles(&mut self) -> bool {
        let running: Vec<Arc<Vm>> = self
            .vms
            .iter()
            .filter_map(|slot| match &slot.state {
                SlotState::Running(active) => Some(active.vm.clone()),
                _ => None,
            })
            .collect();
        let sources: Vec<_> = running.iter().flat_map(|vm| LINES.map(|line| (vm, line))).collect();
        let mut turns = core::mem::take(&mut self.turns);
        let has_more = if self.port.is_some() {
            let room = OUTGOING_LIMIT.saturating_sub(self.outgoing.len());
            let allowed = |taken: usize| CONSOLE_CHUNK.min(room.saturating_sub(taken));
            turns.deal(sources.len(), allowed, |source, most| {
                let (vm, line) = sources[source];
                self.console_output(vm, line, most)
            });
            // The port's pace decides, not this pCPU's.
            false
        } else {
            self.consoles_to_terminal(&mut turns, &sources)
        };
        self.turns = turns;
        has_more
    }

    /// Without a port: this pCPU waits for the UARTs, however slow they are. So this stops after one chunk if they are
    /// slow.
    fn consoles_to_terminal(&mut self, turns: &mut Turns, sources: &[(&Arc<Vm>, Line)]) -> bool {
        let since = tsc::now();
        let rests = since < self.log_rests_until;
        let has_more = turns.deal(
            sources.len(),
            |taken| LOG_CHUNK.min(LOG_LIMIT.saturating_sub(taken)),
            |source, most| {
                let (vm, line) = sources[source];
                let room = self.terminal.as_ref().map_or(most, |terminal| terminal.room(vm.number as usize));
                self.console_output(vm, line, most.min(room))
            },
        );
        if rests {
            return false;
        }
        let until = since + tsc::nanos_to_ticks(WORK_NANOS);
        let is_empty = self.send_terminal(|| tsc::now() < until);
        let now = tsc::now();
        self.log_rests_until = now + (now - since);
        has_more || !is_empty
    }

    /// Sends pending output to the machine's own consoles, while `goes_on` is true. Returns whether all was sent.
    fn send_terminal(&mut self, goes_on: impl Fn() -> bool) -> bool {
        let Some(terminal) = &mut self.terminal else { return true };
        loop {
            let bytes = terminal.next();
            let bytes = &bytes[..bytes.len().min(LOG_CHUNK)];
            if bytes.is_empty() || !goes_on() {
                return bytes.is_empty();
            }
            crate::log::raw(bytes);
            let count = bytes.len();
            terminal.sent(count);
            if self.log_is_slow {
                let until = tsc::now() + tsc::nanos_to_ticks(SLOW_BYTE_NANOS * count as u64);
                while tsc::now() < until {
                    core::hint::spin_loop();
                }
            }
        }
    }

    /// Takes up to `most` bytes of the guest's output on a line. Returns how many it took.
    fn console_output(&mut self, vm: &Arc<Vm>, line: Line, most: usize) -> usize {
        if most == 0 {
            return 0;
        }
        let tell = |asserted| platform::serial_interrupt(vm, line, asserted);
        let Some((at_ns, bytes)) = vm.serial(line).take_output(most, tell) else { return 0 };
        let count = bytes.len();
        match &mut self.terminal {
            Some(terminal) if line == Line::Console => terminal.wrote(vm.number as usize, &bytes),
            // The other line has no reader.
            Some(_) => {}
            None => self.say(&Message::Console { vm: vm.number, line, at_ns, bytes }),
        }
        count
    }

    fn say(&mut self, message: &Message) {
        if self.port.is_none() {
            return;
        }
        match encode(message) {
            Ok(frame) => self.outgoing.extend(frame),
            Err(error) => error!("a message for the control port was lost: {error}"),
        }
    }

    /// Gives the port as many bytes as it accepts.
    fn transmit(&mut self) {
        let Some(port) = &mut self.port else { return };
        while !self.outgoing.is_empty() {
            let (bytes, _) = self.outgoing.as_slices();
            let taken = port.transmit(bytes);
            if taken == 0 {
                break;
            }
            self.outgoing.drain(..taken);
        }
    }

    fn is_idle(&self) -> bool {
        !self.vms.iter().any(|slot| matches!(slot.state, SlotState::Running(_)))
    }

    /// All VMs have ended: ends the machine, unless it must stay on.
    fn idle(&mut self) {
        if self.exit_when_idle {
            self.farewell();
        }
        let is_shown = self.terminal.as_ref().is_some_and(|terminal| terminal.next().is_empty());
        if is_shown && !core::mem::replace(&mut self.has_told_idle, true) {
            info!("all VMs have ended, and the machine stays on; Ctrl-] o turns it off");
        }
    }

    /// Sends the last message and ends the machine.
    fn farewell(&mut self) -> ! {
        let until = tsc::now() + FAREWELL_SECONDS * tsc::hz();
        self.send_terminal(|| tsc::now() < until);
        info!("all VMs have ended");
        for message in EVENTS.lock().drain(..) {
            self.say(&message);
        }
        self.say(&Message::Bye);
        let until = tsc::now() + FAREWELL_SECONDS * tsc::hz();
        loop {
            self.transmit();
            let all_gone = self.outgoing.is_empty() && self.port.as_mut().is_none_or(ControlPort::is_drained);
            if all_gone || tsc::now() > until {
                power::exit(exit_code::CLEAN);
            }
        }
    }
}

impl Active {
    fn pause(&mut self, id: u32) -> Result<Option<Answer>, Refusal> {
        if self.pausing.is_some() {
            return Err(Refusal::Busy);
        }
        self.vm.pause(true);
        self.pausing = Some(id);
        Ok(None)
    }

    fn resume(&mut self) -> Result<Option<Answer>, Refusal> {
        if self.pausing.is_some() || self.awaited.is_some() {
            return Err(Refusal::Busy);
        }
        self.vm.pause(false);
        Ok(Some(Answer::Done))
    }

    fn start_log(&mut self, how: Option<DirtyLogging>, mirror: bool) -> Result<Option<Answer>, Refusal> {
        if self.session.as_ref().is_some_and(|session| !session.is_over()) {
            return Err(Refusal::Logging);
        }
        let started = Session::start(&self.vm, how.unwrap_or(self.vm.config.dirty), mirror);
        self.session = Some(started.map_err(|error| match error {
            StartError::OutOfMemory => Refusal::OutOfMemory,
            StartError::NoHardwareLog => Refusal::NoHardwareLog,
        })?);
        Ok(Some(Answer::Done))
    }

    /// The log, if it runs and nothing is being done with it.
    fn log(&mut self) -> Result<&mut Session, Refusal> {
        match &mut self.session {
            Some(session) if session.is_busy() => Err(Refusal::Busy),
            Some(session) if session.is_logging() => Ok(session),
            _ => Err(Refusal::NotLogging),
        }
    }

    fn begin_round(&mut self, id: u32, lose: bool) -> Result<Option<Answer>, Refusal> {
        self.log()?.begin_round(lose);
        self.awaited = Some(id);
        Ok(None)
    }

    fn begin_comparison(&mut self, id: u32) -> Result<Option<Answer>, Refusal> {
        let is_at_rest = self.vm.is_at_rest();
        let session = self.log()?;
        if !session.has_mirror() {
            return Err(Refusal::NoMirror);
        }
        if !is_at_rest {
            return Err(Refusal::NotPaused);
        }
        session.begin_comparison();
        self.awaited = Some(id);
        Ok(None)
    }

    fn stop_log(&mut self) -> Result<Option<Answer>, Refusal> {
        let vm = self.vm.clone();
        self.log()?.stop(&vm);
        Ok(Some(Answer::Done))
    }

    fn log_info(&self) -> DirtyInfo {
        self.session.as_ref().map_or_else(|| session::info_without_log(&self.vm), |session| session.info(&self.vm))
    }

    /// Continues with requests, not much longer than `until`. Returns whether there is more to do.
    fn work(&mut self, until: u64, replies: &mut Vec<(u32, Answer)>) -> bool {
        if self.pausing.is_some() && self.vm.is_at_rest() {
            replies.extend(self.pausing.take().map(|id| (id, Answer::Done)));
        }
        let Some(session) = &mut self.session else { return false };
        while session.has_work() {
            match session.step(&self.vm) {
                Some(Done::Round(round)) => replies.extend(self.awaited.take().map(|id| (id, Answer::Round(round)))),
                Some(Done::Compared(result)) => {
                    replies.extend(self.awaited.take().map(|id| (id, Answer::Compared(result))))
                }
                None => {}
            }
            if tsc::now() > until {
                break;
            }
        }
        session.has_work()
    }
}

impl Slot {
    fn running(&self) -> Option<&Vm> {
        match &self.state {
            SlotState::Running(active) => Some(&active.vm),
            _ => None,
        }
    }

    fn info(&self) -> VmInfo {
        VmInfo {
            name: self.config.name.clone(),
            vcpus: self.config.vcpus,
            memory_bytes: self.config.memory_bytes,
            state: match &self.state {
                SlotState::Running(_) => VmState::Running,
                SlotState::Ended { ending, .. } => VmState::Stopped(ending.reason),
                SlotState::Failed => VmState::Failed,
            },
        }
    }
}

fn commanded_stop(vm: &Vm) {
    vm.stop(abi::control::StopReason::Commanded, format_args!("a command on the control port"));
}

fn host_info() -> HostInfo {
    HostInfo {
        version: String::from(env!("CARGO_PKG_VERSION")),
        pcpus: u32::try_from(cpu::scheduler::runners().count()).unwrap_or(u32::MAX),
        memory_bytes: frames::total_bytes(),
        tsc_hz: tsc::hz(),
        processor: virtualization::describe(),
    }
}

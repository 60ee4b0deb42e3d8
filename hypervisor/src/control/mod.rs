//! The control port's logic: executes requests, and reports events to the tool.
//!
//! Only the first pCPU uses the port ([`poll`], called by its housekeeping). Nothing here waits for the tool: messages
//! that do not fit into the port's buffers stay here, console output stays in its VM, and a guest with a full console
//! waits by itself. This file decides the order. The transport is in [`port`], commands are in [`commands`] and
//! [`upload`], [`saving`] and [`restoring`], serial lines in [`consoles`]. [`vm::table`](crate::vm::table) owns the
//! VMs.
//!
//! A process in a parent VM may make requests too, by a port of that VM ([`visitor`]). Events and consoles' output go
//! to the machine's own port only.

mod commands;
mod consoles;
mod port;
mod restoring;
mod saving;
mod upload;
mod visitor;

use alloc::string::String;
use alloc::vec::Vec;

use abi::control::{Answer, HostInfo, Message, Refusal, StopReason, VmEvent};
use abi::exit_code;
use abi::payload::{Devices, Role, VmConfig};
use crossbeam_utils::CachePadded;
use log::{error, info};

use crate::arch::{Arch, Machine};
use crate::cpu::preemption::{preemption_point, preemption_point_before};
use crate::mutants::{self, Mutant};
use crate::sync::{Mutex, per_host};
use crate::trace::longest;
use crate::vm::creation::{Creation, NotCreated};
use crate::vm::spec::Spec;
use crate::vm::table::{self, table};
use crate::vm::{self};
use crate::{cpu, frames, trace};
use commands::Attended;
use consoles::Consoles;
use port::{Asker, Peer, Port, Visitor};
use restoring::Restoring;
use saving::Saving;
use upload::Upload;

/// How long the last words may take, in seconds.
const FAREWELL_SECONDS: u64 = 2;
/// Maximum duration of one turn of work on commands.
const WORK_NANOS: u64 = 500_000;

per_host! {
    static CONTROL: CachePadded<Mutex<Option<Control>>> = CachePadded::new(Mutex::new(None));
}

struct Control {
    port: Port,
    /// The process in a parent that has that VM's port open.
    visitor: Option<Visitor>,
    consoles: Consoles,
    /// VMs about which something is being done.
    attended: Vec<Attended>,
    /// The VM that a command creates.
    upload: Option<Upload>,
    /// The VM that is being saved, and the one that is being restored.
    saving: Option<Saving>,
    restoring: Option<Restoring>,
    /// VMs to forget when they have ended.
    discarded: Vec<u32>,
    /// Who has started a trace that goes on.
    tracer: Option<Peer>,
    exit_when_idle: bool,
    /// It was reported that all VMs have ended and that the machine stays on.
    has_told_idle: bool,
    /// All VMs of the payload were created or have failed.
    complete: bool,
}

/// Takes the machine's port, if it has one, and sends the hello message. With `slow_log` it uses no port and treats the
/// log's UART as being as slow as a real one.
pub(crate) fn init(vms: &[VmConfig], exit_when_idle: bool, slow_log: bool) {
    let mut port = if slow_log { Port::none() } else { Port::take() };
    port.say(&Message::Up(host_info()));
    let terminal = !port.is_there();
    if terminal {
        info!("no control port (virtio console): VMs have their consoles here; Ctrl-] ? shows the keys");
    }
    let names = vms.iter().map(|vm| vm.name.as_str());
    *CONTROL.lock() = Some(Control {
        port,
        visitor: None,
        consoles: Consoles::new(terminal.then(|| (0..).zip(names)), slow_log),
        attended: Vec::new(),
        upload: None,
        saving: None,
        restoring: None,
        discarded: Vec::new(),
        tracer: None,
        exit_when_idle,
        has_told_idle: false,
        complete: false,
    });
}

/// Creates and starts `vm` of the payload from its `spec`. If that fails, it reports why; other VMs still start.
pub(crate) fn create_from_payload(vm: &VmConfig, spec: Result<Spec<'_>, NotCreated>) {
    let number = table::new_number();
    tell(number, VmEvent::Creating);
    match spec.and_then(|spec| create_at_once(number, spec)) {
        Ok(()) => tell(number, VmEvent::Started),
        Err(NotCreated { why, .. }) => {
            error!("{}: {why}", vm.name);
            table().add_failed(number, vm.clone());
            if let Some(control) = &mut *CONTROL.lock() {
                control.consoles.ended(number);
            }
            tell(number, VmEvent::Failed(why));
        }
    }
}

fn create_at_once(number: u32, spec: Spec<'_>) -> Result<(), NotCreated> {
    let mut creation = Creation::begin(number, spec.config.clone())?;
    let vm = loop {
        if let Some(vm) = creation.step(spec)? {
            break vm;
        }
    };
    let mut table = table();
    table.add(vm);
    // It is there, and waits for this.
    let _ = table.start(number);
    Ok(())
}

fn tell(vm: u32, event: VmEvent) {
    if let Some(control) = &mut *CONTROL.lock() {
        control.tell(vm, event);
    }
}

/// All VMs of the payload were created or have failed.
pub(crate) fn payload_complete() {
    if let Some(control) = &mut *CONTROL.lock() {
        control.complete = true;
    }
}

/// Reads requests, sends messages and continues commands, without waiting. Only the first pCPU calls it. Returns
/// whether there is more to do.
pub(crate) fn poll() -> bool {
    let Some(mut guard) = CONTROL.try_lock() else { return false };
    let Some(control) = &mut *guard else { return false };

    preemption_point_before("requests");
    let mut has_more = control.listen();
    has_more |= control.listen_to_visitor();
    preemption_point_before("keyboard");
    has_more |= control.typed();
    preemption_point_before("commands that take longer");
    has_more |= control.work();
    preemption_point_before("output of guests");
    has_more |= control.consoles.show(&mut control.port);
    preemption_point_before("orphans");
    end_orphans();
    preemption_point_before("statistics for a parent");
    renew_statistics();
    preemption_point_before("VMs that have ended");
    control.bury();
    preemption_point_before("answers");
    control.port.transmit();
    has_more |= control.answer_visitor();

    let is_making = control.upload.is_some() || control.restoring.is_some();
    if control.complete && table().all_alive().next().is_none() && !is_making {
        control.idle();
    }
    has_more
}

/// Does a part of the end of children whose parent has ended.
fn end_orphans() {
    let parent = table().all_alive().find(|vm| Machine::has_orphans(vm)).cloned();
    if let Some(parent) = parent {
        Machine::end_orphans(&parent);
    }
}

/// Keeps the pages true that show statistics to the host's parent.
fn renew_statistics() {
    let parent = table().all_alive().find(|vm| vm.config.role == Role::Parent).cloned();
    if let Some(parent) = parent {
        Machine::renew_statistics(&parent);
    }
}

impl Control {
    /// Something happened to a VM.
    fn tell(&mut self, vm: u32, event: VmEvent) {
        self.port.say(&Message::Vm { vm, at_ns: Machine::nanos(), event });
    }

    /// Answers a request. A process that has closed its port gets no answer.
    fn reply(&mut self, to: Asker, result: Result<Answer, Refusal>) {
        self.say(to.peer, &port::reply(to.id, result));
    }

    fn say(&mut self, to: Peer, message: &Message) {
        preemption_point();
        match (to, &mut self.visitor) {
            (Peer::Host, _) => self.port.say(message),
            (Peer::Parent(..), Some(visitor)) if visitor.peer() == to => visitor.say(message),
            (Peer::Parent(..), _) => {}
        }
    }

    /// Handles input from the machine's own consoles. Returns whether more may follow soon.
    fn typed(&mut self) -> bool {
        let typed = self.consoles.typed();
        self.exit_when_idle |= typed.power_off;
        typed.may_go_on
    }

    /// Continues unfinished commands. Returns whether there is more to do.
    fn work(&mut self) -> bool {
        let until = Machine::now() + Machine::nanos_to_ticks(WORK_NANOS);
        let mut replies = Vec::new();
        let mut has_more = false;
        for attended in &mut self.attended {
            has_more |= attended.work(until, &mut replies);
        }
        preemption_point();
        for (asker, answer) in replies {
            self.reply(asker, Ok(answer));
        }
        self.attended.retain(|attended| !attended.is_done());
        preemption_point_before("creation of a VM");
        has_more |= self.create(until);
        preemption_point_before("save of a VM");
        self.save();
        preemption_point_before("restore of a VM");
        has_more |= self.restore(until);
        preemption_point_before("commands that take longer");
        self.let_go();
        has_more |= trace::goes_on();
        has_more
    }

    /// Frees VMs that have ended.
    fn bury(&mut self) {
        loop {
            let over = table().over().cloned();
            let Some(vm) = over else { return };
            let (number, has_machine) = (vm.number, vm.config.devices == Devices::All);
            // Send the guest's last output before the report of its end.
            self.consoles.last_output(&vm, &mut self.port);
            let counters = vm.last_counters();
            drop(vm);
            let attended = self.attended.iter().position(|attended| attended.number() == number);
            let attended = attended.map(|at| self.attended.swap_remove(at));
            let (awaiting, destroyers) = attended.map(Attended::end).unwrap_or_default();
            let buried = table().bury(number, counters);
            let ending = buried.map(|(ending, vm)| {
                vm::take_apart(vm);
                ending
            });
            for asker in awaiting.into_iter().flatten().filter(|_| !mutants::is(Mutant::AwaitingForgotten)) {
                self.reply(asker, Err(Refusal::NotRunning));
            }
            self.consoles.ended(number);
            if let Some(ending) = ending {
                self.tell(number, VmEvent::Stopped { reason: ending.reason, detail: ending.detail });
                if has_machine {
                    self.follow(ending.reason);
                }
            }
            if let Some(at) = self.discarded.iter().position(|discarded| *discarded == number) {
                self.discarded.swap_remove(at);
                // It has just ended.
                let _ = self.forget(number);
            }
            for asker in destroyers {
                let answer = self.forget(number);
                self.reply(asker, answer);
            }
        }
    }

    /// All VMs have ended. Ends the machine too, unless it should stay on.
    fn idle(&mut self) {
        if self.exit_when_idle {
            self.farewell("all VMs have ended", turn_off);
        }
        if self.consoles.all_is_shown() && !core::mem::replace(&mut self.has_told_idle, true) {
            info!("all VMs have ended, and the machine stays on; Ctrl-] o turns it off");
        }
    }

    /// The VM with the machine's devices has ended so: the machine as well, if its guest wanted that.
    fn follow(&mut self, reason: StopReason) {
        match reason {
            StopReason::PowerOff => self.farewell("the machine is turned off", turn_off),
            StopReason::Reset | StopReason::TripleFault => self.farewell("the machine restarts", Machine::restart),
            _ => {}
        }
    }

    /// Sends the last message and ends the machine.
    fn farewell(&mut self, why: &str, end: fn() -> !) -> ! {
        let until = Machine::now() + FAREWELL_SECONDS * Machine::hz();
        self.consoles.send_while(|| Machine::now() < until);
        info!("{why}");
        longest::report();
        self.port.say(&Message::Bye);
        let until = Machine::now() + FAREWELL_SECONDS * Machine::hz();
        loop {
            self.port.transmit();
            if self.port.is_drained() || Machine::now() > until {
                end();
            }
        }
    }
}

fn turn_off() -> ! {
    Machine::exit(exit_code::CLEAN)
}

fn host_info() -> HostInfo {
    HostInfo {
        version: String::from(env!("CARGO_PKG_VERSION")),
        arch: String::from(Machine::name()),
        pcpus: u32::try_from(cpu::scheduler::runners().count()).unwrap_or(u32::MAX),
        memory_bytes: frames::total_bytes(),
        clock_hz: Machine::hz(),
        processor: Machine::describe(),
    }
}

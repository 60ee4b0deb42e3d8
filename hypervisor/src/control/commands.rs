//! Executes commands.
//!
//! Most commands finish at once. A pause, a round of a dirty log or the end of a VM takes longer: it is recorded with
//! its VM ([`Attended`]), and the answer follows when it is complete.

use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::{
    Answer, Command, Message, PLACES_CHUNK, Refusal, Request, STATS_CHUNK, StopReason, VMS_CHUNK, VmEvent,
};
use abi::dirty::DirtyInfo;
use abi::payload::DirtyLogging;
use abi::resources::Resources;
use addr::Gpa;
use log::warn;

use super::port::{Asker, Peer};
use super::{Control, host_info};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::{preemption_point, preemption_point_before};
use crate::mutants::{self, Mutant};
use crate::vm::dirty::session::{self, Done, Session, StartError};
use crate::vm::table::table;
use crate::vm::{Vm, tags};
use crate::{cpu, exhaustion, frames, layout, trace};

/// A VM with unfinished commands.
#[derive(Default)]
pub(super) struct Attended {
    number: u32,
    session: Option<Session>,
    /// The request that [`Session`] is at work on.
    awaited: Option<Asker>,
    /// The request that waits for all vCPUs to have stopped.
    pausing: Option<Asker>,
    /// Requests that wait for the VM's end, to remove the VM then.
    destroyers: Vec<Asker>,
}

/// Maximum number of requests that wait for the end of a VM.
const MOST_DESTROYERS: usize = 64;

impl Control {
    /// Reads the requests that have arrived. Returns whether there may be more.
    pub(super) fn listen(&mut self) -> bool {
        let (requests, has_more) = self.port.receive();
        for request in requests {
            match request {
                Ok(request) => self.carry_out(Peer::Host, request),
                Err(error) => {
                    warn!("control port: {error}; refused");
                    self.port.say(&Message::Refused(error));
                }
            }
        }
        has_more
    }

    /// Executes a request, and answers it unless it takes longer.
    pub(super) fn carry_out(&mut self, peer: Peer, Request { id, command }: Request) {
        preemption_point_before(command.name());
        let asker = Asker { peer, id };
        if let Some(result) = self.obey(asker, command).transpose() {
            self.reply(asker, result);
        }
    }

    /// Executes a command. Returns no answer for a command that takes longer.
    fn obey(&mut self, asker: Asker, command: Command) -> Result<Option<Answer>, Refusal> {
        if let Peer::Parent(own, _) = asker.peer {
            not_about_itself(own, &command)?;
        }
        match command {
            // It is paused, and would go on with the end of the save.
            Command::Pause { vm } if self.is_saving(vm) => Err(Refusal::Busy),
            Command::Pause { vm } => self.attend(vm, |vm, attended| attended.pause(vm, asker)),
            Command::Resume { vm } => {
                self.goes_on_without_save(vm);
                self.attend(vm, |vm, attended| attended.resume(vm))
            }
            Command::Save { vm } => self.begin_save(asker, vm),
            Command::RestoreBegin { config, state_bytes } => self.begin_restore(asker, config, state_bytes),
            Command::DirtyStart { vm, how, mirror } => {
                self.attend(vm, |vm, attended| attended.start_log(vm, how, mirror))
            }
            Command::DirtyRound { vm, lose } => self.attend(vm, |_, attended| attended.begin_round(asker, lose)),
            Command::DirtyCompare { vm } => self.attend(vm, |vm, attended| attended.begin_comparison(vm, asker)),
            Command::DirtyStop { vm } => self.attend(vm, |vm, attended| attended.stop_log(vm)),
            Command::DirtyInfo { vm } => self.log_info(vm).map(Answer::Dirty).map(Some),
            Command::CreateBegin { config } => self.begin_upload(asker.peer, config).map(Some),
            Command::CreateData { upload, part, offset, bytes } => {
                self.upload_data(upload, part, offset, &bytes).map(Some)
            }
            Command::CreateFinish { upload } => self.finish_upload(upload, asker).map(|()| None),
            Command::CreateAbort { upload } => self.abort_upload(upload).map(Some),
            Command::Start { vm } => self.start(vm).map(Some),
            Command::Destroy { vm } => self.destroy(asker, vm),
            Command::TraceStart => self.start_trace(asker.peer).map(Some),
            at_once => self.answer(at_once).map(Some),
        }
    }

    fn answer(&mut self, command: Command) -> Result<Answer, Refusal> {
        match command {
            Command::Hello => Ok(Answer::Host(host_info())),
            Command::Speculation => Ok(Answer::Speculation(Machine::speculation())),
            Command::List { first } => Ok(Answer::Vms(table().infos(first).take(VMS_CHUNK).collect())),
            Command::Resources => Ok(Answer::Resources(resources())),
            Command::Stop { vm } => {
                let vm = running_or_created(vm)?;
                commanded_stop(&vm);
                Ok(Answer::Done)
            }
            Command::Stats { vm, first } => {
                let vcpus = table().counters(vm, first, STATS_CHUNK)?;
                Ok(Answer::Stats { vm, first, at_ns: Machine::nanos(), vcpus })
            }
            Command::Input { vm, line, bytes } => {
                let taken = running(vm)?.type_on(line, &bytes);
                Ok(Answer::Accepted(u32::try_from(taken).unwrap_or(u32::MAX)))
            }
            Command::Write { vm, gpa, bytes } => {
                let is_written = running(vm)?.memory.write(Gpa(gpa), &bytes);
                if is_written { Ok(Answer::Done) } else { Err(Refusal::NoMemoryThere) }
            }
            Command::SaveState { save, offset } => self.saved_state(save, offset),
            Command::SaveUsed { save, gpa } => self.used_pages(save, gpa),
            Command::SaveMemory { save, gpa, bytes } => self.saved_memory(save, gpa, bytes),
            Command::SaveEnd { save, stay } => self.finish_save(save, stay),
            Command::RestoreState { upload, offset, bytes } => self.restore_state(upload, offset, &bytes),
            Command::RestoreMemory { upload, gpa, bytes } => self.restore_memory(upload, gpa, &bytes),
            Command::RestoreFinish { upload } => self.finish_restore(upload),
            Command::RestoreAbort { upload } => self.abort_restore(upload),
            Command::Layout { kind } => layout::kind(kind).map(Answer::Layout).ok_or(Refusal::NoSuchLayout),
            Command::Places { first } => {
                let all = layout::places(table().all_alive().map(|vm| &**vm)).into_iter();
                Ok(Answer::Places(all.skip(first as usize).take(PLACES_CHUNK).collect()))
            }
            Command::TraceRead { pcpu } => trace::read(pcpu).map(Answer::Events).ok_or(Refusal::NoSuchPcpu),
            Command::TraceStop => {
                self.stop_trace();
                Ok(Answer::Done)
            }
            Command::Exhaust { first, count } => {
                exhaustion::choose(first, count).map(Answer::Taken).ok_or(Refusal::Invalid)
            }
            Command::PowerOff => {
                self.exit_when_idle = true;
                self.upload = None;
                self.end_saving();
                self.restoring = None;
                table().all_alive().for_each(|vm| commanded_stop(vm));
                Ok(Answer::Done)
            }
            // The other commands finish later, or have a function of their own.
            Command::Pause { .. }
            | Command::Resume { .. }
            | Command::DirtyStart { .. }
            | Command::DirtyRound { .. }
            | Command::DirtyCompare { .. }
            | Command::DirtyStop { .. }
            | Command::DirtyInfo { .. }
            | Command::CreateBegin { .. }
            | Command::CreateData { .. }
            | Command::CreateFinish { .. }
            | Command::CreateAbort { .. }
            | Command::Start { .. }
            | Command::TraceStart
            | Command::Save { .. }
            | Command::RestoreBegin { .. }
            | Command::Destroy { .. } => Err(Refusal::Busy),
        }
    }

    fn start(&mut self, number: u32) -> Result<Answer, Refusal> {
        if self.attended.iter().any(|attended| attended.number == number && !attended.destroyers.is_empty()) {
            return Err(Refusal::NotRunning);
        }
        if self.is_restoring(number) {
            return Err(Refusal::Busy);
        }
        table().start(number)?;
        self.tell(number, VmEvent::Started);
        Ok(Answer::Done)
    }

    /// Ends a VM, and removes it once it has ended.
    fn destroy(&mut self, asker: Asker, number: u32) -> Result<Option<Answer>, Refusal> {
        let alive = running_or_created(number);
        match alive {
            Ok(vm) => {
                if self.attended(number).destroyers.len() >= MOST_DESTROYERS {
                    return Err(Refusal::Busy);
                }
                commanded_stop(&vm);
                if mutants::is(Mutant::EndAnsweredEarly) {
                    return Ok(Some(Answer::Done));
                }
                self.attended(number).destroyers.push(asker);
                Ok(None)
            }
            Err(Refusal::NotRunning) => self.forget(number).map(Some),
            Err(refusal) => Err(refusal),
        }
    }

    fn start_trace(&mut self, peer: Peer) -> Result<Answer, Refusal> {
        trace::start().map_err(|_| Refusal::OutOfMemory)?;
        self.tracer = Some(peer);
        Ok(Answer::Done)
    }

    pub(super) fn stop_trace(&mut self) {
        trace::stop();
        self.tracer = None;
    }

    /// Forgets a VM that has ended.
    pub(super) fn forget(&mut self, number: u32) -> Result<Answer, Refusal> {
        table().remove(number)?;
        self.consoles.removed(number);
        self.tell(number, VmEvent::Destroyed);
        Ok(Answer::Done)
    }

    /// Also of a child: who asks for it changes nothing. Its own log is its parent's.
    fn log_info(&self, number: u32) -> Result<DirtyInfo, Refusal> {
        let vm = Arc::clone(table().running(number)?);
        let attended = self.attended.iter().find(|attended| attended.number == number);
        let log = attended.and_then(|attended| attended.session.as_ref());
        Ok(log.map_or_else(|| session::info_without_log(&vm), |log| log.info(&vm)))
    }

    /// Does something about the VM of this number, which runs.
    fn attend<R>(
        &mut self,
        number: u32,
        act: impl FnOnce(&Vm, &mut Attended) -> Result<R, Refusal>,
    ) -> Result<R, Refusal> {
        let vm = running(number)?;
        act(&vm, self.attended(number))
    }

    /// Whether a command about this VM is unfinished, other than a dirty log.
    pub(super) fn is_attended(&self, number: u32) -> bool {
        let is_busy = |attended: &Attended| attended.awaited.is_some() || attended.pausing.is_some();
        self.attended.iter().any(|attended| attended.number == number && is_busy(attended))
    }

    fn attended(&mut self, number: u32) -> &mut Attended {
        let at = self.attended.iter().position(|attended| attended.number == number).unwrap_or_else(|| {
            self.attended.push(Attended { number, ..Attended::default() });
            self.attended.len() - 1
        });
        &mut self.attended[at]
    }
}

impl Attended {
    /// The number of the VM.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The VM is over: the requests that wait for something else, and those that wait for this.
    pub(super) fn end(self) -> ([Option<Asker>; 2], Vec<Asker>) {
        ([self.awaited, self.pausing], self.destroyers)
    }

    fn pause(&mut self, vm: &Vm, asker: Asker) -> Result<Option<Answer>, Refusal> {
        if self.pausing.is_some() {
            return Err(Refusal::Busy);
        }
        vm.pause(true);
        if mutants::is(Mutant::PauseAnsweredEarly) {
            return Ok(Some(Answer::Done));
        }
        self.pausing = Some(asker);
        Ok(None)
    }

    fn resume(&mut self, vm: &Vm) -> Result<Option<Answer>, Refusal> {
        if self.pausing.is_some() || self.awaited.is_some() {
            return Err(Refusal::Busy);
        }
        vm.pause(false);
        Ok(Some(Answer::Done))
    }

    fn start_log(&mut self, vm: &Vm, how: Option<DirtyLogging>, mirror: bool) -> Result<Option<Answer>, Refusal> {
        if self.session.as_ref().is_some_and(|session| !session.is_over()) {
            return Err(Refusal::Logging);
        }
        let started = Session::start(vm, how.unwrap_or(vm.config.dirty), mirror);
        self.session = Some(started.map_err(|error| match error {
            StartError::OutOfMemory => Refusal::OutOfMemory,
            StartError::NoHardwareLog => Refusal::NoHardwareLog,
            StartError::NoPml => Refusal::NoPml,
            StartError::OwnsDevices => Refusal::OwnsDevices,
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

    fn begin_round(&mut self, asker: Asker, lose: bool) -> Result<Option<Answer>, Refusal> {
        self.log()?.begin_round(lose);
        self.awaited = Some(asker);
        Ok(None)
    }

    fn begin_comparison(&mut self, vm: &Vm, asker: Asker) -> Result<Option<Answer>, Refusal> {
        let is_at_rest = vm.is_at_rest();
        let session = self.log()?;
        if !session.has_mirror() {
            return Err(Refusal::NoMirror);
        }
        if !is_at_rest {
            return Err(Refusal::NotPaused);
        }
        session.begin_comparison();
        self.awaited = Some(asker);
        Ok(None)
    }

    fn stop_log(&mut self, vm: &Vm) -> Result<Option<Answer>, Refusal> {
        self.log()?.stop(vm);
        Ok(Some(Answer::Done))
    }

    /// Continues unfinished commands until about `until`. Returns whether there is more to do.
    pub(super) fn work(&mut self, until: u64, replies: &mut Vec<(Asker, Answer)>) -> bool {
        let Ok(vm) = running(self.number) else { return false };
        if self.pausing.is_some() && vm.is_at_rest() {
            replies.extend(self.pausing.take().map(|asker| (asker, Answer::Done)));
        }
        let Some(session) = &mut self.session else { return false };
        if !session.has_work() {
            return false;
        }
        let began = Machine::now();
        while session.has_work() {
            match session.step(&vm) {
                Some(Done::Round(round)) => {
                    replies.extend(self.awaited.take().map(|asker| (asker, Answer::Round(round))))
                }
                Some(Done::Compared(result)) => {
                    replies.extend(self.awaited.take().map(|asker| (asker, Answer::Compared(result))))
                }
                None => {}
            }
            preemption_point();
            if Machine::now() > until {
                break;
            }
        }
        cpu::charge_work(vm.share(), began);
        session.has_work()
    }

    /// Whether the VM has no unfinished command and no dirty log.
    pub(super) fn is_done(&self) -> bool {
        self.session.is_none() && self.awaited.is_none() && self.pausing.is_none() && self.destroyers.is_empty()
    }
}

pub(super) fn running(number: u32) -> Result<Arc<Vm>, Refusal> {
    no_child(table().running(number)?).cloned()
}

fn running_or_created(number: u32) -> Result<Arc<Vm>, Refusal> {
    no_child(table().alive(number)?).cloned()
}

/// A process in the parent with this number does not end or stop that VM, and with it itself: no answer could come. It
/// has the power switch of its own machine.
fn not_about_itself(own: u32, command: &Command) -> Result<(), Refusal> {
    match *command {
        Command::PowerOff => Err(Refusal::Own),
        Command::Pause { vm } | Command::Stop { vm } | Command::Destroy { vm } | Command::Save { vm } if vm == own => {
            Err(Refusal::Own)
        }
        _ => Ok(()),
    }
}

/// A child is shown and counted like any VM. Its parent decides about everything else, and must be able to end it at
/// once.
fn no_child(vm: &Arc<Vm>) -> Result<&Arc<Vm>, Refusal> {
    if vm.as_child().is_some() { Err(Refusal::Child) } else { Ok(vm) }
}

fn commanded_stop(vm: &Vm) {
    vm.stop(StopReason::Commanded, format_args!("a command on the control port"));
}

fn resources() -> Resources {
    let [tags_in_pools, tags_owned, tags] = tags::usage();
    let table = table();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Resources {
        at_ns: Machine::nanos(),
        vms: count(table.len()),
        alive_vms: count(table.all_alive().count()),
        vcpus: count(table.all_alive().map(|vm| vm.vcpus().len()).sum()),
        total_bytes: frames::total_bytes(),
        free_bytes: frames::free_bytes(),
        heap_bytes: frames::heap_bytes(),
        heap_used_bytes: frames::heap_used_bytes(),
        tables_reserved_bytes: table.all_alive().map(|vm| vm.memory.reserved_table_bytes()).sum(),
        tables_used_bytes: table.all_alive().map(|vm| vm.memory.table_bytes()).sum(),
        tags,
        tags_in_pools,
        tags_owned,
    }
}

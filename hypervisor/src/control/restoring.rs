//! Restores a VM by command, from a file that a tool reads.
//!
//! The VM is created without a kernel, and paused. It is in the table from then on, so all else of a VM works, but
//! nobody can start it. It takes over its state when that has arrived, which tells early whether it can run here. Its
//! memory comes in pieces. In the end its time goes on, and it runs.
//!
//! One VM at a time. A tool may vanish, so a VM that nothing comes for is discarded.

use alloc::boxed::Box;
use alloc::sync::Arc;

use abi::control::{About, Answer, MEMORY_CHUNK, Refusal, StopReason, VmEvent, WHY_LIMIT};
use abi::payload::VmConfig;
use addr::{Gpa, PAGE_BYTES};
use alloc::string::String;
use log::{info, warn};

use super::Control;
use super::port::{Asker, Peer};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::frames::{self, Filled, Frames};
use crate::mutants::{self, Mutant};
use crate::vm::creation::{Creation, NotCreated};
use crate::vm::spec::Spec;
use crate::vm::table::{self, table};
use crate::vm::{Vm, saved};

/// Seconds without a command after which the VM is discarded. Then another one can be restored.
const PATIENCE_SECONDS: u64 = 120;

/// A VM that is being restored.
pub(super) struct Restoring {
    number: u32,
    sender: Peer,
    config: VmConfig,
    state_bytes: u64,
    state: Filled,
    /// When something came last, in host ticks.
    heard_at: u64,
    stage: Stage,
}

enum Stage {
    /// It is created. The request waits for that.
    Making(Box<Creation>, Asker),
    /// It is in the table, and paused.
    Filling(Arc<Vm>),
    /// It has taken over its state: its time stands still at this tick.
    Standing(Arc<Vm>, u64),
}

impl Control {
    /// Begins to restore a VM. Its number serves to name this, too.
    pub(super) fn begin_restore(
        &mut self,
        asker: Asker,
        config: VmConfig,
        state_bytes: u64,
    ) -> Result<Option<Answer>, Refusal> {
        if self.restoring.is_some() {
            return Err(Refusal::Busy);
        }
        table().admit(&config.name)?;
        let not_created = |about, why| Ok(Some(Answer::NotCreated { about, why }));
        if let Err(NotCreated { about, why }) = Spec::check(&config) {
            return not_created(about, why);
        }
        if let Err(why) = saved::check(&config) {
            return not_created(About::State, String::from(why));
        }
        if state_bytes > saved::most_bytes(&config) {
            return Err(Refusal::Invalid);
        }
        if frames::is_low() {
            return Err(Refusal::OutOfMemory);
        }
        let room = Frames::allocate(state_bytes.max(1), PAGE_BYTES).map_err(|_| Refusal::OutOfMemory)?;
        let number = table::new_number();
        match Creation::without_kernel(number, config.clone()) {
            Ok(creation) => {
                self.restoring = Some(Restoring {
                    number,
                    sender: asker.peer,
                    config,
                    state_bytes,
                    state: Filled::new(room),
                    heard_at: Machine::now(),
                    stage: Stage::Making(Box::new(creation), asker),
                });
                Ok(None)
            }
            Err(NotCreated { about, why }) => not_created(about, why),
        }
    }

    /// Continues until about `until`. Returns whether there is more to do.
    pub(super) fn restore(&mut self, until: u64) -> bool {
        let Some(restoring) = &mut self.restoring else { return false };
        let Stage::Making(creation, asker) = &mut restoring.stage else {
            if Machine::now().saturating_sub(restoring.heard_at) > PATIENCE_SECONDS * Machine::hz() {
                warn!("{}: no data for {PATIENCE_SECONDS} s; it is not restored", restoring.config.name);
                self.discard();
            }
            return false;
        };
        let asker = *asker;
        let spec = Spec { config: &restoring.config, kernel: &[], initrd: None };
        let made = loop {
            match creation.step(spec) {
                Ok(None) if Machine::now() > until => return true,
                Ok(None) => preemption_point(),
                Ok(Some(vm)) => break Ok(vm),
                Err(why) => break Err(why),
            }
        };
        restoring.heard_at = Machine::now();
        match made {
            Ok(vm) => {
                let (number, name) = (vm.number, String::from(vm.name()));
                vm.pause(true);
                restoring.stage = Stage::Filling(vm.clone());
                table().add(vm);
                self.consoles.added(number, &name);
                self.tell(number, VmEvent::Created { name });
                self.reply(asker, Ok(Answer::Upload(number)));
            }
            Err(NotCreated { about, why }) => {
                info!("{}: not restored: {why}", restoring.config.name);
                self.restoring = None;
                let why = why.chars().take(WHY_LIMIT / 4).collect();
                self.reply(asker, Ok(Answer::NotCreated { about, why }));
            }
        }
        true
    }

    /// The next bytes of the state.
    pub(super) fn restore_state(&mut self, upload: u32, offset: u64, bytes: &[u8]) -> Result<Answer, Refusal> {
        let restoring = self.restoring_of(upload)?;
        let Stage::Filling(vm) = &restoring.stage else { return Err(Refusal::NoSuchUpload) };
        let vm = vm.clone();
        let at = restoring.state.bytes().len() as u64;
        let follows = offset == at && bytes.len() as u64 <= restoring.state_bytes - at;
        if !follows || !restoring.state.push(bytes) {
            return Err(Refusal::NoSuchUpload);
        }
        if at + (bytes.len() as u64) < restoring.state_bytes {
            return Ok(Answer::Done);
        }
        let tick = Machine::now();
        match saved::restore(&vm, restoring.state.bytes(), tick) {
            Ok(()) => {
                restoring.stage = Stage::Standing(vm, tick);
                Ok(Answer::Done)
            }
            Err(why) => {
                info!("{}: not restored: {why}", vm.name());
                self.discard();
                let why = why.chars().take(WHY_LIMIT / 4).collect();
                Ok(Answer::NotCreated { about: About::State, why })
            }
        }
    }

    /// A part of the memory.
    pub(super) fn restore_memory(&mut self, upload: u32, gpa: u64, bytes: &[u8]) -> Result<Answer, Refusal> {
        let restoring = self.restoring_of(upload)?;
        let (Stage::Filling(vm) | Stage::Standing(vm, _)) = &restoring.stage else { return Err(Refusal::NoSuchUpload) };
        let is_written = bytes.len() <= MEMORY_CHUNK && vm.memory.write(Gpa(gpa), bytes);
        if is_written { Ok(Answer::Done) } else { Err(Refusal::NoMemoryThere) }
    }

    /// All has arrived: the VM goes on.
    pub(super) fn finish_restore(&mut self, upload: u32) -> Result<Answer, Refusal> {
        let restoring = self.restoring_of(upload)?;
        let Stage::Standing(vm, tick) = &restoring.stage else { return Err(Refusal::NoSuchUpload) };
        let (vm, tick) = (vm.clone(), *tick);
        table().start(upload)?;
        self.restoring = None;
        self.tell(upload, VmEvent::Started);
        if !mutants::is(Mutant::SavedTimeGoesOn) {
            Machine::time_stood_still(&vm, tick, Machine::now());
        }
        vm.pause(false);
        Ok(Answer::Created { vm: upload })
    }

    /// Discards the VM.
    pub(super) fn abort_restore(&mut self, upload: u32) -> Result<Answer, Refusal> {
        self.restoring_of(upload)?;
        self.discard();
        Ok(Answer::Done)
    }

    /// A tool has gone.
    pub(super) fn restorer_left(&mut self, sender: Peer) {
        if self.restoring.as_ref().is_some_and(|restoring| restoring.sender == sender) {
            self.discard();
        }
    }

    /// Whether this VM is being restored: nobody starts it.
    pub(super) fn is_restoring(&self, number: u32) -> bool {
        self.restoring.as_ref().is_some_and(|restoring| restoring.number == number)
    }

    /// Ends what there is of the VM that is being restored, and removes it when that is over.
    fn discard(&mut self) {
        let Some(Restoring { stage: Stage::Filling(vm) | Stage::Standing(vm, _), .. }) = self.restoring.take() else {
            return;
        };
        vm.stop(StopReason::Commanded, format_args!("it is not restored"));
        self.discarded.push(vm.number);
    }

    /// The one with this number, if it is still there.
    fn restoring_of(&mut self, number: u32) -> Result<&mut Restoring, Refusal> {
        let restoring = self.restoring.as_mut().filter(|restoring| restoring.number == number);
        let restoring = restoring.ok_or(Refusal::NoSuchUpload)?;
        restoring.heard_at = Machine::now();
        let is_over = match &restoring.stage {
            Stage::Making(..) => true,
            Stage::Filling(vm) | Stage::Standing(vm, _) => vm.ending().is_some(),
        };
        if is_over { Err(Refusal::NoSuchUpload) } else { Ok(restoring) }
    }

    /// A VM has ended: lets go of it if it was being restored.
    pub(super) fn let_go(&mut self) {
        let is_over = |stage: &Stage| match stage {
            Stage::Making(..) => false,
            Stage::Filling(vm) | Stage::Standing(vm, _) => vm.ending().is_some(),
        };
        let _ = self.restoring.take_if(|restoring| is_over(&restoring.stage));
    }
}

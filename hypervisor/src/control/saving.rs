//! Saves a VM by command, for a tool that writes the file.
//!
//! The VM is paused. When all its vCPUs are at rest its time stops, and its state is taken at once. Then the tool reads
//! the state and the memory, in pieces of its choice. In the end the VM goes on as if no time had passed, or ends.
//!
//! One VM at a time. A tool may vanish: then the VM goes on after [`PATIENCE_SECONDS`], or at once if the tool was a
//! program in a parent VM. Whatever else lets the VM go on ends the save too, so what a tool has read until
//! [`Command::SaveEnd`] belongs together.
//!
//! [`Command::SaveEnd`]: abi::control::Command::SaveEnd

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;

use abi::control::{Answer, MEMORY_CHUNK, Refusal, Saving as Description, StopReason, USED_BYTES};
use addr::{Gpa, PAGE_BYTES};
use log::{info, warn};

use super::Control;
use super::commands::running;
use super::port::{Asker, Peer};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::frames::Filled;
use crate::mutants::{self, Mutant};
use crate::vm::{Vm, saved, table};

/// Seconds without a command after which the VM goes on. A tool's slowest step is to wait for its disk.
const PATIENCE_SECONDS: u64 = 30;
const PAGES: usize = (USED_BYTES / PAGE_BYTES) as usize;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

/// A VM that is being saved.
pub(super) struct Saving {
    number: u32,
    vm: Arc<Vm>,
    sender: Peer,
    /// It was paused before, and stays so.
    was_paused: bool,
    /// When something came last, in host ticks.
    heard_at: u64,
    stage: Stage,
}

enum Stage {
    /// The vCPUs are on their way out of their guests. The request waits for that.
    Pausing(Asker),
    /// The VM's time stands still at this tick.
    Standing { tick: u64, state: Filled },
}

impl Control {
    /// Begins to save a VM. Answers at once if that is impossible.
    pub(super) fn begin_save(&mut self, asker: Asker, number: u32) -> Result<Option<Answer>, Refusal> {
        let vm = running(number)?;
        if self.saving.is_some() || self.is_attended(number) {
            return Err(Refusal::Busy);
        }
        if let Err(why) = saved::check(&vm.config) {
            return Ok(Some(Answer::NotSaved { why: String::from(why) }));
        }
        let was_paused = vm.is_paused();
        vm.pause(true);
        self.saving = Some(Saving {
            number: table::new_number(),
            vm,
            sender: asker.peer,
            was_paused,
            heard_at: Machine::now(),
            stage: Stage::Pausing(asker),
        });
        Ok(None)
    }

    /// Goes on with a save.
    pub(super) fn save(&mut self) {
        let Some(saving) = &mut self.saving else { return };
        if saving.vm.ending().is_some() {
            if let Some(Saving { stage: Stage::Pausing(asker), .. }) = self.saving.take() {
                self.reply(asker, Err(Refusal::NotRunning));
            }
            return;
        }
        match saving.stage {
            Stage::Pausing(asker) if saving.vm.is_at_rest() => {
                let tick = Machine::now();
                saving.heard_at = tick;
                match saved::save(&saving.vm, tick) {
                    Ok(state) => {
                        let described = describe(saving, &state);
                        saving.stage = Stage::Standing { tick, state };
                        self.reply(asker, Ok(Answer::Saving(Box::new(described))));
                    }
                    Err(_) => self.give_up_saving(Refusal::OutOfMemory),
                }
            }
            Stage::Pausing(_) => {}
            Stage::Standing { .. } => {
                if Machine::now().saturating_sub(saving.heard_at) > PATIENCE_SECONDS * Machine::hz() {
                    let name = saving.vm.name();
                    warn!("{name}: nothing was read for {PATIENCE_SECONDS} s; it is not saved, and goes on");
                    self.end_saving();
                }
            }
        }
    }

    /// Bytes of the state.
    pub(super) fn saved_state(&mut self, save: u32, offset: u64) -> Result<Answer, Refusal> {
        let (_, state) = self.standing(save)?;
        let rest = usize::try_from(offset).ok().and_then(|offset| state.bytes().get(offset..));
        let rest = rest.ok_or(Refusal::Invalid)?;
        Ok(Answer::Bytes(rest[..rest.len().min(MEMORY_CHUNK)].to_vec()))
    }

    /// Which pages from `gpa` on are not all zero.
    pub(super) fn used_pages(&mut self, save: u32, gpa: u64) -> Result<Answer, Refusal> {
        let (vm, _) = self.standing(save)?;
        if gpa.checked_add(USED_BYTES).is_none() {
            return Err(Refusal::Invalid);
        }
        let mut used = alloc::vec![0_u8; PAGES / 8];
        let mut page = [0; PAGE];
        for number in 0..PAGES {
            if number % 8 == 0 {
                preemption_point();
            }
            let at = Gpa(gpa + number as u64 * PAGE_BYTES);
            if vm.memory.read(at, &mut page) && !is_zero(&page) {
                used[number / 8] |= 1 << (number % 8);
            }
        }
        Ok(Answer::Used(used))
    }

    /// Bytes of the memory.
    pub(super) fn saved_memory(&mut self, save: u32, gpa: u64, bytes: u32) -> Result<Answer, Refusal> {
        let (vm, _) = self.standing(save)?;
        let length = usize::try_from(bytes).ok().filter(|length| *length <= MEMORY_CHUNK).ok_or(Refusal::Invalid)?;
        let mut bytes = alloc::vec![0; length];
        if vm.memory.read(Gpa(gpa), &mut bytes) { Ok(Answer::Bytes(bytes)) } else { Err(Refusal::NoMemoryThere) }
    }

    /// The tool has all that it wants.
    pub(super) fn finish_save(&mut self, save: u32, stay: bool) -> Result<Answer, Refusal> {
        let (vm, _) = self.standing(save)?;
        if stay {
            self.end_saving();
        } else {
            info!("{}: saved", vm.name());
            vm.stop(StopReason::Saved, format_args!("it lives in its file"));
            self.saving = None;
        }
        Ok(Answer::Done)
    }

    /// The VM that is being saved goes on, if it was not paused before.
    pub(super) fn end_saving(&mut self) {
        self.give_up_saving(Refusal::NotSaving);
    }

    /// The same. A request that still waits for the vCPUs to stop is refused.
    fn give_up_saving(&mut self, why: Refusal) {
        let Some(Saving { vm, was_paused, stage, .. }) = self.saving.take() else { return };
        match stage {
            Stage::Pausing(asker) => self.reply(asker, Err(why)),
            Stage::Standing { tick, .. } if !mutants::is(Mutant::SavedTimeGoesOn) => {
                Machine::time_stood_still(&vm, tick, Machine::now());
            }
            Stage::Standing { .. } => {}
        }
        if !was_paused {
            vm.pause(false);
        }
    }

    /// Whether this VM is being saved.
    pub(super) fn is_saving(&self, number: u32) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.vm.number == number)
    }

    /// Something else lets this VM go on.
    pub(super) fn goes_on_without_save(&mut self, number: u32) {
        if self.is_saving(number) {
            self.end_saving();
        }
    }

    /// A tool has gone.
    pub(super) fn saver_left(&mut self, sender: Peer) {
        if self.saving.as_ref().is_some_and(|saving| saving.sender == sender) {
            self.end_saving();
        }
    }

    /// The VM and its state, if this save is under way and the VM stands still.
    fn standing(&mut self, save: u32) -> Result<(Arc<Vm>, &Filled), Refusal> {
        let saving = self.saving.as_mut().filter(|saving| saving.number == save).ok_or(Refusal::NotSaving)?;
        saving.heard_at = Machine::now();
        match &saving.stage {
            Stage::Standing { state, .. } if saving.vm.ending().is_none() => Ok((saving.vm.clone(), state)),
            _ => Err(Refusal::NotSaving),
        }
    }
}

fn describe(saving: &Saving, state: &Filled) -> Description {
    Description {
        save: saving.number,
        config: saving.vm.config.clone(),
        state_bytes: state.bytes().len() as u64,
        regions: saving.vm.memory.backing.regions.iter().map(|region| (region.start.0, region.bytes())).collect(),
    }
}

fn is_zero(page: &[u8; PAGE]) -> bool {
    page.as_chunks::<16>().0.iter().all(|chunk| u128::from_ne_bytes(*chunk) == 0)
}

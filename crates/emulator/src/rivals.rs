//! A vCPU without caches of its own: it uses its VM's cache, which its vCPUs share, or none. The VM's cache has
//! instructions by their place, in pages that are read-only for the guest.

use core::ops::DerefMut;

use decode_cache::{Bytes, InsertOutcome, Insertion, Place, Protect, Vouching, WriteProtect};
use x86_defs::registers::{cr0, cr4, efer};
use x86_emulate::{Cpu, Device, Emulation, Memory, Outcome, Path, path};

use crate::{Count, Decoded, Emulator, Event, InstructionCaches, mode, uncached};

/// A decoded and executed instruction, to be cached for the whole VM.
pub(crate) struct PendingInsert {
    place: Place,
    bytes: Bytes,
    decoded: Decoded,
    linear: u64,
}

/// Executes the instruction at RIP: by the VM's cache, or without any.
#[inline]
pub(crate) fn emulate<C: Cpu, M: Memory, D: Device>(
    emulation: &mut Emulation<'_, C, M, D>,
    shared: Option<&WriteProtect<Decoded>>,
    pending: &mut Option<PendingInsert>,
    given: &[u8],
    count: impl Count,
) -> Outcome {
    match shared {
        Some(shared) => by_place(emulation, shared, pending, count),
        None => {
            count.add(Event::Missed, 1);
            uncached(emulation, given)
        }
    }
}

impl<M: Memory, K: DerefMut<Target = InstructionCaches<M>>> Emulator<M, K> {
    /// Whether the last instruction was decoded and executed, and belongs into the VM's cache.
    #[inline]
    pub fn has_pending_insert(&self) -> bool {
        self.pending.is_some()
    }

    /// Caches the last executed instruction for the whole VM. Not during the emulation, because `protect` may wait for
    /// other vCPUs. The control registers in `cpu` are still those of the instruction.
    #[cold]
    pub fn insert_pending(
        &mut self,
        cpu: &impl Cpu,
        memory: &M,
        shared: &WriteProtect<Decoded>,
        protect: &impl Protect,
        count: impl Count,
    ) {
        if let Some(pending) = self.pending.take() {
            pending.insert(cpu, memory, shared, protect, count);
        }
    }
}

/// Executes the instruction at RIP: by its place, else by decoding.
#[inline(never)]
fn by_place<C: Cpu, M: Memory, D: Device>(
    emulation: &mut Emulation<'_, C, M, D>,
    shared: &WriteProtect<Decoded>,
    pending: &mut Option<PendingInsert>,
    count: impl Count,
) -> Outcome {
    // Walk the guest's page tables, unless they are protected as well.
    let at = match shared.vouching() {
        Vouching::Walk => emulation.locate().map(|(linear, gpa)| (linear, Some(gpa))),
        Vouching::Tables => emulation.linear_rip().map(|linear| (linear, None)),
    };
    let (rip, gpa) = match at {
        Ok(found) => found,
        Err(outcome) => return outcome,
    };
    let place = Place { rip, space: space(emulation.cpu()), mode: mode(emulation), gpa };
    if let Some(Decoded(instruction)) = shared.find(&place) {
        count.add(Event::Found, 1);
        return emulation.execute(&instruction);
    }

    count.add(Event::Missed, 1);
    let (fetched, instruction) = match emulation.fetch().and_then(|fetched| Ok((fetched, emulation.decode(&fetched)?)))
    {
        Ok(found) => found,
        Err(outcome) => return outcome,
    };
    let outcome = emulation.execute(&instruction);
    if let Outcome::Done { .. } | Outcome::Again = outcome {
        let bytes = Bytes::from_words(fetched.window.words(), fetched.window.length());
        let place = Place { gpa: Some(fetched.gpa), ..place };
        *pending = Some(PendingInsert { place, bytes, decoded: Decoded(instruction), linear: rip });
    }
    outcome
}

/// CR3, with the other inputs of a walk in its unused bits.
fn space(cpu: &impl Cpu) -> u64 {
    let bit = |condition: bool, place: u32| u64::from(condition) << place;
    cpu.cr3()
        ^ bit(cpu.cr0() & cr0::PG != 0, 58)
        ^ bit(cpu.cr4() & cr4::PSE != 0, 59)
        ^ bit(cpu.cr4() & cr4::PAE != 0, 60)
        ^ bit(cpu.cr4() & cr4::LA57 != 0, 61)
        ^ bit(cpu.efer() & efer::LMA != 0, 62)
}

impl PendingInsert {
    /// Caches the instruction, if its bytes and the walk to it are still the same.
    pub(crate) fn insert<M: Memory>(
        self,
        cpu: &impl Cpu,
        memory: &M,
        shared: &WriteProtect<Decoded>,
        protect: &impl Protect,
        count: impl Count,
    ) {
        let Self { place, bytes, decoded, linear } = self;
        let way = path(cpu, memory, linear);
        let tables = way.as_ref().map_or(&[][..], Path::tables);
        let rewalk = || way.is_some() && path(cpu, memory, linear) == way;
        let Insertion { outcome, lost, .. } = shared.insert(&place, &bytes, decoded, tables, protect, rewalk);

        if let InsertOutcome::Stored | InsertOutcome::Replaced = outcome {
            count.add(Event::Inserted, 1);
        }
        count.add(Event::Replaced, u64::from(outcome == InsertOutcome::Replaced) + u64::from(lost.entries()));
    }
}

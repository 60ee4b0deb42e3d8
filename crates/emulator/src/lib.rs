//! The instruction emulator of a vCPU: `x86_emulate`, with the caches of `decode_cache` in front of it.
//!
//! Each of the two crates is useful alone, and neither imports the other. This crate joins them once, for the
//! hypervisor and for the benchmark. So the benchmark measures the code that ships.
//!
//! A vCPU has an [`Emulator`]. Its caches depend on how it was made, and on what each call passes:
//!
//! ```text
//! decode_cache =               the vCPU's caches      the VM's cache   how an instruction is executed
//! "bytes"                      walks, sites, bytes    -                repeat; else fetch, look up; else decode
//! "write-protect[-tables]"     walks                  WriteProtect     look up its place; else fetch, decode
//! "off"                        -                      -                fetch, decode
//! ```
//!
//! The first is the product's. The others are in `rivals.rs`, to be measured beside it.
//!
//! The emulator reports each event of an emulation to a [`Count`].

#![no_std]
#![forbid(unsafe_code)]

mod by_bytes;
mod rivals;

use core::ops::DerefMut;

use decode_cache::{ModeNumber, WriteProtect};
use x86_emulate::{Cause, Cpu, Device, Emulation, Instruction, Memory, Outcome, Walks};

pub use by_bytes::InstructionCaches;
use rivals::PendingInsert;

/// A decoded instruction, in the form that the caches store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Decoded(pub Instruction);

impl decode_cache::Decoded for Decoded {
    #[inline]
    fn length(&self) -> u8 {
        self.0.length
    }

    #[inline]
    fn pack(&self) -> [u64; 4] {
        self.0.pack()
    }

    #[inline]
    fn unpack(words: [u64; 4]) -> Option<Self> {
        Instruction::unpack(words).map(Self)
    }
}

/// An event of an emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The site was cached: the instruction was neither fetched nor decoded.
    Repeated,
    /// The instruction was cached under its bytes or under its place.
    Found,
    /// The instruction was not cached.
    Missed,
    /// The instruction is cached from now on.
    Inserted,
    /// Another instruction is no longer cached.
    Replaced,
    /// The emulator walked the guest's page tables: no cached walk was valid.
    Walked,
}

/// Counts events. A copy counts into the same counters.
pub trait Count: Copy {
    /// Adds `times` to the counter of `event`.
    fn add(self, event: Event, times: u64);
}

/// What the CPU reports about the instruction that caused an exit.
#[derive(Clone, Copy, Debug)]
pub struct ExitInfo<'a> {
    /// The reason of the exit.
    pub cause: Cause,
    /// The bytes that the CPU has saved, perhaps none.
    pub bytes: &'a [u8],
}

/// A vCPU's data for the emulation of instructions. `K` owns its caches of instructions.
pub struct Emulator<M: Memory, K> {
    walks: Walks<M>,
    /// The vCPU's own caches, if it has any.
    caches: Option<K>,
    /// The last executed instruction, to insert into the VM's cache: only without caches of its own.
    pending: Option<PendingInsert>,
}

impl<M: Memory, K: DerefMut<Target = InstructionCaches<M>>> Emulator<M, K> {
    /// An emulator with this cache of walks, and with `caches` as its own caches of instructions, if any.
    pub fn new(walks: Walks<M>, caches: Option<K>) -> Self {
        Self { walks, caches, pending: None }
    }

    /// Executes the instruction at RIP. `shared` finds the VM's cache; a vCPU with caches of its own does not ask.
    ///
    /// If [`has_pending_insert`](Self::has_pending_insert) is then true, the caller calls
    /// [`insert_pending`](Self::insert_pending).
    #[inline]
    pub fn emulate<'s, C: Cpu, D: Device>(
        &mut self,
        cpu: &mut C,
        memory: &M,
        device: &mut D,
        exit: ExitInfo<'_>,
        shared: impl FnOnce() -> Option<&'s WriteProtect<Decoded>>,
        count: impl Count,
    ) -> Outcome {
        let Self { walks, caches, pending } = self;
        let mut emulation = Emulation::new(cpu, memory, device, walks, exit.cause);
        let outcome = match caches {
            Some(caches) => by_bytes::emulate(&mut emulation, caches, exit.bytes, count),
            None => rivals::emulate(&mut emulation, shared(), pending, exit.bytes, count),
        };
        if walks.done() != 0 {
            count.add(Event::Walked, walks.take_done());
        }
        outcome
    }

    /// The cached walks, for other code that reads the guest's instructions.
    #[inline]
    pub fn walks(&mut self) -> &mut Walks<M> {
        &mut self.walks
    }

    /// The vCPU's own caches, if it has any.
    #[inline]
    pub fn caches(&self) -> Option<&K> {
        self.caches.as_ref()
    }
}

/// Decodes the saved bytes, or else fetches and decodes, and executes the instruction.
#[cold]
fn uncached<C: Cpu, M: Memory, D: Device>(emulation: &mut Emulation<'_, C, M, D>, given: &[u8]) -> Outcome {
    let decoded = match x86_emulate::decode(emulation.mode(), given) {
        Ok(instruction) => Ok(instruction),
        Err(_) => emulation.fetch().and_then(|fetched| emulation.decode(&fetched)),
    };
    match decoded {
        Ok(instruction) => emulation.execute(&instruction),
        Err(outcome) => outcome,
    }
}

/// The processor mode, as the caches number it.
#[inline]
fn mode<C: Cpu, M: Memory, D: Device>(emulation: &Emulation<'_, C, M, D>) -> ModeNumber {
    ModeNumber(emulation.mode() as u8)
}

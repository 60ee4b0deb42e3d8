//! Emulates x86 instructions that access device registers.
//!
//! A guest accesses a device by ordinary loads and stores. The hardware stops the guest and reports *where* the access
//! is (a guest physical address), but not *what* it is: which register, how wide, with which extension. This crate gets
//! that from the instruction:
//!
//! ```text
//! fetch    the bytes at RIP, through the guest's own page tables       fetch.rs, walk.rs
//! decode   into an Instruction: the operation and its operands         decode.rs, instruction.rs
//! plan     translate all operands; is each access allowed?             operand.rs
//! execute  reads, the operation, then writes                           execute.rs, strings.rs, arithmetic.rs
//! commit   registers, flags and RIP
//! ```
//!
//! Every error happens before the first access: a device sees each access once, or not at all.
//!
//! The guest can change its instruction and its page tables while this runs. So the crate does not assume that it reads
//! what the hardware saw. If no operand is where the hardware stopped, the outcome is [`Outcome::Retry`], and the guest
//! causes the same or another exit.
//!
//! Supported are the instructions that drivers use on device registers: see [`Operation`]. An operand may be in a
//! device, in RAM, or partly in each. A repeated string instruction executes [`BATCH`] elements at most, so that the
//! guest can be interrupted. Everything else is [`Outcome::Unsupported`].
//!
//! A caller can do the steps one by one ([`Emulation`]) and cache their results. [`Walks`] caches page-table walks. The
//! caller chooses where to cache a decoded [`Instruction`].

#![no_std]
#![forbid(unsafe_code)]

mod arithmetic;
mod cpu;
mod decode;
mod execute;
mod fetch;
mod instruction;
mod operand;
mod sites;
mod strings;
mod vendor;
mod walk;
mod walks;
mod width;

pub use cpu::{Cpu, CpuState, Exception, Mode, Segment, SegmentRegister};
pub use decode::{DecodeError, decode};
pub use execute::execute;
pub use fetch::{Fetched, Window, decode_fetched, fetch, fetch_whole};
pub use instruction::{Address, Base, Form, Index, Instruction, Operation, Register, Repeat};
pub use operand::Emulation;
pub use sites::Sites;
pub use strings::BATCH;
pub use vendor::Vendor;
pub use walk::{Access, Path, Stop, path, probe};
pub use walks::{Walks, translate};
pub use width::Width;

use addr::Gpa;

/// The guest's memory: RAM and ROM, never device registers.
pub trait Memory {
    /// A handle of an aligned 64-bit word. (The default is never used for an access.)
    type Word: Copy + Default;

    /// The word that holds `gpa`; `None` if there is no memory.
    fn find(&self, gpa: Gpa) -> Option<Self::Word>;

    /// Reads the word that is `ahead` words after `word`, on the same 4 KiB page, in one access.
    fn load(&self, word: Self::Word, ahead: usize) -> u64;

    /// Whether each of these words still has the value beside it.
    #[inline(always)]
    fn have_values(&self, mut words: impl Iterator<Item = (Self::Word, u64)>) -> bool {
        words.all(|(word, value)| self.load(word, 0) == value)
    }

    /// Whether `found`, which [`find`](Self::find) once returned, is what it would return now. Only memory that comes
    /// and goes while its guest runs needs to ask.
    #[inline(always)]
    fn is_current(&self, found: Option<Self::Word>) -> bool {
        let _ = found;
        true
    }

    /// Atomically replaces a word if it is still `current`. Returns whether it was.
    fn compare_exchange(&self, word: Self::Word, current: u64, new: u64) -> bool;

    /// Reads `bytes` from `gpa` on, within one page; `None` if there is no memory.
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()>;

    /// Writes `bytes` from `gpa` on, within one page; `None` if there is no writable memory.
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()>;
}

/// The devices: all addresses without memory, and all ports.
///
/// An instruction that reads and writes back makes two accesses. If it must be atomic, like XCHG, the caller holds the
/// device's lock around the whole emulation.
pub trait Device {
    /// Reads `width` at `gpa`. Bits above the width are ignored.
    fn read(&mut self, gpa: Gpa, width: Width) -> u64;

    /// Writes the low `width` of `value` at `gpa`. Bits above the width are zero.
    fn write(&mut self, gpa: Gpa, width: Width, value: u64);

    /// Reads `width`, at most 32 bits, from a port. Bits above the width are ignored.
    fn read_port(&mut self, port: u16, width: Width) -> u64;

    /// Writes the low `width`, at most 32 bits, of `value` to a port. Bits above the width are zero.
    fn write_port(&mut self, port: u16, width: Width, value: u64);
}

/// Why the hardware stopped the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// An access to this guest physical address.
    Access(Gpa),
    /// An intercepted INS or OUTS; the hardware has checked the right to execute it.
    Port,
}

/// Length of the longest instruction in bytes (APM vol. 3, 1.1).
pub const MAX_LENGTH: usize = 15;

/// Result of an emulation. Only [`Done`](Self::Done) and [`Again`](Self::Again) have changed the state or accessed a
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The instruction is done and RIP is behind it. The caller does what follows every instruction: it ends the
    /// interrupt shadow, and raises #DB if RFLAGS.TF was set.
    Done {
        /// Length of the instruction in bytes.
        length: u8,
    },
    /// Some repetitions of a string instruction are done. RIP still points to it, and the registers hold the rest.
    /// Interrupts may come now.
    Again,
    /// The instruction causes this exception instead.
    Fault(Exception),
    /// This is not, or no longer, an access to the page where the hardware stopped. Enter the guest again.
    Retry,
    /// An unsupported instruction, or none at all.
    Unsupported {
        /// The bytes at RIP.
        bytes: [u8; MAX_LENGTH],
        /// Number of `bytes` that belong to the instruction, or at least were read.
        length: u8,
    },
    /// The guest's code or page tables are at an address without memory.
    Unbacked(Gpa),
}

/// Emulates the instruction at RIP, without caches.
pub fn emulate<M: Memory>(cpu: &mut impl Cpu, memory: &M, device: &mut impl Device, cause: Cause) -> Outcome {
    let mut walks = Walks::forgetful();
    let mut emulation = Emulation::new(cpu, memory, device, &mut walks, cause);
    match emulation.fetch().and_then(|fetched| emulation.decode(&fetched)) {
        Ok(instruction) => emulation.execute(&instruction),
        Err(outcome) => outcome,
    }
}

#[cfg(test)]
mod tests;

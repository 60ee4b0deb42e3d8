//! Emulates the x86 instruction that touched a device register.
//!
//! A guest talks to a device by ordinary loads and stores. The hardware stops it at the access and says *where* (a guest
//! physical address), but not *what*: which register, how wide, with which extension. That is in the instruction, and
//! this crate finds it out:
//!
//! ```text
//! fetch    the bytes at RIP, through the guest's own page tables       fetch.rs, walk.rs
//! decode   into an Instruction: what is done, with which operands      decode.rs, instruction.rs
//! plan     where its operands lie; may they be accessed at all?        operand.rs
//! execute  reads, the operation, then writes                           execute.rs, strings.rs, arithmetic.rs
//! commit   registers, flags and RIP
//! ```
//!
//! Everything that can go wrong does so before the first access: a device sees each access once, or not at all.
//!
//! The guest can change its instruction and its tables while this runs. So nothing read from it is trusted to
//! be what the hardware saw; when no operand is where the hardware said, the answer is [`Outcome::Retry`], and the
//! guest runs into the same or another exit.
//!
//! Known are the instructions that are used on device registers: see [`Operation`]. An operand may lie in a device, in
//! RAM, or partly in each. A repeated string instruction goes on for [`BATCH`] elements at most before the guest
//! gets its chance to be interrupted. All else is [`Outcome::Unsupported`].
//!
//! The steps can be taken one by one ([`Emulation`]), so that what they found may be remembered: walks of page tables are, in
//! [`Walks`], and what a decoded [`Instruction`] is kept in is the caller's choice.

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
pub use decode::{Refusal, decode};
pub use execute::execute;
pub use fetch::{Fetched, Window, decode_fetched, fetch, fetch_whole};
pub use instruction::{Address, Base, Form, Index, Instruction, Operation, Register, Repeat};
pub use operand::Emulation;
pub use sites::Sites;
pub use strings::BATCH;
pub use vendor::Vendor;
pub use walk::{Access, Path, Stop, path};
pub use walks::{Walks, translate};
pub use width::Width;

use addr::Gpa;

/// The guest's memory: RAM and ROM, never device registers.
pub trait Memory {
    /// An aligned 64-bit word of it, once found. (The default is never used for an access.)
    type Word: Copy + Default;

    /// The word that holds `gpa`; `None` when there is no memory.
    fn find(&self, gpa: Gpa) -> Option<Self::Word>;

    /// The word that is `ahead` words behind `word`, on the same 4 KiB page, in one access.
    fn load(&self, word: Self::Word, ahead: usize) -> u64;

    /// Atomically replaces a word if it is still `current`. Says whether it was.
    fn compare_exchange(&self, word: Self::Word, current: u64, new: u64) -> bool;

    /// Fills `bytes` from `gpa` on, which does not cross a page; `None` when there is no memory.
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()>;

    /// Writes `bytes` from `gpa` on, which does not cross a page; `None` when there is no memory that can be written.
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()>;
}

/// The devices: whatever answers where there is no memory, and at ports.
///
/// An instruction that reads, changes and writes back makes two accesses; if it is to be atomic, as XCHG is, the lock
/// of the device is held around the whole emulation.
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
    /// It accessed this guest physical address.
    Access(Gpa),
    /// It is about to execute INS or OUTS; the right to do so has been checked.
    Port,
}

/// The longest an instruction can be, in bytes (APM vol. 3, 1.1).
pub const MAX_LENGTH: usize = 15;

/// How an emulation ended. Only [`Done`](Self::Done) and [`Again`](Self::Again) have changed the state or reached a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The instruction has been carried out and RIP is behind it. What follows every instruction is left to the caller:
    /// the interrupt shadow ends, and a #DB comes if RFLAGS.TF was set.
    Done {
        /// Length of the instruction in bytes.
        length: u8,
    },
    /// Some repetitions of a string instruction have been carried out. RIP is still at it, and the registers say how many
    /// are left: whatever interrupts may come now.
    Again,
    /// The instruction causes this exception instead.
    Fault(Exception),
    /// This is not, or no longer, an access to the page that the hardware stopped at. Let the guest run again.
    Retry,
    /// Not an instruction that this crate knows, or not one at all.
    Unsupported {
        /// What was found at RIP.
        bytes: [u8; MAX_LENGTH],
        /// How many of `bytes` are the instruction, or at least were looked at.
        length: u8,
    },
    /// The guest keeps its code or page tables at an address where there is no memory.
    Unbacked(Gpa),
}

/// Emulates the instruction at RIP, remembering nothing.
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

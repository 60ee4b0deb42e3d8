//! Emulates the x86 instruction that touched a device register.
//!
//! A guest talks to a device by ordinary loads and stores. The hardware stops it at the access and says *where* (a guest
//! physical address), but not *what*: which register, how wide, with which extension. That is in the instruction, and
//! this crate finds it out:
//!
//! ```text
//! fetch    the bytes at RIP, through the guest's own page tables       fetch.rs, walk.rs
//! decode   into the few things that matter: operation and operands     decode.rs
//! plan     the operand's address; is it the device's page at all?      execute.rs
//! execute  at most one device read, then at most one device write
//! commit   registers, flags and RIP
//! ```
//!
//! Everything that can go wrong does so before the device is touched: a device sees each access once, or not at all.
//!
//! The guest can change its instruction and its tables while this runs. So nothing read from it is trusted to
//! be what the hardware saw; when the operand is not where the hardware said, the answer is [`Outcome::Retry`], and the
//! guest runs into the same or another exit. Segment limits and protection keys, which the hardware has checked
//! before it stopped, are not checked again.
//!
//! Known are the instructions that drivers use on device registers: all forms of MOV between memory and general
//! registers, MOVZX, MOVSX, MOVSXD, XCHG, and OR, AND, XOR, ADD, SUB, CMP and TEST. All else is
//! [`Outcome::Unsupported`].

#![no_std]
#![forbid(unsafe_code)]

mod cpu;
mod decode;
mod execute;
mod fetch;
mod walk;

pub use cpu::{CpuState, Exception, Mode, Segment};
pub use walk::{Access, Stop, translate};

use addr::Gpa;

/// The guest's memory: RAM and ROM, never device registers.
pub trait Memory {
    /// Fills `bytes` from `gpa` on, which does not cross a 4 KiB page; `None` when there is no memory.
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()>;

    /// The 32-bit word at `gpa`, a multiple of 4, in one access; `None` when there is no memory.
    fn read_u32(&self, gpa: Gpa) -> Option<u32>;

    /// The 64-bit word at `gpa`, a multiple of 8, in one access; `None` when there is no memory.
    fn read_u64(&self, gpa: Gpa) -> Option<u64>;

    /// Atomically replaces the word at `gpa`, a multiple of 4, if it is still `current`. Says whether it was; `None` when
    /// there is no memory that can be written.
    fn compare_exchange_u32(&self, gpa: Gpa, current: u32, new: u32) -> Option<bool>;

    /// As [`compare_exchange_u32`](Self::compare_exchange_u32), for 64 bits at a multiple of 8.
    fn compare_exchange_u64(&self, gpa: Gpa, current: u64, new: u64) -> Option<bool>;
}

/// The device registers behind the page that the hardware stopped at.
///
/// An instruction that reads, changes and writes back calls both functions; if it is to be atomic, as XCHG is, the lock
/// of the device is held around the whole emulation.
pub trait Device {
    /// Reads `width` at `gpa`. Bits above the width are ignored.
    fn read(&mut self, gpa: Gpa, width: Width) -> u64;

    /// Writes the low `width` of `value` at `gpa`. Bits above the width are zero.
    fn write(&mut self, gpa: Gpa, width: Width, value: u64);
}

/// How much an access moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Width {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Word,
    /// 32 bits.
    Dword,
    /// 64 bits.
    Qword,
}

impl Width {
    /// The width of so many bytes, if there is one.
    #[must_use]
    pub const fn from_bytes(bytes: u8) -> Option<Self> {
        match bytes {
            1 => Some(Self::Byte),
            2 => Some(Self::Word),
            4 => Some(Self::Dword),
            8 => Some(Self::Qword),
            _ => None,
        }
    }

    /// Number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.bits() as u64 / 8
    }

    /// Number of bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Byte => 8,
            Self::Word => 16,
            Self::Dword => 32,
            Self::Qword => 64,
        }
    }

    /// The low bits of `value` that fit; the others zero.
    #[must_use]
    pub const fn truncate(self, value: u64) -> u64 {
        value & (u64::MAX >> (64 - self.bits()))
    }

    /// The low bits of `value` that fit; the others copies of their highest.
    #[must_use]
    pub const fn sign_extend(self, value: u64) -> u64 {
        let unused = 64 - self.bits();
        ((value << unused).cast_signed() >> unused).cast_unsigned()
    }

    /// Whether `value`, seen as a signed number of this width, is negative.
    #[must_use]
    pub const fn is_negative(self, value: u64) -> bool {
        value >> (self.bits() - 1) & 1 != 0
    }
}

/// The longest an instruction can be, in bytes (APM vol. 3, 1.1).
pub const MAX_LENGTH: usize = 15;

/// How an emulation ended. Only [`Done`](Self::Done) has changed the state or reached the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The instruction has been carried out and RIP is behind it. What follows every instruction is left to the caller:
    /// the interrupt shadow ends, and a #DB comes if RFLAGS.TF was set.
    Done {
        /// Length of the instruction in bytes.
        length: u8,
    },
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

/// Emulates the instruction at RIP, which the hardware stopped because it accessed `fault_gpa`.
pub fn emulate(state: &mut CpuState, memory: &impl Memory, device: &mut impl Device, fault_gpa: Gpa) -> Outcome {
    let (instruction, window) = match fetch::fetch(state, memory) {
        Ok(fetched) => fetched,
        Err(outcome) => return outcome,
    };
    execute::execute(state, memory, device, fault_gpa, &instruction, &window)
}

/// As [`emulate`], with the instruction's `bytes` that the hardware has saved (SVM decode assists; APM vol. 2, 15.8.4).
///
/// When they are too few, as on a processor that saves none, they are fetched.
pub fn emulate_fetched(
    state: &mut CpuState,
    bytes: &[u8],
    memory: &impl Memory,
    device: &mut impl Device,
    fault_gpa: Gpa,
) -> Outcome {
    let window = fetch::Window::of(bytes);
    match decode::decode(state.mode(), window.bytes()) {
        Ok(instruction) => execute::execute(state, memory, device, fault_gpa, &instruction, &window),
        Err(decode::Refusal::Incomplete) => emulate(state, memory, device, fault_gpa),
        Err(decode::Refusal::Unknown) => window.unsupported(),
    }
}

#[cfg(test)]
mod tests;

//! The bytes of an instruction, and with them the instruction.
//!
//! An instruction may lie across two pages, and then the second is translated only when the first does not hold all of
//! it: the processor would not fault on a page that it does not need.

use crate::decode::{self, Instruction, Refusal};
use crate::walk::{Access, Stop, translate};
use crate::{CpuState, Exception, MAX_LENGTH, Memory, Outcome, Segment};
use addr::PAGE_BYTES;

/// Bytes at RIP, as far as they were read.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    bytes: [u8; MAX_LENGTH],
    length: usize,
}

impl Window {
    /// The first of `bytes`, as many as an instruction can have.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut window = Self { bytes: [0; MAX_LENGTH], length: bytes.len().min(MAX_LENGTH) };
        for (to, from) in window.bytes.iter_mut().zip(bytes) {
            *to = *from;
        }
        window
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// The answer to what could not be decoded.
    pub(crate) fn unsupported(&self) -> Outcome {
        self.unsupported_of(u8::try_from(self.length).unwrap_or(u8::MAX))
    }

    /// The answer to a decoded instruction of `length` that could not be executed.
    pub(crate) fn unsupported_of(&self, length: u8) -> Outcome {
        Outcome::Unsupported { bytes: self.bytes, length }
    }
}

/// Fetches and decodes the instruction at RIP.
pub(crate) fn fetch(state: &CpuState, memory: &impl Memory) -> Result<(Instruction, Window), Outcome> {
    let mut window = Window { bytes: [0; MAX_LENGTH], length: 0 };

    // At most two rounds: to the end of the first page, then to the full length.
    while window.length < MAX_LENGTH {
        fill_to_page_end(&mut window, state, memory)?;
        match decode::decode(state.mode(), window.bytes()) {
            Ok(instruction) => return Ok((instruction, window)),
            Err(Refusal::Unknown) => return Err(window.unsupported()),
            Err(Refusal::Incomplete) => {}
        }
    }
    // More than 15 bytes (APM vol. 3, 1.1).
    Err(Outcome::Fault(Exception::GENERAL_PROTECTION))
}

/// Reads on behind what the window holds, up to the end of that page.
fn fill_to_page_end(window: &mut Window, state: &CpuState, memory: &impl Memory) -> Result<(), Outcome> {
    let offset = state.rip.wrapping_add(window.length as u64);
    let linear = state.linear(Segment::Cs, offset).ok_or(Outcome::Fault(Exception::GENERAL_PROTECTION))?;
    let gpa = translate(state, memory, linear, Access::Execute).map_err(outcome)?;

    let left_in_page = usize::try_from(PAGE_BYTES - linear % PAGE_BYTES).unwrap_or(usize::MAX);
    let end = MAX_LENGTH.min(window.length.saturating_add(left_in_page));
    memory.read(gpa, &mut window.bytes[window.length..end]).ok_or(Outcome::Unbacked(gpa))?;
    window.length = end;
    Ok(())
}

/// What a failed translation means for the instruction.
pub(crate) fn outcome(stop: Stop) -> Outcome {
    match stop {
        Stop::Fault(exception) => Outcome::Fault(exception),
        Stop::Unbacked(gpa) => Outcome::Unbacked(gpa),
        Stop::Contended => Outcome::Retry,
    }
}

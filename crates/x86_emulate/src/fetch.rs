//! Fetches the bytes of an instruction.
//!
//! An instruction may cross two pages. The second one is translated only if the first does not hold all of the
//! instruction, because the processor does not fault on a page that it does not need.

use crate::cpu::{Regime, linear};
use crate::decode::{DecodeError, decode};
use crate::instruction::Instruction;
use crate::walk::{Access, Stop};
use crate::walks::{Found, Walks};
use crate::{Cpu, Exception, MAX_LENGTH, Memory, Outcome, Segment};
use addr::{Gpa, PAGE_BYTES, PageSize};

/// 64-bit words in a page.
const WORDS_PER_PAGE: usize = 512;

/// Up to 15 bytes of code, in two words; unknown bytes are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    words: [u64; 2],
    length: u8,
}

impl Window {
    /// The first bytes of `bytes`, up to the longest instruction.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut window = [0; 16];
        let length = bytes.len().min(MAX_LENGTH);
        window[..length].copy_from_slice(&bytes[..length]);
        let (low, high) = (u64::from_le_bytes(first_half(window)), u64::from_le_bytes(second_half(window)));
        #[expect(clippy::cast_possible_truncation, reason = "at most 15")]
        let length = length as u8;
        Self { words: [low, high], length }
    }

    /// The bytes as two little-endian words, zero beyond the length.
    #[must_use]
    #[inline]
    pub fn words(&self) -> [u64; 2] {
        self.words
    }

    /// Number of known bytes.
    #[must_use]
    #[inline]
    pub fn length(&self) -> u8 {
        self.length
    }

    /// The bytes one by one; those from [`length`](Self::length) on are zero.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.words[0].to_le_bytes());
        bytes[8..].copy_from_slice(&self.words[1].to_le_bytes());
        bytes
    }

    /// The outcome for an unsupported instruction of `length` that begins with these bytes.
    pub(crate) fn unsupported(&self, length: u8) -> Outcome {
        let mut bytes = [0; MAX_LENGTH];
        bytes.copy_from_slice(&self.to_bytes()[..MAX_LENGTH]);
        Outcome::Unsupported { bytes, length }
    }
}

fn first_half(bytes: [u8; 16]) -> [u8; 8] {
    core::array::from_fn(|at| bytes[at])
}

fn second_half(bytes: [u8; 16]) -> [u8; 8] {
    core::array::from_fn(|at| bytes[8 + at])
}

/// The code at RIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The bytes, up to the end of the page.
    pub window: Window,
    /// Address of the first byte.
    pub gpa: Gpa,
}

/// Reads the code at RIP, up to the end of the page.
///
/// # Errors
/// The outcome of an instruction that cannot be fetched: an exception, or no memory there.
pub fn fetch<M: Memory>(cpu: &impl Cpu, memory: &M, walks: &mut Walks<M>) -> Result<Fetched, Outcome> {
    fetch_in(cpu, &Regime::of(cpu), memory, walks)
}

/// Like [`fetch()`], with a known regime.
#[inline(always)]
pub(crate) fn fetch_in<M: Memory>(
    cpu: &impl Cpu,
    regime: &Regime,
    memory: &M,
    walks: &mut Walks<M>,
) -> Result<Fetched, Outcome> {
    let found = locate(cpu, regime, memory, walks, cpu.rip())?;
    let page = found.page.ok_or(Outcome::Unbacked(found.gpa))?;

    let offset = found.gpa.offset_in(PageSize::Size4K);
    let left = PAGE_BYTES - offset;
    let word = (offset / 8) as usize;
    let shift = offset % 8 * 8;
    let load = |word: usize| if word < WORDS_PER_PAGE { memory.load(page, word) } else { 0 };
    let mut words = [load(word), load(word + 1)];
    if shift != 0 {
        let third = load(word + 2);
        words = [words[0] >> shift | words[1] << (64 - shift), words[1] >> shift | third << (64 - shift)];
    }
    words[1] &= u64::MAX >> 8;
    // Words that are gone read as zero. Code has such bytes as well, so this is asked of all.
    if !memory.is_current(Some(page)) {
        return Err(Outcome::Retry);
    }
    #[expect(clippy::cast_possible_truncation, reason = "at most 15")]
    let length = left.min(MAX_LENGTH as u64) as u8;
    Ok(Fetched { window: Window { words, length }, gpa: found.gpa })
}

/// Decodes `fetched`, and reads beyond the end of the page if the instruction crosses it.
///
/// # Errors
/// The bytes are no instruction, or too many, or the second page cannot be fetched.
pub fn decode_fetched<M: Memory>(
    cpu: &impl Cpu,
    memory: &M,
    walks: &mut Walks<M>,
    fetched: &Fetched,
) -> Result<Instruction, Outcome> {
    let Fetched { mut window, .. } = *fetched;
    let mode = cpu.mode();
    let mut decoded = decode(mode, &window.to_bytes()[..usize::from(window.length)]);
    if decoded == Err(DecodeError::Incomplete) {
        window = complete(cpu, memory, walks, &window)?;
        decoded = decode(mode, &window.to_bytes()[..usize::from(window.length)]);
    }
    decoded.map_err(|refusal| match refusal {
        // More than 15 bytes (APM vol. 3, 1.1).
        DecodeError::TooLong => Outcome::Fault(Exception::GENERAL_PROTECTION),
        DecodeError::Unknown | DecodeError::Incomplete => window.unsupported(window.length),
    })
}

/// Reads the code at RIP, as many bytes as an instruction can have: from two pages, if the second can be fetched.
///
/// # Errors
/// As for [`fetch()`].
pub fn fetch_whole<M: Memory>(cpu: &impl Cpu, memory: &M, walks: &mut Walks<M>) -> Result<Window, Outcome> {
    let window = fetch(cpu, memory, walks)?.window;
    if usize::from(window.length) == MAX_LENGTH {
        return Ok(window);
    }
    Ok(complete(cpu, memory, walks, &window).unwrap_or(window))
}

/// The window with the bytes from the next page.
fn complete<M: Memory>(cpu: &impl Cpu, memory: &M, walks: &mut Walks<M>, window: &Window) -> Result<Window, Outcome> {
    let known = usize::from(window.length);
    let found = locate(cpu, &Regime::of(cpu), memory, walks, cpu.rip().wrapping_add(known as u64))?;
    let mut bytes = window.to_bytes();
    memory.read(found.gpa, &mut bytes[known..MAX_LENGTH]).ok_or(Outcome::Unbacked(found.gpa))?;
    Ok(Window::of(&bytes[..MAX_LENGTH]))
}

/// Address of the byte at `rip`.
#[inline(always)]
fn locate<M: Memory>(
    cpu: &impl Cpu,
    regime: &Regime,
    memory: &M,
    walks: &mut Walks<M>,
    rip: u64,
) -> Result<Found<M>, Outcome> {
    let linear = linear(cpu, regime, Segment::Cs, rip, 1, Access::Execute).map_err(Outcome::Fault)?;
    walks.find(cpu, regime, memory, linear, Access::Execute).map_err(outcome)
}

/// The outcome of an instruction whose translation failed.
pub(crate) fn outcome(stop: Stop) -> Outcome {
    match stop {
        Stop::Fault(exception) => Outcome::Fault(exception),
        Stop::Unbacked(gpa) => Outcome::Unbacked(gpa),
        Stop::Contended => Outcome::Retry,
    }
}

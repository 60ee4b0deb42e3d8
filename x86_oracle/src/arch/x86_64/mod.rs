//! Executes an instruction in this process.
//!
//! A signal handler can set any registers of the interrupted code, code and stack segment included. The entry is an
//! INT3, whose handler replaces our registers by the case's. The exit is the INT3 behind the instruction, or the
//! exception that the instruction causes; the handler restores ours. No assembly code needs to save anything.

mod memory;
mod segments;
mod signals;

use crate::identity::Identity;
use crate::machine::{Case, Ended};
use crate::operands::Confined;
use core::arch::x86_64::__cpuid;
use memory::Mapped;
use segments::Selectors;
use signals::{EndState, Handlers};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use x86_emulate::{Exception, Mode};

/// There is one address space, and one handler of each signal.
static TAKEN: Mutex<()> = Mutex::new(());

/// Why the processor cannot be asked.
#[derive(Debug)]
pub struct Unavailable {
    what: &'static str,
    error: std::io::Error,
}

impl Unavailable {
    fn last(what: &'static str) -> Self {
        Self { what, error: std::io::Error::last_os_error() }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.error)
    }
}

impl std::error::Error for Unavailable {}

/// The processor, as far as a process can use it. One thread at a time has it.
pub struct Processor {
    // In the order of their removal.
    handlers: Handlers,
    memory: Mapped,
    has_segments: bool,
    _taken: MutexGuard<'static, ()>,
}

/// The vector of INT3 (APM vol. 2, 8.2.4).
const BREAKPOINT: u8 = 3;
/// The vector of page faults, which alone set CR2.
const PAGE_FAULT: u8 = 14;

impl Processor {
    /// Waits until no other thread has the processor.
    ///
    /// # Errors
    /// The kernel does not provide a required feature.
    pub fn take() -> Result<Self, Unavailable> {
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = Mapped::new()?;
        let handlers = Handlers::install()?;
        Ok(Self { handlers, memory, has_segments: segments::describe(), _taken: taken })
    }

    /// Which one it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let names = __cpuid(0);
        Identity::from_leaves([names.ebx, names.edx, names.ecx], __cpuid(1).eax)
    }

    /// Whether there are segments of our own, and so 16- and 32-bit code.
    #[must_use]
    pub fn has_segments(&self) -> bool {
        self.has_segments
    }

    /// Whether FS and GS can have any base.
    #[must_use]
    pub fn has_bases(&self) -> bool {
        segments::has_base_instructions()
    }

    /// Writes to the window, from `offset` on; to its read-only page as well.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.memory.write(offset, bytes);
    }

    /// The whole window.
    pub(crate) fn read(&self, into: &mut [u8]) {
        self.memory.read(into);
    }

    /// Executes the case's instruction.
    ///
    /// # Panics
    /// If the case needs segments or bases that are not there.
    pub(crate) fn run(&mut self, case: &Confined) -> Ended {
        let case = case.case();
        assert!(case.mode == Mode::Bits64 || self.has_segments, "there are no segments of our own");
        assert!(case.bases == [0; 2] || self.has_bases(), "FS and GS have no bases of our own");
        self.memory.put_code(case.place.into(), case.instruction());
        let ended = self.handlers.visit(case, Selectors::of(case));
        self.memory.clear_code(case.place.into(), case.instruction().len());

        let registers = ended.registers;
        let (rip, exception) = if ended.vector == BREAKPOINT {
            (registers.rip.wrapping_sub(1), None)
        } else {
            (registers.rip, Some(exception(&ended)))
        };
        Ended { gprs: registers.gprs, rip, flags: registers.flags, exception }
    }
}

/// The exception as the processor raised it.
fn exception(end: &EndState) -> Exception {
    const PRESENT: u32 = 1 << 0;
    const END_OF_PROCESS: u64 = 0x7fff_ffff_f000;
    let cr2 = (end.vector == PAGE_FAULT).then_some(end.cr2);
    // Linux sets this bit for all addresses that no process can have (arch/x86/mm/fault.c). Nothing is there.
    let hidden = if cr2.is_some_and(|address| address >= END_OF_PROCESS) { PRESENT } else { 0 };
    Exception { vector: end.vector, error_code: end.error_code & !hidden, cr2 }
}

/// Registers before and after the instruction.
#[derive(Clone, Copy, Debug)]
struct Registers {
    gprs: [u64; 16],
    rip: u64,
    flags: u64,
}

impl Registers {
    fn of(case: &Case) -> Self {
        const ALWAYS: u64 = 0x202;
        Self { gprs: case.gprs, rip: case.rip(), flags: case.flags | ALWAYS }
    }
}

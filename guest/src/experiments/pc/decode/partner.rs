//! A second CPU that follows the requests of CPU 0, through a word in memory: it writes code, or runs it.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::attempt::Fault;
use crate::arch::probe::{self, Level, RAX, RDI, RSI, Registers};
use crate::arch::{apic, code_pages, tlb, tsc};
use crate::cpu;

/// The CPU that it is.
const PARTNER: usize = 1;

/// The requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// Write this code, up to eight bytes of it, at the start of the frame.
    Write([u8; 8]),
    /// Run the code once and answer RAX.
    Run,
    /// Load this root and run the code this many times, with the same result each time. Returns the first unexpected
    /// result.
    RunWithRoot { root: u64, times: u64, expected: u64 },
    /// Return.
    Leave,
}

/// Where the code is: its address and its frame; RDI and RSI for it.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) rip: u64,
    pub(super) frame: u64,
    pub(super) rdi: u64,
    pub(super) rsi: u64,
}

/// The request's number (even: none is open), its kind and operands, the place, and the answer: fault or not, value.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
static ANSWER: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// The other CPU, at work until it is dropped or does not answer.
pub(super) struct Partner {
    place: Place,
    patience: u64,
    lost: bool,
}

impl Partner {
    /// Starts the work of CPU 1, with `priority` as its task priority. `None` if it cannot.
    pub(super) fn hire(place: Place, patience: u64) -> Option<Self> {
        NUMBER.store(0, Ordering::SeqCst);
        (cpu::is_up(PARTNER) && cpu::give(PARTNER, work)).then_some(Self { place, patience, lost: false })
    }

    /// Sends a request, without waiting.
    pub(super) fn begin(&self, request: Request) {
        let Place { rip, frame, rdi, rsi } = self.place;
        let operands = match request {
            Request::Write(code) => [0, u64::from_le_bytes(code), 0, 0],
            Request::Run => [1, 0, 0, 0],
            Request::RunWithRoot { root, times, expected } => [2, root, times, expected],
            Request::Leave => [3, 0, 0, 0],
        };
        for (word, value) in WORDS.iter().zip(operands.into_iter().chain([rip, frame, rdi, rsi])) {
            word.store(value, Ordering::SeqCst);
        }
        NUMBER.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits for the answer. `None` if there is none.
    pub(super) fn end(&mut self) -> Option<Result<u64, Fault>> {
        let last = tsc::now().saturating_add(self.patience);
        while NUMBER.load(Ordering::SeqCst) & 1 == 1 {
            if tsc::now() > last {
                self.lost = true;
                return None;
            }
            core::hint::spin_loop();
        }
        let value = ANSWER[1].load(Ordering::SeqCst);
        Some(match ANSWER[0].load(Ordering::SeqCst) {
            0 => Ok(value),
            vector => {
                let [vector, ..] = vector.to_le_bytes();
                let [error, ..] = [value & 0xffff_ffff].map(|low| u32::try_from(low).unwrap_or(0));
                Err(Fault { vector, error })
            }
        })
    }

    pub(super) fn ask(&mut self, request: Request) -> Option<Result<u64, Fault>> {
        self.begin(request);
        self.end()
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        if !self.lost {
            self.begin(Request::Leave);
            cpu::wait_for_all(self.patience);
        }
    }
}

/// What CPU 1 does.
fn work(_: usize) {
    apic::write(super::TASK_PRIORITY, super::PRIORITY);
    tlb::flush_all();
    loop {
        while NUMBER.load(Ordering::SeqCst) & 1 == 0 {
            core::hint::spin_loop();
        }
        let [kind, first, times, expected, rip, frame, rdi, rsi] =
            core::array::from_fn(|at| WORDS[at].load(Ordering::SeqCst));
        let start = Registers::at(rip).with(RDI, rdi).with(RSI, rsi);
        let run = || probe::run(&start, Level::Kernel).value(RAX);
        let answer = match kind {
            0 => {
                code_pages::write(frame, 0, &first.to_le_bytes());
                Ok(0)
            }
            1 => run(),
            2 => probe::with_root(first, || {
                (0..times).map(|_| run()).find(|seen| *seen != Ok(expected)).unwrap_or(Ok(expected))
            }),
            _ => break,
        };
        let words = match answer {
            Ok(value) => [0, value],
            Err(fault) => [u64::from(fault.vector), u64::from(fault.error)],
        };
        for (word, value) in ANSWER.iter().zip(words) {
            word.store(value, Ordering::SeqCst);
        }
        NUMBER.fetch_add(1, Ordering::SeqCst);
    }
    apic::write(super::TASK_PRIORITY, 0);
}

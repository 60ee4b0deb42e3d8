//! One signal enters the instruction, and another one leaves it.

use super::segments::{Selectors, fs_base, has_base_instructions, restore_fs, unload_unused};
use super::{Registers, Unavailable};
use crate::machine::Case;
use core::arch::asm;
use libc::{c_int, c_void, greg_t, siginfo_t, ucontext_t};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// How exceptions reach a process, and INT3 (signal(7)).
const SIGNALS: [c_int; 5] = [libc::SIGTRAP, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE];

/// The general registers in a signal's context, in the order of their encoding.
const GPRS: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Where the handler is between the two signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Signals are not ours.
    Outside,
    /// The next one is the way in.
    Entering,
    /// The next one is the way out.
    Inside,
}

/// The state after an instruction, and why it ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndState {
    pub(super) registers: Registers,
    pub(super) vector: u8,
    pub(super) error_code: u32,
    pub(super) cr2: u64,
}

/// Data shared by the handler and the interrupted code.
struct Exchange {
    phase: Phase,
    /// The stack that the handler runs on. On another, it runs for another thread.
    stack: Range<usize>,
    /// The base of FS outside, if it is ours to change.
    fs: Option<u64>,
    selectors: Selectors,
    registers: Registers,
    /// Our own registers while the instruction has its.
    ours: [greg_t; 23],
    end: EndState,
}

struct Shared(UnsafeCell<Exchange>);

// SAFETY: used only by the thread that has the `Processor`, and by the handler on that thread's signal stack, while the
// thread waits for it.
unsafe impl Sync for Shared {}

const NOTHING: Registers = Registers { gprs: [0; 16], rip: 0, flags: 0 };

static EXCHANGE: Shared = Shared(UnsafeCell::new(Exchange {
    phase: Phase::Outside,
    stack: 0..0,
    fs: None,
    selectors: Selectors { cs: 0, ss: 0, ds: 0, es: 0, fs: 0, gs: 0, bases: None },
    registers: NOTHING,
    ours: [0; 23],
    end: EndState { registers: NOTHING, vector: 0, error_code: 0, cr2: 0 },
}));

/// The handlers of signals, and their stack, while the processor is taken.
pub(super) struct Handlers {
    before: Vec<(c_int, libc::sigaction)>,
    stack_before: libc::stack_t,
    _stack: Vec<u8>,
}

/// The kernel puts all vector registers there as well.
const STACK_BYTES: usize = 256 * 1024;

impl Handlers {
    pub(super) fn install() -> Result<Self, Unavailable> {
        let mut stack = vec![0_u8; STACK_BYTES];
        let start = stack.as_mut_ptr();
        let new = libc::stack_t { ss_sp: start.cast(), ss_flags: 0, ss_size: STACK_BYTES };
        let mut stack_before = MaybeUninit::uninit();
        // SAFETY: the stack lives as long as `Self`, which gives it back.
        let done = unsafe { libc::sigaltstack(&raw const new, stack_before.as_mut_ptr()) };
        if done != 0 {
            return Err(Unavailable::last("no stack for signals"));
        }
        // SAFETY: the call above has filled it.
        let stack_before = unsafe { stack_before.assume_init() };
        let mut handlers = Self { before: Vec::new(), stack_before, _stack: stack };
        // SAFETY: no signal is on its way to the handler, which is not installed yet, and `Processor` is taken once.
        let exchange = unsafe { &mut *EXCHANGE.0.get() };
        exchange.phase = Phase::Outside;
        exchange.stack = start as usize..start as usize + STACK_BYTES;

        for signal in SIGNALS {
            let before = set_action(signal, &action(on_signal as *const () as usize));
            handlers.before.push((signal, before.ok_or_else(|| Unavailable::last("no handlers for signals"))?));
        }
        Ok(handlers)
    }

    /// Executes the code at the case's RIP, until it reaches an INT3 or causes an exception.
    pub(super) fn visit(&mut self, case: &Case, selectors: Selectors) -> EndState {
        // SAFETY: asked for just before.
        let fs = has_base_instructions().then(|| unsafe { fs_base() });
        {
            // SAFETY: the handler is not running: it does so during INT3 and exceptions only, on this very thread.
            let exchange = unsafe { &mut *EXCHANGE.0.get() };
            exchange.fs = fs;
            exchange.selectors = selectors;
            exchange.registers = Registers::of(case);
            exchange.phase = Phase::Entering;
        }
        selectors.load_unused();
        // SAFETY: the handler saves all our registers, and restores them after the instruction. To this code nothing
        // has changed except `EXCHANGE`. `Confined` guarantees that the instruction changes no memory that the compiler
        // knows.
        unsafe { asm!("int3") };
        unload_unused();
        // SAFETY: as above; the handler has run twice.
        let exchange = unsafe { &*EXCHANGE.0.get() };
        assert_eq!(exchange.phase, Phase::Outside, "no way out");
        exchange.end
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for (signal, before) in &self.before {
            set_action(*signal, before);
        }
        // SAFETY: the earlier stack. Nothing runs on ours.
        unsafe { libc::sigaltstack(&raw const self.stack_before, std::ptr::null_mut()) };
    }
}

fn action(handler: usize) -> libc::sigaction {
    // SAFETY: all its fields may be zero: no flags, an empty mask, and the default handler.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    action
}

/// Gives a signal a new handler and returns the former one.
fn set_action(signal: c_int, new: &libc::sigaction) -> Option<libc::sigaction> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: the new handler is a function of the right type, the default, or an earlier one.
    let done = unsafe { libc::sigaction(signal, new, before.as_mut_ptr()) };
    // SAFETY: a call that succeeds has filled it.
    (done == 0).then(|| unsafe { before.assume_init() })
}

/// Handles all signals. At its start and end it runs with the instruction's FS, so it uses nothing that is local to a
/// thread.
extern "C" fn on_signal(signal: c_int, _info: *mut siginfo_t, context: *mut c_void) {
    let here = (&raw const signal) as usize;
    // SAFETY: the thread that has the `Processor` does not access this data while it handles a signal. Other threads
    // find in the next line that the signal is not for them, and read no more.
    let exchange = unsafe { &mut *EXCHANGE.0.get() };
    if !exchange.stack.contains(&here) || exchange.phase == Phase::Outside {
        // A bug elsewhere: the signal comes again after the return, and ends the process.
        set_action(signal, &action(libc::SIG_DFL));
        return;
    }
    // SAFETY: the kernel gives the handler a context that is its own.
    let context = unsafe { &mut *context.cast::<ucontext_t>() };
    let registers = &mut context.uc_mcontext.gregs;
    if exchange.phase == Phase::Entering {
        exchange.ours = *registers;
        put(registers, &exchange.registers, &exchange.selectors);
        exchange.phase = Phase::Inside;
        if exchange.fs.is_some() {
            // SAFETY: from here on only the instruction runs, then this handler.
            unsafe { exchange.selectors.load_fs() };
        }
    } else {
        if let Some(base) = exchange.fs {
            // SAFETY: `visit` found this value on this thread.
            unsafe { restore_fs(base) };
        }
        exchange.end = take(registers);
        *registers = exchange.ours;
        exchange.phase = Phase::Outside;
    }
}

fn put(context: &mut [greg_t; 23], registers: &Registers, selectors: &Selectors) {
    for (place, value) in GPRS.into_iter().zip(registers.gprs) {
        context[place as usize] = value.cast_signed();
    }
    context[libc::REG_RIP as usize] = registers.rip.cast_signed();
    context[libc::REG_EFL as usize] = registers.flags.cast_signed();
    // CS is the lowest of four, SS the highest; the kernel loads no others.
    let both = u64::from(selectors.cs) | u64::from(selectors.ss) << 48;
    context[libc::REG_CSGSFS as usize] = both.cast_signed();
}

fn take(context: &[greg_t; 23]) -> EndState {
    let value = |place: c_int| context[place as usize].cast_unsigned();
    #[expect(clippy::cast_possible_truncation, reason = "vectors have 8 bits, error codes 32")]
    let (vector, error_code) = (value(libc::REG_TRAPNO) as u8, value(libc::REG_ERR) as u32);
    let registers = Registers { gprs: GPRS.map(value), rip: value(libc::REG_RIP), flags: value(libc::REG_EFL) };
    EndState { registers, vector, error_code, cr2: value(libc::REG_CR2) }
}

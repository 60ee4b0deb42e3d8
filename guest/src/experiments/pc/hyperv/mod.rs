//! The conformance cases of the Hyper-V interface (TLFS), with their names in the project's list: A discovery and MSRs,
//! B control words and registers, C flushes, D interrupts, E timers and their messages, F the calls of a parent, G the
//! state of its child, H what the two tell each other, I the child's own interface, J ends of interrupts without an
//! EOI.
//!
//! Each case writes one record, `case name=.. about=".." outcome=pass|fail|skipped why=".."`. A failed case also writes
//! a `violation`, and counts.

pub(super) mod abi;
mod abi_list;
pub(super) mod assist;
pub(super) mod child;
pub(super) mod discovery;
mod enlightened;
pub(super) mod flush;
mod flush_sets;
pub(super) mod ipi;
pub(super) mod parent;
mod signals;
pub(super) mod timers;
mod watch;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::hypercall::{Control, reps, status};

use crate::arch::attempt::Fault;
use crate::arch::cpu_local;
use crate::arch::hyperv::{self, Instruction, R8, RAX, RCX, RDX, Registers};
use crate::cpu;
use crate::experiments::cases::Cases;
use crate::experiments::pc::line::Line;
use crate::experiments::{Context, Outcome};

const NO_INTERFACE: Outcome = Outcome::Unsupported("no Hyper-V interface");

/// Why a case does not apply.
const NEEDS_TWO: &str = "needs two CPUs";
const FLUSH_WITHHELD: &str = "the flush calls are withheld from this VM";
const SETS_WITHHELD: &str = "the calls with sets are withheld from this VM";

impl Cases<'_, '_> {
    /// A case whose result must be exactly `expected`.
    fn result(&mut self, name: &str, about: &str, expected: u64, answer: Answer) {
        let text = Line::of(format_args!("{}", ShownAnswer(Ok(expected))));
        self.check(name, about, text.text(), format_args!("{}", ShownAnswer(answer)), answer == Ok(expected));
    }

    /// A case in which the TLFS prescribes only the status, as one of several.
    fn status(&mut self, name: &str, about: &str, allowed: &[u16], answer: Answer) {
        let matches = answer.is_ok_and(|result| allowed.contains(&status(result)));
        let text = Line::of(format_args!("status {allowed:?}"));
        self.check(name, about, text.text(), format_args!("{}", ShownAnswer(answer)), matches);
    }
}

/// The result of a hypercall: RAX, or the exception.
type Answer = Result<u64, Fault>;

struct ShownAnswer(Answer);

impl fmt::Display for ShownAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(result) if result & !0xfff_0000_ffff != 0 => write!(f, "result {result:#x}"),
            Ok(result) => write!(f, "status {} reps {}", status(result), reps(result)),
            Err(fault) => write!(f, "#{fault}"),
        }
    }
}

/// Calls that changed a register wrongly, and one such register.
static CHANGED: AtomicU64 = AtomicU64::new(0);
static CHANGED_REGISTER: AtomicU64 = AtomicU64::new(0);

/// Executes a hypercall with these registers, and checks that no other register changed, see [`CHANGED`].
fn ask(before: &Registers) -> Answer {
    let after = hyperv::exchange(Instruction::Own, before)?;
    // RCX may return with another start index.
    const START: u64 = 0xfff << 48;
    let differs = |at: usize| match at {
        RAX => false,
        RCX => (before.general[at] ^ after.general[at]) & !START != 0,
        _ => before.general[at] != after.general[at],
    };
    let general = (0..before.general.len()).find(|at| differs(*at));
    let vector = before.vectors.iter().zip(&after.vectors).position(|(old, new)| old != new).map(|at| 100 + at);
    let flags = Some(200).filter(|_| before.flags != after.flags);
    if let Some(register) = general.or(vector).or(flags) {
        CHANGED.fetch_add(1, Ordering::Relaxed);
        CHANGED_REGISTER.store(register as u64, Ordering::Relaxed);
    }
    Ok(after.general[RAX])
}

/// A call whose input is `words`, in this CPU's input page.
fn by_memory(control: Control, words: &[u64]) -> Answer {
    at(control, place(words))
}

/// A call whose input is at `input`.
fn at(control: Control, input: u64) -> Answer {
    ask(&Registers::call(control.0, input, 0))
}

/// Puts `words` at the start of this CPU's input page, and answers where that is.
fn place(words: &[u64]) -> u64 {
    let page = hyperv::input_page(cpu_local::index());
    for (place, word) in page.words().iter().zip(words) {
        place.store(*word, Ordering::SeqCst);
    }
    page.address()
}

/// A call whose input is `words`, in RDX, R8 and, if needed, XMM0 to 5. It loads all of XMM in both cases.
fn by_registers(control: Control, words: &[u64]) -> Answer {
    let mut registers = Registers::call(control.fast().0, 0, 0);
    let mut words = words.iter().copied();
    registers.general[RDX] = words.next().unwrap_or(0);
    registers.general[R8] = words.next().unwrap_or(0);
    for half in registers.vectors.as_flattened_mut() {
        *half = words.next().unwrap_or(0);
    }
    ask(&registers)
}

/// The VP mask of one CPU below VP 64; zero for another.
fn bit(cpu: usize) -> u64 {
    hyperv::vp_index(cpu).filter(|index| *index < 64).map_or(0, |index| 1 << index)
}

/// Runs `job` on every CPU, this one included, and waits. Answers whether all have finished.
fn on_all(job: cpu::Job, patience: u64) -> bool {
    let others = cpu::up().without(0);
    let given = others.iter().all(|index| cpu::give(index, job));
    job(cpu_local::index());
    given && cpu::wait_for_all(patience).is_none()
}

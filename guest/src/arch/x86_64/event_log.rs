//! Runs generated code with handlers that log each event: its vector, where it occurred, and the saved flags.
//!
//! During a [`run`], the dispatcher passes everything but resolved page faults to [`note`]. An NMI then uses no stack
//! of its own, so a second one can arrive while the first is handled. The code can also run within the handler of an
//! NMI, where further NMIs wait.

use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::interrupts::Frame;
use super::{apic, attempt, descriptors};

/// A vector with a trap gate: IF keeps its value.
pub(crate) const TRAP_GATE: u8 = 0x34;
const NMI: u8 = 2;
const DEBUG: u8 = 1;

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// The vector.
    pub(crate) vector: u8,
    /// Index of the place, of those in [`Code::starts`]; their number when the event came elsewhere.
    pub(crate) place: u8,
    /// The saved flags: IF, TF, RF.
    pub(crate) flags: [bool; 3],
    /// Whether DR6.BS was set. The handler clears it.
    pub(crate) single_step: bool,
}

/// Maximum number of logged events per run.
pub(crate) const MOST: usize = 48;

/// Code to run.
pub(crate) struct Code<'a> {
    /// Its address. It ends with RET. It finds `rdi` in RDI and zero in RSI, and keeps RBX, RBP and R12 to R15.
    pub(crate) at: u64,
    /// Where each place begins, as offsets: mostly one instruction.
    pub(crate) starts: &'a [u16],
    /// The value of RDI at its start.
    pub(crate) rdi: u64,
    /// Run it within the handler of an NMI.
    pub(crate) within_nmi: bool,
}

static ACTIVE: AtomicBool = AtomicBool::new(false);
static CODE: AtomicU64 = AtomicU64::new(0);
static STARTS: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
static COUNT: AtomicUsize = AtomicUsize::new(0);
static LOG: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
static LOGGED: AtomicUsize = AtomicUsize::new(0);
/// The handler of the next NMI runs the code.
static WITHIN_NMI: AtomicBool = AtomicBool::new(false);
static RDI: AtomicU64 = AtomicU64::new(0);
/// RAX that the code left.
static RESULT: AtomicU64 = AtomicU64::new(0);

/// Whether a run lasts.
pub(super) fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// Runs the code on this CPU, with interrupts off at its start. Returns its RAX and the number of events.
pub(crate) fn run(code: &Code<'_>) -> (u64, usize) {
    for (slot, &start) in STARTS.iter().zip(code.starts) {
        slot.store(code.at + u64::from(start), Ordering::Relaxed);
    }
    COUNT.store(code.starts.len().min(STARTS.len()), Ordering::Relaxed);
    LOGGED.store(0, Ordering::Relaxed);
    CODE.store(code.at, Ordering::Relaxed);
    RDI.store(code.rdi, Ordering::Relaxed);
    WITHIN_NMI.store(code.within_nmi, Ordering::Relaxed);
    descriptors::change_gate(NMI, 0, false);
    descriptors::change_gate(TRAP_GATE, 0, true);
    ACTIVE.store(true, Ordering::SeqCst);
    if code.within_nmi {
        apic::send_self_nmi();
        // The handler has run the code when this returns; remaining events arrive here.
        settle();
    } else {
        call();
        settle();
    }
    ACTIVE.store(false, Ordering::SeqCst);
    descriptors::change_gate(NMI, 2, false);
    descriptors::change_gate(TRAP_GATE, 0, false);
    (RESULT.load(Ordering::Relaxed), LOGGED.load(Ordering::Relaxed).min(MOST))
}

/// Event `index` of the last run.
pub(crate) fn noted(index: usize) -> Noted {
    let [vector, place, flags, ..] = LOG[index].load(Ordering::Relaxed).to_le_bytes();
    let flag = |bit: u8| flags >> bit & 1 != 0;
    Noted { vector, place, flags: [flag(0), flag(1), flag(2)], single_step: flag(3) }
}

fn call() {
    let result: u64;
    // SAFETY: the caller made the code for this call: it preserves what a function preserves, and ends with RET.
    unsafe {
        asm!(
            "call {code}",
            code = in(reg) CODE.load(Ordering::Relaxed),
            out("rax") result,
            out("rcx") _,
            out("rdx") _,
            inout("rsi") 0u64 => _,
            inout("rdi") RDI.load(Ordering::Relaxed) => _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    RESULT.store(result, Ordering::Relaxed);
}

/// Takes the remaining pending interrupts.
fn settle() {
    // SAFETY: the handlers that run in between save what they change.
    unsafe { asm!("jmp 2f", "2:", "sti", "nop", "nop", "cli", options(nostack)) };
}

/// Logs the event, and lets the code continue after it.
pub(super) fn note(vector: u8, frame: &mut Frame) {
    let dr6 = attempt::read_dr6();
    let place = place(frame.rip());
    let flags = frame.rflags();
    let bits = flags >> 9 & 1 | (flags >> 8 & 1) << 1 | (flags >> 16 & 1) << 2 | (dr6 >> 14 & 1) << 3;
    if let Some(slot) = LOG.get(LOGGED.fetch_add(1, Ordering::Relaxed)) {
        slot.store(u64::from(vector) | (place as u64) << 8 | bits << 16, Ordering::Relaxed);
    }
    match vector {
        DEBUG => {
            // The handler's part (APM vol. 2, 13.1.1.3): the processor sets these bits and never clears them.
            let _ = attempt::write_dr6(dr6 & !0xf00f);
        }
        NMI if WITHIN_NMI.swap(false, Ordering::Relaxed) => call(),
        // Faults of the code: it continues after the instruction.
        0 | 6 | 13 | 14 => {
            let next = STARTS[..COUNT.load(Ordering::Relaxed)].get(place + 1);
            frame.set_rip(next.map_or(frame.rip(), |next| next.load(Ordering::Relaxed)));
        }
        32.. if apic::is_in_service(vector) => apic::end_of_interrupt(vector),
        _ => {}
    }
}

/// Index of the place that `rip` is in; the number of places when it is elsewhere.
fn place(rip: u64) -> usize {
    let starts = &STARTS[..COUNT.load(Ordering::Relaxed)];
    let begun = starts.iter().take_while(|start| start.load(Ordering::Relaxed) <= rip).count();
    let is_inside = begun > 0 && rip < CODE.load(Ordering::Relaxed) + 256;
    if is_inside { begun - 1 } else { starts.len() }
}

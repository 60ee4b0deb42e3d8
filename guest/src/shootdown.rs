//! Remote TLB flushes, as a guest kernel does them. One function starts with interrupts. When the guest finds the
//! machine's own way (`arch::remote`), it replaces them: by a hypercall, or by an instruction that all CPUs obey.
//!
//! | operation | FreeBSD's `invl_op` | by interrupt | by hypercall |
//! |---|---|---|---|
//! | [`Operation::Whole`] | TLB, TLB_INVPCID, TLB_PCID (1 to 4) | each reloads CR3 | 0x0002 or 0x0013, this root, NON_GLOBAL |
//! | [`Operation::Range`] | PGRNG (5 to 7) | INVLPG for each page, beyond 33 CR3 | 0x0003 or 0x0014, one entry per 4096 pages |
//! | [`Operation::Page`] | PG (8 to 10) | INVLPG | 0x0003 or 0x0014, one entry, as Linux has it |
//!
//! Both take a set of CPUs, which may include the caller. They return when all CPUs of the set have flushed.
//!
//! **By interrupt.** Each CPU has one request, and an inbox with a bit per sender. The sender fills in its request,
//! sets its bit in each target's inbox, and interrupts the targets. One command interrupts all other CPUs, if all CPUs
//! belong to the guest; otherwise each gets its own. Then the sender flushes its own TLB and waits for the answers.
//! While it waits, it serves its own inbox. So two CPUs that flush each other with interrupts off both finish.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use guest_model::command_line::Approach;
use guest_model::cpu_set::CpuSet;

use crate::arch::boot::MAX_CPUS;
use crate::arch::{controller, cpu_local, interrupts, remote, tlb, tsc};
use crate::cpu;
use crate::interrupt::SHOOTDOWN;
use crate::record::record;

/// What is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// The address space: all that is not global.
    Whole,
    /// `pages` pages from `start` on.
    Range {
        /// First address.
        start: u64,
        /// Number of pages.
        pages: u64,
    },
    /// One page.
    Page {
        /// An address in it.
        at: u64,
    },
}

/// Ranges of more pages are flushed whole (Linux' `tlb_single_page_flush_ceiling`).
pub(crate) const CEILING: u64 = 33;

/// Which implementation [`smp_targeted_tlb_shootdown`] uses; an index into [`IMPLEMENTATIONS`].
static CURRENT: AtomicU8 = AtomicU8::new(0);
const IMPLEMENTATIONS: [fn(&CpuSet, Operation); 2] = [native, remotely];

/// Whether a set of all CPUs is named one by one nevertheless.
static BY_MASK: AtomicBool = AtomicBool::new(false);
/// Hypercalls that did not succeed.
static FALLBACKS: AtomicU64 = AtomicU64::new(0);

/// Flushes `operation` on all CPUs of `set`, and returns when all have flushed.
pub(crate) fn smp_targeted_tlb_shootdown(set: &CpuSet, operation: Operation) {
    IMPLEMENTATIONS[usize::from(CURRENT.load(Ordering::Relaxed)) & 1](set, operation);
}

/// The same, by a given approach, which must be offered.
pub(crate) fn shoot_down_by(approach: Approach, set: &CpuSet, operation: Operation) {
    match approach {
        Approach::Ipi => native(set, operation),
        Approach::Hypercall | Approach::Broadcast => remotely(set, operation),
    }
}

/// Chooses the function. `false`, and nothing changed, if the machine lacks it.
pub(crate) fn choose(approach: Approach) -> bool {
    let offered = match approach {
        Approach::Ipi => true,
        other => other == remote::APPROACH && remote::is_offered(),
    };
    if offered {
        CURRENT.store(u8::from(approach != Approach::Ipi), Ordering::SeqCst);
    }
    offered
}

/// The implementation in use.
pub(crate) fn chosen() -> Approach {
    if CURRENT.load(Ordering::Relaxed) == 0 { Approach::Ipi } else { remote::APPROACH }
}

/// Lets the hypercall name all CPUs by a flag when all are meant (as guests do), or one by one.
pub(crate) fn name_one_by_one(on: bool) {
    BY_MASK.store(on, Ordering::SeqCst);
}

/// Number of hypercalls that failed so far.
pub(crate) fn fallbacks() -> u64 {
    FALLBACKS.load(Ordering::Relaxed)
}

/// Flushes on this CPU.
fn perform(operation: Operation) {
    match operation {
        Operation::Range { start, pages } if pages <= CEILING => {
            (0..pages).for_each(|page| tlb::flush_page(start + page * 4096));
        }
        Operation::Page { at } => tlb::flush_page(at),
        Operation::Whole | Operation::Range { .. } => tlb::flush_all(),
    }
}

/// What one CPU asks of the others. Its CPU writes it while `unanswered` is zero; the CPUs whose inbox has its bit read
/// it.
#[repr(align(128))]
struct Request {
    /// `invl_op`: 1 whole, 5 range, 8 page.
    code: AtomicU8,
    start: AtomicU64,
    pages: AtomicU64,
    /// Targets that have yet to flush.
    unanswered: AtomicU64,
}

const INBOX_WORDS: usize = MAX_CPUS.div_ceil(64);

/// The CPUs that wait for this CPU to flush.
#[repr(align(128))]
struct Inbox([AtomicU64; INBOX_WORDS]);

static REQUESTS: [Request; MAX_CPUS] = [const {
    Request {
        code: AtomicU8::new(0),
        start: AtomicU64::new(0),
        pages: AtomicU64::new(0),
        unanswered: AtomicU64::new(0),
    }
}; MAX_CPUS];
static INBOXES: [Inbox; MAX_CPUS] = [const { Inbox([const { AtomicU64::new(0) }; INBOX_WORDS]) }; MAX_CPUS];

impl Request {
    fn write(&self, operation: Operation, targets: u64) {
        let (code, start, pages) = match operation {
            Operation::Whole => (1, 0, 0),
            Operation::Range { start, pages } => (5, start, pages),
            Operation::Page { at } => (8, at, 1),
        };
        self.code.store(code, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.pages.store(pages, Ordering::Relaxed);
        // The later store to the inbox makes all of this visible.
        self.unanswered.store(targets, Ordering::Relaxed);
    }

    fn operation(&self) -> Operation {
        let start = self.start.load(Ordering::Relaxed);
        match self.code.load(Ordering::Relaxed) {
            5 => Operation::Range { start, pages: self.pages.load(Ordering::Relaxed) },
            8 => Operation::Page { at: start },
            _ => Operation::Whole,
        }
    }
}

/// Seconds without an answer after which the guest writes a record. It continues to wait.
const PATIENCE: u64 = 60;

/// By interrupt.
fn native(set: &CpuSet, operation: Operation) {
    interrupts::held_off(|| {
        let own = cpu_local::index();
        let others = set.without(own);
        let request = &REQUESTS[own];

        if !others.is_empty() {
            request.write(operation, others.len() as u64);
            for target in others.iter() {
                INBOXES[target].0[own / 64].fetch_or(1 << (own % 64), Ordering::SeqCst);
            }
            // As a kernel does: one command for all others, one for each of some.
            let everybody = !BY_MASK.load(Ordering::Relaxed) && cpu::all_are_ours();
            if everybody && others == CpuSet::first(cpu::count()).without(own) {
                controller::send_others(SHOOTDOWN);
            } else {
                others.iter().for_each(|target| controller::send(cpu::hardware_id(target), SHOOTDOWN));
            }
        }

        if set.contains(own) {
            perform(operation);
        }

        let mut patience = Some(tsc::now() + tsc::seconds(PATIENCE));
        while request.unanswered.load(Ordering::Acquire) != 0 {
            serve(own);
            core::hint::spin_loop();
            if patience.is_some_and(|last| tsc::now() > last) {
                patience = None;
                let missing = request.unanswered.load(Ordering::Relaxed);
                record!("error", about = "shootdown-unanswered", cpu = own, missing = missing);
            }
        }
    });
}

/// The target's part: handles the requests in this CPU's inbox, and answers them.
pub(crate) fn serve(own: usize) {
    for (at, word) in INBOXES[own].0.iter().enumerate() {
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let senders = word.swap(0, Ordering::SeqCst);
        for bit in (0..64).filter(|bit| senders >> bit & 1 != 0) {
            let request = &REQUESTS[at * 64 + bit];
            perform(request.operation());
            request.unanswered.fetch_sub(1, Ordering::Release);
        }
    }
}

/// As this machine has it, or natively if that fails.
fn remotely(set: &CpuSet, operation: Operation) {
    let everybody = !BY_MASK.load(Ordering::Relaxed) && cpu::all_are_ours() && *set == CpuSet::first(cpu::count());
    if interrupts::held_off(|| remote::flush(set, operation, everybody).is_none()) {
        FALLBACKS.fetch_add(1, Ordering::Relaxed);
        native(set, operation);
    }
}

//! What each interrupt vector means.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::boot::MAX_CPUS;
use crate::arch::interrupts::{Frame, WINDOW_STACK};
use crate::arch::{apic, cpu_local, power, tsc};
use crate::experiments::mixed;
use crate::record::record;
use crate::shootdown;

/// The local APIC's timer.
pub(crate) const TIMER: u8 = 0x40;
/// Only wakes a CPU that sleeps.
pub(crate) const WAKE: u8 = 0x41;
/// A CPU wants others to flush translations.
pub(crate) const SHOOTDOWN: u8 = 0x42;
/// Only counted.
pub(crate) const COUNTED: u8 = 0x43;
/// First of the vectors by which CPUs message each other in `mixed`: the sender's index modulo 16 is added.
pub(crate) const MAILBOX: u8 = 0x50;
/// Vectors from [`MAILBOX`] on.
pub(crate) const MAILBOXES: u8 = 16;
const SPURIOUS: u8 = 0xff;

/// What one CPU has taken.
#[repr(align(128))]
pub(crate) struct Taken {
    /// Timer interrupts.
    pub(crate) timer: AtomicU64,
    /// When the last timer interrupt was taken, in TSC ticks.
    pub(crate) timer_at: AtomicU64,
    /// Wake-ups.
    pub(crate) wake: AtomicU64,
    /// Interrupts [`COUNTED`].
    pub(crate) counted: AtomicU64,
    /// Interrupts on the stack in the window.
    pub(crate) window_stack: AtomicU64,
    /// Interrupts that nobody asked for.
    pub(crate) unexpected: AtomicU64,
}

static TAKEN: [Taken; MAX_CPUS] = [const {
    Taken {
        timer: AtomicU64::new(0),
        timer_at: AtomicU64::new(0),
        wake: AtomicU64::new(0),
        counted: AtomicU64::new(0),
        window_stack: AtomicU64::new(0),
        unexpected: AtomicU64::new(0),
    }
}; MAX_CPUS];

/// What CPU `cpu` has taken so far.
pub(crate) fn taken(cpu: usize) -> &'static Taken {
    &TAKEN[cpu]
}

/// Called with interrupts off, by the entry code's dispatcher.
pub(crate) fn handle(vector: u8) {
    let cpu = cpu_local::index();
    let taken = taken(cpu);
    match vector {
        TIMER => {
            taken.timer_at.store(tsc::now(), Ordering::Relaxed);
            taken.timer.fetch_add(1, Ordering::Release);
        }
        WAKE => {
            taken.wake.fetch_add(1, Ordering::Release);
        }
        SHOOTDOWN => shootdown::serve(cpu),
        COUNTED => {
            taken.counted.fetch_add(1, Ordering::Release);
        }
        MAILBOX..0x60 => mixed::collect(cpu, usize::from(vector - MAILBOX)),
        WINDOW_STACK => {
            taken.window_stack.fetch_add(1, Ordering::Release);
            // Reached by a software interrupt too, which leaves nothing in service.
            if !apic::is_in_service(vector) {
                return;
            }
        }
        // The APIC delivers it without taking it into service (APM vol. 2, 16.4.7).
        SPURIOUS => return,
        _ => {
            taken.unexpected.fetch_add(1, Ordering::Release);
            if !apic::is_in_service(vector) {
                return;
            }
        }
    }
    apic::end_of_interrupt();
}

/// An exception that no experiment expected: the end.
pub(crate) fn unexpected_exception(vector: u8, error: u64, cr2: u64, frame: &Frame) {
    record!(
        "exception",
        cpu = cpu_local::index(),
        vector = vector,
        error = format_args!("{error:#x}"),
        rip = format_args!("{:#x}", frame.rip()),
        cr2 = format_args!("{cr2:#x}"),
    );
    power::off(false)
}

//! The meaning of each interrupt. The architecture defines their numbers: vectors, or INTIDs.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::boot::MAX_CPUS;
use crate::arch::vectors::LAST_MAILBOX;
pub(crate) use crate::arch::vectors::{COUNTED, MAILBOX, MAILBOXES, SHOOTDOWN, TIMER, WAKE};
use crate::arch::{controller, cpu_local, power, tsc};
use crate::experiments::mixed;
use crate::shootdown;

/// Interrupts that one CPU has taken.
#[repr(align(128))]
pub(crate) struct Taken {
    /// Timer interrupts.
    pub(crate) timer: AtomicU64,
    /// When the last timer interrupt was taken, in ticks.
    pub(crate) timer_at: AtomicU64,
    /// Wake-ups.
    pub(crate) wake: AtomicU64,
    /// Interrupts [`COUNTED`].
    pub(crate) counted: AtomicU64,
    /// Unexpected interrupts.
    pub(crate) unexpected: AtomicU64,
}

static TAKEN: [Taken; MAX_CPUS] = [const {
    Taken {
        timer: AtomicU64::new(0),
        timer_at: AtomicU64::new(0),
        wake: AtomicU64::new(0),
        counted: AtomicU64::new(0),
        unexpected: AtomicU64::new(0),
    }
}; MAX_CPUS];

/// Ticks that the handler of [`COUNTED`] takes, with interrupts off.
static LINGERS: AtomicU64 = AtomicU64::new(0);

/// From now on the handler of [`COUNTED`] takes so many ticks.
#[cfg_attr(target_arch = "aarch64", expect(dead_code, reason = "only an experiment of PCs asks for it"))]
pub(crate) fn let_counted_linger(ticks: u64) {
    LINGERS.store(ticks, Ordering::SeqCst);
}

/// Interrupts that CPU `cpu` has taken so far.
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
            controller::timer_was_taken();
        }
        WAKE => {
            taken.wake.fetch_add(1, Ordering::Release);
        }
        SHOOTDOWN => shootdown::serve(cpu),
        COUNTED => {
            taken.counted.fetch_add(1, Ordering::Release);
            let start = tsc::now();
            // Without PAUSE, which may be more than a moment's rest for an emulator.
            while tsc::now().wrapping_sub(start) < LINGERS.load(Ordering::Relaxed) {}
        }
        MAILBOX..=LAST_MAILBOX => mixed::collect(cpu, usize::from(vector - MAILBOX)),
        _ => {
            taken.unexpected.fetch_add(1, Ordering::Release);
            if !controller::is_in_service(vector) {
                return;
            }
        }
    }
    controller::end_of_interrupt(vector);
}

/// An exception that no experiment expected, which the architecture describes: the end.
pub(crate) fn unexpected_exception(what: fmt::Arguments<'_>) -> ! {
    crate::record::emit(format_args!("exception cpu={} {what}", cpu_local::index()));
    power::off(false)
}

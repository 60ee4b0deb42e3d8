//! Each CPU's own data, reached through TPIDR_EL1.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::boot::MAX_CPUS;

/// The block that TPIDR_EL1 points to. The first field's offset is used by assembly.
#[repr(C, align(128))]
pub(super) struct CpuLocal {
    index: AtomicU64,
    /// Where to continue after an exception of code that was made at run time; zero while none runs.
    pub(super) landing: AtomicU64,
    /// Interrupts taken by the measured sender.
    pub(super) own_sgis: AtomicU64,
    /// The period with which the timer is set again when it fires; zero if it fires once.
    pub(super) period: AtomicU64,
    /// Redistributor of this CPU.
    pub(super) redistributor: AtomicU64,
    /// Timer interrupts that were no longer pending when the CPU took them.
    pub(super) late_timers: AtomicU64,
}

static BLOCKS: [CpuLocal; MAX_CPUS] = [const {
    CpuLocal {
        index: AtomicU64::new(0),
        landing: AtomicU64::new(0),
        own_sgis: AtomicU64::new(0),
        period: AtomicU64::new(0),
        redistributor: AtomicU64::new(0),
        late_timers: AtomicU64::new(0),
    }
}; MAX_CPUS];

/// Points TPIDR_EL1 of this CPU to block `index`.
pub(super) fn load(index: usize) {
    if let Some(block) = BLOCKS.get(index) {
        block.index.store(index as u64, Ordering::Relaxed);
        // SAFETY: the register is this kernel's own.
        unsafe { asm!("msr tpidr_el1, {}", in(reg) &raw const *block, options(nostack, preserves_flags)) };
    }
}

/// Index of this CPU: 0 is the one that booted.
pub(crate) fn index() -> usize {
    let index: usize;
    // SAFETY: TPIDR_EL1 points to this CPU's block from `load` on, and its first field is the index.
    unsafe {
        asm!("mrs {0}, tpidr_el1", "ldr {0}, [{0}]", out(reg) index, options(nostack, readonly, preserves_flags));
    }
    index
}

/// This CPU's block.
pub(super) fn own() -> &'static CpuLocal {
    &BLOCKS[index()]
}

/// The value that TPIDR_EL1 must have on CPU `index`.
pub(super) fn address(index: usize) -> u64 {
    BLOCKS.get(index).map_or(0, |block| &raw const *block as u64)
}

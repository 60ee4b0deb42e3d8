//! Each CPU's own data, reached through GS.

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt;
use super::boot::MAX_CPUS;

/// MSR numbers (APM vol. 2, appendix A).
pub(crate) const FS_BASE: u32 = 0xc000_0100;
pub(crate) const GS_BASE: u32 = 0xc000_0101;
pub(crate) const KERNEL_GS_BASE: u32 = 0xc000_0102;
pub(crate) const TSC_AUX: u32 = 0xc000_0103;

/// The block that GS points to. Field offsets are used by assembly.
#[repr(C, align(128))]
pub(super) struct CpuLocal {
    index: AtomicU64,
    /// Interrupts taken by the measured self-IPI handlers.
    pub(super) self_ipis: AtomicU64,
}

/// Offset of [`CpuLocal::self_ipis`] from GS.
pub(super) const SELF_IPIS: usize = offset_of!(CpuLocal, self_ipis);

static BLOCKS: [CpuLocal; MAX_CPUS] =
    [const { CpuLocal { index: AtomicU64::new(0), self_ipis: AtomicU64::new(0) } }; MAX_CPUS];

/// Points GS of this CPU to block `index`.
pub(super) fn load(index: u32) {
    if let Some(block) = BLOCKS.get(index as usize) {
        block.index.store(u64::from(index), Ordering::Relaxed);
        attempt::write_msr(GS_BASE, &raw const *block as u64);
    }
}

/// Index of this CPU: 0 is the one that booted.
pub(crate) fn index() -> usize {
    let index: usize;
    // SAFETY: GS points to this CPU's block from `load` on, and its first field is the index.
    unsafe { asm!("mov {}, gs:[0]", out(reg) index, options(nostack, readonly, preserves_flags)) };
    index
}

/// The value that GS_BASE must have on CPU `index`.
pub(crate) fn gs_base(index: usize) -> u64 {
    BLOCKS.get(index).map_or(0, |block| &raw const *block as u64)
}

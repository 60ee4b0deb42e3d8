//! The VMCS of a vCPU (SDM vol. 3C, chapter 25): a region in memory that only VMREAD and VMWRITE access, while it is
//! the current one of a pCPU.

#![expect(unsafe_code, reason = "VMX instructions")]

use alloc::boxed::Box;
use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, Hpa};

use super::hpa_of;

/// A page that only the processor reads and writes.
#[repr(C, align(4096))]
pub(super) struct Region([u8; 4096]);

impl Region {
    /// A region of this machine: it begins with the revision that BASIC names (SDM vol. 3D, A.1).
    pub(super) fn new(revision: u32) -> Box<Self> {
        // SAFETY: all bytes of a region may be zero. (Made in place: pages do not fit on the stack.)
        let mut region = unsafe { Box::<Self>::new_zeroed().assume_init() };
        region.0[..4].copy_from_slice(&revision.to_le_bytes());
        region
    }

    pub(super) fn hpa(&self) -> Hpa {
        hpa_of(self)
    }
}

/// The pages to which a pCPU has written since the list was taken last (SDM vol. 3C, 29.3.6). The pCPU fills it from
/// its end on.
#[repr(C, align(4096))]
pub(super) struct WriteList([AtomicU64; 512]);

impl WriteList {
    /// Index of the entry that is written first.
    pub(super) const LAST: u16 = 511;

    pub(super) fn new() -> Box<Self> {
        // SAFETY: all entries may be zero.
        unsafe { Box::<Self>::new_zeroed().assume_init() }
    }

    pub(super) fn hpa(&self) -> Hpa {
        hpa_of(self)
    }

    /// The pages, when `next` is the entry that would be written next. A full list has written the first one, and
    /// counts below zero.
    pub(super) fn pages(&self, next: u16) -> impl Iterator<Item = Gpa> {
        let first = usize::from(next.wrapping_add(1));
        self.0.iter().skip(first).map(|entry| Gpa(entry.load(Ordering::Relaxed)))
    }
}

/// Makes a VMCS the pCPU's current one (SDM vol. 3C, VMPTRLD).
///
/// # Safety
/// The region is a vCPU's own, cleared, and no other pCPU has it.
pub(super) unsafe fn load(region: Hpa) {
    // SAFETY: VMX is on, see the caller for the region.
    unsafe { asm!("vmptrld [{}]", in(reg) &raw const region.0, options(nostack)) };
}

/// Writes the VMCS back to memory. It is no pCPU's current one then, and not launched.
///
/// # Safety
/// The region is a vCPU's own, and no other pCPU has it.
pub(super) unsafe fn clear(region: Hpa) {
    // SAFETY: VMX is on, see the caller for the region.
    unsafe { asm!("vmclear [{}]", in(reg) &raw const region.0, options(nostack)) };
}

/// A field of the current VMCS. A narrow one is extended by zeros.
#[inline(always)]
pub(super) fn read(field: u32) -> u64 {
    let value: u64;
    // SAFETY: reading a field has no effect. All fields that are named here exist where `check` has succeeded.
    unsafe {
        asm!("vmread {}, {}", out(reg) value, in(reg) u64::from(field), options(nomem, nostack));
    }
    value
}

/// Writes a field of the current VMCS.
///
/// # Safety
/// What the field says keeps the guest where it belongs, and the host's state after an exit is what Rust expects.
#[inline(always)]
pub(super) unsafe fn write(field: u32, value: u64) {
    // SAFETY: see the caller.
    unsafe { asm!("vmwrite {}, {}", in(reg) u64::from(field), in(reg) value, options(nostack)) };
}

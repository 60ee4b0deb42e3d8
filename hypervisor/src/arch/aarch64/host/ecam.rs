//! Configuration spaces of PCI functions in memory (PCI Express base specification, 7.2.2).

#![expect(unsafe_code, reason = "registers in memory")]

use addr::{HpaRange, Hva};

use super::paging::map_mmio;

/// The configuration space behind a host bridge, mapped for good.
#[derive(Debug)]
pub(in crate::arch::aarch64) struct Ecam {
    at: Hva,
    bytes: u64,
}

impl Ecam {
    /// Maps it.
    pub(in crate::arch::aarch64) fn map(range: &HpaRange) -> Self {
        Self { at: map_mmio(range.start, range.bytes()), bytes: range.bytes() }
    }

    /// Whether there is a function whose page begins at this offset.
    pub(in crate::arch::aarch64) fn has_function(&self, offset: u64) -> bool {
        const NO_VENDOR: u32 = 0xffff;
        if !offset.is_multiple_of(4) || offset >= self.bytes {
            return false;
        }
        // SAFETY: a register within the space, which is never unmapped. Reading it has no effect.
        let word = unsafe { ((self.at.0 + offset) as *const u32).read_volatile() };
        word & NO_VENDOR != NO_VENDOR
    }
}

//! Configuration spaces of PCI functions in memory (PCI Express base specification, 7.2.2).

use addr::HpaRange;

use super::mmio::Registers;

/// The configuration space behind a host bridge.
#[derive(Debug)]
pub(in crate::arch::aarch64) struct Ecam(Registers);

impl Ecam {
    /// Maps it.
    pub(in crate::arch::aarch64) fn map(range: &HpaRange) -> Self {
        Self(Registers::map(range))
    }

    /// Whether there is a function whose page begins at this offset of the space.
    pub(in crate::arch::aarch64) fn has_function(&self, offset: u64) -> bool {
        const NO_VENDOR: u32 = 0xffff;
        self.0.read32(offset) & NO_VENDOR != NO_VENDOR
    }
}

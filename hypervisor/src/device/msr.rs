//! Model-specific registers without an effect: they keep what the guest writes, or always have the same value.
//!
//! These are the memory types, MISC_ENABLE, and registers that kernels use without asking CPUID. Other registers have
//! their effect elsewhere. All lists are allow-lists: for a register in none of them the guest gets #GP, as on a CPU
//! that lacks it.

use x86_defs::msr;
use x86_emulate::Vendor;

use super::memory_types::MemoryTypes;

/// HWCR: the TSC always counts at the P0 frequency.
const HWCR_TSC_FREQ_SEL: u64 = 1 << 24;

/// MISC_ENABLE is Intel's, and no CPUID bit reports it. QEMU and KVM have it on every vendor's CPU, so some software
/// does not check the vendor. Writes are stored without effect: the features that it would switch are not offered.
const MISC_ENABLE_WRITABLE: u64 = 1 << 0 | 1 << 3 | 1 << 16 | 1 << 18 | 1 << 22 | 1 << 23 | 1 << 34;
/// No branch trace, no event sampling.
const MISC_ENABLE_READ_ONLY: u64 = 1 << 11 | 1 << 12;
/// After reset: fast strings.
const MISC_ENABLE_RESET: u64 = MISC_ENABLE_READ_ONLY | 1 << 0;

/// These registers of one vCPU.
pub struct KeptMsrs {
    /// The memory-type registers.
    pub memory_types: MemoryTypes,
    /// MISC_ENABLE, which [`is_valid_misc_enable`].
    pub misc_enable: u64,
}

impl Default for KeptMsrs {
    fn default() -> Self {
        Self::new()
    }
}

impl KeptMsrs {
    /// After reset.
    pub const fn new() -> Self {
        Self { memory_types: MemoryTypes::new(), misc_enable: MISC_ENABLE_RESET }
    }

    /// Value of register `number` on a CPU of this vendor, if it is one of these.
    pub fn read(&self, number: u32, vendor: Vendor) -> Option<u64> {
        match number {
            msr::MISC_ENABLE => Some(self.misc_enable),
            // No banks of machine checks.
            msr::MCG_CAP => Some(0),
            number if reads_as_zero(number) => Some(0),
            number => self.memory_types.read(number).or_else(|| vendors_register(vendor, number)),
        }
    }

    /// A write of register `number` on a CPU of this vendor, whose physical addresses have `address_bits`. `None` if it
    /// is none of these, cannot be written, or cannot have this value: then nothing has changed.
    pub fn write(&mut self, number: u32, value: u64, vendor: Vendor, address_bits: u8) -> Option<()> {
        match number {
            msr::MISC_ENABLE => is_valid_misc_enable(value).then(|| self.misc_enable = value),
            number if reads_as_zero(number) || vendors_register(vendor, number).is_some() => Some(()),
            number => self.memory_types.write(number, value, address_bits),
        }
    }
}

/// Whether a guest can have this value in MISC_ENABLE.
pub fn is_valid_misc_enable(value: u64) -> bool {
    value & !MISC_ENABLE_WRITABLE == MISC_ENABLE_READ_ONLY
}

/// Registers that Linux accesses without checking CPUID, and that do nothing here: they read zero and ignore writes.
fn reads_as_zero(number: u32) -> bool {
    matches!(number, msr::TSC_ADJUST | msr::PATCH_LEVEL | msr::DEBUG_CTL)
}

/// Values of registers that only this vendor's processors have, and that kernels use without checking CPUID. Writes
/// have no effect. On the other vendor's processors they raise #GP.
fn vendors_register(vendor: Vendor, number: u32) -> Option<u64> {
    match vendor {
        Vendor::Amd => amd_register(number),
        Vendor::Intel => intel_register(number),
    }
}

/// Those of Intel's (SDM vol. 4, table 2-2).
fn intel_register(number: u32) -> Option<u64> {
    matches!(number, msr::PLATFORM_ID | msr::EBL_CR_POWERON).then_some(0)
}

/// Those of AMD's (APM vol. 2, appendix A; the processors' PPRs).
fn amd_register(number: u32) -> Option<u64> {
    match number {
        msr::HWCR => Some(HWCR_TSC_FREQ_SEL),
        msr::DE_CFG => Some(msr::DE_CFG_LFENCE_SERIALIZES),
        msr::K7_EVNTSEL0..=msr::K7_PERFCTR3
        | msr::SYSCFG
        | msr::TOP_MEM
        | msr::TOP_MEM2
        | msr::NB_CFG
        | msr::INT_PENDING
        | msr::DC_CFG => Some(0),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

//! The memory-type range registers (APM vol. 2, 7.7). They are stored so that a kernel reads back its writes.
//!
//! They have no effect, because a guest has only RAM and emulated devices. As after a PC's firmware, they are on and
//! everything is write-back. Values that the manual does not allow are rejected, also for the page attribute table.

use x86_defs::msr;

/// The memory-type range registers of one vCPU.
pub struct MemoryTypes {
    variable: [u64; VARIABLE_REGISTERS],
    fixed: [u64; 11],
    default: u64,
}

const VARIABLE_REGISTERS: usize = (msr::MTRR_PHYS_MASK_7 - msr::MTRR_PHYS_BASE_0 + 1) as usize;
/// Eight variable ranges, fixed ranges, write-combining.
const CAPABILITIES: u64 = 8 | 1 << 8 | 1 << 10;
/// Ranges are on, and memory outside them is write-back.
const ON_AND_WRITE_BACK: u64 = ENABLE | 6;
/// Default type: all ranges on, fixed ranges on.
const ENABLE: u64 = 1 << 11;
const ENABLE_FIXED: u64 = 1 << 10;
/// Mask of a variable range: the range is on.
const VALID: u64 = 1 << 11;

impl Default for MemoryTypes {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryTypes {
    /// As a PC's firmware leaves them.
    pub const fn new() -> Self {
        Self { variable: [0; VARIABLE_REGISTERS], fixed: [0x0606_0606_0606_0606; 11], default: ON_AND_WRITE_BACK }
    }

    /// Value of MSR `number`, if it is one of these.
    pub fn read(&self, number: u32) -> Option<u64> {
        match number {
            msr::MTRR_CAP => Some(CAPABILITIES),
            msr::MTRR_DEF_TYPE => Some(self.default),
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 => {
                Some(self.variable[(number - msr::MTRR_PHYS_BASE_0) as usize])
            }
            _ => Some(self.fixed[fixed_index(number)?]),
        }
    }

    /// A write of MSR `number` on a CPU whose physical addresses have `address_bits`. `None` if it is none of these, or
    /// the value is invalid: nonexistent memory types, reserved bits.
    pub fn write(&mut self, number: u32, value: u64, address_bits: u8) -> Option<()> {
        let addresses = u64::MAX.checked_shr(u64::BITS.saturating_sub(address_bits.into())).unwrap_or(0) & !0xfff;
        let [low, ..] = value.to_le_bytes();
        let is_legal = match number {
            msr::MTRR_DEF_TYPE => is_type(low) && value & !(ENABLE | ENABLE_FIXED | 0xff) == 0,
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 if number.is_multiple_of(2) => {
                is_type(low) && value & !(addresses | 0xff) == 0
            }
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 => value & !(addresses | VALID) == 0,
            _ => value.to_le_bytes().into_iter().all(is_type),
        };
        let register = match number {
            msr::MTRR_DEF_TYPE => &mut self.default,
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 => {
                &mut self.variable[(number - msr::MTRR_PHYS_BASE_0) as usize]
            }
            _ => &mut self.fixed[fixed_index(number)?],
        };
        is_legal.then(|| *register = value)
    }
}

/// Uncacheable, write-combining, write-through, write-protected, write-back (APM vol. 2, table 7-6).
const fn is_type(number: u8) -> bool {
    matches!(number, 0 | 1 | 4 | 5 | 6)
}

/// Whether the page attribute table may have this value: eight memory types, one per byte. Besides those of a range
/// there is 7, UC- (APM vol. 2, 7.8.1).
pub fn is_valid_pat(value: u64) -> bool {
    value.to_le_bytes().into_iter().all(|kind| is_type(kind) || kind == 7)
}

fn fixed_index(number: u32) -> Option<usize> {
    match number {
        msr::MTRR_FIX_64K => Some(0),
        msr::MTRR_FIX_16K_0 => Some(1),
        msr::MTRR_FIX_16K_1 => Some(2),
        msr::MTRR_FIX_4K_0..=msr::MTRR_FIX_4K_7 => Some(3 + (number - msr::MTRR_FIX_4K_0) as usize),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

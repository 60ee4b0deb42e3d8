//! Registers of the machine's devices in memory, for drivers that have no crate.

#![expect(unsafe_code, reason = "registers in memory")]

use addr::{HpaRange, Hva};

use super::counter;
use super::paging::map_mmio;

/// The registers of a device, mapped for good. Reading one has no effect on the machine.
///
/// Who makes one of these for a device, and writes to it, hands memory over to the device only for good, or takes it
/// back first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    at: Hva,
    bytes: u64,
}

impl Registers {
    /// Maps the registers of a device, which the device tree names.
    pub(super) fn map(range: &HpaRange) -> Self {
        Self { at: map_mmio(range.start, range.bytes()), bytes: range.bytes() }
    }

    /// Where the register at this offset is.
    ///
    /// # Panics
    /// It is not one of this device, or not aligned.
    fn place<T>(self, offset: u64) -> *mut T {
        let bytes = size_of::<T>() as u64;
        assert!(offset.is_multiple_of(bytes) && offset + bytes <= self.bytes, "no register at {offset:#x}");
        (self.at.0 + offset) as *mut T
    }

    /// Reads a register of 32 bits.
    pub(super) fn read32(self, offset: u64) -> u32 {
        // SAFETY: `place` gives an aligned register of the device, and the mapping stays.
        unsafe { self.place::<u32>(offset).read_volatile() }
    }

    /// Writes a register of 32 bits.
    pub(super) fn write32(self, offset: u64, value: u32) {
        // SAFETY: as above; what the device does then, the driver knows.
        unsafe { self.place::<u32>(offset).write_volatile(value) };
    }

    /// Reads a register of 64 bits.
    pub(super) fn read64(self, offset: u64) -> u64 {
        // SAFETY: as above.
        unsafe { self.place::<u64>(offset).read_volatile() }
    }

    /// Writes a register of 64 bits.
    pub(super) fn write64(self, offset: u64, value: u64) {
        // SAFETY: as above.
        unsafe { self.place::<u64>(offset).write_volatile(value) };
    }

    /// Waits until something is so, at most for this time. Returns whether it is.
    pub(super) fn wait_until(self, nanos: u64, is_so: impl Fn(Self) -> bool) -> bool {
        let end = counter::now() + counter::nanos_to_ticks(nanos);
        while !is_so(self) {
            if counter::now() > end {
                return false;
            }
            core::hint::spin_loop();
        }
        true
    }
}

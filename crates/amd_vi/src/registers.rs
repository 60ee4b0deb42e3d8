//! Registers of an IOMMU, in memory (3.4): offsets from its base, and bits.

use addr::{Hpa, PAGE_BYTES};

/// Bytes that the registers take, without those for performance counters.
pub const BYTES: u64 = 16 << 10;

/// Address and length of the device table.
pub const DEVICE_TABLE_BASE: u64 = 0x0000;
/// Address and length of the command buffer.
pub const COMMAND_BUFFER_BASE: u64 = 0x0008;
/// Address and length of the event log.
pub const EVENT_LOG_BASE: u64 = 0x0010;
/// What is on: [`control`].
pub const CONTROL: u64 = 0x0018;
/// Addresses that are not translated: first page, and two flags.
pub const EXCLUSION_BASE: u64 = 0x0020;
/// The last of those pages.
pub const EXCLUSION_LIMIT: u64 = 0x0028;
/// What the IOMMU can do: [`ExtendedFeatures`].
pub const EXTENDED_FEATURES: u64 = 0x0030;
/// The IOMMU's place in the command buffer.
pub const COMMAND_HEAD: u64 = 0x2000;
/// The driver's place in the command buffer.
pub const COMMAND_TAIL: u64 = 0x2008;
/// The driver's place in the event log.
pub const EVENT_HEAD: u64 = 0x2010;
/// The IOMMU's place in the event log.
pub const EVENT_TAIL: u64 = 0x2018;
/// What has happened: [`status`].
pub const STATUS: u64 = 0x2020;

/// Bits of the control register.
pub mod control {
    /// The IOMMU translates.
    pub const ENABLE: u64 = 1 << 0;
    /// The event log is written.
    pub const EVENT_LOG: u64 = 1 << 2;
    /// The IOMMU's own accesses to tables snoop the processors' caches.
    pub const COHERENT: u64 = 1 << 10;
    /// Commands are executed.
    pub const COMMAND_BUFFER: u64 = 1 << 12;
}

/// Bits of the status register. A written 1 clears [`EVENT_OVERFLOW`](status::EVENT_OVERFLOW).
pub mod status {
    /// Events were lost, and none is written until the log starts again.
    pub const EVENT_OVERFLOW: u64 = 1 << 0;
    /// The event log is being written.
    pub const EVENT_LOG_RUNS: u64 = 1 << 3;
    /// Commands are being executed.
    pub const COMMAND_BUFFER_RUNS: u64 = 1 << 4;
}

/// The value of [`DEVICE_TABLE_BASE`] for a table at `base` of `bytes`, a multiple of 4 KiB up to 2 MiB.
#[must_use]
pub const fn device_table_base(base: Hpa, bytes: u64) -> u64 {
    base.0 | (bytes / PAGE_BYTES - 1) & 0x1ff
}

/// The register of this name (3.4.2.1): what the IOMMU can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedFeatures(pub u64);

impl ExtendedFeatures {
    /// Levels that I/O page tables may have (HATS); `None` if the IOMMU does not translate, or by a number unknown.
    #[must_use]
    pub const fn levels(self) -> Option<u32> {
        match self.0 >> 10 & 3 {
            0 => Some(4),
            1 => Some(5),
            2 => Some(6),
            _ => None,
        }
    }

    /// Whether [`Command::invalidate_all`](crate::Command::invalidate_all) exists (IASup).
    #[must_use]
    pub const fn invalidates_all(self) -> bool {
        self.0 & 1 << 6 != 0
    }

    /// Whether interrupts can go to APIC ids above 255 (XTSup).
    #[must_use]
    pub const fn reaches_x2apic_ids(self) -> bool {
        self.0 & 1 << 2 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_features_are_read() {
        let plain = ExtendedFeatures(0x29d3);
        assert_eq!((plain.levels(), plain.invalidates_all(), plain.reaches_x2apic_ids()), (Some(6), true, false));
        assert!(ExtendedFeatures(0x29d7).reaches_x2apic_ids());
        assert_eq!(ExtendedFeatures(0x2dd3).levels(), None, "translation is disabled");
    }

    #[test]
    fn whole_device_table_has_the_largest_size_of_the_register() {
        assert_eq!(device_table_base(Hpa(0x20_0000), 2 << 20), 0x20_01ff);
    }
}

//! Registers of an IOMMU, in memory (11.4): offsets from its base, and bits.

use addr::{Hpa, PAGE_BYTES};

/// Bytes of the registers with fixed places. Others are where [`Capabilities::faults`] says.
pub const BYTES: u64 = PAGE_BYTES;

/// Version: major number in bits 7:4, minor in 3:0. 32 bits.
pub const VERSION: u64 = 0x00;
/// What the IOMMU can do: [`Capabilities`].
pub const CAPABILITIES: u64 = 0x08;
/// What else it can do: [`Extended`].
pub const EXTENDED: u64 = 0x10;
/// What shall be on: [`global`]. 32 bits. One change a write.
pub const COMMAND: u64 = 0x18;
/// What is on: the same bits. 32 bits.
pub const STATUS: u64 = 0x1c;
/// Address of the root table.
pub const ROOT_TABLE: u64 = 0x20;
/// What has happened: [`fault_status`]. 32 bits.
pub const FAULT_STATUS: u64 = 0x34;
/// Whether faults raise interrupts: bit 31 says no. 32 bits.
pub const FAULT_CONTROL: u64 = 0x38;
/// The value of [`FAULT_CONTROL`] that turns interrupts off.
pub const FAULTS_MASKED: u32 = 1 << 31;
/// Memory that no device reaches, left by firmware: bit 31 turns it on, bit 0 says that it is. 32 bits.
pub const PROTECTED_MEMORY: u64 = 0x64;
/// [`PROTECTED_MEMORY`] is on.
pub const IS_PROTECTED: u32 = 1 << 0;
/// The IOMMU's place in the invalidation queue: an offset in bytes.
pub const QUEUE_HEAD: u64 = 0x80;
/// The driver's place in it.
pub const QUEUE_TAIL: u64 = 0x88;
/// Address of the queue. Its length is 256 descriptors if bits 2:0 are clear.
pub const QUEUE_ADDRESS: u64 = 0x90;
/// Descriptors of such a queue: they fill a page.
pub const QUEUE_LENGTH: u64 = 256;
/// Address and length of the interrupt remapping table: [`interrupt_table`](crate::interrupt_table).
pub const INTERRUPT_TABLE: u64 = 0xb8;

/// Bits of [`COMMAND`] and [`STATUS`].
pub mod global {
    /// Devices' accesses are translated.
    pub const TRANSLATION: u32 = 1 << 31;
    /// The root table is the one that the register names.
    pub const ROOT_TABLE: u32 = 1 << 30;
    /// Write buffers between processors and memory are empty.
    pub const WRITE_BUFFER: u32 = 1 << 27;
    /// The invalidation queue is read.
    pub const QUEUE: u32 = 1 << 26;
    /// Interrupts are remapped.
    pub const INTERRUPTS: u32 = 1 << 25;
    /// The interrupt remapping table is the one that the register names.
    pub const INTERRUPT_TABLE: u32 = 1 << 24;
    /// Interrupts of the old format pass, while others are remapped.
    pub const OLD_INTERRUPTS: u32 = 1 << 23;
    /// Bits that stay on by being written again. Those of the others that are set in the status would act again.
    pub const LASTING: u32 = TRANSLATION | QUEUE | INTERRUPTS | OLD_INTERRUPTS;
}

/// Bits of [`FAULT_STATUS`]. A written 1 clears them.
pub mod fault_status {
    /// A fault found no free record.
    pub const OVERFLOW: u32 = 1 << 0;
    /// Some record has a fault. Cleared with the records.
    pub const PENDING: u32 = 1 << 1;
    /// The invalidation queue had an error: no descriptor is executed until this is cleared.
    pub const QUEUE_ERRORS: u32 = 1 << 4 | 1 << 5 | 1 << 6;
}

/// The register [`CAPABILITIES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Number of bits of a domain's number, from 4 to 16 (ND).
    #[must_use]
    pub const fn domain_bits(self) -> u32 {
        4 + 2 * (self.0 & 7) as u32
    }

    /// Whether write buffers must be emptied by a command before the IOMMU is told of a change (RWBF).
    #[must_use]
    pub const fn has_write_buffer(self) -> bool {
        self.0 & 1 << 4 != 0
    }

    /// Whether some memory can be protected by [`PROTECTED_MEMORY`] (PLMR, PHMR).
    #[must_use]
    pub const fn protects_memory(self) -> bool {
        self.0 & (1 << 5 | 1 << 6) != 0
    }

    /// Whether tables may have four levels (SAGAW).
    #[must_use]
    pub const fn walks_four_levels(self) -> bool {
        self.0 & 1 << 10 != 0
    }

    /// Whether leaves of 2 MiB, and of 1 GiB, are possible (SLLPS).
    #[must_use]
    pub const fn large_pages(self) -> [bool; 2] {
        [self.0 & 1 << 34 != 0, self.0 & 1 << 35 != 0]
    }

    /// log2 of the pages that one invalidation can name; `None` if it names all of a domain (PSI, MAMV).
    #[must_use]
    pub const fn most_pages(self) -> Option<u32> {
        if self.0 & 1 << 39 != 0 { Some((self.0 >> 48 & 0x3f) as u32) } else { None }
    }

    /// Offset of the first fault record, and how many there are (FRO, NFR).
    #[must_use]
    pub const fn faults(self) -> (u64, u64) {
        ((self.0 >> 24 & 0x3ff) * 16, (self.0 >> 40 & 0xff) + 1)
    }
}

/// The register [`EXTENDED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended(pub u64);

impl Extended {
    /// Whether the IOMMU's reads of its tables snoop the processors' caches (C).
    #[must_use]
    pub const fn is_coherent(self) -> bool {
        self.0 & 1 << 0 != 0
    }

    /// Whether there is an invalidation queue (QI).
    #[must_use]
    pub const fn has_queue(self) -> bool {
        self.0 & 1 << 1 != 0
    }

    /// Whether interrupts can be remapped (IR).
    #[must_use]
    pub const fn remaps_interrupts(self) -> bool {
        self.0 & 1 << 3 != 0
    }

    /// Whether a device's accesses can pass untranslated while others are translated (PT).
    #[must_use]
    pub const fn passes_through(self) -> bool {
        self.0 & 1 << 6 != 0
    }
}

/// The value of [`ROOT_TABLE`] for a table of the legacy mode.
#[must_use]
pub const fn root_table(base: Hpa) -> u64 {
    base.0 & !(PAGE_BYTES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_capabilities_are_read() {
        let [old, new] = [0x00d2_008c_2226_0206, 0x80d2_008c_222f_0606].map(Capabilities);
        assert_eq!((old.walks_four_levels(), new.walks_four_levels()), (false, true));
        for capabilities in [old, new] {
            assert_eq!(capabilities.domain_bits(), 16);
            assert_eq!(capabilities.large_pages(), [true, true]);
            assert_eq!(capabilities.most_pages(), Some(18));
            assert_eq!(capabilities.faults(), (0x220, 1));
            assert!(!capabilities.has_write_buffer() && !capabilities.protects_memory());
        }
        let extended = Extended(0xf0_0f4a);
        assert!(extended.has_queue() && extended.passes_through() && !extended.is_coherent());
        assert!(extended.remaps_interrupts() && !Extended(0xf0_0f42).remaps_interrupts());
    }

    #[test]
    fn register_of_a_missing_iommu_has_all_bits() {
        let none = Capabilities(u64::MAX);
        assert_eq!(none.domain_bits(), 18, "more than there are");
        assert_eq!(none.faults(), (0x3ff0, 256));
    }
}

//! Commands to the IOMMU (2.4). It executes those of one buffer in order, but an invalidation may still be under way
//! when the next one starts: only [`Command::completion_wait`] tells when all before it are complete.

use addr::{Hpa, PAGE_BYTES};

use crate::DeviceId;

/// Operation codes, in bits 63:60 of the first word.
const COMPLETION_WAIT: u64 = 1;
const INVALIDATE_DEVTAB_ENTRY: u64 = 2;
const INVALIDATE_IOMMU_PAGES: u64 = 3;
const INVALIDATE_INTERRUPT_TABLE: u64 = 5;
const INVALIDATE_IOMMU_ALL: u64 = 8;

/// COMPLETION_WAIT: the IOMMU stores the data.
const STORE: u64 = 1 << 0;
/// INVALIDATE_IOMMU_PAGES: the address encodes a size above 4 KiB.
const SIZE: u64 = 1 << 0;
/// INVALIDATE_IOMMU_PAGES: cached pointers to tables go, too.
const TABLES: u64 = 1 << 1;

/// The address that stands for all (2.4.3).
const ALL: u64 = 0x7fff_ffff_ffff_f000;

/// One command: two words of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command(pub [u64; 2]);

/// Addresses whose translations the IOMMU shall forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// All addresses.
    All,
    /// This block: 2^`order` bytes, at least a page, at a multiple of its size.
    Block {
        /// Its first address.
        start: u64,
        /// log2 of its length.
        order: u32,
    },
}

impl Pages {
    /// The smallest block that covers `start` up to, and without, `end`. Nothing is the smallest block, too.
    #[must_use]
    pub const fn covering(start: u64, end: u64) -> Self {
        let last = if end > start { end - 1 } else { start };
        let differing = u64::BITS - (start ^ last).leading_zeros();
        let order = if differing < PAGE_BYTES.ilog2() { PAGE_BYTES.ilog2() } else { differing };
        // 2^51 and more is "all" in the encoding.
        if order > 50 { Self::All } else { Self::Block { start: start >> order << order, order } }
    }

    /// Whether the address is among them.
    #[must_use]
    pub const fn contains(self, address: u64) -> bool {
        match self {
            Self::All => true,
            Self::Block { start, order } => address >> order == start >> order,
        }
    }

    /// The second word of INVALIDATE_IOMMU_PAGES without its flag for tables.
    const fn encoded(self) -> u64 {
        match self {
            Self::All => ALL | SIZE,
            Self::Block { start, order: 0..=12 } => start & !(PAGE_BYTES - 1),
            // The lowest clear bit from bit 12 on is that of half the size.
            Self::Block { start, order } => start | ((1 << (order - 1)) - PAGE_BYTES) | SIZE,
        }
    }
}

impl Command {
    /// Bytes of a command.
    pub const BYTES: u64 = 16;

    const fn new(code: u64, low: u64, high: u64) -> Self {
        Self([code << 60 | low, high])
    }

    /// When all commands before it are complete, the IOMMU stores `data` at `at`, a multiple of 8.
    #[must_use]
    pub const fn completion_wait(at: Hpa, data: u64) -> Self {
        Self::new(COMPLETION_WAIT, at.0 & 0x000f_ffff_ffff_fff8 | STORE, data)
    }

    /// Forget the device table entry of this device.
    #[must_use]
    pub const fn invalidate_device(device: DeviceId) -> Self {
        Self::new(INVALIDATE_DEVTAB_ENTRY, device.0 as u64, 0)
    }

    /// Forget translations of a domain. With `tables`, cached pointers to tables on their way, too.
    #[must_use]
    pub const fn invalidate_pages(domain: u16, pages: Pages, tables: bool) -> Self {
        let high = pages.encoded() | if tables { TABLES } else { 0 };
        Self::new(INVALIDATE_IOMMU_PAGES, (domain as u64) << 32, high)
    }

    /// Forget the interrupt remapping table of this device.
    #[must_use]
    pub const fn invalidate_interrupts(device: DeviceId) -> Self {
        Self::new(INVALIDATE_INTERRUPT_TABLE, device.0 as u64, 0)
    }

    /// Forget everything. Only if [`invalidates_all`](crate::registers::ExtendedFeatures::invalidates_all).
    #[must_use]
    pub const fn invalidate_all() -> Self {
        Self::new(INVALIDATE_IOMMU_ALL, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_bits_of_the_manual() {
        assert_eq!(Command::completion_wait(Hpa(0x1238), 77).0, [0x1000_0000_0000_1239, 77]);
        assert_eq!(Command::invalidate_device(DeviceId(0xa0)).0, [0x2000_0000_0000_00a0, 0]);
        assert_eq!(Command::invalidate_interrupts(DeviceId(0xa0)).0, [0x5000_0000_0000_00a0, 0]);
        assert_eq!(Command::invalidate_all().0, [0x8000_0000_0000_0000, 0]);
        let page = Pages::covering(0x1234_5000, 0x1234_6000);
        assert_eq!(Command::invalidate_pages(3, page, false).0, [0x3000_0003_0000_0000, 0x1234_5000]);
        let all = Command::invalidate_pages(0xffff, Pages::All, true);
        assert_eq!(all.0, [0x3000_ffff_0000_0000, 0x7fff_ffff_ffff_f003]);
    }

    /// The size of table 14: bits from 12 up to the first clear one, which stands for half of it.
    fn size_of(word: u64) -> u64 {
        if word & SIZE == 0 { PAGE_BYTES } else { 2 << (word | 0xfff).trailing_ones() }
    }

    #[test]
    fn sizes_are_encoded_by_the_lowest_clear_bit() {
        assert_eq!(Pages::covering(0, 0x2000).encoded(), 0x0001, "8 KiB: bit 12 is clear");
        assert_eq!(Pages::covering(0x20_0000, 0x40_0000).encoded(), 0x2f_f001, "2 MiB");
        for order in 12..=50 {
            let block = Pages::Block { start: 0, order };
            assert_eq!(size_of(block.encoded()), 1 << order, "{order}");
        }
    }

    #[test]
    fn block_covers_every_range_that_it_is_made_for() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100_000 {
            let start = random.u64(..) >> random.u32(12..64);
            let end = start.saturating_add(random.u64(..) >> random.u32(12..64));
            let pages = Pages::covering(start, end);
            for address in [start, end.saturating_sub(1).max(start), start + (end - start) / 2] {
                assert!(pages.contains(address), "{pages:?} {address:#x}");
            }
            if let Pages::Block { start, order } = pages {
                let word = pages.encoded();
                assert_eq!(size_of(word), 1 << order);
                assert_eq!(word & !0xfff & !(size_of(word) - 1), start);
            }
        }
        assert_eq!(Pages::covering(0, u64::MAX), Pages::All);
        assert_eq!(Pages::covering(0x5000, 0x5000), Pages::Block { start: 0x5000, order: 12 });
    }
}

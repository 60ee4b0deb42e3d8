//! Descriptors of the invalidation queue (6.5.2). The IOMMU executes them in order, but an invalidation may still be
//! under way when the next one starts: only [`Descriptor::wait`] tells when all before it are complete.

use addr::{Hpa, PAGE_BYTES};

/// Types, in bits 3:0 of the first word.
const CONTEXT_CACHE: u64 = 1;
const IOTLB: u64 = 2;
const INTERRUPTS: u64 = 4;
const WAIT: u64 = 5;

/// Granularity, in bits 5:4 of an invalidation: all, those of a domain, or its pages that the second word names.
const ALL: u64 = 1 << 4;
const OF_DOMAIN: u64 = 2 << 4;
const OF_PAGES: u64 = 3 << 4;

/// IOTLB: reads and writes of devices that are under way are complete as well.
const DRAIN: u64 = 1 << 6 | 1 << 7;
/// IOTLB, second word: pointers to tables on the way may stay.
const LEAVES_ONLY: u64 = 1 << 6;
/// WAIT: the IOMMU stores a word of 32 bits.
const STORE: u64 = 1 << 5;

/// INTERRUPTS: only the entry that bits 47:32 name.
const ONE: u64 = 1 << 4;
const INDEX_SHIFT: u32 = 32;

const DOMAIN_SHIFT: u32 = 16;
const DATA_SHIFT: u32 = 32;

/// One descriptor: two words of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor(pub [u64; 2]);

/// Addresses whose translations the IOMMU shall forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// All addresses.
    All,
    /// 2^`order` pages, the first of them at a multiple of their size.
    Block {
        /// The first address.
        start: u64,
        /// log2 of the number of pages.
        order: u32,
    },
}

impl Pages {
    /// The smallest block that covers `start` up to, and without, `end`. It has at most 2^`most` pages; all addresses
    /// stand for larger ones. Nothing is the smallest block, too.
    #[must_use]
    pub const fn covering(start: u64, end: u64, most: u32) -> Self {
        let last = if end > start { end - 1 } else { start };
        let (first, last) = (start / PAGE_BYTES, last / PAGE_BYTES);
        let order = u64::BITS - (first ^ last).leading_zeros();
        if order > most { Self::All } else { Self::Block { start: (first >> order << order) * PAGE_BYTES, order } }
    }
}

impl Descriptor {
    /// Bytes of a descriptor.
    pub const BYTES: u64 = 16;

    /// Forget all context entries.
    pub const ALL_CONTEXTS: Self = Self([CONTEXT_CACHE | ALL, 0]);

    /// Forget all translations.
    pub const ALL_TRANSLATIONS: Self = Self([IOTLB | ALL | DRAIN, 0]);

    /// Forget all entries of the interrupt remapping table (6.5.2.7).
    pub const ALL_INTERRUPTS: Self = Self([INTERRUPTS, 0]);

    /// Forget an entry of the interrupt remapping table.
    #[must_use]
    pub const fn forget_interrupt(index: u16) -> Self {
        Self([INTERRUPTS | ONE | (index as u64) << INDEX_SHIFT, 0])
    }

    /// Forget translations of a domain. With `tables`, cached pointers to tables on their way, too.
    #[must_use]
    pub const fn forget_pages(domain: u16, pages: Pages, tables: bool) -> Self {
        let first = IOTLB | DRAIN | (domain as u64) << DOMAIN_SHIFT;
        match pages {
            Pages::All => Self([first | OF_DOMAIN, 0]),
            Pages::Block { start, order } => {
                let hint = if tables { 0 } else { LEAVES_ONLY };
                Self([first | OF_PAGES, start & !(PAGE_BYTES - 1) | hint | order as u64])
            }
        }
    }

    /// When all descriptors before it are complete, the IOMMU stores `data` at `at`, a multiple of 4.
    #[must_use]
    pub const fn wait(at: Hpa, data: u32) -> Self {
        Self([WAIT | STORE | (data as u64) << DATA_SHIFT, at.0 & !3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_have_the_bits_of_the_manual() {
        assert_eq!(Descriptor::ALL_CONTEXTS.0, [0x11, 0]);
        assert_eq!(Descriptor::ALL_TRANSLATIONS.0, [0xd2, 0]);
        assert_eq!(Descriptor::forget_pages(3, Pages::All, true).0, [0x3_00e2, 0]);
        let page = Pages::covering(0x1234_5000, 0x1234_6000, 18);
        assert_eq!(Descriptor::forget_pages(3, page, true).0, [0x3_00f2, 0x1234_5000]);
        let large = Pages::covering(0x20_0000, 0x40_0000, 18);
        assert_eq!(Descriptor::forget_pages(3, large, false).0, [0x3_00f2, 0x20_0049]);
        assert_eq!(Descriptor::ALL_INTERRUPTS.0, [4, 0]);
        assert_eq!(Descriptor::forget_interrupt(0x341).0, [0x341_0000_0014, 0]);
        assert_eq!(Descriptor::wait(Hpa(0x1238), 77).0, [77 << 32 | 0x25, 0x1238]);
    }

    #[test]
    fn block_covers_every_range_that_it_is_made_for_and_is_not_larger_than_allowed() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100_000 {
            let start = random.u64(..) >> random.u32(12..64);
            let end = start.saturating_add(random.u64(..) >> random.u32(12..64));
            let most = random.u32(0..=40);
            if let Pages::Block { start: first, order } = Pages::covering(start, end, most) {
                let bytes = u128::from(PAGE_BYTES) << order;
                assert!(order <= most);
                assert_eq!(u128::from(first) % bytes, 0);
                assert!(first <= start && u128::from(first) + bytes >= u128::from(end));
            }
        }
        assert_eq!(Pages::covering(0, u64::MAX, 40), Pages::All);
        assert_eq!(Pages::covering(0x5000, 0x5000, 0), Pages::Block { start: 0x5000, order: 0 });
        assert_eq!(Pages::covering(0x5000, 0x7000, 0), Pages::All);
    }
}

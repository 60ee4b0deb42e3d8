//! Addresses to flush: elements of the lists of HvCallFlushVirtualAddressList and its Ex form (TLFS, HV_GVA_RANGE).
//!
//! An element is one word. Its upper bits are a page, its lower bits the number of further pages. There are two
//! formats; a flag of the call selects one for its whole list.

use core::iter::FusedIterator;

use addr::{Gva, PageSize};

use crate::input::Words;

/// An element of a list, as the guest wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvaRange(pub u64);

impl GvaRange {
    const LARGE: u64 = 1 << 11;
    const LARGE_1G: u64 = 1 << 12;

    /// The simple format: page number in bits 63:12, further 4 KiB pages in bits 11:0.
    #[must_use]
    pub const fn simple(self) -> GvaPages {
        GvaPages::clipped(Gva(self.0), self.0 & 0xfff, PageSize::Size4K)
    }

    /// The extended format. With bit 11 clear, further 4 KiB pages are in bits 10:0. With bit 11 set, bits 10:0 count
    /// large pages, of 2 MiB or with bit 12 of 1 GiB. Bits 63:21 are the number of the first in units of 2 MiB; bits
    /// 20:13 are ignored.
    #[must_use]
    pub const fn extended(self) -> GvaPages {
        let size = match (self.0 & Self::LARGE != 0, self.0 & Self::LARGE_1G != 0) {
            (false, _) => PageSize::Size4K,
            (true, false) => PageSize::Size2M,
            (true, true) => PageSize::Size1G,
        };
        GvaPages::clipped(Gva(self.0), self.0 & 0x7ff, size)
    }
}

/// Consecutive pages of one size. Never empty, and never past the end of the address space. The addresses may be
/// non-canonical: such an address has no translation that could be stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvaPages {
    first: Gva,
    count: u64,
    size: PageSize,
}

impl GvaPages {
    /// The page that holds `within` and up to `more` behind it, without those that would wrap around.
    const fn clipped(within: Gva, more: u64, size: PageSize) -> Self {
        let first = within.page(size);
        let behind = !first.0 >> size.shift();
        Self { first, count: 1 + if more < behind { more } else { behind }, size }
    }

    /// Address of the first page.
    #[must_use]
    pub const fn first(&self) -> Gva {
        self.first
    }

    /// Number of pages of [`Self::size`].
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Size of each page.
    #[must_use]
    pub const fn size(&self) -> PageSize {
        self.size
    }

    /// The number of 4 KiB pages: the measure for the cut-off if each is flushed alone.
    #[must_use]
    pub const fn small_pages(&self) -> u64 {
        self.count << (self.size.shift() - PageSize::Size4K.shift())
    }

    /// The address of each page.
    pub fn addresses(&self) -> impl Iterator<Item = Gva> + use<> {
        let Self { first, count, size } = *self;
        (0..count).map(move |index| Gva(first.0 + (index << size.shift())))
    }
}

/// A list of pages, from the call's first element on. A clone can walk any part of it again.
#[derive(Clone, Debug)]
pub struct GvaRanges<'a> {
    elements: core::slice::Iter<'a, [u8; 8]>,
    extended: bool,
}

impl<'a> GvaRanges<'a> {
    pub(crate) fn new(elements: Words<'a>, extended: bool) -> Self {
        Self { elements: elements.0.iter(), extended }
    }

    /// Whether the elements are in the extended format.
    #[must_use]
    pub const fn is_extended(&self) -> bool {
        self.extended
    }
}

impl Iterator for GvaRanges<'_> {
    type Item = GvaPages;

    fn next(&mut self) -> Option<GvaPages> {
        let range = GvaRange(u64::from_le_bytes(*self.elements.next()?));
        Some(if self.extended { range.extended() } else { range.simple() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.elements.size_hint()
    }
}

impl ExactSizeIterator for GvaRanges<'_> {}
impl FusedIterator for GvaRanges<'_> {}

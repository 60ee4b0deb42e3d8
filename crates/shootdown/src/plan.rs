//! Decides: flush page by page, or everything?

use crate::requests::{Flush, Pages, Requests, WORDS};

/// Maximum number of pages that are flushed one by one. Above it, everything is flushed: the guest then walks its
/// tables again for pages that it still uses, but no vCPU pays for each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOff {
    pages: u64,
    address_bits: u32,
}

impl CutOff {
    /// At most `pages` one by one, for guests with linear addresses of `address_bits` bits (48 or 57).
    #[must_use]
    pub const fn new(pages: u64, address_bits: u32) -> Self {
        assert!(address_bits > PAGE_SHIFT && address_bits <= 64, "linear addresses have 48 or 57 bits");
        Self { pages, address_bits }
    }

    /// The part of a run with canonical addresses, whose bits from the highest on are all equal. These form two halves,
    /// one at each end of the 2^64 bytes. The hole between them is longer than any run, and no run crosses the end.
    fn canonical(self, pages: Pages) -> Option<Pages> {
        const ALL: u64 = 1 << (64 - PAGE_SHIFT);
        let half = 1 << (self.address_bits - 1 - PAGE_SHIFT);

        let first = pages.first() >> PAGE_SHIFT;
        let end = ALL.min(first + pages.count());
        let (first, end) = if first < half { (first, end.min(half)) } else { (first.max(ALL - half), end) };
        (first < end).then(|| Pages::new(first << PAGE_SHIFT, end - first))
    }
}

impl Default for CutOff {
    /// 8 pages (`docs/decisions/0007-cut-off.md` has the figures), 48 bits.
    fn default() -> Self {
        Self::new(8, 48)
    }
}

/// The flush of one shootdown. It starts empty, grows by runs of pages, and becomes a flush of everything above the
/// limit.
#[derive(Clone, Debug)]
pub struct Plan {
    cut_off: CutOff,
    runs: [Pages; WORDS],
    count: usize,
    pages: u64,
    whole: bool,
}

/// log2 of the bytes of a page.
const PAGE_SHIFT: u32 = 12;
/// Pages of a large page (2 MiB).
const LARGE: u64 = 512;

impl Plan {
    /// An empty plan.
    #[must_use]
    pub fn new(cut_off: CutOff) -> Self {
        Self { cut_off, runs: [Pages::new(0, 1); WORDS], count: 0, pages: 0, whole: false }
    }

    /// A flush of everything.
    #[must_use]
    pub fn whole() -> Self {
        Self { whole: true, ..Self::new(CutOff::default()) }
    }

    /// Adds a run of pages. Non-canonical addresses are left out.
    pub fn add(&mut self, pages: Pages) {
        if self.whole {
            return;
        }
        let Some(pages) = self.cut_off.canonical(pages) else { return };

        let grown = self.runs[..self.count].last_mut().is_some_and(|last| last.append(pages));
        if !grown {
            match self.runs.get_mut(self.count) {
                Some(slot) => {
                    *slot = pages;
                    self.count += 1;
                }
                None => self.whole = true,
            }
        }
        // A run as long as a large page probably is one, and is not worth its 512 flushes.
        let is_large = self.runs[..self.count].last().is_some_and(|last| last.count() >= LARGE);
        self.pages += pages.count();
        self.whole |= self.pages > self.cut_off.pages || is_large;
    }

    /// Whether everything is flushed.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Number of requests that it leaves with each target.
    #[must_use]
    pub fn requests(&self) -> usize {
        if self.whole { 1 } else { self.count }
    }

    /// Whether nothing is flushed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.whole && self.count == 0
    }

    /// Adds the flushes to a target's requests ([`Requests::ask`]).
    #[inline]
    pub fn leave_with(&self, requests: &Requests) {
        if self.whole {
            requests.ask(Flush::Whole);
        } else {
            self.runs[..self.count].iter().for_each(|&pages| requests.ask(Flush::Pages(pages)));
        }
    }

    /// The flushes.
    pub fn flushes(&self) -> impl Iterator<Item = Flush> + '_ {
        let runs = if self.whole { &[] } else { &self.runs[..self.count] };
        self.whole.then_some(Flush::Whole).into_iter().chain(runs.iter().map(|&pages| Flush::Pages(pages)))
    }
}

impl Pages {
    /// Appends a run that begins where this one ends, if both fit into one run.
    fn append(&mut self, next: Self) -> bool {
        // No page follows the last one: page 0 is not next to it.
        let end = self.first().checked_add(self.count() << PAGE_SHIFT);
        let fits = end == Some(next.first()) && self.count() + next.count() <= LARGE;
        if fits {
            *self = Self::new(self.first(), self.count() + next.count());
        }
        fits
    }
}

//! The ledger of a parent's pages: whether a page is deposited, or how many uses by children and shared pages it has.
//!
//! A deposited page belongs to the hypervisor, which may keep tables there. If a child could write to it, the child
//! could write tables. So the two uses exclude each other, and one atomic word for each page decides between them.
//! Several processors may execute calls of one parent at the same time.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU16, Ordering};

use hyperv_defs::Status;

/// The ledger.
#[derive(Debug)]
pub struct Ledger {
    ranges: Vec<Range>,
    words: Vec<AtomicU16>,
}

/// Consecutive pages of the parent.
#[derive(Clone, Copy, Debug)]
struct Range {
    first: u64,
    pages: u64,
    /// Index of the first page's word.
    at: usize,
}

/// How a page is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// The hypervisor has it.
    Deposited,
    /// The parent owns the page, and this number of children's pages and shared pages use it.
    Shared(u16),
}

const DEPOSITED: u16 = u16::MAX;
const MOST_USES: u16 = DEPOSITED - 1;

impl Ledger {
    /// A ledger of a parent's memory: first page and number of pages of each range, ascending, and apart from each
    /// other. `None`: there is no memory for it, two bytes a page.
    #[must_use]
    pub fn new(memory: &[(u64, u64)]) -> Option<Self> {
        let mut ranges = Vec::new();
        ranges.try_reserve_exact(memory.len()).ok()?;
        let mut at = 0_usize;
        for (first, pages) in memory.iter().copied() {
            ranges.push(Range { first, pages, at });
            at = at.checked_add(usize::try_from(pages).ok()?)?;
        }

        let mut words = Vec::new();
        words.try_reserve_exact(at).ok()?;
        words.extend((0..at).map(|_| AtomicU16::new(0)));
        Some(Self { ranges, words })
    }

    /// How a page is used. `None`: it is not the parent's.
    #[must_use]
    pub fn page_use(&self, page: u64) -> Option<PageUse> {
        Some(match self.word(page)?.load(Ordering::Acquire) {
            DEPOSITED => PageUse::Deposited,
            uses => PageUse::Shared(uses),
        })
    }

    /// Uses a page once more.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] if it is not the parent's or deposited, [`Status::NoResources`] if it is used too
    /// often already.
    pub fn share(&self, page: u64) -> Result<(), Status> {
        let word = self.word(page).ok_or(Status::InvalidParameter)?;
        let more = |uses: u16| (uses < MOST_USES).then(|| uses + 1);
        match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(()),
            Err(DEPOSITED) => Err(Status::InvalidParameter),
            Err(_) => Err(Status::NoResources),
        }
    }

    /// Ends one use of a page, after no TLB has it any more.
    pub fn release(&self, page: u64) {
        let fewer = |uses: u16| (uses != 0 && uses != DEPOSITED).then(|| uses - 1);
        let done = self.word(page).map(|word| word.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer));
        debug_assert!(matches!(done, Some(Ok(_))), "page {page:#x} was not in use: {done:?}");
    }

    /// Makes a page the hypervisor's.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] if it is not the parent's, or in use, or deposited already.
    pub fn deposit(&self, page: u64) -> Result<(), Status> {
        let word = self.word(page).ok_or(Status::InvalidParameter)?;
        let done = word.compare_exchange(0, DEPOSITED, Ordering::AcqRel, Ordering::Acquire);
        done.map(|_| ()).map_err(|_| Status::InvalidParameter)
    }

    /// Makes a deposited page the parent's again.
    pub fn withdraw(&self, page: u64) {
        let done = self.word(page).map(|word| word.compare_exchange(DEPOSITED, 0, Ordering::AcqRel, Ordering::Acquire));
        debug_assert!(matches!(done, Some(Ok(_))), "page {page:#x} was not deposited: {done:?}");
    }

    /// The words of pages that are used, for checks: page and use.
    pub fn used(&self) -> impl Iterator<Item = (u64, PageUse)> + '_ {
        let pages = self.ranges.iter().flat_map(|range| range.first..range.first + range.pages);
        pages.filter_map(|page| {
            let found = self.page_use(page)?;
            (found != PageUse::Shared(0)).then_some((page, found))
        })
    }

    fn word(&self, page: u64) -> Option<&AtomicU16> {
        let behind = self.ranges.partition_point(|range| range.first <= page);
        let range = self.ranges.get(behind.checked_sub(1)?)?;
        let offset = page - range.first;
        if offset >= range.pages {
            return None;
        }
        self.words.get(range.at + usize::try_from(offset).ok()?)
    }
}

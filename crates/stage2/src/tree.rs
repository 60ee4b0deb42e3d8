//! A tree, and the right to change its shape. [`Walk`](crate::Walk) does all work on the tables.

use crate::{Access, Cell, ENTRIES, Format, MapError, PageTableEntry, Pages, Replace, Stale};
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};

/// A stage-2 translation: the tables of one VM.
///
/// The tree owns its tables but holds no reference to their pool. So each [walk](Self::walk) gets the pool, which must
/// always be the same one. A tree that is dropped instead of [destroyed](Self::destroy) leaks its tables.
#[derive(Debug)]
pub struct Tree<F> {
    pub(crate) format: F,
    root: Hpa,
}

/// The right to change the shape of one tree: which addresses are mapped, and by how many tables.
///
/// There is one per tree. While a caller holds it, no other processor maps, unmaps or collapses. Faults, changes of
/// single pages and dirty logs continue; they only split leaves. So an operation that has counted its tables never
/// needs more.
#[derive(Debug)]
pub struct Shape(());

impl<F: Format> Tree<F> {
    /// An empty tree, whose root maps nothing, and the right to change it.
    pub fn new(format: F, pages: &impl Pages) -> Result<(Self, Shape), MapError> {
        let root = match root_tables(&format) {
            1 => pages.allocate(),
            count => pages.allocate_root(count),
        };
        Ok((Self { root: root.ok_or(MapError::OutOfTables)?, format }, Shape(())))
    }

    /// The root, for the register that the hardware starts from (SVM: nCR3; Arm: VTTBR_EL2).
    #[must_use]
    pub fn root(&self) -> Hpa {
        self.root
    }

    /// The format of its entries.
    #[must_use]
    pub fn format(&self) -> &F {
        &self.format
    }

    /// Does `work` with the same tree, in the format that its own stands for: both encode alike. Where the kind of
    /// tables is known only when the host starts, work that must be fast is thus compiled for each kind.
    #[inline(always)]
    pub fn known_as<G: Format, R>(&self, format: G, work: impl FnOnce(&Tree<G>) -> R) -> R {
        work(&Tree { format, root: self.root })
    }

    /// Takes the tree out of a place that must keep one, to [destroy](Self::destroy) it. What stays there has its root
    /// at address 0: walk it only in a pool that has an empty table at each address.
    #[must_use]
    pub fn take(&mut self) -> Self
    where
        F: Clone,
    {
        let format = self.format.clone();
        core::mem::replace(self, Self { format, root: Hpa(0) })
    }

    /// Returns all tables to the pool.
    ///
    /// No processor may walk the tree any more: no vCPU runs on it, and every TLB that used it is flushed.
    pub fn destroy(self, pages: &impl Pages) {
        self.empty(pages, || true);
        for table in self.roots() {
            pages.free(table);
        }
    }

    /// The same for all tables but the root, as long as there is time for `more` after each. Returns whether the root
    /// is all that is left. If not, the next call goes on.
    pub fn empty(&self, pages: &impl Pages, mut more: impl FnMut() -> bool) -> bool {
        self.roots().all(|table| self.empty_table(pages, table, self.format.levels() - 1, &mut more))
    }

    fn roots(&self) -> impl Iterator<Item = Hpa> {
        let first = self.root;
        (0..root_tables(&self.format)).map(move |number| Hpa(first.0 + u64::from(number) * PAGE_BYTES))
    }

    fn empty_table(&self, pages: &impl Pages, table: Hpa, level: u32, more: &mut impl FnMut() -> bool) -> bool {
        if level == 0 {
            return true;
        }
        for cell in (0..entries::<F>()).map(|index| Cell::new(table, index)) {
            if let PageTableEntry::Table(next) = self.format.decode(level, pages.load(cell)) {
                if !self.empty_table(pages, next, level - 1, more) {
                    return false;
                }
                pages.write_private(cell, 0);
                pages.free(next);
                if !more() {
                    return false;
                }
            }
        }
        true
    }

    /// The flush for a leaf that covers `page` and has lost a right.
    pub(crate) fn owed_for(&self, page: GpaRange, level: u32) -> Stale {
        match self.format.replace() {
            Replace::Freely | Replace::BreakFirst => Stale::leaf(page, level),
            // Another processor may not yet have flushed its split: a larger leaf may be cached for the page.
            Replace::OneStore | Replace::Uncached(_) => Stale::leaf(page, level).of_any_size(),
        }
    }

    /// First address that the tree cannot translate.
    #[inline]
    pub(crate) fn limit(&self) -> Gpa {
        Gpa(1 << self.format.input_bits())
    }

    #[inline]
    pub(crate) fn check_range(&self, range: GpaRange) -> Result<(), MapError> {
        if !range.start.is_aligned(PageSize::Size4K) || !range.end().is_aligned(PageSize::Size4K) {
            return Err(MapError::Misaligned(range));
        }
        if range.end() > self.limit() {
            return Err(MapError::Beyond(range.start.max(self.limit())));
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn check_host(&self, hpa: Hpa, bytes: u64) -> Result<(), MapError> {
        if !hpa.is_aligned(PageSize::Size4K) {
            return Err(MapError::MisalignedHost(hpa));
        }
        let limit = self.format.host_limit();
        match hpa.checked_add(bytes) {
            Some(end) if end <= limit => Ok(()),
            _ => Err(MapError::BeyondHost(hpa.max(limit))),
        }
    }

    #[inline]
    pub(crate) fn check_access(&self, access: Access) -> Result<(), MapError> {
        if self.format.expresses(access) { Ok(()) } else { Err(MapError::Inexpressible(access)) }
    }
}

/// Bytes that one entry at `level` decides about.
pub(crate) const fn span<F: Format>(level: u32) -> u64 {
    1 << (12 + F::INDEX_BITS * level)
}

/// Entries of one table.
pub(crate) const fn entries<F: Format>() -> usize {
    assert!(F::INDEX_BITS <= ENTRIES.trailing_zeros(), "a table is one page");
    1 << F::INDEX_BITS
}

/// Number of tables that form the root.
fn root_tables<F: Format>(format: &F) -> u32 {
    1 << format.input_bits().saturating_sub(12 + F::INDEX_BITS * format.levels())
}

pub(crate) fn range_between(start: Gpa, end: Gpa) -> GpaRange {
    GpaRange::new(start, end.0 - start.0).expect("both ends are addresses within the tree")
}

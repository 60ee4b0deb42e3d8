//! A tree, and the step that all operations share: from the root to the first entry that is not a table, which is the
//! one that decides about an address.

use crate::{Access, Cell, ENTRIES, Entry, Format, Leaf, MapError, Pages, Replace, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};

/// A stage-2 translation: the tables of one VM.
///
/// The tree owns its tables but holds no reference to their pool, so each call names the pool, and it must always be the
/// same one. A tree that is dropped instead of [destroyed](Self::destroy) leaks its tables.
///
/// Where small pages are [collapsed](Self::collapse), whoever calls anything else meanwhile has
/// [announced](crate::Epochs::enter) itself before: its way down may lead through a table that is cut off.
#[derive(Debug)]
pub struct Tree<F> {
    pub(crate) format: F,
    root: Hpa,
}

/// The right to change the shape of one tree: which addresses are mapped, and in how many tables.
///
/// There is one per tree. Whoever has it knows that nobody else maps, unmaps or collapses; faults, single pages and dirty
/// logs go on meanwhile, and can only split leaves. So an operation that has counted its tables never needs more.
#[derive(Debug)]
pub struct Shape(());

impl<F: Format> Tree<F> {
    /// An empty tree, with a root where nothing is mapped, and the right to change it.
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

    /// How its entries are spelled.
    #[must_use]
    pub fn format(&self) -> &F {
        &self.format
    }

    /// What is mapped at `gpa`. While another processor replaces the leaf, this is `None`.
    #[must_use]
    pub fn lookup(&self, pages: &impl Pages, gpa: Gpa) -> Option<Leaf> {
        if gpa >= self.limit() {
            return None;
        }
        let slot = self.descend(pages, gpa);
        match slot.entry {
            Entry::Leaf { hpa, access } => Some(Leaf { hpa, level: slot.level, bytes: slot.bytes, access }),
            Entry::Empty | Entry::Busy | Entry::Table(_) => None,
        }
    }

    /// Gives all tables back to the pool.
    ///
    /// No processor may walk the tree any more: no vCPU runs on it, and every TLB that it was used from is flushed.
    pub fn destroy(self, pages: &impl Pages) {
        for number in 0..root_tables(&self.format) {
            let table = Hpa(self.root.0 + u64::from(number) * PAGE_BYTES);
            self.free_below(pages, table, self.format.levels() - 1);
        }
    }

    fn free_below(&self, pages: &impl Pages, table: Hpa, level: u32) {
        if level > 0 {
            for index in 0..entries::<F>() {
                if let Entry::Table(next) = self.format.decode(level, pages.load(Cell::new(table, index))) {
                    self.free_below(pages, next, level - 1);
                }
            }
        }
        pages.free(table);
    }

    /// The entry that decides about `gpa`: the first on the way down that is not a table.
    #[inline(always)]
    pub(crate) fn descend(&self, pages: &impl Pages, gpa: Gpa) -> Slot {
        self.descend_to(pages, gpa, 0)
    }

    /// The same, but going no deeper than `lowest`, where it may find a table.
    #[inline(always)]
    pub(crate) fn descend_to(&self, pages: &impl Pages, gpa: Gpa, lowest: u32) -> Slot {
        // A walk of a known length is carried out without a loop.
        match self.format.levels() {
            3 => self.descend_from(2, pages, gpa, lowest),
            4 => self.descend_from(3, pages, gpa, lowest),
            levels => self.descend_from(levels - 1, pages, gpa, lowest),
        }
    }

    #[inline(always)]
    fn descend_from(&self, mut level: u32, pages: &impl Pages, gpa: Gpa, lowest: u32) -> Slot {
        let mut table = Hpa(self.root.0 + (gpa.0 >> span::<F>(level + 1).trailing_zeros()) * PAGE_BYTES);
        let mut above = None;
        loop {
            let cell = Cell::new(table, index::<F>(gpa, level));
            let bits = pages.load(cell);
            match self.format.decode(level, bits) {
                Entry::Table(next) if level > lowest => {
                    above = Some(cell);
                    table = next;
                    level -= 1;
                }
                entry => {
                    let bytes = span::<F>(level);
                    return Slot { cell, bits, entry, level, start: Gpa(gpa.0 & !(bytes - 1)), bytes, above };
                }
            }
        }
    }

    /// As [`descend`](Self::descend), but waits where somebody else is replacing the entry.
    ///
    /// Not for those who are replacing one themselves: two of them would wait for each other.
    #[inline]
    pub(crate) fn settle(&self, pages: &impl Pages, tlb: &impl Tlb, gpa: Gpa) -> Slot {
        self.settle_to(pages, tlb, gpa, 0)
    }

    /// The same, but going no deeper than `lowest`.
    #[inline]
    pub(crate) fn settle_to(&self, pages: &impl Pages, tlb: &impl Tlb, gpa: Gpa, lowest: u32) -> Slot {
        loop {
            let slot = self.descend_to(pages, gpa, lowest);
            if slot.entry != Entry::Busy {
                return slot;
            }
            tlb.relax();
        }
    }

    /// The debt of a leaf that covers `page` and has lost a right.
    pub(crate) fn owed_for(&self, page: GpaRange, level: u32) -> Stale {
        match self.format.replace() {
            Replace::Freely | Replace::BreakFirst => Stale::leaf(page, level),
            // What another processor owes for a split may not be paid yet: a larger leaf may be cached for the page.
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

/// An entry that is not a table, and where it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) cell: Cell,
    /// What the entry was when it was read, and what that says.
    pub(crate) bits: u64,
    pub(crate) entry: Entry,
    pub(crate) level: u32,
    /// First address that the entry decides about, and for how many bytes it does.
    pub(crate) start: Gpa,
    pub(crate) bytes: u64,
    /// The entry that names the table in which this one stands, if it is not a root.
    pub(crate) above: Option<Cell>,
}

impl Slot {
    /// All that the entry decides about.
    pub(crate) fn page(&self) -> GpaRange {
        range_between(self.start, Gpa(self.start.0 + self.bytes))
    }

    /// What the entry decides about from `gpa` on, and before `end`.
    pub(crate) fn piece(&self, gpa: Gpa, end: Gpa) -> GpaRange {
        range_between(gpa, end.min(self.page().end()))
    }

    /// Rights of the leaf, if it is one.
    pub(crate) fn access(&self) -> Option<Access> {
        match self.entry {
            Entry::Leaf { access, .. } => Some(access),
            Entry::Empty | Entry::Busy | Entry::Table(_) => None,
        }
    }

    /// Writes `new` if the entry is still what it was. Leaves are exchanged by [`Tree::exchange`].
    pub(crate) fn exchange(&self, pages: &impl Pages, new: u64) -> bool {
        pages.compare_exchange(self.cell, self.bits, new).is_ok()
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

/// Place of the entry for `gpa` in its table at `level`.
fn index<F: Format>(gpa: Gpa, level: u32) -> usize {
    let mask = entries::<F>() as u64 - 1;
    usize::try_from((gpa.0 / span::<F>(level)) & mask).expect("masked to at most nine bits")
}

/// Number of tables that form the root.
fn root_tables<F: Format>(format: &F) -> u32 {
    1 << format.input_bits().saturating_sub(12 + F::INDEX_BITS * format.levels())
}

pub(crate) fn range_between(start: Gpa, end: Gpa) -> GpaRange {
    GpaRange::new(start, end.0 - start.0).expect("both ends are addresses within the tree")
}

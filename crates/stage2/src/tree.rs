//! A tree, and the step that all operations share: the descent from the root to the first entry that is not a table.
//! This entry decides about an address.

use crate::{Access, Cell, ENTRIES, Entry, Format, Leaf, MapError, Pages, Replace, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};

/// A stage-2 translation: the tables of one VM.
///
/// The tree owns its tables but holds no reference to their pool. So each call gets the pool, which must always be the
/// same one. A tree that is dropped instead of [destroyed](Self::destroy) leaks its tables.
///
/// While another processor [collapses](Self::collapse) tables, the caller of any other operation must have
/// [announced](crate::Epochs::enter) itself first. Otherwise its descent may use a table that was freed.
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

    /// The leaf that maps `gpa`. `None` also while another processor replaces the leaf.
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

    /// Returns all tables to the pool.
    ///
    /// No processor may walk the tree any more: no vCPU runs on it, and every TLB that used it is flushed.
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

    /// The entry that decides about `gpa`: the first entry on the descent that is not a table.
    #[inline(always)]
    pub(crate) fn descend(&self, pages: &impl Pages, gpa: Gpa) -> Slot {
        self.descend_to(pages, gpa, 0)
    }

    /// The same, but not below level `lowest`, where the entry may be a table.
    #[inline(always)]
    pub(crate) fn descend_to(&self, pages: &impl Pages, gpa: Gpa, lowest: u32) -> Slot {
        // A descent of known length needs no loop.
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

    /// Like [`descend`](Self::descend), but waits while another processor replaces the entry.
    ///
    /// A caller that itself replaces an entry must not use it: two such callers would wait for each other.
    #[inline]
    pub(crate) fn settle(&self, pages: &impl Pages, tlb: &impl Tlb, gpa: Gpa) -> Slot {
        self.settle_to(pages, tlb, gpa, 0)
    }

    /// The same, but not below level `lowest`.
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

/// An entry that is not a table, and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) cell: Cell,
    /// The entry when it was read, raw and decoded.
    pub(crate) bits: u64,
    pub(crate) entry: Entry,
    pub(crate) level: u32,
    /// First address that the entry decides about, and the number of bytes.
    pub(crate) start: Gpa,
    pub(crate) bytes: u64,
    /// The entry that points to this entry's table, unless that table is the root.
    pub(crate) above: Option<Cell>,
}

impl Slot {
    /// The range that the entry decides about.
    pub(crate) fn page(&self) -> GpaRange {
        range_between(self.start, Gpa(self.start.0 + self.bytes))
    }

    /// The part of that range from `gpa` to `end`.
    pub(crate) fn piece(&self, gpa: Gpa, end: Gpa) -> GpaRange {
        range_between(gpa, end.min(self.page().end()))
    }

    /// Access rights of the leaf, if it is one.
    pub(crate) fn access(&self) -> Option<Access> {
        match self.entry {
            Entry::Leaf { access, .. } => Some(access),
            Entry::Empty | Entry::Busy | Entry::Table(_) => None,
        }
    }

    /// Writes `new` if the entry is unchanged. For leaves use [`Tree::exchange`].
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

/// Index of the entry for `gpa` in its table at `level`.
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

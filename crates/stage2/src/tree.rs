//! The walker: everything that is done with a tree, for any format.
//!
//! All operations share one step, [`Tree::descend`]: from the root to the first entry that is not a table, which is the
//! one that decides about an address. A range is handled entry by entry: decide, change, go on behind it.

use crate::{Access, Entry, Format, Leaf, MapError, Memory, Pages, Stale};
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};
use core::sync::atomic::{AtomicU64, Ordering};

/// A stage-2 translation: the tables of one VM.
///
/// The tree owns its tables but holds no reference to their pool, so each call names the pool, and it must always be the
/// same one. A tree that is dropped instead of [destroyed](Self::destroy) leaks its tables.
#[derive(Debug)]
pub struct Tree<F> {
    pub(crate) format: F,
    root: Hpa,
}

impl<F: Format> Tree<F> {
    /// An empty tree: a root, nothing mapped.
    pub fn new(format: F, pages: &impl Pages) -> Result<Self, MapError> {
        let root = match root_tables(&format) {
            1 => pages.allocate(),
            count => pages.allocate_root(count),
        };
        Ok(Self { root: root.ok_or(MapError::OutOfTables)?, format })
    }

    /// The root, for the register that the hardware starts from (SVM: nCR3; Arm: VTTBR_EL2).
    #[must_use]
    pub fn root(&self) -> Hpa {
        self.root
    }

    /// What is mapped at `gpa`.
    #[must_use]
    pub fn lookup(&self, pages: &impl Pages, gpa: Gpa) -> Option<Leaf> {
        if gpa >= self.limit() {
            return None;
        }
        let slot = self.descend(pages, gpa);
        match slot.entry {
            Entry::Leaf { hpa, access } => Some(Leaf { hpa, size: PageSize::at_level(slot.level)?, access }),
            Entry::Empty | Entry::Table(_) => None,
        }
    }

    /// Maps `range` to host memory from `hpa` on, in leaves as large as both alignments and the tables already there
    /// allow. Nothing in the range may be mapped before.
    ///
    /// Owes no flush on processors that do not cache empty entries; the result says so.
    pub fn map(&mut self, pages: &impl Pages, range: GpaRange, hpa: Hpa, access: Access) -> Result<Stale, MapError> {
        self.map_as(pages, range, hpa, access, Memory::Normal)
    }

    /// Maps the registers of a device as [`map`](Self::map) maps memory.
    pub fn map_device(
        &mut self,
        pages: &impl Pages,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
    ) -> Result<Stale, MapError> {
        self.map_as(pages, range, hpa, access, Memory::Device)
    }

    fn map_as(
        &mut self,
        pages: &impl Pages,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
        memory: Memory,
    ) -> Result<Stale, MapError> {
        self.check_range(range)?;
        self.check_host(hpa, range.bytes())?;
        self.check_access(access)?;

        // Prepare: the way is free, and every table that is missing on it is at hand.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.descend(pages, gpa);
            if let Entry::Leaf { .. } = slot.entry {
                return Err(MapError::Overlaps(slot.page()));
            }
            let piece = slot.piece(gpa, range.end());
            let top = self.largest_level(piece.start, host_of(range, hpa, piece.start));
            missing += tables_below(slot.level, top, piece);
            gpa = piece.end();
        }
        let mut spare = Spare::take(pages, missing)?;

        // Commit.
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.descend(pages, gpa);
            let target = host_of(range, hpa, gpa);

            match self.largest_leaf(gpa, target, range.end().0 - gpa.0, slot.level) {
                Some(size) if size.level() == slot.level => {
                    slot.entry_cell.store(self.format.leaf(target, size, access, memory), Ordering::Release);
                    gpa = Gpa(gpa.0 + size.bytes());
                }
                _ => slot.entry_cell.store(self.format.table(spare.next(pages)), Ordering::Release),
            }
        }
        Ok(Stale::EMPTY)
    }

    /// Unmaps `range`. What is not mapped there stays so; a large leaf that reaches over an end is split there.
    ///
    /// The host pages behind the range may be used for something else only after the flush.
    pub fn unmap(&mut self, pages: &impl Pages, range: GpaRange) -> Result<Stale, MapError> {
        self.change(pages, range, None)
    }

    /// Gives everything that is mapped in `range` the rights `access`, splitting large leaves at its ends as
    /// [`unmap`](Self::unmap) does. Holes stay holes.
    ///
    /// Rights that grow owe no flush: the guest's first use of them walks the tables again.
    pub fn protect(&mut self, pages: &impl Pages, range: GpaRange, access: Access) -> Result<Stale, MapError> {
        self.check_access(access)?;
        self.change(pages, range, Some(access))
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

    /// Gives every leaf in `range` the rights `wanted`, or removes it.
    fn change(&mut self, pages: &impl Pages, range: GpaRange, wanted: Option<Access>) -> Result<Stale, MapError> {
        self.check_range(range)?;

        // Prepare: tables to split the leaves that reach over an end of the range.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.descend(pages, gpa);
            let piece = slot.piece(gpa, range.end());
            if slot.access().is_some_and(|now| Some(now) != wanted) {
                missing += tables_below(slot.level, slot.level, piece);
            }
            gpa = piece.end();
        }
        let mut spare = Spare::take(pages, missing)?;

        // Commit.
        let mut stale = Stale::EMPTY;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.descend(pages, gpa);
            let piece = slot.piece(gpa, range.end());
            let Some(now) = slot.access().filter(|now| Some(*now) != wanted) else {
                gpa = piece.end();
                continue;
            };

            if piece != slot.page() {
                // Come back for the part that is meant. The split itself changes no translation and owes nothing.
                self.split(pages, &slot, spare.next(pages));
                continue;
            }
            match wanted {
                None => slot.entry_cell.store(0, Ordering::Release),
                // The hardware may set Accessed or Dirty in the meantime: change only what is ours.
                Some(access) => update(slot.entry_cell, |bits| self.format.with_access(bits, access)),
            }
            if !wanted.is_some_and(|access| access.includes(now)) {
                stale = stale.merge(Stale::of(piece));
            }
            gpa = piece.end();
        }
        Ok(stale)
    }

    /// Replaces the large leaf in `slot` by `table`, filled with 512 smaller leaves that say the same.
    fn split(&self, pages: &impl Pages, slot: &Slot<'_>, table: Hpa) {
        let part_level = slot.level - 1;
        let size = PageSize::at_level(part_level).expect("leaves exist at every level below a leaf");

        // When the hardware sets Accessed or Dirty between our look and our exchange, the parts must say so as well.
        let mut bits = slot.entry_cell.load(Ordering::Relaxed);
        loop {
            for (index, part) in (0..).zip(pages.table(table)) {
                part.store(self.format.part(bits, size, index), Ordering::Relaxed);
            }
            let link = self.format.table(table);
            match slot.entry_cell.compare_exchange(bits, link, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => bits = changed,
            }
        }
    }

    fn free_below(&self, pages: &impl Pages, table: Hpa, level: u32) {
        if level > 0 {
            for entry in pages.table(table) {
                if let Entry::Table(next) = self.format.decode(level, entry.load(Ordering::Relaxed)) {
                    self.free_below(pages, next, level - 1);
                }
            }
        }
        pages.free(table);
    }

    /// The entry that decides about `gpa`: the first on the way down that is not a table.
    pub(crate) fn descend<'p>(&self, pages: &'p impl Pages, gpa: Gpa) -> Slot<'p> {
        let mut level = self.format.levels() - 1;
        let mut table = Hpa(self.root.0 + (gpa.0 >> (12 + 9 * self.format.levels())) * PAGE_BYTES);
        loop {
            let entry_cell = &pages.table(table)[index(gpa, level)];
            match self.format.decode(level, entry_cell.load(Ordering::Acquire)) {
                Entry::Table(next) if level > 0 => {
                    table = next;
                    level -= 1;
                }
                entry => return Slot { entry_cell, entry, level, start: Gpa(gpa.0 & !(span(level) - 1)) },
            }
        }
    }

    /// The largest leaf at `level` or below that maps `gpa` to `hpa` and is no longer than `bytes`. A 4 KiB leaf always
    /// fits, so this is `None` only when no leaf exists at these levels.
    fn largest_leaf(&self, gpa: Gpa, hpa: Hpa, bytes: u64, level: u32) -> Option<PageSize> {
        PageSize::LARGEST_FIRST.into_iter().find(|size| {
            size.level() <= level
                && *size <= self.format.largest_leaf()
                && gpa.is_aligned(*size)
                && hpa.is_aligned(*size)
                && size.bytes() <= bytes
        })
    }

    /// The highest level at which leaves can map memory with the distance of `gpa` from `hpa`.
    fn largest_level(&self, gpa: Gpa, hpa: Hpa) -> u32 {
        PageSize::LARGEST_FIRST
            .into_iter()
            .find(|size| *size <= self.format.largest_leaf() && gpa.offset_in(*size) == hpa.offset_in(*size))
            .map_or(0, PageSize::level)
    }

    /// First address that the tree cannot translate.
    pub(crate) fn limit(&self) -> Gpa {
        Gpa(1 << self.format.input_bits())
    }

    fn check_range(&self, range: GpaRange) -> Result<(), MapError> {
        if !range.start.is_aligned(PageSize::Size4K) || !range.end().is_aligned(PageSize::Size4K) {
            return Err(MapError::Misaligned(range));
        }
        if range.end() > self.limit() {
            return Err(MapError::Beyond(range.start.max(self.limit())));
        }
        Ok(())
    }

    fn check_host(&self, hpa: Hpa, bytes: u64) -> Result<(), MapError> {
        if !hpa.is_aligned(PageSize::Size4K) {
            return Err(MapError::MisalignedHost(hpa));
        }
        let limit = self.format.host_limit();
        match hpa.checked_add(bytes) {
            Some(end) if end <= limit => Ok(()),
            _ => Err(MapError::BeyondHost(hpa.max(limit))),
        }
    }

    pub(crate) fn check_access(&self, access: Access) -> Result<(), MapError> {
        if self.format.expresses(access) { Ok(()) } else { Err(MapError::Inexpressible(access)) }
    }
}

/// An entry that is not a table, and where it stands.
pub(crate) struct Slot<'p> {
    pub(crate) entry_cell: &'p AtomicU64,
    /// What the entry said when it was read.
    pub(crate) entry: Entry,
    pub(crate) level: u32,
    /// First address that the entry decides about.
    start: Gpa,
}

impl Slot<'_> {
    /// All that the entry decides about.
    fn page(&self) -> GpaRange {
        range_between(self.start, Gpa(self.start.0 + span(self.level)))
    }

    /// What the entry decides about from `gpa` on, and before `end`.
    fn piece(&self, gpa: Gpa, end: Gpa) -> GpaRange {
        range_between(gpa, end.min(self.page().end()))
    }

    /// Rights of the leaf, if it is one.
    fn access(&self) -> Option<Access> {
        match self.entry {
            Entry::Leaf { access, .. } => Some(access),
            Entry::Empty | Entry::Table(_) => None,
        }
    }
}

/// Tables that are taken from the pool but part of no tree yet. They form a list: the first entry of each holds the
/// address of the next.
struct Spare {
    head: Hpa,
    count: u64,
}

impl Spare {
    /// Takes `count` tables, or none.
    fn take(pages: &impl Pages, count: u64) -> Result<Self, MapError> {
        let mut spare = Self { head: Hpa(0), count: 0 };
        while spare.count < count {
            let Some(table) = pages.allocate() else {
                while spare.count > 0 {
                    pages.free(spare.next(pages));
                }
                return Err(MapError::OutOfTables);
            };
            pages.table(table)[0].store(spare.head.0, Ordering::Relaxed);
            spare = Self { head: table, count: spare.count + 1 };
        }
        Ok(spare)
    }

    /// One of the tables, all zero.
    fn next(&mut self, pages: &impl Pages) -> Hpa {
        self.count = self.count.checked_sub(1).expect("the prepare step counted every table");
        let table = self.head;
        self.head = Hpa(pages.table(table)[0].swap(0, Ordering::Relaxed));
        table
    }
}

/// How many tables a `piece` of one entry at `level` needs below it, when leaves are possible up to level `top`.
///
/// At each level, an entry becomes a table when the piece covers it in part, or when it is too high for a leaf.
fn tables_below(level: u32, top: u32, piece: GpaRange) -> u64 {
    (1..=level)
        .map(|at| {
            let shift = span(at).trailing_zeros();
            let touched = ((piece.end().0 - 1) >> shift) - (piece.start.0 >> shift) + 1;
            let covered = (piece.end().0 >> shift).saturating_sub(piece.start.0.div_ceil(span(at)));
            if at > top { touched } else { touched - covered }
        })
        .sum()
}

/// Number of tables that form the root.
fn root_tables(format: &impl Format) -> u32 {
    1 << format.input_bits().saturating_sub(12 + 9 * format.levels())
}

/// Bytes that one entry at `level` decides about.
const fn span(level: u32) -> u64 {
    1 << (12 + 9 * level)
}

/// Place of the entry for `gpa` in its table at `level`.
fn index(gpa: Gpa, level: u32) -> usize {
    const MASK: u64 = crate::ENTRIES as u64 - 1;
    usize::try_from(gpa.0 >> (12 + 9 * level) & MASK).expect("masked to nine bits")
}

/// Where `gpa` of `range` belongs when the range starts at `hpa`.
fn host_of(range: GpaRange, hpa: Hpa, gpa: Gpa) -> Hpa {
    Hpa(hpa.0 + (gpa.0 - range.start.0))
}

fn range_between(start: Gpa, end: Gpa) -> GpaRange {
    GpaRange::new(start, end.0 - start.0).expect("both ends are addresses within the tree")
}

/// Atomically replaces the entry by what `change` makes of it.
pub(crate) fn update(cell: &AtomicU64, change: impl Fn(u64) -> u64) {
    let mut bits = cell.load(Ordering::Relaxed);
    while let Err(changed) = cell.compare_exchange_weak(bits, change(bits), Ordering::Release, Ordering::Relaxed) {
        bits = changed;
    }
}

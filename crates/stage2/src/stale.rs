//! The flush that a change requires: which translations a TLB may still hold although the tables have changed, and
//! whose TLB.
//!
//! From least to most: nothing; one page on the calling processor; a few pages on all processors; a range; everything
//! of the VM. Callers merge these values and flush once: the flushes of a thousand changes are often one range.

use crate::Tlb;
use addr::{Gpa, GpaRange};

/// Number of single pages that a value holds before it becomes a range.
const PAGES: usize = 8;

/// Translations that must be flushed before a change takes effect.
///
/// The flush must drop every cached translation that overlaps the named addresses, large ones too. Until then nothing
/// that the change took away may be reused: neither the host page behind an unmapped range, nor the assumption that a
/// write-protected page does not change.
///
/// An empty value is a value too, never `None`: the compiler warns when a caller drops it, but not when it drops an
/// `Option` around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "these translations may still be in use until they are flushed"]
pub struct Stale {
    scope: Scope,
    what: What,
    /// The smallest range that holds all of it; `start == end` if there is nothing to flush.
    start: Gpa,
    end: Gpa,
    /// A table was added or removed, so cached pointers to tables must go too, not only leaves.
    tables: bool,
    /// The level of all leaves to flush, if it is one and certain.
    level: Option<u32>,
}

/// Whose TLBs must be flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Only that of the processor that made the change. Others notice by themselves: their old entry faults.
    Local,
    /// That of every processor that may have run the guest.
    AllCpus,
}

/// What must be flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Nothing.
    Nothing,
    /// Leaves that start at these addresses.
    Pages(FewPages),
    /// All of a range.
    Range(GpaRange),
    /// Everything of the VM.
    Whole,
}

/// A few addresses of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewPages {
    list: [Gpa; PAGES],
    count: usize,
}

impl FewPages {
    /// The addresses.
    #[must_use]
    pub fn as_slice(&self) -> &[Gpa] {
        &self.list[..self.count]
    }

    /// Both lists as one, if it has room.
    fn joined(mut self, other: &Self) -> Option<Self> {
        for &gpa in other.as_slice() {
            if !self.as_slice().contains(&gpa) {
                *self.list.get_mut(self.count)? = gpa;
                self.count += 1;
            }
        }
        Some(self)
    }
}

impl Stale {
    /// Nothing to flush.
    pub const EMPTY: Self =
        Self { scope: Scope::Local, what: What::Nothing, start: Gpa(0), end: Gpa(0), tables: false, level: None };

    /// Everything of the VM, on all processors.
    pub const WHOLE: Self =
        Self { scope: Scope::AllCpus, what: What::Whole, start: Gpa(0), end: Gpa(u64::MAX), tables: true, level: None };

    /// The leaf at `level` that covers `range`, on all processors.
    pub fn leaf(range: GpaRange, level: u32) -> Self {
        Self::page(range, level, Scope::AllCpus)
    }

    /// The leaf at `level` that covers `range`, on the calling processor.
    pub fn local(range: GpaRange, level: u32) -> Self {
        Self::page(range, level, Scope::Local)
    }

    /// Everything within `range`, on all processors: leaves of all sizes, and pointers to tables.
    pub fn of(range: GpaRange) -> Self {
        if range.bytes() == 0 {
            return Self::EMPTY;
        }
        Self {
            scope: Scope::AllCpus,
            what: What::Range(range),
            start: range.start,
            end: range.end(),
            tables: true,
            level: None,
        }
    }

    fn page(range: GpaRange, level: u32, scope: Scope) -> Self {
        let mut list = [Gpa(0); PAGES];
        list[0] = range.start;
        let what = What::Pages(FewPages { list, count: 1 });
        Self { scope, what, start: range.start, end: range.end(), tables: false, level: Some(level) }
    }

    /// Whether there is nothing to flush.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.what, What::Nothing)
    }

    /// Whose TLBs must be flushed, if there is anything to flush.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        self.scope
    }

    /// What must be flushed.
    #[must_use]
    pub const fn what(&self) -> What {
        self.what
    }

    /// Whether pointers to tables must be flushed too.
    #[must_use]
    pub const fn tables(&self) -> bool {
        self.tables
    }

    /// The level of all leaves to flush, if it is one and certain.
    #[must_use]
    pub const fn level(&self) -> Option<u32> {
        self.level
    }

    /// The smallest range that holds everything to flush; empty if there is nothing.
    #[must_use]
    pub fn range(&self) -> GpaRange {
        GpaRange::new(self.start, self.end.0 - self.start.0).expect("both ends are addresses")
    }

    /// Flushes now, if there is anything to flush.
    pub fn pay(self, tlb: &impl Tlb) {
        if !self.is_empty() {
            tlb.flush(self);
        }
    }

    /// The same flush, where entries of several sizes may be cached for the addresses: no level is certain.
    pub const fn of_any_size(mut self) -> Self {
        self.level = None;
        self
    }

    /// Adds the flush of one more leaf: what [`merge`](Self::merge) gives, and fast once there is a range.
    pub(crate) fn add(&mut self, leaf: Self) {
        if let (What::Range(range), What::Pages(_)) = (&mut self.what, &leaf.what)
            && self.scope >= leaf.scope
        {
            let (start, end) = (self.start.min(leaf.start), self.end.max(leaf.end));
            if let Some(grown) = GpaRange::new(start, end.0 - start.0) {
                (*range, self.start, self.end) = (grown, start, end);
                self.tables |= leaf.tables;
                self.level = self.level.filter(|level| Some(*level) == leaf.level);
                return;
            }
        }
        *self = self.merge(leaf);
    }

    /// One flush for both. It may cover more than the two: a flush of too much is only slow.
    pub fn merge(self, other: Self) -> Self {
        if self.is_empty() {
            return other;
        }
        if other.is_empty() {
            return self;
        }
        let (start, end) = (self.start.min(other.start), self.end.max(other.end));
        let what = match (self.what, other.what) {
            (What::Whole, _) | (_, What::Whole) => What::Whole,
            (What::Pages(mine), What::Pages(theirs)) => mine
                .joined(&theirs)
                .map_or_else(|| GpaRange::new(start, end.0 - start.0).map_or(What::Whole, What::Range), What::Pages),
            _ => GpaRange::new(start, end.0 - start.0).map_or(What::Whole, What::Range),
        };
        Self {
            scope: self.scope.max(other.scope),
            what,
            start,
            end,
            tables: self.tables || other.tables,
            level: if self.level == other.level { self.level } else { None },
        }
    }
}

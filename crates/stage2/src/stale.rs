//! The debt of a change: which translations may still be in a TLB although the tables no longer say so, and whose.
//!
//! From least to most: nothing; one page of the processor that asks; a few pages of everybody; a range; all that the VM
//! has. Debts are gathered and paid together: what a thousand changes owe is often one range.

use crate::Tlb;
use addr::{Gpa, GpaRange};

/// Single pages that a debt remembers before it becomes a range.
const PAGES: usize = 8;

/// Translations that must be flushed before a change can be relied on.
///
/// To be flushed is every cached translation that touches what is named, so a large one that merely overlaps it as well.
/// Nothing that the change took away may be reused before: neither the host page behind an unmapped range, nor the
/// belief that a write-protected page no longer changes.
///
/// An empty debt is a value too, never an absent one: the compiler warns of a debt that is dropped, but not of one that
/// is dropped inside an `Option`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "these translations may still be in use until they are flushed"]
pub struct Stale {
    reach: Reach,
    what: What,
    /// The smallest range that holds all of it; `start == end` when nothing is owed.
    start: Gpa,
    end: Gpa,
    /// A table went away or came, so cached pointers to tables are owed too, not just leaves.
    tables: bool,
    /// The level of all leaves that are owed, where it is one and certain.
    level: Option<u32>,
}

/// Whose TLBs a debt is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Of the processor that made the change. Others find out by themselves: their old entry faults.
    Local,
    /// Of every processor that may have run the guest.
    Everybody,
}

/// What a debt names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Nothing.
    Nothing,
    /// Leaves that start at these addresses.
    Pages(FewPages),
    /// All of a range.
    Range(GpaRange),
    /// All that the VM has.
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

    /// Both lists as one, if they fit.
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
    /// Nothing needs to be flushed.
    pub const EMPTY: Self =
        Self { reach: Reach::Local, what: What::Nothing, start: Gpa(0), end: Gpa(0), tables: false, level: None };

    /// Everything of the VM needs to be flushed, everywhere.
    pub const WHOLE: Self = Self {
        reach: Reach::Everybody,
        what: What::Whole,
        start: Gpa(0),
        end: Gpa(u64::MAX),
        tables: true,
        level: None,
    };

    /// The leaf at `level` that covers `range`, everywhere.
    pub fn leaf(range: GpaRange, level: u32) -> Self {
        Self::page(range, level, Reach::Everybody)
    }

    /// The leaf at `level` that covers `range`, from the TLB of the processor that asks.
    pub fn local(range: GpaRange, level: u32) -> Self {
        Self::page(range, level, Reach::Local)
    }

    /// Everything within `range`, everywhere: leaves of all sizes, and pointers to tables.
    pub fn of(range: GpaRange) -> Self {
        if range.bytes() == 0 {
            return Self::EMPTY;
        }
        Self {
            reach: Reach::Everybody,
            what: What::Range(range),
            start: range.start,
            end: range.end(),
            tables: true,
            level: None,
        }
    }

    fn page(range: GpaRange, level: u32, reach: Reach) -> Self {
        let mut list = [Gpa(0); PAGES];
        list[0] = range.start;
        let what = What::Pages(FewPages { list, count: 1 });
        Self { reach, what, start: range.start, end: range.end(), tables: false, level: Some(level) }
    }

    /// Whether nothing needs to be flushed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.what, What::Nothing)
    }

    /// Whose TLBs are concerned, if anything is owed.
    #[must_use]
    pub const fn reach(&self) -> Reach {
        self.reach
    }

    /// What needs to be flushed.
    #[must_use]
    pub const fn what(&self) -> What {
        self.what
    }

    /// Whether pointers to tables are owed too.
    #[must_use]
    pub const fn tables(&self) -> bool {
        self.tables
    }

    /// The level of all leaves that are owed, where it is one and certain.
    #[must_use]
    pub const fn level(&self) -> Option<u32> {
        self.level
    }

    /// The smallest range that holds all that needs to be flushed; empty when nothing does.
    #[must_use]
    pub fn range(&self) -> GpaRange {
        GpaRange::new(self.start, self.end.0 - self.start.0).expect("both ends are addresses")
    }

    /// Pays at once, if anything is owed.
    pub fn pay(self, tlb: &impl Tlb) {
        if !self.is_empty() {
            tlb.flush(self);
        }
    }

    /// The same debt, where entries of several sizes may be cached for what it names: no level is certain.
    pub const fn of_any_size(mut self) -> Self {
        self.level = None;
        self
    }

    /// One debt for both. It may name more than the two: a flush of too much is only slow.
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
            reach: self.reach.max(other.reach),
            what,
            start,
            end,
            tables: self.tables || other.tables,
            level: if self.level == other.level { self.level } else { None },
        }
    }
}

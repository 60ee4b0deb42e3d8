//! The debt of a change: which translations may still be in a TLB although the tables no longer say so.

use addr::{Gpa, GpaRange};

/// Translations that must be flushed before a change can be relied on.
///
/// To be flushed is every cached translation that touches the range, so a large one that merely overlaps it as well.
/// Nothing that the change took away may be reused before: neither the host page behind an unmapped range, nor the
/// belief that a write-protected page no longer changes.
///
/// An empty debt is a value too, never an absent one: the compiler warns of a debt that is dropped, but not of one that
/// is dropped inside an `Option`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "translations of this range may still be in use until they are flushed"]
pub struct Stale {
    start: Gpa,
    /// First byte after the range; equal to `start` when nothing is owed.
    end: Gpa,
}

impl Stale {
    /// Nothing needs to be flushed.
    pub const EMPTY: Self = Self { start: Gpa(0), end: Gpa(0) };

    /// Everything within `range` needs to be flushed.
    pub const fn of(range: GpaRange) -> Self {
        Self { start: range.start, end: range.end() }
    }

    /// Whether nothing needs to be flushed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.start.0 == self.end.0
    }

    /// What needs to be flushed; empty when nothing does.
    #[must_use]
    pub fn range(&self) -> GpaRange {
        GpaRange::new(self.start, self.end.0 - self.start.0).expect("both ends are addresses")
    }

    /// One debt for both. What lies between the two is included: a flush of too much is only slow.
    pub fn merge(self, other: Self) -> Self {
        if self.is_empty() {
            other
        } else if other.is_empty() {
            self
        } else {
            Self { start: self.start.min(other.start), end: self.end.max(other.end) }
        }
    }
}

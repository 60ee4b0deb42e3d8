//! A tag, and a range of them.

use core::num::NonZeroU32;

/// The tag of one guest's TLB entries. Zero is the host's, so no such value exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(NonZeroU32);

impl Tag {
    /// The number for the hardware.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

/// A run of tags. Pools on one machine have ranges that do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagRange {
    first: NonZeroU32,
    count: u32,
}

impl TagRange {
    /// `count` tags from `first` on. Zero is not a tag, so a range begins at 1 or above and has at least one tag.
    #[must_use]
    pub const fn new(first: u32, count: u32) -> Self {
        let first = match NonZeroU32::new(first) {
            Some(first) => first,
            None => NonZeroU32::MIN,
        };
        let room = u32::MAX - first.get() + 1;
        let count = if count == 0 {
            1
        } else if count > room {
            room
        } else {
            count
        };
        Self { first, count }
    }

    /// The first tag.
    #[must_use]
    pub const fn first(self) -> Tag {
        Tag(self.first)
    }

    /// Number of tags; at least one.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.count
    }

    /// The tag at `index`, or the last one if `index` is too large.
    #[inline]
    pub(crate) fn at(self, index: u32) -> Tag {
        Tag(self.first.saturating_add(index.min(self.count - 1)))
    }
}

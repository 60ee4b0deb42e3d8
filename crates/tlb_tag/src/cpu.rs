//! A pCPU's state of a pool. Only that pCPU writes it.

use alloc::boxed::Box;
use alloc::vec;

use crate::pool::Scheme;
use crate::rivals::Generations;
use crate::tag::TagRange;

/// The tags of a pool, as one pCPU has assigned them.
#[derive(Debug)]
pub struct CpuTags {
    pub(crate) range: TagRange,
    pub(crate) can_flush_one_tag: bool,
    pub(crate) generations: Generations,
    pub(crate) cache: Cache,
    pub(crate) counts: Counts,
}

/// A pCPU's statistics for a pool. Entries are not counted here: each is one check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Assignments of a tag: the next one in order, or one that another vCPU had here.
    pub assignments: u64,
    /// New generations.
    pub generations: u64,
    /// Entries that flushed one tag.
    pub tag_flushes: u64,
    /// Entries that flushed everything.
    pub full_flushes: u64,
}

impl CpuTags {
    pub(crate) fn new(scheme: Scheme, range: TagRange, can_flush_one_tag: bool) -> Self {
        let slots = if scheme == Scheme::Epoch { range.count() } else { 0 };
        Self {
            range,
            can_flush_one_tag,
            generations: Generations::new(),
            cache: Cache { holders: vec![NOBODY; slots as usize].into_boxed_slice(), unused: slots, random: 1 },
            counts: Counts::default(),
        }
    }

    /// The statistics so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// For [`Scheme::Epoch`]: which vCPU uses each tag on this pCPU.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Names of vCPUs, by index of the tag.
    holders: Box<[u64]>,
    /// All tags from here on were in use at some time.
    unused: u32,
    random: u32,
}

/// No vCPU has this name.
pub(crate) const NOBODY: u64 = 0;

impl Cache {
    /// Whether the tag is used for `name`.
    pub(crate) fn holds(&self, index: u32, name: u64) -> bool {
        self.holders.get(index as usize) == Some(&name)
    }

    /// A tag for `name`. It prefers its home tag, then the tag that it held before.
    pub(crate) fn take(&mut self, name: u64, home: Option<u32>, before: u32) -> u32 {
        let index = match home {
            // Evict the guest vCPU that uses the home tag.
            Some(home) => home,
            None if self.holds(before, name) => before,
            None => self.unused().unwrap_or_else(|| self.victim()),
        };
        if let Some(holder) = self.holders.get_mut(index as usize) {
            *holder = name;
        }
        index
    }

    /// The highest unused tag; home tags are assigned from the lowest on.
    fn unused(&mut self) -> Option<u32> {
        while self.unused > 0 {
            self.unused -= 1;
            if self.holds(self.unused, NOBODY) {
                return Some(self.unused);
            }
        }
        None
    }

    /// Evicts at random. vCPUs take turns, so the least recently used one is needed next: to evict it would be the
    /// worst choice.
    fn victim(&mut self) -> u32 {
        // xorshift32 (Marsaglia 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random % u32::try_from(self.holders.len()).unwrap_or(u32::MAX).max(1)
    }
}

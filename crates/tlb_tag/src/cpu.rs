//! A pCPU's state of a pool. Only that pCPU writes it.

use alloc::boxed::Box;
use alloc::vec;

use crate::pool::Scheme;
use crate::tag::{Tag, TagRange};

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

/// For [`Scheme::Generation`]; with other schemes there is only the first generation.
#[derive(Debug)]
pub(crate) struct Generations {
    /// The current generation if no flush is due; otherwise [`NONE`], which no vCPU has. One word, so that an entry
    /// compares one.
    pub(crate) valid: u64,
    /// The current generation. 64 bits never overflow.
    current: u64,
    /// Index of the next tag to assign.
    next: u32,
    /// The epoch that last made this pCPU begin a new generation.
    epoch: u64,
}

/// The first generation of a pCPU.
pub(crate) const FIRST_GENERATION: u64 = 1;
/// No vCPU's tag is of this generation.
const NONE: u64 = u64::MAX;

impl Generations {
    fn new() -> Self {
        Self { valid: FIRST_GENERATION, current: FIRST_GENERATION, next: 0, epoch: 0 }
    }

    /// The current generation.
    pub(crate) fn current(&self) -> u64 {
        self.current
    }

    /// Whether a new generation has begun, and no entry has flushed since. The debt belongs to the pCPU: the next entry
    /// flushes.
    pub(crate) fn owes_flush(&self) -> bool {
        self.valid == NONE
    }

    /// An entry has flushed everything.
    pub(crate) fn flushed(&mut self) {
        self.valid = self.current;
    }

    /// Assigns the next tag, in a new generation if none is left. Also returns whether one began.
    pub(crate) fn assign(&mut self, range: TagRange) -> (Tag, bool) {
        let begins = self.next >= range.count();
        if begins {
            self.current += 1;
            self.next = 0;
        }
        let index = self.next;
        self.next += 1;
        // In the last generation the first tag had another owner, and so had all that follow. So everything is flushed
        // once, before any of them is used. (Flushing this one tag is not enough: Xen's mistake from 2019 to 2025.)
        if index == 0 {
            self.valid = NONE;
        } else if !self.owes_flush() {
            self.valid = self.current;
        }
        (range.at(index), begins)
    }

    /// All TLB entries of some VM became void. The VM's tags are not known here, so all tags of the pCPU become void,
    /// whatever VM they belong to.
    pub(crate) fn meet_epoch(&mut self, epoch: u64) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.current += 1;
            if !self.owes_flush() {
                self.valid = self.current;
            }
        }
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

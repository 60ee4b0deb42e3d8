//! What a pCPU keeps of a pool. Written by that pCPU alone.

use alloc::boxed::Box;
use alloc::vec;

use crate::pool::Scheme;
use crate::tag::{Tag, TagRange};

/// The tags of a pool as one pCPU has handed them out.
#[derive(Debug)]
pub struct CpuTags {
    pub(crate) range: TagRange,
    pub(crate) can_flush_one_tag: bool,
    pub(crate) generations: Generations,
    pub(crate) cache: Cache,
    pub(crate) counts: Counts,
}

/// What a pCPU has done for a pool. Entries are not counted here: each is one check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times that a vCPU was given a tag: one after another's, or one that another had here.
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

    /// What was done so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// For [`Scheme::Generation`]; with other schemes there is only the first.
#[derive(Debug)]
pub(crate) struct Generations {
    /// The current generation while nothing is owed; otherwise [`NONE`], which no vCPU has. One word, so that an entry
    /// compares one.
    pub(crate) valid: u64,
    /// The current generation. 64 bits do not run out.
    current: u64,
    /// Index of the tag to hand out next.
    next: u32,
    /// The epoch that last made this pCPU begin a new generation.
    epoch: u64,
}

/// The generation that a pCPU begins with.
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

    /// Whether a new generation has begun, and no entry has flushed since. The debt is the pCPU's: whoever enters first
    /// pays.
    pub(crate) fn owes_flush(&self) -> bool {
        self.valid == NONE
    }

    /// An entry has flushed everything.
    pub(crate) fn flushed(&mut self) {
        self.valid = self.current;
    }

    /// The next tag; a new generation when there is none left. Says whether one began.
    pub(crate) fn assign(&mut self, range: TagRange) -> (Tag, bool) {
        let begins = self.next >= range.count();
        if begins {
            self.current += 1;
            self.next = 0;
        }
        let index = self.next;
        self.next += 1;
        // The first tag of a generation had another owner in the last one, and so have all that follow: everything goes
        // once, before any of them is used. (Flushing this one tag would not do: Xen's fault from 2019 to 2025.)
        if index == 0 {
            self.valid = NONE;
        } else if !self.owes_flush() {
            self.valid = self.current;
        }
        (range.at(index), begins)
    }

    /// All TLB entries of some VM became void. The tags of that VM are not known here, so all tags of the pCPU are
    /// voided, whoever they belong to.
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

/// For [`Scheme::Epoch`]: which vCPU each tag is used for on this pCPU.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Names of vCPUs, by index of the tag.
    holders: Box<[u64]>,
    /// Tags from here on were all in use at some time.
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

    /// A tag for `name`, which prefers its home, then a tag that it held before.
    pub(crate) fn take(&mut self, name: u64, home: Option<u32>, before: u32) -> u32 {
        let index = match home {
            // Whoever is a guest there has to go.
            Some(home) => home,
            None if self.holds(before, name) => before,
            None => self.unused().unwrap_or_else(|| self.victim()),
        };
        if let Some(holder) = self.holders.get_mut(index as usize) {
            *holder = name;
        }
        index
    }

    /// The highest tag that nobody has used; homes are given out from the lowest on.
    fn unused(&mut self) -> Option<u32> {
        while self.unused > 0 {
            self.unused -= 1;
            if self.holds(self.unused, NOBODY) {
                return Some(self.unused);
            }
        }
        None
    }

    /// Any tag. vCPUs take turns, so the one that was used longest ago is the one that is needed next: to take that one
    /// from it would be the worst choice, and chance is better.
    fn victim(&mut self) -> u32 {
        // xorshift32 (Marsaglia 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random % u32::try_from(self.holders.len()).unwrap_or(u32::MAX).max(1)
    }
}

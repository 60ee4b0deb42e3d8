//! What each pCPU remembers: whose entries are under which tag. Only that pCPU writes it.

use alloc::boxed::Box;
use alloc::vec;

use super::pool::{FIRST_GENERATION, Id};
use crate::tag::TagRange;

/// What one pCPU knows about its TLB.
#[derive(Debug)]
pub struct CpuTags {
    pub(super) number: usize,
    /// The generation of the last flush of everything.
    clean_since: u64,
    /// By index of the tag.
    last: Box<[Last]>,
    pub(super) counts: Counts,
}

/// The last entry with a tag since the last flush of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Last {
    who: Name,
    /// Of the VM.
    epoch: u64,
}

/// Identifies a vCPU among all others ever made, and its VM: the VM's name in the upper bits, the vCPU's number in the
/// lower bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name(u64);

const NUMBER_BITS: u32 = 16;

impl Name {
    /// No vCPU: VMs' names begin at 1.
    const NOBODY: Self = Self(0);

    /// `number` is below 2^16, because a pool's VMs have fewer vCPUs.
    pub(super) const fn new(vm: u64, number: u64) -> Self {
        Self(vm << NUMBER_BITS | number & ((1 << NUMBER_BITS) - 1))
    }

    const fn is_sibling(self, other: Self) -> bool {
        self.0 >> NUMBER_BITS == other.0 >> NUMBER_BITS
    }
}

/// A pCPU's statistics for a pool. Entries are not counted here: each is one check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Arrivals of a vCPU whose VM had another tag when the vCPU ran last.
    pub assignments: u64,
    /// New generations that began with an arrival here.
    pub generations: u64,
    /// Entries that flushed the guest's own translations.
    pub own_flushes: u64,
    /// Entries that flushed one tag.
    pub tag_flushes: u64,
    /// Entries that flushed everything.
    pub full_flushes: u64,
}

/// No generation is this one.
const NEVER: u64 = FIRST_GENERATION - 1;
const NOBODY: Last = Last { who: Name::NOBODY, epoch: 0 };

/// What is under a tag, for a vCPU that is about to use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// No entries.
    Nothing,
    /// Entries of the same vCPU.
    Mine,
    /// Entries of another vCPU of the VM, in the same epoch.
    Sibling,
    /// Entries of another VM, or of another epoch.
    Other,
    /// Unknown: tags were reassigned since.
    Unknown,
}

impl CpuTags {
    pub(super) fn new(number: usize, range: TagRange, inherits: bool) -> Self {
        Self {
            number,
            clean_since: if inherits { NEVER } else { FIRST_GENERATION },
            last: vec![NOBODY; range.count() as usize].into_boxed_slice(),
            counts: Counts::default(),
        }
    }

    /// The statistics so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What is under the tag `id`, for this vCPU in this epoch of its VM.
    pub(super) fn find(&self, id: Id, who: Name, epoch: u64) -> Found {
        if self.clean_since != id.generation() {
            return Found::Unknown;
        }
        match self.last.get(id.index() as usize) {
            Some(&NOBODY) => Found::Nothing,
            Some(last) if last.epoch != epoch => Found::Other,
            Some(last) if last.who == who => Found::Mine,
            Some(last) if last.who.is_sibling(who) => Found::Sibling,
            _ => Found::Other,
        }
    }

    /// Records a flush of everything for the generation of `id`.
    pub(super) fn flushed(&mut self, id: Id) {
        self.clean_since = id.generation();
        self.last.fill(NOBODY);
    }

    /// Records an entry of the vCPU with the tag `id`.
    pub(super) fn entered(&mut self, id: Id, who: Name, epoch: u64) {
        if let Some(last) = self.last.get_mut(id.index() as usize) {
            *last = Last { who, epoch };
        }
    }
}

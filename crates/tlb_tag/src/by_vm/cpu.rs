//! Whose entries are under which tag: what each pCPU remembers. Written by that pCPU alone.

use alloc::boxed::Box;
use alloc::vec;

use super::pool::{FIRST_GENERATION, Id};
use crate::tag::TagRange;

/// What one pCPU knows about its TLB.
#[derive(Debug)]
pub struct CpuTags {
    pub(super) number: usize,
    /// The generation that everything was last flushed for.
    clean_since: u64,
    /// By index of the tag.
    last: Box<[Last]>,
    pub(super) counts: Counts,
}

/// The last entry with a tag since everything was flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Last {
    who: Name,
    /// Of the VM.
    epoch: u64,
}

/// Tells a vCPU from all others ever made, and says which VM it is of: the VM's name above, its number there below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name(u64);

const NUMBER_BITS: u32 = 16;

impl Name {
    /// Nobody's: VMs' names begin at 1.
    const NOBODY: Self = Self(0);

    /// `number` is below 2^16: a pool's VMs have fewer vCPUs.
    pub(super) const fn new(vm: u64, number: u64) -> Self {
        Self(vm << NUMBER_BITS | number & ((1 << NUMBER_BITS) - 1))
    }

    const fn is_sibling(self, other: Self) -> bool {
        self.0 >> NUMBER_BITS == other.0 >> NUMBER_BITS
    }
}

/// What a pCPU has done for a pool. Entries are not counted here: each is one check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times that a vCPU arrived whose VM had another tag than when it ran last.
    pub assignments: u64,
    /// New generations that began with an arrival here.
    pub generations: u64,
    /// Entries that flushed what belonged to the guest's own tables.
    pub own_flushes: u64,
    /// Entries that flushed one tag.
    pub tag_flushes: u64,
    /// Entries that flushed everything.
    pub full_flushes: u64,
}

const NOBODY: Last = Last { who: Name::NOBODY, epoch: 0 };

/// What is under a tag, seen by who is about to use it.
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
    /// Nobody knows: tags were handed out anew since.
    Unknown,
}

impl CpuTags {
    pub(super) fn new(number: usize, range: TagRange) -> Self {
        Self {
            number,
            clean_since: FIRST_GENERATION,
            last: vec![NOBODY; range.count() as usize].into_boxed_slice(),
            counts: Counts::default(),
        }
    }

    /// What was done so far.
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

    /// Everything was flushed for the generation of `id`.
    pub(super) fn flushed(&mut self, id: Id) {
        self.clean_since = id.generation();
        self.last.fill(NOBODY);
    }

    /// The vCPU was entered with the tag `id`.
    pub(super) fn entered(&mut self, id: Id, who: Name, epoch: u64) {
        if let Some(last) = self.last.get_mut(id.index() as usize) {
            *last = Last { who, epoch };
        }
    }
}

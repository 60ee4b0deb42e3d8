//! A machine whose TLBs keep everything that the manual allows: the reference model of the tests.
//!
//! Real TLBs are small and drop many entries by chance, and emulators flush far more than they must. Neither shows a
//! missing flush. Here an entry stays until an invalidation covers it, without limit, and an older entry stays next to
//! a newer one for the same page. A test runs the released code on this machine. At each access it asks for *all*
//! possible answers of the TLB: if one of them must not be visible any more, a flush was missing.
//!
//! ```
//! use hw_model::{Machine, Tag};
//!
//! let mut machine = Machine::new(2);
//! let (page, tag) = (7, Tag(1));
//! machine.walk(0, tag, page, "old");
//!
//! // The guest's page table changes. Both may be seen now, until the entry is flushed.
//! machine.walk(0, tag, page, "new");
//! assert_eq!(machine.answers(0, tag, page), ["new", "old"]);
//! machine.flush_page(0, tag, page);
//! assert!(machine.answers(0, tag, page).is_empty());
//! ```
//!
//! The rules are those of SVM (APM vol. 2, 15.15 and 15.16). An entry belongs to a pCPU, a tag and a page. An
//! invalidation affects one pCPU. A walk may happen at any time while a guest runs, also without an access. Arm also
//! has invalidations for all pCPUs ([`Machine::flush_page_everywhere`] and similar), by the tag of the pCPU that
//! executes them.
//!
//! Here the test says what a walk finds. [`Walks`](walks::Walks) is a machine that walks stage-2 tables by itself while
//! they change. [`ept`] has the rules of Intel's processors, where they differ. [`trace`] checks what a real host has
//! done.

#![forbid(unsafe_code)]

pub mod ept;
pub mod trace;
pub mod walks;

use std::collections::{BTreeMap, BTreeSet};

/// The number that separates entries of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag(pub u32);

/// pCPUs and their TLBs. `T` is the translation of a page; tests use any type that lets them judge an answer.
#[derive(Clone, Debug)]
pub struct Machine<T> {
    tlbs: Vec<BTreeMap<(Tag, u64), BTreeSet<T>>>,
    counts: Counts,
}

/// Number of invalidations done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of everything.
    pub everything: u64,
    /// Of one tag.
    pub tags: u64,
    /// Of one page of one tag.
    pub pages: u64,
    /// Of one tag, or one page of it, on all pCPUs.
    pub broadcasts: u64,
}

impl<T: Copy + Ord> Machine<T> {
    /// A machine with empty TLBs.
    #[must_use]
    pub fn new(cpus: usize) -> Self {
        Self { tlbs: vec![BTreeMap::new(); cpus], counts: Counts::default() }
    }

    /// The guest with `tag` on `cpu` walks its tables, for an access or speculatively, and finds `translation`.
    pub fn walk(&mut self, cpu: usize, tag: Tag, page: u64, translation: T) {
        self.tlbs[cpu].entry((tag, page)).or_default().insert(translation);
    }

    /// All possible answers of the TLB to an access, in order of `T`.
    #[must_use]
    pub fn answers(&self, cpu: usize, tag: Tag, page: u64) -> Vec<T> {
        self.tlbs[cpu].get(&(tag, page)).into_iter().flatten().copied().collect()
    }

    /// Drops all entries of `cpu`.
    pub fn flush_everything(&mut self, cpu: usize) {
        self.tlbs[cpu].clear();
        self.counts.everything += 1;
    }

    /// Drops the entries of one tag from `cpu`.
    pub fn flush_tag(&mut self, cpu: usize, tag: Tag) {
        self.tlbs[cpu].retain(|&(owner, _), _| owner != tag);
        self.counts.tags += 1;
    }

    /// Drops the entries of one page of one tag from `cpu`.
    pub fn flush_page(&mut self, cpu: usize, tag: Tag, page: u64) {
        self.tlbs[cpu].remove(&(tag, page));
        self.counts.pages += 1;
    }

    /// Drops the entries of one page of one tag from all pCPUs.
    pub fn flush_page_everywhere(&mut self, tag: Tag, page: u64) {
        self.tlbs.iter_mut().for_each(|tlb| drop(tlb.remove(&(tag, page))));
        self.counts.broadcasts += 1;
    }

    /// Drops the entries of one tag from all pCPUs.
    pub fn flush_tag_everywhere(&mut self, tag: Tag) {
        self.tlbs.iter_mut().for_each(|tlb| tlb.retain(|&(owner, _), _| owner != tag));
        self.counts.broadcasts += 1;
    }

    /// Invalidations so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

//! A machine whose TLBs forget nothing that the manual lets them keep: the oracle of the tests.
//!
//! Real TLBs are small and forget much by chance, and emulators flush far more than they must; a missing flush shows on
//! neither. Here an entry stays until an invalidation covers it, however long that takes, and beside a newer entry
//! for the same page the older one stays as well. A test lets this machine run with the code that ships, and asks at
//! each access for *all* that the TLB might answer: if any of it must not be seen any more, a flush was missing.
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
//! The rules are those of SVM (APM vol. 2, 15.15 and 15.16): entries are told apart by pCPU, tag and page; an
//! invalidation concerns one pCPU; a walk may happen at any time while a guest runs, asked for or not. On Arm there are
//! also invalidations that reach all pCPUs ([`Machine::flush_page_everywhere`] and its like), by the tag of the one that asks.
//!
//! What walks find, the test says here. A machine that walks stage-2 tables by itself, as they are being changed, is
//! [`Walks`](walks::Walks). It also judges what a real host has done: [`trace`].

#![forbid(unsafe_code)]

pub mod trace;
pub mod walks;

use std::collections::{BTreeMap, BTreeSet};

/// The number that entries are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag(pub u32);

/// pCPUs and their TLBs. `T` is what a page is translated to; tests put there whatever lets them judge an answer.
#[derive(Clone, Debug)]
pub struct Machine<T> {
    tlbs: Vec<BTreeMap<(Tag, u64), BTreeSet<T>>>,
    counts: Counts,
}

/// Invalidations that were carried out.
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

    /// The guest with `tag` on `cpu` walks its tables, by an access or ahead of one, and finds `translation`.
    pub fn walk(&mut self, cpu: usize, tag: Tag, page: u64, translation: T) {
        self.tlbs[cpu].entry((tag, page)).or_default().insert(translation);
    }

    /// All that an access may be answered with from the TLB, in order of `T`.
    #[must_use]
    pub fn answers(&self, cpu: usize, tag: Tag, page: u64) -> Vec<T> {
        self.tlbs[cpu].get(&(tag, page)).into_iter().flatten().copied().collect()
    }

    /// All entries of `cpu` go.
    pub fn flush_everything(&mut self, cpu: usize) {
        self.tlbs[cpu].clear();
        self.counts.everything += 1;
    }

    /// The entries of one tag go from `cpu`.
    pub fn flush_tag(&mut self, cpu: usize, tag: Tag) {
        self.tlbs[cpu].retain(|&(owner, _), _| owner != tag);
        self.counts.tags += 1;
    }

    /// The entries of one page of one tag go from `cpu`.
    pub fn flush_page(&mut self, cpu: usize, tag: Tag, page: u64) {
        self.tlbs[cpu].remove(&(tag, page));
        self.counts.pages += 1;
    }

    /// The entries of one page of one tag go from all pCPUs.
    pub fn flush_page_everywhere(&mut self, tag: Tag, page: u64) {
        self.tlbs.iter_mut().for_each(|tlb| drop(tlb.remove(&(tag, page))));
        self.counts.broadcasts += 1;
    }

    /// The entries of one tag go from all pCPUs.
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

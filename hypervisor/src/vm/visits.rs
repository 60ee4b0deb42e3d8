//! The hypervisor's own accesses to memory that may go away: that of a child, and that of its parent, which deposits
//! pages.
//!
//! Other VMs keep their frames as long as they live, and the hypervisor finds a byte by its place in them. Here it
//! finds each page by a walk of stage 2, as the guest does, and announces this as a *visit*. Whoever takes pages away
//! works in this order:
//!
//! ```text
//!   taker                                                   visitor
//!     clear   the entries in stage 2                          announce   "I walk"
//!     flush   all TLBs; waits for guests and emulators           ---- full barrier ----
//!     forget  words that were found before are not valid      walk       and access the page
//!     wait    for all who announced themselves before         leave
//!     reuse   the pages
//! ```
//!
//! A visitor that announces itself after the taker has cleared the entries does not find the page. One that did so
//! before is waited for. A visitor holds no lock that a taker may hold, and waits for nobody.
//!
//! Emulators find a word once and read it often ([`Word`](crate::arch::guest_ram::words::Word)). Such a word is valid
//! until something is taken away: its owner has a new name then. An emulation announces itself by its vCPU's
//! [`Presence`](shootdown::Presence), and the flush waits for it. So a word that an emulation has found itself is valid
//! until its end.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool as Flag, AtomicU64 as Counter};

use addr::{Gpa, Hpa, PAGE_BYTES, PageSize};
use stage2::{Epochs, Quiescence, Walker, Walking};
use vcpu_layout::{OwnerField, OwnerWord, Proof};

use super::address_space::NoTlb;
use super::dirty::comeback::Comeback;
use super::memory::Memory;
use crate::cpu;
use crate::frames::{Exhausted, reserve};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Mutex, Ordering, relax};

/// What memory that may go away has besides.
pub(super) struct Visits {
    /// Its name: differs from that of any other memory, and from any that it had before.
    name: AtomicU64,
    /// Whether the guest's rights hold for visitors too: a child's are its parent's decision.
    has_rights: bool,
    /// Visitors record their writes.
    records_writes: Flag,
    /// Of a child: large pages that come back after it was tracked.
    comeback: Mutex<Comeback>,
}

/// A visit. While it lasts, the pages that it finds are not used for anything else.
pub(crate) struct Visit<'a> {
    memory: &'a Memory,
    walking: Walking<'a>,
    name: u64,
    has_rights: bool,
    records_writes: bool,
}

impl Visits {
    /// None are under way.
    pub(super) fn new(has_rights: bool) -> Self {
        Self {
            name: AtomicU64::new(new_name()),
            has_rights,
            records_writes: Flag::new(false),
            comeback: Mutex::new(Comeback::new()),
        }
    }
}

/// Walkers of a VM's stage 2: for faults, one for each pCPU; behind them one more for each, for visits.
pub(super) fn walkers() -> Result<Epochs<Vec<Walker>>, Exhausted> {
    let count = 2 * cpu::count();
    let mut walkers = Vec::new();
    reserve(&mut walkers, count)?;
    walkers.extend((0..count).map(|_| Walker::new()));
    Ok(Epochs::new(walkers))
}

/// Never zero, and never the same again.
pub(crate) fn new_name() -> u64 {
    static NEXT: Counter = Counter::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Memory {
    /// Begins a visit, if this memory may go away.
    ///
    /// # Panics
    /// This pCPU is on a visit already.
    #[inline]
    pub(crate) fn visit(&self) -> Option<Visit<'_>> {
        self.visits.as_deref().map(|visits| self.announce_visit(visits))
    }

    /// Whether this memory may go away.
    #[inline(always)]
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn may_lack_pages(&self) -> bool {
        self.visits.is_some()
    }

    fn announce_visit<'a>(&'a self, visits: &Visits) -> Visit<'a> {
        let number = cpu::count() + cpu::this().id.index();
        let walking = self.dirty.walkers().enter(number).expect("a pCPU visits memory for one reason at a time");
        // After the announcement: with an old name comes a taker that waits.
        let name = visits.name.load(Ordering::SeqCst);
        let records_writes = visits.records_writes.load(Ordering::Relaxed);
        Visit { memory: self, walking, name, has_rights: visits.has_rights, records_writes }
    }

    /// Waits until nobody uses what was unmapped, and flushed, before. The caller is not a walker.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn wait_for_visitors(&self) {
        if let Some(visits) = &self.visits
            && !mutants::is(Mutant::WordKept)
        {
            visits.name.store(new_name(), Ordering::SeqCst);
        }
        let walkers = self.dirty.walkers();
        let epoch = walkers.end_epoch();
        while !walkers.have_left(epoch) && !mutants::is(Mutant::VisitorsNotWaitedFor) {
            relax();
        }
    }

    /// From now on visitors record their writes, or do not any more. On return all do who are on a visit.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(super) fn set_recording(&self, is_on: bool) {
        if let Some(visits) = &self.visits {
            visits.records_writes.store(is_on, Ordering::SeqCst);
        }
        self.wait_for_visitors();
    }

    /// A child's: large pages that come back.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(in crate::vm) fn comeback(&self) -> Option<&Mutex<Comeback>> {
        self.visits.as_deref().filter(|visits| visits.has_rights).map(|visits| &visits.comeback)
    }

    /// Whether it is a child's: it has no frames of its own.
    #[inline]
    pub(super) fn is_lent(&self) -> bool {
        self.visits.as_deref().is_some_and(|visits| visits.has_rights)
    }

    /// From now on its pages may go away: it is the memory of a parent.
    pub(crate) fn may_go_away(&mut self) {
        self.visits = Some(Box::new(Visits::new(false)));
        self.dirty.expect_gaps();
    }
}

impl Visit<'_> {
    /// The name that the memory has during the visit. Words that were found under another are not valid.
    #[inline]
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    /// The visitor is about to write to `gpa`, or may do so. Before it [finds](Self::find) the page: then whoever takes
    /// the page away in between has seen the record. Without it, which this returns, the page is not there now.
    pub(crate) fn record_write(&self, gpa: Gpa) -> bool {
        if self.records_writes && !mutants::is(Mutant::HostWriteNotMarked) {
            return self.memory.record_write(&self.walking, gpa);
        }
        true
    }

    /// Where `gpa` is in host memory, if it is there now, and whether it may be written to.
    #[inline(always)]
    pub(crate) fn find(&self, gpa: Gpa) -> Option<(Hpa, bool)> {
        let page = gpa.page(PageSize::Size4K);
        match cpu::this().found_lately.look(self.name, page) {
            Some(hpa) => Some((Hpa(hpa.0 + (gpa.0 - page.0)), true)),
            None => self.find_by_walk(gpa),
        }
    }

    /// The same for a page that was not found lately. Apart, so that the usual case is short enough for its callers.
    #[inline(never)]
    fn find_by_walk(&self, gpa: Gpa) -> Option<(Hpa, bool)> {
        let memory = self.memory;
        // The stage 2 of a parent that owns the machine's devices also maps their registers, where the host has no
        // memory. What a child has is its parent's memory.
        if !self.has_rights && !memory.has(gpa) && !mutants::is(Mutant::DevicesVisited) {
            return None;
        }
        let leaf = memory.tree().walk(memory.tables(), &NoTlb, &self.walking).lookup(gpa)?;
        let is_writable = leaf.access.write || !self.has_rights;
        if is_writable {
            let page = gpa.page(PageSize::Size4K);
            cpu::this().found_lately.keep(self.name, page, leaf.translate(page));
        }
        Some((leaf.translate(gpa), is_writable))
    }
}

/// Pages that visits on one pCPU have found lately, all writable: a small TLB. An entry holds for visits under the name
/// that it was found under, as a word does. So it needs no flush.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct FoundLately {
    entries: [FoundPage; 32],
}

impl OwnerField for FoundLately {}

#[repr(C)]
#[derive(Debug, Default)]
struct FoundPage {
    name: OwnerWord,
    gpa: OwnerWord,
    hpa: OwnerWord,
}

impl FoundLately {
    fn entry(&self, page: Gpa) -> &FoundPage {
        &self.entries[(page.0 / PAGE_BYTES) as usize % self.entries.len()]
    }

    #[inline]
    fn look(&self, name: u64, page: Gpa) -> Option<Hpa> {
        let entry = self.entry(page);
        // No name is zero.
        (entry.name.get() == name && entry.gpa.get() == page.0).then(|| Hpa(entry.hpa.get()))
    }

    /// Only the pCPU that this belongs to calls it.
    fn keep(&self, name: u64, page: Gpa, hpa: Hpa) {
        let (entry, here) = (self.entry(page), Proof::by_place());
        entry.name.set(here, name);
        entry.gpa.set(here, page.0);
        entry.hpa.set(here, hpa.0);
    }
}

//! [`Scheme::Generation`](crate::Scheme::Generation), like Linux for Arm (2021). It is kept to be measured beside one
//! tag for life.
//!
//! Each pCPU has a slot with the tag that it runs under. An arriving vCPU whose VM has a tag of the current generation
//! writes it there by one compare-exchange, without a lock. A rollover holds the lock. It first publishes the new
//! generation and then empties the slots, one by one: a VM that it finds there is running, and keeps its tag. The two
//! meet in the slot. Either the arrival was first, and the rollover keeps its tag; or the slot is empty, and the
//! arrival asks again under the lock.
//!
//! An entry does not ask for the scheme: it compares its VM's epoch. Arrivals and departures ask once. (The scheme that
//! flushes always has no code of its own: its pool has one tag, and no entry is current.)

use super::pool::{HandedOut, Id, Shared, VmTags};
use crate::sync::Ordering;

impl VmTags {
    /// A vCPU of the VM, whose tag was `id`, arrives at pCPU `cpu`. Returns its tag, and whether a new generation
    /// began.
    pub(super) fn claim_in_generation(&self, cpu: usize, id: Id) -> (Id, bool) {
        let shared = self.shared();
        let slot = &shared.slots[cpu].0;
        let before = slot.load(Ordering::Relaxed);
        if before != Id::NONE.0
            && id.generation() == shared.generation.load(Ordering::Acquire)
            && slot.compare_exchange(before, id.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return (id, false);
        }
        self.claim_slowly(cpu)
    }

    #[cold]
    fn claim_slowly(&self, cpu: usize) -> (Id, bool) {
        let shared = self.shared();
        let mut handed_out = shared.handed_out.lock();
        let before = Id(self.0.id.load(Ordering::Relaxed));
        let (id, begins) = if before.generation() == shared.generation.load(Ordering::Relaxed) {
            (before, false)
        } else {
            shared.assign(&mut handed_out, self.0.name, before)
        };
        self.0.id.store(id.0, Ordering::Release);
        shared.slots[cpu].0.store(id.0, Ordering::Release);
        (id, begins)
    }
}

impl Shared {
    /// The vCPU departs from pCPU `cpu`.
    pub(super) fn vacate(&self, cpu: usize) {
        // A swap, not a store: if a rollover has emptied the slot, the swap tells the pCPU about the generation before
        // its next arrival compares one.
        self.slots[cpu].0.swap(Id::IDLE.0, Ordering::AcqRel);
    }

    /// A tag of the current generation for a VM whose tag is from an older one.
    fn assign(&self, handed_out: &mut HandedOut, name: u64, before: Id) -> (Id, bool) {
        let generation = self.generation.load(Ordering::Relaxed);
        if before != Id::NONE {
            let same = Id::new(generation, before.index());
            // It ran on some pCPU during the rollover, and may still run: only the same tag is possible.
            if handed_out.keep(before, same) {
                return (same, false);
            }
            // Its entries in TLBs do not matter, but to keep the number saves a change.
            let used = &mut handed_out.used[before.index() as usize];
            if !core::mem::replace(used, true) {
                return (same, false);
            }
        }
        if let Some(index) = handed_out.take_free() {
            return (Id::new(generation, index), false);
        }
        self.roll_over(handed_out, generation + 1);
        let index = handed_out.take_free().unwrap_or_else(|| self.any(name));
        (Id::new(generation + 1, index), true)
    }

    fn roll_over(&self, handed_out: &mut HandedOut, generation: u64) {
        self.generation.store(generation, Ordering::Release);
        handed_out.used.fill(false);
        handed_out.next = 0;
        for (slot, kept) in self.slots.iter().zip(&mut handed_out.kept) {
            match Id(slot.0.swap(Id::NONE.0, Ordering::AcqRel)) {
                // It has run since before the last rollover.
                Id::NONE => {}
                Id::IDLE => *kept = Id::NONE,
                running => *kept = running,
            }
            if *kept != Id::NONE {
                handed_out.used[kept.index() as usize] = true;
            }
        }
    }
}

impl HandedOut {
    /// Whether a pCPU ran with `before` at the last rollover; if so, records `now` for it.
    fn keep(&mut self, before: Id, now: Id) -> bool {
        let mut found = false;
        for kept in self.kept.iter_mut().filter(|kept| **kept == before) {
            *kept = now;
            found = true;
        }
        found
    }
}

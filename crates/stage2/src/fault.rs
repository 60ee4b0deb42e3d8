//! What a fault of the guest leads to, and other changes of single pages.
//!
//! Any number of processors does this at once, on the same page too. There is no lock: each change is one conditional
//! exchange of one entry, made again on what another processor has left. Nothing is written but the entry itself and,
//! where a leaf is split, a table that nobody else has seen yet.

use crate::split::{AsBefore, Dress, Split};
use crate::tree::{Slot, Tree, span};
use crate::{Access, Entry, Format, Leaf, MapError, Memory, Pages, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa};

/// What to do about a fault.
#[derive(Clone, Copy, Debug)]
#[must_use = "a fault may owe a flush before the guest goes on"]
pub enum Fault {
    /// The guest may try again. It may fault again when another processor was about to change the entry.
    Retry {
        /// To be paid before it does, by this processor for itself.
        now: Stale,
        /// To be paid some time, by anybody: a large leaf may still be cached that says the same as its parts, or less. Many
        /// of these make one broadcast. Until then the hardware may report a conflict where it has FEAT_BBM.
        later: Stale,
    },
    /// Nothing is mapped there.
    Unmapped,
    /// The page does not allow this.
    Denied(Leaf),
}

/// How large leaves are split that a dirty log has closed, when the guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Not at all: the whole leaf counts as written.
    Whole,
    /// The page counts as written; each of the others faults at its own first write.
    Closed,
    /// The hardware records the writes to all of them from now on, so no other faults.
    Watched,
}

impl<F: Format> Tree<F> {
    /// The guest was stopped as it wanted to use `gpa` in the ways that `wanted` names.
    ///
    /// A leaf that a dirty log has closed is opened for writes, or split as `granularity` says. Where that needs more
    /// tables than are in `spare`, the leaf is opened whole: more counts as written than was, and nobody waits.
    pub fn fault(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        wanted: Access,
        granularity: Granularity,
        spare: &mut Spare,
    ) -> Fault {
        if gpa >= self.limit() {
            return Fault::Unmapped;
        }
        let mut later = Stale::EMPTY;
        loop {
            let slot = self.descend(pages, gpa);
            let Entry::Leaf { hpa, access } = slot.entry else {
                // Who replaces the entry is done in a moment; the guest comes back, or is interrupted meanwhile.
                return match slot.entry {
                    Entry::Busy => Fault::Retry { now: Stale::EMPTY, later },
                    _ => Fault::Unmapped,
                };
            };
            if !access.includes(wanted) {
                return Fault::Denied(Leaf { hpa, level: slot.level, bytes: slot.page().bytes(), access });
            }

            let format = &self.format;
            let is_closed = wanted.write && !format.is_writable(slot.bits);
            if is_closed && slot.level > 0 && granularity != Granularity::Whole && spare.count() > 0 {
                if let Ok(Split::Done(owed)) = self.split(pages, tlb, slot, spare, &Touch(granularity)) {
                    later = later.merge(owed);
                }
                // Below the new table is the page itself, or a leaf that is still large.
                continue;
            }

            let bits = if is_closed { format.opened(slot.bits) } else { slot.bits };
            let bits = format.touched(bits);
            if bits == slot.bits || self.exchange(pages, &slot, bits) {
                if is_closed {
                    self.open_nearby(pages, &slot, granularity);
                }
                tlb.publish();
                return Fault::Retry { now: self.owed_for_denial(&slot), later };
            }
        }
    }

    /// Maps the page at `level` that holds `gpa` to `hpa`, which starts such a page: the guest has touched it for the
    /// first time. Says what is mapped there now, which is something else when another processor was quicker.
    ///
    /// # Errors
    /// When a table is missing on the way and there is no spare one, or the page cannot be mapped like this.
    #[expect(clippy::too_many_arguments, reason = "the tree, its three helpers, and the four facts of a leaf")]
    pub fn populate(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        spare: &mut Spare,
        gpa: Gpa,
        hpa: Hpa,
        level: u32,
        access: Access,
    ) -> Result<Leaf, MapError> {
        let level = level.min(self.format.largest_leaf());
        let bytes = span::<F>(level);
        let page = GpaRange::new(Gpa(gpa.0 & !(bytes - 1)), bytes).ok_or(MapError::Beyond(gpa))?;
        self.check_range(page)?;
        self.check_host(hpa, bytes)?;
        self.check_access(access)?;
        if hpa.0 & (bytes - 1) != 0 {
            return Err(MapError::MisalignedHost(hpa));
        }
        loop {
            let slot = self.settle(pages, tlb, gpa);
            if let Entry::Leaf { hpa, access } = slot.entry {
                return Ok(Leaf { hpa, level: slot.level, bytes: slot.page().bytes(), access });
            }
            if slot.level <= level {
                // A table is there already, for whatever was mapped before: the page comes as one of its parts.
                let offset = slot.page().start.0 - page.start.0;
                let leaf = self.format.leaf(Hpa(hpa.0 + offset), slot.level, access, Memory::Normal);
                let _ = self.exchange(pages, &slot, leaf);
                tlb.publish();
            } else {
                let table = spare.take(pages).ok_or(MapError::OutOfTables)?;
                if !slot.exchange(pages, self.format.table(table)) {
                    spare.put_back(pages, table, 0);
                }
            }
        }
    }

    /// Gives the page at level 0 that holds `gpa` the rights `access`, and leaves all others as they are. A page that is
    /// not mapped stays so.
    ///
    /// Rights that grow owe no flush: a guest that does not know of them yet [faults](Self::fault) on its old entry.
    ///
    /// # Errors
    /// When `access` cannot be expressed, or the pool has no table left to split a large leaf with; the page keeps its
    /// rights.
    pub fn protect_page(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        access: Access,
    ) -> Result<Stale, MapError> {
        self.check_access(access)?;
        if gpa >= self.limit() {
            return Err(MapError::Beyond(gpa));
        }
        let mut spare = Spare::new();
        let result = self.protect_page_with(pages, tlb, gpa, access, &mut spare);
        spare.give_back(pages);
        result
    }

    fn protect_page_with(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        wanted: Access,
        spare: &mut Spare,
    ) -> Result<Stale, MapError> {
        let mut stale = Stale::EMPTY;
        loop {
            let slot = self.settle(pages, tlb, gpa);
            let Some(now) = slot.access().filter(|now| *now != wanted) else { return Ok(stale) };
            if slot.level == 0 {
                if self.exchange(pages, &slot, self.format.with_access(slot.bits, wanted)) {
                    let owed = !wanted.includes(now);
                    return Ok(if owed { stale.merge(self.owed_for(slot.page(), 0)) } else { stale });
                }
                continue;
            }
            // All that the way down can take, so that nothing can fail halfway and leave a debt behind.
            spare.fill(pages, slot.level.into())?;
            if let Split::Done(owed) = self.split(pages, tlb, slot, spare, &AsBefore)? {
                stale = stale.merge(owed);
            }
        }
    }

    /// What the processor that faulted owes before it tries again: it may remember that the access was denied.
    ///
    /// Others may remember it too. They fault once more, find nothing to change, and pay for themselves.
    fn owed_for_denial(&self, slot: &Slot) -> Stale {
        if self.format.denials_are_cached() {
            let local = Stale::local(slot.page(), slot.level);
            // Denied may have been a page of another size.
            local.of_any_size()
        } else {
            Stale::EMPTY
        }
    }
}

/// The parts of a closed leaf that the guest writes to.
struct Touch(Granularity);

impl Dress for Touch {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // A part that is large itself stays closed: it is split in turn when its own first write comes.
        if self.0 == Granularity::Watched && level == 0 { format.watched(bits) } else { bits }
    }
}

//! Handling of guest faults, and other changes of single pages.
//!
//! Any number of processors may do this at the same time, on the same page too. There is no lock: each change is one
//! compare-exchange of one entry, and a processor that loses the race retries on the new value. Only the entry is
//! written. A split also writes a table that no other processor has seen yet.

use crate::split::{AsBefore, Dress, Split};
use crate::tree::span;
use crate::walk::{Slot, Walk};
use crate::{Access, Entry, Format, Leaf, MapError, Memory, Pages, Source, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa};

/// What the caller must do about a fault.
#[derive(Clone, Copy, Debug)]
#[must_use = "a fault may owe a flush before the guest goes on"]
pub enum Fault {
    /// Let the guest retry, after this processor has flushed the denial. The guest may fault again if another processor
    /// was about to change the entry.
    Retry(Denial),
    /// The page is in a large leaf that a dirty log has write-protected. [Split](Walk::split_at_fault) the leaf and
    /// call [`Walk::fault`] again, or call it with [`Granularity::Whole`].
    Large,
    /// Nothing is mapped there.
    Unmapped,
    /// The page does not allow this access.
    Denied(Leaf),
}

/// An entry that denies an access and that the faulting processor may have in its TLB. It must
/// [flush](crate::tlbi::forget) it before the guest retries. Other processors may have it too: they fault once more,
/// find nothing to change, and flush their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest may fault for ever on what its processor remembers"]
pub struct Denial(Option<Gpa>);

impl Denial {
    /// An address in the page, which may be cached in any size; `None` if TLBs do not cache denials.
    #[must_use]
    pub fn gpa(self) -> Option<Gpa> {
        self.0
    }
}

/// Result of an [attempt](Walk::try_protect_page) to change a page's rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what was done may owe a flush"]
pub enum Attempt {
    /// The page has the rights, or is not mapped.
    Done(Stale),
    /// Another processor replaces the entry. The page has its old rights. Larger leaves around it may have been split
    /// and need this flush.
    Busy(Stale),
}

/// How to split a large leaf that a dirty log has write-protected, when the guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Do not split: the whole leaf counts as written.
    Whole,
    /// This page counts as written. Each other page faults at its own first write.
    Closed,
    /// The hardware records writes to all pages from now on, so no other page faults.
    Watched,
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Handles a fault of the guest at `gpa`, for the accesses in `wanted`.
    ///
    /// If a dirty log has write-protected the leaf, this makes it writable. If the leaf is large and `granularity` asks
    /// for a split, this returns [`Fault::Large`] instead.
    // Inlined everywhere, so that no result is built only to be passed on.
    #[inline(always)]
    pub fn fault(self, gpa: Gpa, wanted: Access, granularity: Granularity) -> Fault {
        if gpa >= self.tree.limit() {
            return Fault::Unmapped;
        }
        let slot = self.descend(gpa);
        let (hpa, access) = match slot.entry {
            Entry::Leaf { hpa, access } => (hpa, access),
            // The other processor finishes in a moment. The guest retries, or takes an interrupt meanwhile.
            Entry::Busy => return Fault::Retry(Denial(None)),
            Entry::Empty | Entry::Table(_) => return Fault::Unmapped,
        };
        if !access.includes(wanted) {
            return Fault::Denied(Leaf { hpa, level: slot.level, bytes: slot.bytes, access });
        }

        let format = self.format();
        let is_closed = wanted.write && !format.is_writable(slot.bits);
        if is_closed && slot.level > 0 && granularity != Granularity::Whole {
            return Fault::Large;
        }
        let bits = if is_closed { format.opened(slot.bits) } else { slot.bits };
        let bits = format.touched(bits);
        if bits != slot.bits && !self.exchange(&slot, bits) {
            // Another processor was faster, with this change or another one.
            return Fault::Retry(Denial(None));
        }
        if is_closed && slot.level == 0 && granularity == Granularity::Watched {
            self.without_tlb().apart(move |walk| walk.open_table(slot));
        }
        self.tlb.publish();
        Fault::Retry(Denial(format.denials_are_cached().then_some(gpa)))
    }

    /// Splits the [large](Fault::Large) leaf that a fault found at `gpa`, if it still is one. Returns the flush for it.
    ///
    /// The flush may be done later and by any processor. Until then the TLB may hold the old leaf, which grants the
    /// same rights or fewer. Callers collect many of these for one broadcast. With FEAT_BBM the hardware may report a
    /// conflict until the flush.
    ///
    /// Also splits up to `ahead` leaves behind it, together, if they are equally large and write-protected and there
    /// are spare tables. This helps a guest that writes to one leaf after the other; see [`Stream`](crate::Stream).
    /// Also returns the end of the last of them.
    ///
    /// # Errors
    /// No spare table.
    #[inline(always)]
    pub fn split_at_fault(
        self,
        gpa: Gpa,
        granularity: Granularity,
        ahead: u64,
        spare: &mut Spare,
    ) -> Result<(Stale, Gpa), MapError> {
        self.apart(move |walk| walk.split_large(gpa, granularity, ahead, spare))
    }

    #[inline(always)]
    fn split_large(
        self,
        gpa: Gpa,
        granularity: Granularity,
        ahead: u64,
        spare: &mut Spare,
    ) -> Result<(Stale, Gpa), MapError> {
        let slot = self.descend(gpa);
        let page = slot.page();
        if slot.level == 0 || slot.access().is_none() {
            return Ok((Stale::EMPTY, page.end()));
        }
        let dress = Touch(granularity);
        if ahead > 0 && slot.level == 1 && spare.count() > 1 {
            let bytes = page.bytes().saturating_mul(ahead.saturating_add(1)).min(self.tree.limit().0 - page.start.0);
            let range = GpaRange::new(page.start, bytes).unwrap_or(page);
            let is_closed = |format: &F, bits| match format.decode(1, bits) {
                Entry::Leaf { access, .. } => access.write && !format.is_writable(bits),
                Entry::Empty | Entry::Busy | Entry::Table(_) => false,
            };
            return Ok(self.split_batch(range, spare, is_closed, &dress));
        }
        match self.split(slot, spare, &dress)? {
            Split::Done(owed) => Ok((owed, page.end())),
            Split::Lost => Ok((Stale::EMPTY, page.end())),
        }
    }

    /// Maps the page at `level` that holds `gpa` to `hpa`, which is aligned to that page: the guest's first touch. If
    /// another processor is faster, its mapping stays.
    ///
    /// # Errors
    /// A table is missing and there is no spare one, or the page cannot be mapped like this.
    #[inline]
    pub fn populate(self, spare: &mut Spare, gpa: Gpa, hpa: Hpa, level: u32, access: Access) -> Result<(), MapError> {
        let level = level.min(self.format().largest_leaf());
        let bytes = span::<F>(level);
        // Pages and limits are aligned to a page's size: a page that starts below a limit ends below it.
        if gpa >= self.tree.limit() {
            return Err(MapError::Beyond(gpa));
        }
        if hpa >= self.format().host_limit() {
            return Err(MapError::BeyondHost(hpa));
        }
        if hpa.0 & (bytes - 1) != 0 {
            return Err(MapError::MisalignedHost(hpa));
        }
        self.tree.check_access(access)?;

        // Fast path: most pages have a table already and no competitor.
        if self.fill(&self.descend(gpa), First::new::<F>(gpa, hpa, level, access)) {
            return Ok(());
        }
        self.apart(move |walk| walk.populate_without_table(spare, gpa, hpa, level, access))
    }

    #[inline(always)]
    fn populate_without_table(
        self,
        spare: &mut Spare,
        gpa: Gpa,
        hpa: Hpa,
        level: u32,
        access: Access,
    ) -> Result<(), MapError> {
        let first = First::new::<F>(gpa, hpa, level, access);
        loop {
            let slot = self.descend_and_wait(gpa);
            if self.fill(&slot, first) {
                return Ok(());
            }
            if slot.level > first.level && slot.entry == Entry::Empty {
                let table = spare.take(self.pages).ok_or(MapError::OutOfTables)?;
                if !slot.exchange(self.pages, self.format().table(table)) {
                    spare.put_back(self.pages, table, 0);
                }
            }
        }
    }

    /// Maps the page, or the part of it that `slot` decides about, if nothing is mapped there. Returns whether it is
    /// mapped then. It is not if a table is missing or another processor is about to change the entry.
    #[inline(always)]
    fn fill(self, slot: &Slot, page: First) -> bool {
        if slot.entry != Entry::Empty || slot.level > page.level {
            return matches!(slot.entry, Entry::Leaf { .. });
        }
        // An earlier mapping may have left a table: then the page is mapped in parts.
        let hpa = Hpa(page.hpa.0 + (slot.start.0 - page.gpa.0));
        let leaf = self.format().leaf(hpa, slot.level, page.access, Memory::Normal);
        let done = self.exchange(slot, leaf);
        if done {
            self.tlb.publish();
        }
        done
    }

    /// Gives the page at level 0 that holds `gpa` the rights `access`, and changes no other page. A page that is not
    /// mapped stays so.
    ///
    /// Added rights need no flush: a guest with a cached old entry [faults](Self::fault).
    ///
    /// Waits while another processor replaces the entry, which may itself wait for a flush. So the caller must hold
    /// nothing that this flush needs; see [`try_protect_page`](Self::try_protect_page).
    ///
    /// # Errors
    /// The format cannot encode `access`, or the pool has no table to split a large leaf. The page keeps its rights.
    pub fn protect_page(self, gpa: Gpa, access: Access) -> Result<Stale, MapError> {
        let mut stale = Stale::EMPTY;
        loop {
            match self.try_protect_page(gpa, access)? {
                Attempt::Done(owed) => return Ok(stale.merge(owed)),
                Attempt::Busy(owed) => stale = stale.merge(owed),
            }
            self.tlb.relax();
        }
    }

    /// Like [`protect_page`](Self::protect_page), but never waits for another processor: for callers that hold a lock.
    /// It asks `tlb` for a flush only if the format [breaks](crate::Replace) large leaves.
    ///
    /// # Errors
    /// As for [`protect_page`](Self::protect_page).
    pub fn try_protect_page(self, gpa: Gpa, access: Access) -> Result<Attempt, MapError> {
        self.tree.check_access(access)?;
        if gpa >= self.tree.limit() {
            return Err(MapError::Beyond(gpa));
        }
        let mut spare = Spare::new();
        let result = self.try_protect_page_with(gpa, access, &mut spare);
        spare.give_back(self.pages);
        result
    }

    fn try_protect_page_with(self, gpa: Gpa, wanted: Access, spare: &mut Spare) -> Result<Attempt, MapError> {
        let mut stale = Stale::EMPTY;
        loop {
            let slot = self.descend(gpa);
            if slot.entry == Entry::Busy {
                return Ok(Attempt::Busy(stale));
            }
            let Some(now) = slot.access().filter(|now| *now != wanted) else { return Ok(Attempt::Done(stale)) };
            if slot.level == 0 {
                if self.exchange(&slot, self.format().with_access(slot.bits, wanted)) {
                    let owed = !wanted.includes(now);
                    let stale = if owed { stale.merge(self.tree.owed_for(slot.page(), 0)) } else { stale };
                    return Ok(Attempt::Done(stale));
                }
                continue;
            }
            // All tables that the descent can need, so that it cannot fail halfway and leave a flush undone.
            spare.fill(self.pages, slot.level.into())?;
            if let Split::Done(owed) = self.split(slot, spare, &AsBefore)? {
                stale = stale.merge(owed);
            }
        }
    }
}

/// A page at its first touch: its address, its host address, and its attributes.
#[derive(Clone, Copy)]
struct First {
    gpa: Gpa,
    hpa: Hpa,
    level: u32,
    access: Access,
}

impl First {
    /// The page at `level` that holds `gpa`.
    #[inline(always)]
    fn new<F: Format>(gpa: Gpa, hpa: Hpa, level: u32, access: Access) -> Self {
        Self { gpa: Gpa(gpa.0 & !(span::<F>(level) - 1)), hpa, level, access }
    }
}

/// The parts of a write-protected leaf that the guest writes to.
struct Touch(Granularity);

impl Dress for Touch {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // A part that is large itself stays write-protected; it is split at its own first write. If another processor,
        // without tables, has made the whole leaf writable, it counts as written: `watched` would lose that.
        let is_watched = self.0 == Granularity::Watched && level == 0 && !format.is_written(bits, Source::Hardware);
        if is_watched { format.watched(bits) } else { bits }
    }
}

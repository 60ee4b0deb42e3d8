//! What a fault of the guest leads to, and other changes of single pages.
//!
//! Any number of processors does this at once, on the same page too. There is no lock: each change is one conditional
//! exchange of one entry, made again on what another processor has left. Nothing is written but the entry itself and,
//! where a leaf is split, a table that nobody else has seen yet.

use crate::split::{AsBefore, Dress, Split};
use crate::tree::{Slot, Tree, span};
use crate::{Access, Entry, Format, Leaf, MapError, Memory, Pages, Source, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa};

/// What to do about a fault.
#[derive(Clone, Copy, Debug)]
#[must_use = "a fault may owe a flush before the guest goes on"]
pub enum Fault {
    /// The guest may try again, when this processor has forgotten what it may remember. It may fault again when another
    /// processor was about to change the entry.
    Retry(Denial),
    /// A dirty log has closed the large leaf that holds the page. It is to be [split](Tree::split_at_fault), and the fault looked
    /// at again; or looked at again with [`Granularity::Whole`].
    Large,
    /// Nothing is mapped there.
    Unmapped,
    /// The page does not allow this.
    Denied(Leaf),
}

/// What the processor that faulted may have in its TLB, and must [flush](crate::tlbi::forget) there before the guest tries
/// again: that a page denies an access. Others may have it too: they fault once more, find nothing to change, and pay for
/// themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest may fault for ever on what its processor remembers"]
pub struct Denial(Option<Gpa>);

impl Denial {
    /// An address in the page, which may be cached in any size; nothing if denials are not cached.
    #[must_use]
    pub fn gpa(self) -> Option<Gpa> {
        self.0
    }
}

/// What came of an [attempt](Tree::try_protect_page) to change a page's rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what was done may owe a flush"]
pub enum Attempt {
    /// The page has the rights, or is not mapped.
    Done(Stale),
    /// Another processor replaces the entry. The page has its old rights, but larger leaves around it may have been split, and
    /// owe this.
    Busy(Stale),
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
    /// A leaf that a dirty log has closed is opened for writes, or, if it is large and `granularity` says so, left to be split.
    // All of it is carried out where this is called, so that nothing is built only to be handed on.
    #[inline(always)]
    pub fn fault(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        wanted: Access,
        granularity: Granularity,
    ) -> Fault {
        if gpa >= self.limit() {
            return Fault::Unmapped;
        }
        let slot = self.descend(pages, gpa);
        let (hpa, access) = match slot.entry {
            Entry::Leaf { hpa, access } => (hpa, access),
            // Who replaces the entry is done in a moment; the guest comes back, or is interrupted meanwhile.
            Entry::Busy => return Fault::Retry(Denial(None)),
            Entry::Empty | Entry::Table(_) => return Fault::Unmapped,
        };
        if !access.includes(wanted) {
            return Fault::Denied(Leaf { hpa, level: slot.level, bytes: slot.bytes, access });
        }

        let format = &self.format;
        let is_closed = wanted.write && !format.is_writable(slot.bits);
        if is_closed && slot.level > 0 && granularity != Granularity::Whole {
            return Fault::Large;
        }
        let bits = if is_closed { format.opened(slot.bits) } else { slot.bits };
        let bits = format.touched(bits);
        if bits != slot.bits && !self.exchange(pages, &slot, bits) {
            // Another processor was quicker, with this change or another one.
            return Fault::Retry(Denial(None));
        }
        if is_closed && slot.level == 0 && granularity == Granularity::Watched {
            self.open_table(pages, slot);
        }
        tlb.publish();
        Fault::Retry(Denial(format.denials_are_cached().then_some(gpa)))
    }

    /// A fault has found a [large](Fault::Large) leaf at `gpa`: splits it, if it still is one, and gives back what is owed for
    /// that some time, by anybody. The leaf may still be cached, which says the same as its parts, or less. Many of these debts
    /// make one broadcast; until then the hardware may report a conflict where it has FEAT_BBM.
    ///
    /// Up to `ahead` leaves behind it are split as well, together, where they are as large and closed as well, and as far as there
    /// are spare tables: for a guest that writes to one after the other, see [`Stream`](crate::Stream). Also says where the last
    /// of them ends.
    ///
    /// # Errors
    /// When there is no spare table.
    pub fn split_at_fault(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        granularity: Granularity,
        ahead: u64,
        spare: &mut Spare,
    ) -> Result<(Stale, Gpa), MapError> {
        let slot = self.descend(pages, gpa);
        let page = slot.page();
        if slot.level == 0 || slot.access().is_none() {
            return Ok((Stale::EMPTY, page.end()));
        }
        let dress = Touch(granularity);
        if ahead > 0 && slot.level == 1 && spare.count() > 1 {
            let bytes = page.bytes().saturating_mul(ahead.saturating_add(1)).min(self.limit().0 - page.start.0);
            let range = GpaRange::new(page.start, bytes).unwrap_or(page);
            let is_closed = |format: &F, bits| match format.decode(1, bits) {
                Entry::Leaf { access, .. } => access.write && !format.is_writable(bits),
                Entry::Empty | Entry::Busy | Entry::Table(_) => false,
            };
            return Ok(self.split_batch(pages, tlb, range, spare, is_closed, &dress));
        }
        match self.split(pages, tlb, slot, spare, &dress)? {
            Split::Done(owed) => Ok((owed, page.end())),
            Split::Lost => Ok((Stale::EMPTY, page.end())),
        }
    }

    /// Maps the page at `level` that holds `gpa` to `hpa`, which starts such a page: the guest has touched it for the
    /// first time. Something else is mapped there when another processor was quicker.
    ///
    /// # Errors
    /// When a table is missing on the way and there is no spare one, or the page cannot be mapped like this.
    #[inline]
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
    ) -> Result<(), MapError> {
        let level = level.min(self.format.largest_leaf());
        let bytes = span::<F>(level);
        // Pages and limits are multiples of a page's size: what starts below a limit ends below it.
        if gpa >= self.limit() {
            return Err(MapError::Beyond(gpa));
        }
        if hpa >= self.format.host_limit() {
            return Err(MapError::BeyondHost(hpa));
        }
        if hpa.0 & (bytes - 1) != 0 {
            return Err(MapError::MisalignedHost(hpa));
        }
        self.check_access(access)?;

        // Most pages find their table and nobody else at work.
        if self.fill(pages, tlb, &self.descend(pages, gpa), First::new::<F>(gpa, hpa, level, access)) {
            return Ok(());
        }
        self.populate_without_table(pages, tlb, spare, gpa, hpa, level, access)
    }

    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "as above: nothing is built there to be handed on")]
    fn populate_without_table(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        spare: &mut Spare,
        gpa: Gpa,
        hpa: Hpa,
        level: u32,
        access: Access,
    ) -> Result<(), MapError> {
        let first = First::new::<F>(gpa, hpa, level, access);
        loop {
            let slot = self.settle(pages, tlb, gpa);
            if self.fill(pages, tlb, &slot, first) {
                return Ok(());
            }
            if slot.level > first.level && slot.entry == Entry::Empty {
                let table = spare.take(pages).ok_or(MapError::OutOfTables)?;
                if !slot.exchange(pages, self.format.table(table)) {
                    spare.put_back(pages, table, 0);
                }
            }
        }
    }

    /// Maps the page, or as much of it as `slot` decides about, if nothing is mapped there. Says whether something is then; it
    /// is not while a table is missing, or another processor is about to change the entry.
    #[inline(always)]
    fn fill(&self, pages: &impl Pages, tlb: &impl Tlb, slot: &Slot, page: First) -> bool {
        if slot.entry != Entry::Empty || slot.level > page.level {
            return matches!(slot.entry, Entry::Leaf { .. });
        }
        // A table may be there already, for whatever was mapped before: the page comes as one of its parts.
        let hpa = Hpa(page.hpa.0 + (slot.start.0 - page.gpa.0));
        let leaf = self.format.leaf(hpa, slot.level, page.access, Memory::Normal);
        let done = self.exchange(pages, slot, leaf);
        if done {
            tlb.publish();
        }
        done
    }

    /// Gives the page at level 0 that holds `gpa` the rights `access`, and leaves all others as they are. A page that is
    /// not mapped stays so.
    ///
    /// Rights that grow owe no flush: a guest that does not know of them yet [faults](Self::fault) on its old entry.
    ///
    /// Waits while another processor replaces the entry, which may itself wait for a flush. So the caller holds nothing that
    /// anybody needs to do that flush; see [`try_protect_page`](Self::try_protect_page).
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
        let mut stale = Stale::EMPTY;
        loop {
            match self.try_protect_page(pages, tlb, gpa, access)? {
                Attempt::Done(owed) => return Ok(stale.merge(owed)),
                Attempt::Busy(owed) => stale = stale.merge(owed),
            }
            tlb.relax();
        }
    }

    /// As [`protect_page`](Self::protect_page), but never waits for another processor: for callers who hold a lock. Only where
    /// the format [breaks](crate::Replace) large leaves, `tlb` is asked for a flush.
    ///
    /// # Errors
    /// As there.
    pub fn try_protect_page(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        access: Access,
    ) -> Result<Attempt, MapError> {
        self.check_access(access)?;
        if gpa >= self.limit() {
            return Err(MapError::Beyond(gpa));
        }
        let mut spare = Spare::new();
        let result = self.try_protect_page_with(pages, tlb, gpa, access, &mut spare);
        spare.give_back(pages);
        result
    }

    fn try_protect_page_with(
        &self,
        pages: &impl Pages,
        tlb: &impl Tlb,
        gpa: Gpa,
        wanted: Access,
        spare: &mut Spare,
    ) -> Result<Attempt, MapError> {
        let mut stale = Stale::EMPTY;
        loop {
            let slot = self.descend(pages, gpa);
            if slot.entry == Entry::Busy {
                return Ok(Attempt::Busy(stale));
            }
            let Some(now) = slot.access().filter(|now| *now != wanted) else { return Ok(Attempt::Done(stale)) };
            if slot.level == 0 {
                if self.exchange(pages, &slot, self.format.with_access(slot.bits, wanted)) {
                    let owed = !wanted.includes(now);
                    let stale = if owed { stale.merge(self.owed_for(slot.page(), 0)) } else { stale };
                    return Ok(Attempt::Done(stale));
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
}

/// A page that is mapped at its first touch: where, to what, and how.
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

/// The parts of a closed leaf that the guest writes to.
struct Touch(Granularity);

impl Dress for Touch {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // A part that is large itself stays closed: it is split in turn when its own first write comes. And if somebody without
        // tables has opened the leaf whole meanwhile, it was written: watching would forget that.
        let is_watched = self.0 == Granularity::Watched && level == 0 && !format.is_written(bits, Source::Hardware);
        if is_watched { format.watched(bits) } else { bits }
    }
}

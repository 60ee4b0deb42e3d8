//! Splits a large leaf that a fault has found write-protected, or executable in parts only.

use crate::split::{Dress, Split};
use crate::{Format, Granularity, MapError, PageTableEntry, Pages, Source, Spare, Stale, Tlb, Walk};
use addr::{Gpa, GpaRange};

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Splits the [large](crate::Fault::Large) leaf that a fault found at `gpa`, if it still is one. Returns the flush
    /// for it.
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
            let is_protected = |format: &F, bits| match format.decode(1, bits) {
                PageTableEntry::Leaf { access, .. } => access.write && !format.is_writable(bits),
                PageTableEntry::Empty | PageTableEntry::Busy | PageTableEntry::Table(_) => false,
            };
            return Ok(self.split_batch(range, spare, is_protected, &dress));
        }
        match self.split(slot, spare, &dress)? {
            Split::Done(owed) => Ok((owed, page.end())),
            Split::Lost => Ok((Stale::EMPTY, page.end())),
        }
    }
}

/// The parts of a write-protected leaf that the guest writes to.
struct Touch(Granularity);

impl Dress for Touch {
    fn part<F: Format>(&self, format: &F, level: u32, bits: u64) -> u64 {
        // A part that is large itself stays write-protected; it is split at its own first write. If another processor,
        // without tables, has made the whole leaf writable, it counts as written: `recorded` would lose that.
        let is_recorded = self.0 == Granularity::Recorded && level == 0 && !format.is_written(bits, Source::Hardware);
        if is_recorded { format.recorded(bits) } else { bits }
    }
}

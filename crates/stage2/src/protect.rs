//! Changes the rights of one page.

use crate::split::{AsBefore, Split};
use crate::{Access, Format, MapError, PageTableEntry, Pages, Spare, Stale, Tlb, Walk};
use addr::Gpa;

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

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
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
            if slot.entry == PageTableEntry::Busy {
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

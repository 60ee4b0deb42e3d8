//! Pages of statistics that are about no child: about the host, its processors, and the parent itself.

use alloc::vec::Vec;

use addr::Gpa;
use hyperv_defs::Status;
use hyperv_defs::vp::{StatsArea, StatsObject, StatsPage};

use crate::ledger::Ledger;
use crate::partition::{share_into, unshare_from};

/// Those pages of one parent.
#[derive(Debug, Default)]
pub struct OwnStats {
    /// VPs of the parent.
    vps: u32,
    /// Processors of the host.
    processors: u32,
    /// No object twice.
    pages: Vec<(StatsObject, Option<u64>)>,
}

impl OwnStats {
    /// None yet, of a parent with `vps` on a host with `processors`.
    #[must_use]
    pub fn new(vps: u32, processors: u32) -> Self {
        Self { vps, processors, pages: Vec::new() }
    }

    /// What counts for the parent of the caller is not the caller's to see.
    fn check(&self, page: &StatsPage) -> Result<(), Status> {
        if page.area != StatsArea::Own {
            return Err(Status::InvalidParameter);
        }
        match page.object {
            StatsObject::Vp(vp) if vp.index >= self.vps => Err(Status::InvalidVpIndex),
            StatsObject::Processor(number) if number >= self.processors => Err(Status::InvalidParameter),
            _ => Ok(()),
        }
    }

    pub(crate) fn map(&mut self, page: &StatsPage, location: Gpa, ledger: &Ledger) -> Result<u64, Status> {
        self.check(page)?;
        let found = self.pages.iter().position(|(object, _)| *object == page.object);
        let at = match found {
            Some(at) => at,
            None => {
                self.pages.try_reserve(1).map_err(|_| Status::NoResources)?;
                self.pages.push((page.object, None));
                self.pages.len() - 1
            }
        };
        share_into(&mut self.pages[at].1, location, ledger)
    }

    pub(crate) fn unmap(&mut self, page: &StatsPage, ledger: &Ledger) -> Result<(), Status> {
        self.check(page)?;
        let found = self.pages.iter_mut().find(|(object, _)| *object == page.object);
        unshare_from(&mut found.ok_or(Status::NotFound)?.1, ledger)
    }

    /// The parent begins anew, and does not know of its pages any more.
    pub(crate) fn forget(&mut self, ledger: &Ledger) {
        let mapped = core::mem::take(&mut self.pages).into_iter().filter_map(|(_, page)| page);
        mapped.for_each(|page| ledger.release(page));
    }

    /// How many pages there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pages.iter().filter(|(_, page)| page.is_some()).count()
    }
}

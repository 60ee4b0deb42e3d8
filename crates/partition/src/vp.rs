//! A child's virtual processor, as its parent has described it: shared pages.

use alloc::vec::Vec;

use hyperv_defs::vp::{StatePage, StatsArea};

use crate::ledger::Ledger;

/// A VP. Its registers are not here: they are where it runs.
#[derive(Debug, Default)]
pub struct Vp {
    /// Numbers of the deposited pages for it. The hypervisor knows their contents.
    pub(crate) paid: Vec<u64>,
    state: [Option<u64>; 2],
    stats: [Option<u64>; 2],
}

impl Vp {
    /// The deposited pages that pay for it.
    #[must_use]
    pub fn paid(&self) -> &[u64] {
        &self.paid
    }

    /// The parent's page that shows this.
    #[must_use]
    pub fn state_page(&self, which: StatePage) -> Option<u64> {
        self.state[which as usize]
    }

    /// The parent's page that has these statistics.
    #[must_use]
    pub fn stats_page(&self, area: StatsArea) -> Option<u64> {
        self.stats[area as usize]
    }

    pub(crate) fn state_slot(&mut self, which: StatePage) -> &mut Option<u64> {
        &mut self.state[which as usize]
    }

    pub(crate) fn stats_slot(&mut self, area: StatsArea) -> &mut Option<u64> {
        &mut self.stats[area as usize]
    }

    /// All pages of the parent that it shares.
    pub fn shared(&self) -> impl Iterator<Item = u64> + '_ {
        self.state.iter().chain(&self.stats).copied().flatten()
    }

    /// Ends the use of all shared pages.
    pub(crate) fn release_shared(&mut self, ledger: &Ledger) {
        self.shared().for_each(|page| ledger.release(page));
        (self.state, self.stats) = ([None; 2], [None; 2]);
    }
}

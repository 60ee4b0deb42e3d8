//! A child's virtual processor, as its parent has described it: shared pages, and results of CPUID.

use alloc::vec::Vec;

use hyperv_defs::Status;
use hyperv_defs::vp::{CpuidResult, StatePage, StatsArea};

use crate::ledger::Ledger;
use crate::limits;

/// A VP. Its registers are not here: they are where it runs.
#[derive(Debug, Default)]
pub struct Vp {
    /// Numbers of the deposited pages for it. The hypervisor knows their contents.
    pub(crate) paid: Vec<u64>,
    state: [Option<u64>; 2],
    stats: [Option<u64>; 2],
    cpuid: Vec<CpuidResult>,
}

/// A result of CPUID: EAX, EBX, ECX, EDX.
pub type Cpuid = [u32; 4];

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

    /// Registers a result of CPUID. A later one for the same leaf, and the same subleaf or none, takes its place.
    pub(crate) fn register_cpuid(&mut self, result: CpuidResult) -> Result<(), Status> {
        let same = |other: &&mut CpuidResult| (other.leaf, other.subleaf) == (result.leaf, result.subleaf);
        if let Some(other) = self.cpuid.iter_mut().find(same) {
            *other = result;
            return Ok(());
        }
        if self.cpuid.len() >= limits::CPUID_RESULTS || self.cpuid.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        self.cpuid.push(result);
        Ok(())
    }

    /// What CPUID answers where the hypervisor would answer `default`. A result for the subleaf comes before one for
    /// all of them.
    #[must_use]
    pub fn cpuid(&self, leaf: u32, subleaf: u32, default: Cpuid) -> Cpuid {
        let for_leaf = || self.cpuid.iter().filter(move |result| result.leaf == leaf);
        let exact = for_leaf().find(|result| result.subleaf == Some(subleaf));
        let Some(result) = exact.or_else(|| for_leaf().find(|result| result.subleaf.is_none())) else { return default };
        let mut answer = default;
        for (register, (value, mask)) in answer.iter_mut().zip(result.results) {
            *register = *register & !mask | value & mask;
        }
        answer
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

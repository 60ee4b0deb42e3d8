//! What CPUID answers to a child's VP, as far as its parent has registered it.

use alloc::vec::Vec;

use hyperv_defs::Status;
use hyperv_defs::vp::CpuidResult;

use crate::limits;

/// A result of CPUID: EAX, EBX, ECX, EDX.
pub type Cpuid = [u32; 4];

/// The results that are registered for a VP. Each VP has its own, because they have its APIC id.
#[derive(Debug, Default)]
pub struct CpuidResults(Vec<CpuidResult>);

impl CpuidResults {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// HvCallRegisterInterceptResult. A later result for the same leaf, and the same subleaf or none, takes the place
    /// of an earlier one.
    ///
    /// # Errors
    ///
    /// [`Status::NoResources`] for one too many.
    pub fn register(&mut self, result: &CpuidResult) -> Result<(), Status> {
        let same = |other: &&mut CpuidResult| (other.leaf, other.subleaf) == (result.leaf, result.subleaf);
        if let Some(other) = self.0.iter_mut().find(same) {
            *other = *result;
            return Ok(());
        }
        if self.0.len() >= limits::CPUID_RESULTS || self.0.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        self.0.push(*result);
        Ok(())
    }

    /// What CPUID answers where the hypervisor would answer `default`. A result for the subleaf comes before one for
    /// all of them.
    #[must_use]
    pub fn answer(&self, leaf: u32, subleaf: u32, default: Cpuid) -> Cpuid {
        let for_leaf = || self.0.iter().filter(move |result| result.leaf == leaf);
        let exact = for_leaf().find(|result| result.subleaf == Some(subleaf));
        let Some(result) = exact.or_else(|| for_leaf().find(|result| result.subleaf.is_none())) else { return default };
        let mut answer = default;
        for (register, (value, mask)) in answer.iter_mut().zip(result.results) {
            *register = *register & !mask | value & mask;
        }
        answer
    }
}

//! The format of the stage-2 tables of this back end: nested page tables (APM vol. 2, 15.25).

use stage2::Npt;
use x86_defs::cpuid::leaf_8000_0001_edx;

use crate::arch::x86_64::host::iommu;
use crate::arch::x86_64::host::processor::leaf;

/// The format of the stage-2 tables that this machine walks.
pub(super) fn stage2_format() -> Npt {
    let one_gib_pages = leaf(0x8000_0001).edx & leaf_8000_0001_edx::PAGE_1G != 0;
    Npt { one_gib_pages, iommu: iommu::kind() }
}

//! Calls about virtual processors of a child, and about the pages that show their state and statistics.

use addr::Gpa;
use hyperv_defs::Status;
use hyperv_defs::vp::{MapStatePage, StatsObject, StatsPage, UnmapStatePage, Vp};

use super::Ended;
use super::parent::Caller;

/// HvCallCreateVp.
pub(super) fn create(caller: &Caller<'_>, vp: Vp) -> Result<Ended, Status> {
    caller.check_child(vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallDeleteVp.
pub(super) fn delete(caller: &Caller<'_>, vp: Vp) -> Result<Ended, Status> {
    caller.check_child(vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallMapVpStatePage.
pub(super) fn map_state_page(caller: &Caller<'_>, map: &MapStatePage) -> Result<Ended, Status> {
    caller.check_child(map.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallUnmapVpStatePage.
pub(super) fn unmap_state_page(caller: &Caller<'_>, unmap: &UnmapStatePage) -> Result<Ended, Status> {
    caller.check_child(unmap.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallMapStatsPage2.
pub(super) fn map_stats_page(caller: &Caller<'_>, page: &StatsPage, _: Gpa) -> Result<Ended, Status> {
    check_object(caller, page)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallUnmapStatsPage.
pub(super) fn unmap_stats_page(caller: &Caller<'_>, page: &StatsPage) -> Result<Ended, Status> {
    check_object(caller, page)?;
    Err(Status::FeatureUnavailable)
}

fn check_object(caller: &Caller<'_>, page: &StatsPage) -> Result<(), Status> {
    caller.check_child(match page.object {
        StatsObject::Partition(id) => id,
        StatsObject::Vp(vp) => vp.partition,
    })
}

//! Calls about the registers and other state of a child's virtual processors, and about what CPUID answers there.

use hyperv_defs::Status;
use hyperv_defs::vp::{CpuidResult, GetCpuidValues, GetRegisters, InstallIntercept, SetRegisters, State, Translate};

use super::Ended;
use super::parent::Caller;

/// HvCallGetVpRegisters.
pub(super) fn get(caller: &Caller<'_>, get: &GetRegisters<'_>) -> Result<Ended, Status> {
    caller.check_child(get.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallSetVpRegisters.
pub(super) fn set(caller: &Caller<'_>, set: &SetRegisters<'_>) -> Result<Ended, Status> {
    caller.check_child(set.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallGetVpState.
pub(super) fn state(caller: &Caller<'_>, state: &State<'_>) -> Result<Ended, Status> {
    caller.check_child(state.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallSetVpState.
pub(super) fn set_state(caller: &Caller<'_>, state: &State<'_>) -> Result<Ended, Status> {
    caller.check_child(state.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallRegisterInterceptResult.
pub(super) fn register_cpuid(caller: &Caller<'_>, result: &CpuidResult) -> Result<Ended, Status> {
    caller.check_child(result.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallGetVpCpuidValues.
pub(super) fn cpuid_values(caller: &Caller<'_>, get: &GetCpuidValues<'_>) -> Result<Ended, Status> {
    caller.check_child(get.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallTranslateVirtualAddress.
pub(super) fn translate(caller: &Caller<'_>, translate: &Translate) -> Result<Ended, Status> {
    caller.check_child(translate.vp.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallInstallIntercept.
pub(super) fn install_intercept(caller: &Caller<'_>, install: &InstallIntercept) -> Result<Ended, Status> {
    caller.check_child(install.partition)?;
    Err(Status::FeatureUnavailable)
}

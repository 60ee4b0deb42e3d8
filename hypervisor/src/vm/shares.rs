//! The share of the pCPUs that a VM's description gives it.

use abi::payload::{CpuShare, Role, VmConfig};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use sched::{Cap, CpuSet, Share};

use crate::cpu::scheduler;

/// Checks that the numbers of the description are possible here.
///
/// # Errors
/// What is not, and what would be.
pub(crate) fn check(config: &VmConfig) -> Result<(), String> {
    let CpuShare { weight, cap_percent, pcpus } = config.share;
    if !(1..=Share::MAX_WEIGHT).contains(&weight) {
        return Err(format!("weight {weight}: it is 1 to {}", Share::MAX_WEIGHT));
    }
    if cap_percent == Some(0) {
        return Err(String::from("a cap of 0 %: the VM would never run"));
    }
    if let Some(wanted) = pcpus {
        let count = scheduler::runners().count();
        if wanted == 0 {
            return Err(String::from("a VM needs at least one pCPU"));
        }
        let last = u64::BITS - 1 - wanted.leading_zeros();
        if last as usize >= count {
            return Err(format!("there is no pCPU {last}: those that run vCPUs are 0 to {}", count - 1));
        }
    }
    Ok(())
}

/// The pCPUs that its vCPUs may run on. A description counts those that run vCPUs, and no others.
pub(crate) fn cpus(config: &VmConfig) -> CpuSet {
    let Some(wanted) = config.share.pcpus else { return CpuSet::ALL };
    let chosen = (0..).zip(scheduler::runners()).filter(|(number, _)| wanted & 1 << number != 0);
    CpuSet(chosen.fold(0, |set, (_, cpu)| set | 1 << cpu.id.0))
}

/// The share of a VM. A parent's is a group, which its children join.
pub(crate) fn of(config: &VmConfig, parent: Option<&Share>) -> Share {
    if let Some(group) = parent.and_then(Share::group) {
        return Share::member_of(group.clone());
    }
    let CpuShare { weight, cap_percent, .. } = config.share;
    let period = scheduler::cap_period();
    let cap = cap_percent.map(|percent| Cap {
        ticks: period.saturating_mul(u64::from(percent)) / 100,
        period,
        since: scheduler::now(),
    });
    let share = Share::new(weight, cap, cpus(config));
    match config.role {
        Role::Guest => share,
        Role::Parent => Share::member_of(Arc::new(share)),
    }
}

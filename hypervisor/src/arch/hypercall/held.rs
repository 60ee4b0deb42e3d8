//! A child's vCPU that no pCPU runs, for its parent to look at and to change.

use crate::vcpu::{Owner, Vcpu};
use crate::vm::{VcpuRef, Vm};

/// A vCPU that is out of its guest. All its registers are in memory.
pub(in crate::arch) struct Held<'a> {
    /// Its VM.
    pub(in crate::arch) vm: &'a Vm,
    /// Its number there.
    pub(in crate::arch) index: u32,
    /// The part that all pCPUs see.
    pub(in crate::arch) vcpu: &'a Vcpu,
    /// The part that a pCPU owns while it runs the vCPU.
    pub(in crate::arch) owner: &'a mut Owner,
}

impl Held<'_> {
    /// Takes the vCPU out of its guest while `work` uses it.
    pub(super) fn with<R>(vcpu: &VcpuRef, work: impl FnOnce(&mut Held<'_>) -> R) -> R {
        vcpu.hold(|owner| work(&mut Held { vm: vcpu.vm(), index: vcpu.index(), vcpu: vcpu.vcpu(), owner }))
    }
}

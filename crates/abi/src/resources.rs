//! What a host has, and what of it is in use: by these figures it is seen that a VM that is gone has left nothing
//! behind.

use serde::{Deserialize, Serialize};

/// What a host has, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// When, in nanoseconds of the host since it came up.
    pub at_ns: u64,
    /// VMs that were created and not destroyed, those that have ended among them.
    pub vms: u32,
    /// VMs that hold memory: created or running.
    pub alive_vms: u32,
    /// vCPUs of these.
    pub vcpus: u32,
    /// Bytes of memory that were there for VMs and the heap at boot.
    pub total_bytes: u64,
    /// Bytes of that which nobody has.
    pub free_bytes: u64,
    /// Bytes that the hypervisor's heap has taken.
    pub heap_bytes: u64,
    /// Bytes that objects on the heap take.
    pub heap_used_bytes: u64,
    /// Bytes of memory that are set aside for stage-2 tables.
    pub tables_reserved_bytes: u64,
    /// Bytes of that which are tables now.
    pub tables_used_bytes: u64,
    /// TLB tags of the machine.
    pub tags: u32,
    /// TLB tags in the pools of VMs.
    pub tags_in_pools: u32,
    /// TLB tags of these that belong to one vCPU or VM for its life.
    pub tags_owned: u32,
}

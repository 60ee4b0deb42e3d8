//! The machine for the hypervisor itself.
//!
//! `boot` brings the first pCPU from the loader into Rust, `efi` from UEFI into `boot`, `smp` the others. `device_tree`
//! describes the machine.

pub(crate) mod boot;
pub(crate) mod counter;
pub(crate) mod device_tree;
pub(crate) mod ecam;
mod efi;
pub(crate) mod gic;
pub(crate) mod iommu;
pub(crate) mod irq;
pub(crate) mod its;
mod mmio;
pub(crate) mod paging;
pub(crate) mod percpu;
pub(crate) mod power;
pub(crate) mod serial;
pub(crate) mod smp;
pub(crate) mod virtio;

//! The machine as the hypervisor itself uses it.
//!
//! `boot` brings the first pCPU from the loader's hands into Rust, `efi` from those of UEFI into `boot`, `smp` the
//! others. `device_tree` says what the machine is made of.

pub(crate) mod boot;
pub(crate) mod device_tree;
mod efi;
pub(crate) mod gic;
pub(crate) mod irq;
pub(crate) mod paging;
pub(crate) mod percpu;
pub(crate) mod power;
pub(crate) mod serial;
pub(crate) mod smp;
pub(crate) mod tsc;
pub(crate) mod virtio;

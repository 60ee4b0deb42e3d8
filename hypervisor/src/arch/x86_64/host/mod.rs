//! The machine for the hypervisor itself.
//!
//! `boot` brings the first pCPU from the loader into Rust, `smp` the others. `acpi` and `loader_data` read the data of
//! firmware and loader.

pub(crate) mod acpi;
pub(crate) mod apic;
pub(crate) mod boot;
pub(crate) mod device_vectors;
mod edu;
pub(in crate::arch::x86_64) mod framebuffer;
pub(crate) mod io_apic;
pub(crate) mod iommu;
pub(crate) mod irq;
pub(in crate::arch::x86_64) mod keyboard;
mod loader_data;
pub(crate) mod low_memory;
pub(crate) mod machine_check;
pub(crate) mod paging;
pub(crate) mod pci;
pub(crate) mod percpu;
pub(crate) mod port;
pub(crate) mod power;
pub(crate) mod processor;
pub(crate) mod quirks;
pub(crate) mod serial;
pub(crate) mod smp;
pub(crate) mod tsc;
pub(crate) mod virtio;
pub(crate) mod wall_clock;

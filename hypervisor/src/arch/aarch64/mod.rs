//! AArch64 at EL2.
//!
//! `boot` brings the first pCPU from the loader's hands into Rust, `efi` from those of UEFI into `boot`, `smp` the others; `device_tree` says what the machine
//! is made of; `paging`, `percpu`, `irq` and `gic` are the machine as the hypervisor itself uses it.
//!
//! The guest's side: `vcpu` is a vCPU's state, `entry` the door into the guest, `exit` the one match on why it was
//! left; `sysreg`, `mmio` and `firmware` are what an exit may lead to, `platform` is what vCPUs share.

pub(crate) mod boot;
mod debug;
mod device_tree;
mod efi;
mod el1;
pub(crate) mod emulate;
mod entry;
pub(crate) mod exit;
mod firmware;
mod fpu;
pub(crate) mod gate;
pub(crate) mod gic;
mod guest_tree;
mod id_registers;
pub(crate) mod irq;
mod layout;
pub(crate) mod loader;
mod mmio;
pub(crate) mod paging;
pub(crate) mod percpu;
pub(crate) mod platform;
pub(crate) mod power;
mod register;
pub(crate) mod routing;
pub(crate) mod serial;
mod smp;
mod sysreg;
pub(crate) mod tags;
pub(crate) mod tlb;
pub(crate) mod tsc;
pub(crate) mod uart;
pub(crate) mod vcpu;
pub(crate) mod virtio;
pub(crate) mod virtualization;

pub(crate) use gic as interrupts;

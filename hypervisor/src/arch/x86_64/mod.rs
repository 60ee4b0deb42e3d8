//! x86-64 with AMD SVM.
//!
//! `boot` brings the first pCPU from the loader's hands into Rust, `smp` the others; `paging`, `percpu`, `irq` and
//! `apic` are the machine as the hypervisor itself uses it.
//!
//! The guest's side: `vcpu` is a vCPU's state, `entry` the door into the guest, `exit` the one match on why it was
//! left; `cpuid`, `msr`, `mmio` and `platform` are what an exit may lead to, `routing` how interrupts travel.

pub(crate) mod acpi;
pub(crate) mod apic;
pub(crate) mod boot;
mod control;
pub(crate) mod cpuid;
pub(crate) mod emulate;
mod entry;
mod events;
pub(crate) mod exit;
mod fpu;
mod framebuffer;
pub(crate) mod gate;
pub(crate) mod hyperv;
pub(crate) mod irq;
mod keyboard;
pub(crate) mod loader;
mod loader_data;
mod machine_check;
mod mmio;
mod msr;
pub(crate) mod paging;
pub(crate) mod percpu;
pub(crate) mod platform;
pub(crate) mod port;
pub(crate) mod power;
pub(crate) mod routing;
pub(crate) mod serial;
pub(crate) mod smp;
pub(crate) mod svm;
pub(crate) mod tags;
pub(crate) mod tlb;
pub(crate) mod tsc;
pub(crate) mod uart;
pub(crate) mod vcpu;
pub(crate) mod virtio;
pub(crate) mod wall_clock;

pub(crate) use apic as interrupts;
pub(crate) use svm as virtualization;

//! The interface between the hypervisor and the tools.
//!
//! * [`payload`]: the one archive that the boot loader passes to the hypervisor: VM descriptions, kernels, initrds.
//! * [`control`]: the control port, framed messages in both directions over a virtio console.
//! * [`counters`]: the counters per vCPU, and their names in every tool.
//! * [`dirty`]: reports about dirty logs.
//! * [`layout`]: the memory layout of the hypervisor's own state.
//! * [`resources`]: the host's memory, tables and TLB tags, and how much of them is in use.
//! * [`saved`]: the file of a saved VM.
//! * [`setting`]: the names of the values of a VM's settings.
//! * [`exit_code`]: how the hypervisor ends QEMU.
//!
//! Both ends are built from this crate, so their types always agree. Both send a version, so an old tool rejects a new
//! hypervisor instead of misreading it.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod control;
pub mod counters;
pub mod dirty;
pub mod exit_code;
pub mod layout;
pub mod payload;
pub mod resources;
pub mod saved;
pub mod setting;
pub mod trace;

#[cfg(test)]
mod tests;

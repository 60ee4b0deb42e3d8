//! What the hypervisor and the tools around it say to each other.
//!
//! * [`payload`]: the one archive that the boot loader hands to the hypervisor: VM descriptions, kernels, initrds.
//! * [`control`]: the control port, framed messages in both directions over a virtio console.
//! * [`counters`]: what is counted per vCPU, and the names that every tool shows.
//! * [`dirty`]: what is told about dirty logs.
//! * [`layout`]: how the hypervisor's own state lies in memory.
//! * [`exit_code`]: how the hypervisor ends QEMU.
//!
//! Both ends are built from this crate, so a field cannot drift; both carry a version, so an old tool meeting a new
//! hypervisor is told so instead of misreading it.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod control;
pub mod counters;
pub mod dirty;
pub mod exit_code;
pub mod layout;
pub mod payload;
pub mod trace;

#[cfg(test)]
mod tests;

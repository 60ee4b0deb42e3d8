//! AArch64 for a hypervisor at EL2, as data from the manuals, without behaviour.
//!
//! * [`registers`]: fields of the system registers of EL2 and EL1 that the hypervisor sets (Arm ARM, D19).
//! * [`syndrome`]: why the processor entered EL2 (Arm ARM, ESR_EL2).
//! * [`features`]: the processor features that guests get, by its ID registers.
//! * [`promise`]: what a guest was told of its processor, and whether another one keeps that.
//! * [`its`]: the interrupt translation service of GICv3, by which devices raise interrupts with messages.
//! * [`smmu`]: the SMMUv3, by which devices reach what a VM's tables map.
//! * [`image`]: bootable kernels, and their places in memory.
//!
//! The crate compiles on any host, so everything built on it can be tested on any host.

#![no_std]
#![forbid(unsafe_code)]

pub mod features;
pub mod image;
pub mod its;
pub mod promise;
pub mod registers;
pub mod smmu;
pub mod syndrome;

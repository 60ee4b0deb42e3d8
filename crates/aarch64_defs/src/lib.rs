//! AArch64 as a hypervisor at EL2 sees it, as data: what the manuals say, with no behaviour of our own.
//!
//! * [`registers`]: fields of the system registers of EL2 and EL1 that we set (Arm ARM, D19).
//! * [`syndrome`]: why the processor came to EL2 (Arm ARM, ESR_EL2).
//! * [`features`]: what guests are offered of a processor, by its ID registers.
//! * [`image`]: the kernels that are booted there, and where they go.
//!
//! Compiles on any host, so that everything built on it can be tested on any host.

#![no_std]
#![forbid(unsafe_code)]

pub mod features;
pub mod image;
pub mod registers;
pub mod syndrome;

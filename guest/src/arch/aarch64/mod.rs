//! AArch64, at EL1.
//!
//! **What "safe" means here** is what it means on x86-64. This kernel exists to misuse the machine. So functions with
//! an odd effect on the machine are safe to call, by decision. On a machine that follows the manual they never corrupt
//! Rust's own state. They write memory only through the window and through addresses without RAM. They restore the
//! registers that generated code relies on before they return.
//!
//! "Arm ARM" is the Arm Architecture Reference Manual for A-profile, DDI 0487; "GIC" is IHI 0069.

pub(crate) mod attempt;
pub(crate) mod boot;
pub(crate) mod code;
pub(crate) mod control;
pub(crate) mod cpu_local;
pub(crate) mod entries;
mod firmware_tables;
pub(crate) mod gic;
pub(in crate::arch) mod host_writes;
pub(crate) mod interrupts;
pub(crate) mod lower_level;
pub(crate) mod power;
pub(crate) mod private;
pub(crate) mod registers;
pub(crate) mod remap;
pub(crate) mod remote;
pub(crate) mod round_trip;
pub(crate) mod serial;
pub(crate) mod tlb;
pub(crate) mod tsc;
pub(crate) mod vectors;

pub(crate) use gic as controller;

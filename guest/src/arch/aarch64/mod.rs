//! AArch64, at EL1.
//!
//! **What "safe" means here** is what it means on x86-64: this kernel exists to misuse the machine, so functions that
//! do something odd to it are safe to call by decision. What they never do is corrupt Rust's own state behind the
//! caller's back on a machine that behaves as the manual says: memory is only written through the window and through
//! addresses that name no RAM, and the registers that code generation relies on are put back before the function
//! returns.
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

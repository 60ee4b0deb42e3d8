//! Emulated devices, one file each.
//!
//! A device is plain data and logic: it is told of accesses and of time, and returns what follows from them. It knows
//! neither the vCPU that asks nor the address it is mapped at, allocates nothing while the guest runs, and never waits.

pub(crate) mod interrupt;
pub(crate) mod io_apic;
pub(crate) mod local_apic;
pub(crate) mod power;
pub(crate) mod rtc;
pub(crate) mod uart;

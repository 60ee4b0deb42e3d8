//! Emulated devices, one file each.
//!
//! A device is plain data and logic. It gets accesses and the time, and returns the consequences. It knows neither the
//! vCPU of an access nor its own address, allocates nothing while the guest runs, and never waits.
//!
//! Guests have two kinds of machine, the PC and QEMU's `virt`. The devices of both are compiled and tested everywhere.
//! The linker leaves out of an image those that its machine does not use.

pub mod affinity;
pub mod generic_timer;
pub mod gic;
pub mod guest_tsc;
pub mod interrupt;
pub mod io_apic;
pub mod local_apic;
pub mod memory_types;
pub mod msr;
pub mod pci;
pub mod pit;
pub mod pl011;
pub mod power;
pub mod psci;
pub mod rtc;
pub mod serial;
pub mod uart;
pub mod wired;

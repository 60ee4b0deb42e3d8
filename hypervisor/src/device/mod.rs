//! Emulated devices, one file each.
//!
//! A device is plain data and logic: it is told of accesses and of time, and returns what follows from them. It knows
//! neither the vCPU that asks nor the address it is mapped at, allocates nothing while the guest runs, and never waits.
//!
//! There are two kinds of machine for guests, the PC and the one that QEMU calls `virt`. `build.rs` says by
//! `cfg(machine)` which of them the hypervisor is built for, so that it does not carry the devices of the other; the
//! tests, which run anywhere, are of all.

#[cfg(any(test, machine = "virt"))]
pub(crate) mod affinity;
#[cfg(any(test, machine = "virt"))]
pub(crate) mod generic_timer;
#[cfg(any(test, machine = "virt"))]
pub(crate) mod gic;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod interrupt;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod io_apic;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod local_apic;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod memory_types;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod pci;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod pit;
#[cfg(any(test, machine = "virt"))]
pub(crate) mod pl011;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod power;
#[cfg(any(test, machine = "virt"))]
pub(crate) mod psci;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod rtc;
#[cfg(any(test, machine = "pc"))]
pub(crate) mod uart;
pub(crate) mod wired;

//! Emulated devices, one file each.
//!
//! A device is plain data and logic. It gets accesses and the time, and returns the consequences. It knows neither the
//! vCPU of an access nor its own address, allocates nothing while the guest runs, and never waits.
//!
//! Guests have two kinds of machine, the PC and QEMU's `virt`. `build.rs` sets `cfg(machine)` for the hypervisor's
//! machine, so that it does not contain the devices of the other one. The tests run on any host and cover all devices.

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

//! The machine's devices, and the VM that has them: its *owner*.
//!
//! The owner sees the machine itself: its memory is at the machine's addresses, most ports and all registers in memory
//! are the devices' own, and their interrupts go to the vCPU with the number of the pCPU that took them. What the
//! hypervisor keeps stands between: other VMs' memory ([`reach`]), the functions of PCI devices that it uses itself
//! ([`config_space`]), and the I/O APIC, whose pins it must silence while an interrupt is handled ([`pins`]).
//!
//! Or VMs have single PCI functions, and see them on the bus of the hypervisor's PC ([`function`]).
//!
//! One VM has all devices. Without an IOMMU a device can write to any memory, so the owner is trusted with the whole
//! machine: see docs/decisions/0022-owner-of-devices.md.

pub mod config_space;
#[allow(dead_code, reason = "not on every architecture has a VM functions")]
pub mod function;
pub(crate) mod iommu;
pub mod pins;
pub mod reach;

use alloc::sync::{Arc, Weak};

use crate::sync::{Mutex, per_host};
use crate::vm::Vm;

per_host! {
    static OWNER: Mutex<Weak<Vm>> = Mutex::new(Weak::new());
}

/// The VM that has the devices, if one has.
#[allow(dead_code, reason = "not on every architecture has a VM the machine's devices")]
pub(crate) fn owner() -> Option<Arc<Vm>> {
    OWNER.lock().upgrade()
}

/// From now on this VM has the devices.
pub(crate) fn set_owner(vm: &Arc<Vm>) {
    *OWNER.lock() = Arc::downgrade(vm);
}

//! AArch64 at EL2.
//!
//! [`host`] is the machine for the hypervisor itself, [`guest`] the machine that a guest sees. [`el2`] is the back end:
//! a vCPU's state, its entry and its exit. `register` names system registers for all, and
//! `speculation` chooses the steps against speculative execution.

pub(crate) mod el2;
pub(crate) mod guest;
pub(crate) mod host;
mod register;
mod speculation;

use super::control_port;
pub(crate) use el2::{self as hwvirt, entry, exit, format, irq_mask, tags, tlb, vcpu};
pub(crate) use guest::{delivery, emulate, loader, platform, saved};
pub(crate) use host::{counter as clock, gic as interrupts, iommu, irq, paging, percpu, power, serial, virtio};

/// This machine.
pub(crate) struct Machine;

super::contract::implement!(Machine);

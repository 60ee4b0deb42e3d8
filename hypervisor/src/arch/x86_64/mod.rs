//! x86-64 with AMD SVM.
//!
//! [`host`] is the machine for the hypervisor itself, [`guest`] the PC that a guest sees. [`svm`] is the back end: a
//! vCPU's state in AMD's virtualization, its entry and its exit.

pub(crate) mod backend;
pub(crate) mod guest;
pub(crate) mod host;
mod svm;

use super::control_port;
pub(crate) use backend::{entry, exit, format, hwvirt, irq_mask};
pub(crate) use guest::{cpuid, delivery, emulate, loader, platform, registers, translate, vcpu, vp_state};
pub(crate) use host::{apic as interrupts, iommu, irq, paging, percpu, power, serial, tsc as clock, virtio};
pub(crate) use svm::{tags, tlb};

/// This machine.
pub(crate) struct Machine;

super::contract::implement!(Machine);

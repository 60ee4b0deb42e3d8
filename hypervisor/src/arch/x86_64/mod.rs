//! x86-64 with AMD SVM or Intel VT-x.
//!
//! [`host`] is the machine for the hypervisor itself, [`guest`] the PC that a guest sees. [`svm`] and [`vmx`] are the
//! back ends: a vCPU's state in the processor's virtualization, its entry and its exit.

pub(crate) mod backend;
pub(crate) mod guest;
pub(crate) mod host;
mod speculation;
pub(crate) mod stage2_format;
mod svm;
mod vmx;

use super::control_port;
pub(crate) use backend::{entry, exit, hwvirt, irq_mask};
pub(crate) use guest::{cpuid, delivery, emulate, loader, platform, registers, saved, translate, vcpu, vp_state};
pub(crate) use host::{apic as interrupts, iommu, irq, paging, percpu, power, serial, tsc as clock, virtio};
pub(crate) use stage2_format as format;
pub(crate) use svm::{tags, tlb};

/// This machine.
pub(crate) struct Machine;

super::contract::implement!(Machine);

//! x86-64 with AMD SVM.
//!
//! [`host`] is the machine for the hypervisor itself, [`guest`] the PC that a guest sees. [`svm`] is the back end: a
//! vCPU's state in AMD's virtualization, its entry and its exit.

pub(crate) mod guest;
pub(crate) mod host;
pub(crate) mod svm;

pub(crate) use guest::{cpuid, emulate, loader, platform, routing, uart};
pub(crate) use host::{apic as interrupts, irq, paging, percpu, power, serial, tsc, virtio};
pub(crate) use svm::{self as virtualization, exit, format, gate, tags, tlb, vcpu};

/// This machine.
pub(crate) struct Machine;

super::contract::implement!(Machine);

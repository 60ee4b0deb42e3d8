//! x86-64 with AMD SVM.
//!
//! [`host`] is the machine as the hypervisor itself uses it, [`guest`] the PC that a guest sees. [`svm`] is the back end:
//! what a vCPU is to AMD's virtualization, how it is entered and why it was left.

pub(crate) mod guest;
pub(crate) mod host;
pub(crate) mod svm;

pub(crate) use guest::{cpuid, emulate, loader, platform, routing, uart};
pub(crate) use host::{apic as interrupts, irq, paging, percpu, power, serial, tsc, virtio};
pub(crate) use svm::{self as virtualization, exit, format, gate, tags, tlb, vcpu};

//! x86-64.
//!
//! **What "safe" means here.** This kernel exists to misuse the machine: a random MSR write or a store to any address
//! is an experiment, and one of its results is the end of the VM. So functions such as [`attempt::wrmsr`] are safe to
//! call, by decision, although a bad value can crash the kernel. On a machine that follows the manual they never
//! corrupt Rust's own state. They write memory only through the window and through addresses without RAM. They restore
//! the control registers that generated code relies on before they return.

pub(crate) mod apic;
pub(crate) mod attempt;
pub(crate) mod boot;
pub(crate) mod bounds;
pub(crate) mod code_pages;
pub(crate) mod control;
pub(crate) mod control_forms;
pub(crate) mod cpu_local;
mod descriptors;
pub(crate) mod encode;
pub(super) mod entries;
pub(crate) mod event_log;
pub(crate) mod forms;
pub(in crate::arch) mod host_writes;
pub(crate) mod hypercall;
pub(crate) mod hyperv;
pub(crate) mod interrupts;
pub(crate) mod modes;
pub(crate) mod port;
pub(crate) mod power;
pub(crate) mod probe;
pub(crate) mod registers;
pub(crate) mod remap;
pub(crate) mod remote;
pub(crate) mod round_trip;
pub(crate) mod serial;
pub(crate) mod tlb;
pub(crate) mod tsc;
pub(crate) mod vectors;

pub(crate) use apic as controller;

//! The PC that a guest sees.
//!
//! `cpuid`, `msr`, `control`, `mmio` and `platform` handle exits, `intercept` those that a parent handles. `delivery`
//! delivers interrupts between vCPUs.

pub(crate) mod apic;
pub(in crate::arch::x86_64) mod assist;
mod children;
pub(crate) mod control;
pub(crate) mod cpuid;
pub(crate) mod delivery;
pub(crate) mod emulate;
mod events;
pub(crate) mod fpu;
pub(in crate::arch::x86_64) mod functions;
pub(crate) mod hyperv;
pub(crate) mod intercept;
pub(crate) mod loader;
pub(crate) mod mmio;
pub(crate) mod msr;
pub(crate) mod own_machine;
pub(crate) mod platform;
pub(crate) mod registers;
pub(crate) mod saved;
mod spec_ctrl;
pub(crate) mod state;
pub(crate) mod synic;
pub(crate) mod translate;
pub(crate) mod vcpu;
pub(crate) mod vmware;
pub(crate) mod vp_state;

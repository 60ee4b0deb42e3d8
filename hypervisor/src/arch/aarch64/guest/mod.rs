//! The machine that a guest sees.
//!
//! `sysreg`, `mmio` and `firmware` handle exits, `platform` is shared by the vCPUs, `own_machine` is for the VM that
//! has the machine's devices.

pub(crate) mod delivery;
pub(crate) mod emulate;
pub(crate) mod firmware;
pub(crate) mod fpu;
mod guest_tree;
pub(crate) mod id_registers;
pub(crate) mod layout;
pub(crate) mod loader;
mod messages;
pub(crate) mod mmio;
pub(crate) mod own_machine;
pub(crate) mod platform;
pub(crate) mod saved;
pub(crate) mod sysreg;

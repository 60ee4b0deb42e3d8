//! Intel VT-x (SDM vol. 3C): fields and controls of a VMCS, exit reasons, and the two encodings that differ from
//! AMD's: events and access rights of segments.
//!
//! The hypervisor keeps a vCPU's registers in the format of [`crate::vmcb`] on either vendor's processors. So what is
//! here converts from and to that.

pub mod controls;
pub mod event;
pub mod field;
pub mod reason;
pub mod segment;

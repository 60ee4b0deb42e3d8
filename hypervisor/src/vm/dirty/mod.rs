//! The dirty log of a VM: which pages were written since they were copied.
//!
//! [`log`] is what a fault and the hypervisor's own writes know of it. A [`session`] harvests the log, keeps a mirror
//! up to date, and makes large pages of small ones when the log has ended.

pub(crate) mod log;
pub(crate) mod session;

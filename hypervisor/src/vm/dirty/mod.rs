//! The dirty log of a VM: the pages that were written since they were copied.
//!
//! [`log`] has the state that faults and the hypervisor's own writes need. A [`session`] harvests the log, updates a
//! mirror, and joins split pages to large ones after the log has ended. [`lent`] is for
//! children, whose parents harvest; [`comeback`] joins their pages.

#[allow(dead_code, reason = "not every architecture has children")]
pub(crate) mod comeback;
#[allow(dead_code, reason = "not every architecture has children")]
mod lent;
pub(crate) mod log;
pub(crate) mod session;

//! What happens on each pCPU, in order, for whoever wants to see it.
//!
//! Each pCPU writes into a ring of its own, and the one that answers the control port reads them all. Neither waits for the
//! other: when nobody reads, the newest events are lost, and counted.
//!
//! While nobody traces, nothing of this is on the way of an exit: the vCPU loop asks each time whether the vCPU is awake, and
//! one that is watched says no (`vcpu::run`). Whether it is watched is decided when it comes to a pCPU. Kicks and flushes, which
//! cost thousands of cycles, look at one word.

mod ring;
mod tracing;

#[cfg_attr(test, expect(unused_imports, reason = "the fake machine tells of no kick"))]
pub(crate) use tracing::kicked;
pub(crate) use tracing::{arrived, exit, flushed, goes_on, is_on, left, read, start, stop};

//! Events of each pCPU, in order, for `dunlin trace`.
//!
//! Each pCPU writes into a ring of its own, and the pCPU with the control port reads them all. Neither waits for the
//! other: a full ring drops the newest events, and counts them.
//!
//! While no trace runs, it costs an exit nothing. The vCPU loop asks each time whether the vCPU is awake, and a traced
//! vCPU answers no (`vcpu::run`). A pCPU decides whether to trace a vCPU when it starts to run it. Kicks and flushes,
//! which cost thousands of cycles, read one word.

pub(crate) mod longest;
mod ring;
mod tracing;

#[cfg(test)]
pub(crate) use tracing::is_on;
#[cfg_attr(test, expect(unused_imports, reason = "the fake machine tells of no kick"))]
pub(crate) use tracing::kicked;
pub(crate) use tracing::{exit, flushed, goes_on, looks, read, run_began, run_ended, start, stop};

//! Core's atomics, loom's under `cfg(loom)`, or those of a simulation: the one switch.

#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(feature = "interleave", not(loom)))]
pub(crate) use interleave::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

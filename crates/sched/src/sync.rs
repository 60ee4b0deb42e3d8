//! The one switch between core's atomics, loom's (`cfg(loom)`), and those of a simulation.

#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(feature = "interleave", not(loom)))]
pub(crate) use interleave::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

//! Atomics and a lock that are plain, or scheduling points of a simulation: for tests of code that shares memory.
//!
//! Inside [`explore`] all threads of the code under test take turns on one thread of the operating system. At each
//! *scheduling point* the simulation (the crate `shuttle`) decides which thread continues, by a seed. So each run is
//! one interleaving, and the same seed repeats it. Every operation of the atomics and of the lock here is such a point.
//! Memory is sequentially consistent; use loom to test weaker orders.
//!
//! Outside [`explore`] all of this is core's atomics and spin's lock. A library may be built with these types for a
//! test of another crate, and its own tests do not notice.
//!
//! ```
//! use interleave::{AtomicU64, Ordering, Schedules, explore, spawn};
//! use std::sync::Arc;
//!
//! // Two threads that read and then write lose an increment in some interleavings.
//! let totals = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
//! let seen = totals.clone();
//! explore(Schedules::Random, 1, 100, move || {
//!     let word = Arc::new(AtomicU64::new(0));
//!     let other = word.clone();
//!     let add = |word: &AtomicU64| word.store(word.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
//!     let thread = spawn(move || add(&other));
//!     add(&word);
//!     thread.join();
//!     seen.lock().unwrap().insert(word.load(Ordering::SeqCst));
//! });
//! assert_eq!(totals.lock().unwrap().iter().copied().collect::<Vec<_>>(), [1, 2]);
//! ```

#![forbid(unsafe_code)]

mod atomic;
mod lock;
mod simulation;
#[cfg(test)]
mod tests;

pub use atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
pub use lock::{Mutex, MutexGuard, Relax};
pub use simulation::{Context, Parking, STEPS, Schedules, Thread, explore, find, point, relax, spawn};

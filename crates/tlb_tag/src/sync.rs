//! Core's atomics and spin's lock, loom's under `cfg(loom)`, or those of a simulation: the one switch.

#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(feature = "interleave", not(loom)))]
pub(crate) use interleave::{AtomicU64, Mutex, Ordering};
#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use spin::Mutex;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use model::Mutex;

/// Loom's lock with the face of spin's.
#[cfg(loom)]
mod model {
    use loom::sync::MutexGuard;

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("a model ends with the first panic")
        }
    }
}

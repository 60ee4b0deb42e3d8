//! The one switch between core's atomics with spin's lock, loom's (`cfg(loom)`), and those of a simulation.

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

/// Loom's lock with spin's interface.
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

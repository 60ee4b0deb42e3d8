//! The one switch between core's atomics with spin's lock, and loom's (`cfg(loom)`).

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use spin::Mutex;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use model::Mutex;

/// Loom's lock with spin's interface.
#[cfg(loom)]
mod model {
    use loom::sync::MutexGuard;

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

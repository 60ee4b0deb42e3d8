//! Spin's lock with a scheduling point before it is taken; other threads continue while it waits.

use spin::mutex::{SpinMutex, SpinMutexGuard};
use spin::relax::RelaxStrategy;

use crate::{point, relax};

/// A lock with spin's interface.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(SpinMutex<T, Relax>);

/// Access to the lock's data, for its holder.
pub type MutexGuard<'a, T> = SpinMutexGuard<'a, T, Relax>;

/// Waits by letting other threads continue.
#[derive(Debug)]
pub struct Relax;

impl RelaxStrategy for Relax {
    fn relax() {
        relax();
    }
}

impl<T> Mutex<T> {
    /// A free lock.
    #[must_use]
    pub const fn new(value: T) -> Self {
        Self(SpinMutex::new(value))
    }

    /// The lock's data.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits until the lock is free, and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        point();
        self.0.lock()
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        point();
        self.0.try_lock()
    }

    /// The lock's data, for an exclusive owner.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

//! Spin's lock, to take which is a scheduling point, and which lets others go on while it waits.

use spin::mutex::{SpinMutex, SpinMutexGuard};
use spin::relax::RelaxStrategy;

use crate::{point, relax};

/// A lock with the face of spin's.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(SpinMutex<T, Relax>);

/// What is in the lock, for who has it.
pub type MutexGuard<'a, T> = SpinMutexGuard<'a, T, Relax>;

/// Waits by letting others go on.
#[derive(Debug)]
pub struct Relax;

impl RelaxStrategy for Relax {
    fn relax() {
        relax();
    }
}

impl<T> Mutex<T> {
    /// A lock that is free.
    #[must_use]
    pub const fn new(value: T) -> Self {
        Self(SpinMutex::new(value))
    }

    /// What is in it.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits until it is free, and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        point();
        self.0.lock()
    }

    /// Takes it if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        point();
        self.0.try_lock()
    }

    /// What is in it, for who has all of it.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

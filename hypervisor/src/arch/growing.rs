//! A list that grows while others read it. Its room is fixed, so no value ever moves.

#![expect(unsafe_code, reason = "adds values behind those that others read")]

use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use spin::Mutex;

use crate::frames::{self, Exhausted};

/// A list of values of `T`.
pub(crate) struct Growing<T> {
    /// Room for `room` values, of which the first `count` exist.
    values: NonNull<T>,
    room: usize,
    count: AtomicUsize,
    /// Whoever adds a value holds the lock.
    adding: Mutex<()>,
}

// SAFETY: the list owns its values as a `Vec` does.
unsafe impl<T: Send> Send for Growing<T> {}
// SAFETY: a shared list gives out shared references, and takes values from any thread, one at a time.
unsafe impl<T: Send + Sync> Sync for Growing<T> {}

impl<T> Growing<T> {
    /// An empty list with room for this number of values.
    ///
    /// # Errors
    /// The host has no memory for the room.
    pub(crate) fn with_room(room: usize) -> Result<Self, Exhausted> {
        let mut values = Vec::new();
        frames::reserve(&mut values, room)?;
        Ok(Self::from(values))
    }

    /// Adds a value behind the others.
    ///
    /// # Errors
    /// There is no room: the value comes back.
    pub(crate) fn push(&self, value: T) -> Result<(), T> {
        let _adding = self.adding.lock();
        let count = self.count.load(Ordering::Relaxed);
        if count == self.room {
            return Err(value);
        }
        // SAFETY: there is room.
        let place = unsafe { self.values.add(count) };
        // SAFETY: nobody reads behind `count`, and the lock keeps out others that add.
        unsafe { place.write(value) };
        // Whoever sees the count sees the value.
        self.count.store(count + 1, Ordering::Release);
        Ok(())
    }

    /// Takes all values out.
    pub(crate) fn into_vec(self) -> Vec<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: `from` made the list from a vector with this room, and `count` values exist. `this` is never dropped.
        unsafe { Vec::from_raw_parts(this.values.as_ptr(), this.count.load(Ordering::Acquire), this.room) }
    }
}

impl<T> From<Vec<T>> for Growing<T> {
    /// A list with the values and the room of the vector.
    fn from(values: Vec<T>) -> Self {
        let mut values = ManuallyDrop::new(values);
        let (count, room) = (values.len(), values.capacity());
        // SAFETY: a vector's pointer is never null.
        let values = unsafe { NonNull::new_unchecked(values.as_mut_ptr()) };
        Self { values, room, count: AtomicUsize::new(count), adding: Mutex::new(()) }
    }
}

impl<T> Default for Growing<T> {
    /// An empty list without room.
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl<T> Deref for Growing<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the first `count` values exist, do not move, and are only shared as long as the list lives.
        unsafe { core::slice::from_raw_parts(self.values.as_ptr(), self.count.load(Ordering::Acquire)) }
    }
}

impl<T> Drop for Growing<T> {
    fn drop(&mut self) {
        drop(core::mem::take(self).into_vec());
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec::Vec;

    use super::Growing;

    #[test]
    fn values_are_dropped_once_and_do_not_move() {
        let value = Arc::new(());
        let list = Growing::from(Vec::with_capacity(2));
        assert!(list.push(value.clone()).is_ok());
        let first = core::ptr::from_ref(&list[0]);
        while list.push(value.clone()).is_ok() {}
        assert_eq!(core::ptr::from_ref(&list[0]), first);
        assert_eq!(Arc::strong_count(&value), list.len() + 1);
        let values = list.into_vec();
        drop(Growing::from(values));
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

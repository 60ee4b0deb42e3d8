//! The access rules of each class.
//!
//! Fields that the owner writes are in [`Owned`], a lock that a pCPU takes once each time it runs the vCPU: to hold it
//! is to run the vCPU. Words that the owner writes and others read at any time are [`OwnerWord`]s. To write one, the
//! owner shows the [`Proof`] that comes with the lock.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{
    AtomicBool, AtomicI8, AtomicI16, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8, AtomicU16, AtomicU32,
    AtomicU64, AtomicUsize, Ordering,
};

#[cfg(feature = "interleave")]
use interleave::{Mutex, MutexGuard};
use spin::Once;
#[cfg(not(feature = "interleave"))]
use spin::{Mutex, MutexGuard};

/// Types that may be of class `owner`: only one pCPU at a time can write them.
///
/// To implement this for a struct is to claim it for all fields in the struct.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be of class `owner`: others than the owner can write it, or it cannot be written at all",
    label = "not reached through `OwnerGuard` alone",
    note = "put it into `Owned`, or make it an `OwnerWord`; what others write is `mailbox`"
)]
pub trait OwnerField {}

/// Types that may be of class `mailbox`: any pCPU writes them through a shared reference, by atomic operations or with
/// a lock inside.
///
/// To implement this for a struct is to claim it for all fields in the struct.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be of class `mailbox`: it is not made of atomics or locks",
    label = "not for everybody to write",
    note = "what only the owner writes is `owner`; what is never written again is `frozen`"
)]
pub trait MailboxField: Sync {}

macro_rules! mailbox {
    ($($atomic:ty,)*) => { $(impl MailboxField for $atomic {})* };
}
mailbox!(
    AtomicBool,
    AtomicU8,
    AtomicU16,
    AtomicU32,
    AtomicU64,
    AtomicUsize,
    AtomicI8,
    AtomicI16,
    AtomicI32,
    AtomicI64,
    AtomicIsize,
);
impl<T> MailboxField for AtomicPtr<T> {}
impl<T: Send> MailboxField for Mutex<T> {}
#[cfg(feature = "interleave")]
mailbox!(
    interleave::AtomicBool,
    interleave::AtomicU8,
    interleave::AtomicU16,
    interleave::AtomicU32,
    interleave::AtomicU64,
);
#[cfg(feature = "interleave")]
impl<T: Send> MailboxField for spin::Mutex<T> {}
impl<T: MailboxField, const N: usize> MailboxField for [T; N] {}

impl<T: Send> OwnerField for Owned<T> {}
impl OwnerField for OwnerWord {}
impl<T: OwnerField, const N: usize> OwnerField for [T; N] {}
/// The owner makes it at its first use.
impl<T: OwnerField> OwnerField for Once<T> {}

/// Data that one pCPU at a time owns.
#[derive(Default)]
pub struct Owned<T>(Mutex<T>);

impl<T> Owned<T> {
    /// Data without an owner.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Becomes the owner; waits until the last owner has released it.
    #[inline]
    pub fn run(&self) -> OwnerGuard<'_, T> {
        OwnerGuard(self.0.lock())
    }

    /// Becomes the owner, unless there is one.
    #[inline]
    pub fn try_run(&self) -> Option<OwnerGuard<'_, T>> {
        self.0.try_lock().map(OwnerGuard)
    }

    /// The data, for an exclusive reference.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// The data, after the vCPU is gone.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T> fmt::Debug for Owned<T> {
    /// Does not show the data: it may be in use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owned").finish_non_exhaustive()
    }
}

/// Data that could be written through a shared reference but never is, once it is shared. A claim, for types that would
/// count as `mailbox` or `owner`.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Frozen<T>(T);

impl<T> Frozen<T> {
    /// Holds `value`.
    pub const fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for Frozen<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The right to run a vCPU, until dropped.
pub struct OwnerGuard<'a, T>(MutexGuard<'a, T>);

impl<T> OwnerGuard<'_, T> {
    /// The data, and the proof of ownership, for use at the same time.
    #[inline]
    pub fn split(&mut self) -> (&mut T, Proof<'_>) {
        (&mut self.0, Proof(PhantomData))
    }
}

impl<T> Deref for OwnerGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for OwnerGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Proof that the holder owns the data. It takes no space.
///
/// It does not say *which* vCPU is owned: a function that has two of them can still confuse them.
#[derive(Clone, Copy, Debug)]
pub struct Proof<'a>(PhantomData<&'a mut ()>);

impl Proof<'static> {
    /// The place in the program is the proof: code that writes to the block of its own pCPU.
    #[inline]
    #[must_use]
    pub const fn by_place() -> Self {
        Self(PhantomData)
    }
}

/// A word that its owner writes and any pCPU reads at any time, such as a counter.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct OwnerWord(AtomicU64);

impl OwnerWord {
    /// Holds `value`.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// The current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the value.
    #[inline]
    pub fn set(&self, _: Proof<'_>, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Adds `amount`. An ordinary load and store, not a locked instruction, because there is one writer.
    #[inline]
    pub fn add(&self, proof: Proof<'_>, amount: u64) {
        self.set(proof, self.get().wrapping_add(amount));
    }
}

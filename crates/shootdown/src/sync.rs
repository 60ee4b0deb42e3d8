//! Core's atomics, or loom's under `cfg(loom)`: the one switch.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Stores, and lets no later load of the caller overtake the store.
///
/// An exchange does both at once where read-modify-writes are full barriers, and is cheaper there than a store and a
/// fence: on x86 always, on AArch64 if it is one instruction (SWPAL, from Armv8.1 on) but not if it is a loop of
/// LDAXR and STLXR. The language alone promises less, which is why loom is given the fence.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn store_then_look(word: &AtomicU64, value: u64) {
    word.swap(value, Ordering::SeqCst);
}

/// As above. Loom takes sequentially consistent accesses for acquire and release only, but knows such a fence.
#[cfg(loom)]
pub(crate) fn store_then_look(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    fence(Ordering::SeqCst);
}

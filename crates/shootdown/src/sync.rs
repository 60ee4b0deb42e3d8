//! Core's atomics, loom's under `cfg(loom)`, or those of a simulation: the one switch.

#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(feature = "interleave", not(loom)))]
pub(crate) use interleave::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Stores, and lets no later load of the caller overtake the store.
///
/// An exchange does both at once where every read-modify-write is a full barrier, and is cheaper there than a store and a
/// fence: that is on x86. On AArch64 an exchange is one only as a single instruction (SWPAL, from Armv8.1 on), not as the
/// loop of LDAXR and STLXR that is made for all processors. The language alone promises less.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn store_then_look(word: &AtomicU64, value: u64) {
    if cfg!(target_arch = "x86_64") {
        word.swap(value, Ordering::SeqCst);
    } else {
        word.store(value, Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// As above. Loom takes sequentially consistent accesses for acquire and release only, but knows such a fence.
#[cfg(loom)]
pub(crate) fn store_then_look(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    fence(Ordering::SeqCst);
}

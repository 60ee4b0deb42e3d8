//! The one switch between core's atomics, loom's (`cfg(loom)`), and those of a simulation.

#[cfg(not(any(loom, feature = "interleave")))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(feature = "interleave", not(loom)))]
pub(crate) use interleave::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Stores, and keeps later loads of the caller behind the store.
///
/// An exchange does both where every read-modify-write is a full barrier, and is cheaper there than a store and a
/// fence: this is x86. On AArch64 only the single instruction is such a barrier (SWPAL, from Armv8.1 on), not the loop
/// of LDAXR and STLXR that compilers make for all processors. The language promises less.
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

/// As above. Loom treats sequentially consistent accesses as acquire and release only, but supports such a fence.
#[cfg(loom)]
pub(crate) fn store_then_look(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    fence(Ordering::SeqCst);
}

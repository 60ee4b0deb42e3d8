//! Atomics and locks for data that pCPUs share: those of core and spin. In tests, those of a simulation, which may
//! switch to another pCPU at each operation.

#[cfg(not(test))]
pub(crate) use core::hint::spin_loop as relax;
#[cfg(not(test))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(test)]
pub(crate) use interleave::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, fence, point, relax,
};
#[cfg(not(test))]
pub(crate) use spin::{Mutex, MutexGuard};

/// A point where the simulation may switch to another pCPU, besides the operations of these types.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn point() {}

/// Defines a static that exists once per host. In tests, each simulated host has its own.
macro_rules! per_host {
    ($($(#[$doc:meta])* static $name:ident: $kind:ty = $value:expr;)*) => {$(
        $(#[$doc])*
        #[cfg(not(test))]
        static $name: $kind = $value;
        $(#[$doc])*
        #[cfg(test)]
        static $name: $crate::arch::fake::PerHost<$kind> = $crate::arch::fake::PerHost::new(|| $value);
    )*};
}
pub(crate) use per_host;

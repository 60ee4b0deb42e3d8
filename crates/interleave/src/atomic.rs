//! Core's atomics. Before each operation there is a scheduling point.

use core::sync::atomic;
pub use core::sync::atomic::Ordering;

use crate::point;

macro_rules! define {
    ($($name:ident: $value:ty, $($operation:ident)*;)*) => {$(
        #[doc = concat!("Core's `", stringify!($name), "`.")]
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$name);

        impl $name {
            /// An atomic with this value.
            #[must_use]
            pub const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            /// As core's.
            #[inline]
            pub fn load(&self, order: Ordering) -> $value {
                point();
                self.0.load(order)
            }

            /// As core's.
            #[inline]
            pub fn store(&self, value: $value, order: Ordering) {
                point();
                self.0.store(value, order);
            }

            /// As core's.
            #[inline]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.swap(value, order)
            }

            /// As core's.
            ///
            /// # Errors
            /// The current value, if it is not `current`.
            #[inline]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                point();
                self.0.compare_exchange(current, new, success, failure)
            }

            /// As core's, but never fails spuriously.
            ///
            /// # Errors
            /// The current value, if it is not `current`.
            #[inline]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }

            $(
                /// As core's.
                #[inline]
                pub fn $operation(&self, value: $value, order: Ordering) -> $value {
                    point();
                    self.0.$operation(value, order)
                }
            )*
        }
    )*};
}

define! {
    AtomicBool: bool, fetch_or fetch_and;
    AtomicU8: u8, fetch_add fetch_sub fetch_or fetch_and fetch_max fetch_min;
    AtomicU16: u16, fetch_add fetch_sub fetch_or fetch_and fetch_max fetch_min;
    AtomicU32: u32, fetch_add fetch_sub fetch_or fetch_and fetch_max fetch_min;
    AtomicU64: u64, fetch_add fetch_sub fetch_or fetch_and fetch_max fetch_min;
}

/// Core's fence. A simulation runs everything in order anyway.
#[inline]
pub fn fence(order: Ordering) {
    atomic::fence(order);
}

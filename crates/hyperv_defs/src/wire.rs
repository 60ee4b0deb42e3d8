//! Structures in their format in memory: fields at fixed offsets, little-endian, no gaps.
//!
//! Such a structure can be read from any bytes, at any alignment: no value of a field is invalid in itself.

pub use zerocopy::little_endian::{U16, U32, U64};

/// Defines structures of known size. Each can be all zeros ([`Default`]), and be read from and written as bytes.
macro_rules! wire {
    ($($(#[$doc:meta])* $vis:vis struct $name:ident: $bytes:literal {
        $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $type:ty,)*
    })*) => {$(
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
            zerocopy::KnownLayout, zerocopy::Unaligned
        )]
        #[repr(C)]
        $vis struct $name {
            $($(#[$field_doc])* $field_vis $field: $type,)*
        }

        const _: () = assert!(size_of::<$name>() == $bytes, "not the size that the manual says");

        impl $name {
            /// The structure at the start of `bytes`. `None` if they are too few.
            #[must_use]
            $vis fn from_bytes(bytes: &[u8]) -> Option<Self> {
                zerocopy::FromBytes::read_from_prefix(bytes).ok().map(|(read, _)| read)
            }

            /// The structure as it is in memory.
            #[must_use]
            #[allow(dead_code, reason = "not every structure is written somewhere")]
            $vis fn bytes(&self) -> &[u8] {
                zerocopy::IntoBytes::as_bytes(self)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    )*};
}
pub(crate) use wire;

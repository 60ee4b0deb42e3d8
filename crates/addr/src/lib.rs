//! Address types.
//!
//! A hypervisor uses four kinds of addresses. All are 64-bit numbers, and mixing them is a common mistake. Here each is
//! a type of its own:
//!
//! | type | name | used by |
//! |---|---|---|
//! | [`Gva`] | guest virtual address | code in the guest; the guest's page tables translate it |
//! | [`Gpa`] | guest physical address (Arm: IPA) | the guest's page tables and devices; stage 2 translates it |
//! | [`Hva`] | host virtual address | the hypervisor's own pointers |
//! | [`Hpa`] | host physical address (Arm: PA) | the machine |
//!
//! [`PageSize`] has the three leaf sizes of both architectures (4 KiB granule). [`GpaRange`] and [`HpaRange`] are
//! half-open ranges in bytes. Nothing fails silently: all arithmetic that could leave the address space is checked.

#![no_std]
#![forbid(unsafe_code)]

use core::fmt;

/// Bytes in the smallest page, on both architectures.
pub const PAGE_BYTES: u64 = 4096;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $label:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// This address plus `bytes`, or `None` past the end of the address space.
            #[must_use]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// The start of the page of `size` that holds this address.
            #[must_use]
            pub const fn page(self, size: PageSize) -> Self {
                Self(self.0 & !(size.bytes() - 1))
            }

            /// Distance in bytes from the start of the page of `size` that holds this address.
            #[must_use]
            pub const fn offset_in(self, size: PageSize) -> u64 {
                self.0 & (size.bytes() - 1)
            }

            /// Whether the address is a multiple of `size`.
            #[must_use]
            pub const fn is_aligned(self, size: PageSize) -> bool {
                self.offset_in(size) == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, " {:#x}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address!(
    /// Guest virtual address: computed by an instruction in the guest.
    Gva, "GVA"
);
address!(
    /// Guest physical address: the physical address from the guest's view (Arm: IPA).
    Gpa, "GPA"
);
address!(
    /// Host virtual address: a pointer of the hypervisor.
    Hva, "HVA"
);
address!(
    /// Host physical address: the address on the bus (Arm: PA).
    Hpa, "HPA"
);

/// Size of a leaf in a 4 KiB-granule page table, the same three on x86-64 and AArch64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB, level 0.
    Size4K,
    /// 2 MiB, level 1.
    Size2M,
    /// 1 GiB, level 2.
    Size1G,
}

impl PageSize {
    /// All sizes, largest first: the order in which to try them for a mapping.
    pub const LARGEST_FIRST: [Self; 3] = [Self::Size1G, Self::Size2M, Self::Size4K];

    /// Bytes in one page of this size.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Bits of offset within a page of this size.
    #[must_use]
    pub const fn shift(self) -> u32 {
        12 + 9 * self.level()
    }

    /// Level of a leaf of this size, counted from 0 at the 4 KiB leaf. (Arm counts the other way.)
    #[must_use]
    pub const fn level(self) -> u32 {
        match self {
            Self::Size4K => 0,
            Self::Size2M => 1,
            Self::Size1G => 2,
        }
    }

    /// The size of a leaf at `level`, if leaves exist there.
    #[must_use]
    pub const fn at_level(level: u32) -> Option<Self> {
        match level {
            0 => Some(Self::Size4K),
            1 => Some(Self::Size2M),
            2 => Some(Self::Size1G),
            _ => None,
        }
    }
}

macro_rules! range {
    ($(#[$doc:meta])* $name:ident of $address:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct $name {
            /// First byte.
            pub start: $address,
            /// Length in bytes; never reaches past the end of the address space.
            bytes: u64,
        }

        impl $name {
            /// The `bytes` from `start` on, or `None` when they would leave the address space.
            #[must_use]
            pub const fn new(start: $address, bytes: u64) -> Option<Self> {
                match start.checked_add(bytes) {
                    Some(_) => Some(Self { start, bytes }),
                    None => None,
                }
            }

            /// Length in bytes.
            #[must_use]
            pub const fn bytes(&self) -> u64 {
                self.bytes
            }

            /// First byte after the range.
            #[must_use]
            pub const fn end(&self) -> $address {
                $address(self.start.0 + self.bytes)
            }

            /// Whether the range holds `address`.
            #[must_use]
            pub const fn contains(&self, address: $address) -> bool {
                self.start.0 <= address.0 && address.0 - self.start.0 < self.bytes
            }

            /// Whether the two ranges share a byte.
            #[must_use]
            pub const fn overlaps(&self, other: &Self) -> bool {
                self.start.0 < other.start.0 + other.bytes && other.start.0 < self.start.0 + self.bytes
            }
        }
    };
}

range!(
    /// A half-open range of guest physical addresses.
    GpaRange of Gpa
);
range!(
    /// A half-open range of host physical addresses.
    HpaRange of Hpa
);

#[cfg(test)]
mod tests;

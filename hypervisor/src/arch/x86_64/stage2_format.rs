//! The format of stage-2 tables: AMD's nested page tables or Intel's EPT.
//!
//! [`Stage2Format`] asks at each operation which of the two it is, which costs a first touch of a page 23 instructions
//! (docs/decisions/0028-vt-x.md). So the faults of guests ask once, by [`with_known_format!`].

use addr::Hpa;
use stage2::{Access, Ept, Format, Memory, Npt, PageTableEntry, Replace, Source};

use super::backend::{self, Backend as _, Chosen};
use super::vmx;

/// The kind of stage-2 tables of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage2Format {
    /// AMD's.
    Npt(Npt),
    /// Intel's.
    Ept(Ept),
}

/// The format of the stage-2 tables that this machine walks.
pub(crate) fn stage2_format() -> Stage2Format {
    if backend::is_vmx() { Stage2Format::Ept(vmx::stage2_format()) } else { Stage2Format::Npt(Chosen::stage2_format()) }
}

/// Does the work, compiled for each format, with the tree in the one that this machine walks.
macro_rules! with_known_format {
    ($tree:expr, |$known:ident| $work:expr) => {{
        type Either = <$crate::arch::Machine as $crate::arch::Arch>::Format;
        match *$tree.format() {
            Either::Npt(format) => $tree.known_as(format, |$known| $work),
            Either::Ept(format) => $tree.known_as(format, |$known| $work),
        }
    }};
}
pub(crate) use with_known_format;

macro_rules! delegate {
    ($(fn $name:ident(&self $(, $argument:ident: $kind:ty)*) -> $result:ty;)*) => {
        impl Format for Stage2Format {$(
            #[inline(always)]
            fn $name(&self $(, $argument: $kind)*) -> $result {
                match self {
                    Self::Npt(format) => format.$name($($argument),*),
                    Self::Ept(format) => format.$name($($argument),*),
                }
            }
        )*}
    };
}

delegate! {
    fn levels(&self) -> u32;
    fn input_bits(&self) -> u32;
    fn largest_leaf(&self) -> u32;
    fn large_code(&self) -> bool;
    fn host_limit(&self) -> Hpa;
    fn expresses(&self, access: Access) -> bool;
    fn replace(&self) -> Replace;
    fn denials_are_cached(&self) -> bool;
    fn records_writes(&self) -> bool;
    fn table(&self, hpa: Hpa, level: u32) -> u64;
    fn quiet(&self) -> u64;
    fn idle(&self) -> u64;
    fn broken(&self, bits: u64) -> u64;
    fn is_broken(&self, bits: u64) -> bool;
    fn unbroken(&self, bits: u64) -> u64;
    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64;
    fn decode(&self, level: u32, bits: u64) -> PageTableEntry;
    fn with_access(&self, bits: u64, access: Access) -> u64;
    fn part(&self, bits: u64, level: u32, index: u64) -> u64;
    fn whole(&self, first: u64, level: u32) -> u64;
    fn gathered(&self, bits: u64, other: u64) -> u64;
    fn attributes(&self, bits: u64) -> u64;
    fn is_touched(&self, bits: u64) -> bool;
    fn touched(&self, bits: u64) -> u64;
    fn aged(&self, bits: u64) -> u64;
    fn is_writable(&self, bits: u64) -> bool;
    fn is_executable(&self, bits: u64) -> bool;
    fn is_written(&self, bits: u64, source: Source) -> bool;
    fn write_protected(&self, bits: u64) -> u64;
    fn recorded(&self, bits: u64) -> u64;
    fn cleaned(&self, level: u32, bits: u64, source: Source) -> u64;
    fn writable(&self, bits: u64) -> u64;
    fn released(&self, bits: u64) -> u64;
}

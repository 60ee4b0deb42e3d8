//! The Hyper-V hypercalls as data: control words, results, lists of addresses, sparse sets (TLFS, chapter 3 "Hypercall
//! interface" and 12 "Virtual MMU").
//!
//! This module is written from the specification and shares no code with the hypervisor, so that one mistake is not in
//! both.

use crate::cpu_set::CpuSet;

/// HvCallFlushVirtualAddressSpace.
pub const FLUSH_SPACE: u16 = 0x0002;
/// HvCallFlushVirtualAddressList.
pub const FLUSH_LIST: u16 = 0x0003;
/// HvCallNotifyLongSpinWait.
pub const LONG_SPIN: u16 = 0x0008;
/// HvCallSendSyntheticClusterIpi.
pub const SEND_IPI: u16 = 0x000b;
/// HvCallFlushVirtualAddressSpaceEx.
pub const FLUSH_SPACE_EX: u16 = 0x0013;
/// HvCallFlushVirtualAddressListEx.
pub const FLUSH_LIST_EX: u16 = 0x0014;
/// HvCallSendSyntheticClusterIpiEx.
pub const SEND_IPI_EX: u16 = 0x0015;

/// HV_STATUS_SUCCESS.
pub const SUCCESS: u16 = 0;
/// HV_STATUS_INVALID_HYPERCALL_CODE.
pub const INVALID_CODE: u16 = 2;
/// HV_STATUS_INVALID_HYPERCALL_INPUT.
pub const INVALID_INPUT: u16 = 3;
/// HV_STATUS_INVALID_ALIGNMENT.
pub const INVALID_ALIGNMENT: u16 = 4;
/// HV_STATUS_INVALID_PARAMETER.
pub const INVALID_PARAMETER: u16 = 5;
/// HV_STATUS_ACCESS_DENIED.
pub const ACCESS_DENIED: u16 = 6;

/// Flush flag: all processors; the mask is ignored.
pub const ALL_PROCESSORS: u64 = 1;
/// Flush flag: all address spaces; the given one is ignored.
pub const ALL_SPACES: u64 = 2;
/// Flush flag: the TLB may keep global mappings.
pub const NON_GLOBAL: u64 = 4;
/// Flush flag: the list is in the extended format.
pub const EXTENDED_RANGES: u64 = 8;

/// Format of a set: banks of 64.
pub const SPARSE: u64 = 0;
/// Format of a set: all processors.
pub const EVERYBODY: u64 = 1;

/// Pages that one entry of a list can name.
pub const PAGES_PER_ENTRY: u64 = 4096;

/// The control word of a call (RCX in 64-bit mode).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control(pub u64);

impl Control {
    /// A simple call.
    #[must_use]
    pub const fn simple(code: u16) -> Self {
        Self(code as u64)
    }

    /// A call that is repeated for each of `count` elements.
    #[must_use]
    pub const fn rep(code: u16, count: u64) -> Self {
        Self(code as u64 | (count & 0xfff) << 32)
    }

    /// With the element to begin at.
    #[must_use]
    pub const fn start(self, index: u64) -> Self {
        Self(self.0 & !(0xfff << 48) | (index & 0xfff) << 48)
    }

    /// With a variable part of the header, in units of 8 bytes.
    #[must_use]
    pub const fn variable(self, words: u64) -> Self {
        Self(self.0 | (words & 0x3ff) << 17)
    }

    /// With the input in registers.
    #[must_use]
    pub const fn fast(self) -> Self {
        Self(self.0 | 1 << 16)
    }
}

/// The status of a result.
#[must_use]
pub const fn status(result: u64) -> u16 {
    (result & 0xffff) as u16
}

/// The elements that a result counts as done.
#[must_use]
pub const fn reps(result: u64) -> u64 {
    result >> 32 & 0xfff
}

/// The list entries for `pages` pages from `start` on. An entry has a page's address, and in its lowest 12 bits the
/// number of pages that follow it.
pub fn ranges(start: u64, pages: u64) -> impl Iterator<Item = u64> {
    let start = start & !0xfff;
    (0..pages.div_ceil(PAGES_PER_ENTRY)).map(move |entry| {
        let first = entry * PAGES_PER_ENTRY;
        start.wrapping_add(first * 4096) | ((pages - first).min(PAGES_PER_ENTRY) - 1)
    })
}

/// The banks of a sparse set, without gaps from bank 0 on, as Linux and FreeBSD list them: the mask of the banks, and
/// their contents.
#[must_use]
pub fn sparse(set: &CpuSet) -> (u64, &[u64]) {
    let banks = set.banks();
    ((1u64 << banks.len()) - 1, banks)
}

//! Stage-2 tables of Arm's 64-bit memory system architecture (VMSAv8-64): 4 KiB granule, output addresses up to 48 bits
//! (Arm ARM DDI 0487, D8.3).
//!
//! Arm counts levels downwards, from the root to level 3; here level 0 is the 4 KiB leaf, as everywhere in this crate.
//!
//! The size of the guest's address space decides where the walk starts. Up to 16 tables may stand side by side as one
//! large root, which saves a whole level for address spaces that are only a little too large: 40 bits need two root tables
//! and three levels, where a single root would need four.
//!
//! The Contiguous bit stays clear: a run of 16 entries would have to be broken and made as one (D8.16).

use crate::{Access, Entry, Format, Memory};
use addr::{Hpa, PageSize};

/// Bits of a descriptor (D8.3.1, D8.3.2).
const VALID: u64 = 1 << 0;
/// A table above level 0 and a page at level 0; a block has it clear.
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEM_ATTR_SHIFT: u32 = 2;
/// S2AP[0] and S2AP[1].
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const INNER_SHAREABLE: u64 = 0b11 << 8;
const ACCESSED: u64 = 1 << 10;
/// XN[1]: no execution at EL1 and EL0. XN[0], which tells the two apart where FEAT_XNX exists, stays clear.
const EXECUTE_NEVER: u64 = 1 << 54;
/// Bits 47:12.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// The stage-2 format of Arm with the 4 KiB granule.
#[derive(Clone, Copy, Debug)]
pub struct Vmsa {
    ipa_bits: u32,
    pa_bits: u32,
    forced_write_back: bool,
}

impl Vmsa {
    /// The format for a guest address space of `ipa_bits` (the manual's IPA size) on a machine whose physical addresses
    /// have `pa_bits` (ID_AA64MMFR0_EL1.PARange). `None` when such a guest cannot be translated: the guest's addresses
    /// may be 32 to 48 bits long, but no longer than the machine's.
    ///
    /// `forced_write_back` says whether HCR_EL2.FWB is set (FEAT_S2FWB). It decides how memory types are spelled, so it must
    /// be the same on all processors that walk the tables.
    #[must_use]
    pub const fn new(ipa_bits: u32, pa_bits: u32, forced_write_back: bool) -> Option<Self> {
        // Descriptors of this granule hold more than 48 bits only with VTCR_EL2.DS set.
        let pa_bits = if pa_bits > 48 { 48 } else { pa_bits };
        if ipa_bits < 32 || ipa_bits > pa_bits {
            return None;
        }
        Some(Self { ipa_bits, pa_bits, forced_write_back })
    }

    /// VTCR_EL2.T0SZ.
    #[must_use]
    pub const fn t0sz(&self) -> u64 {
        64 - self.ipa_bits as u64
    }

    /// VTCR_EL2.SL0: where the walk starts, one for each level that it has beyond two (D24.2, VTCR_EL2 for the 4 KiB granule).
    #[must_use]
    pub const fn sl0(&self) -> u64 {
        self.depth() as u64 - 2
    }

    /// As few levels as 16 concatenated root tables allow.
    const fn depth(&self) -> u32 {
        (self.ipa_bits - 4 - 12).div_ceil(9)
    }

    const fn mem_attr(&self, memory: Memory) -> u64 {
        let attribute = match (memory, self.forced_write_back) {
            // Normal, write-back in both domains: the least that stage 1 is combined with.
            (Memory::Normal, false) => 0b1111,
            // Normal, write-back, whatever stage 1 says.
            (Memory::Normal, true) => 0b0110,
            // Device-nGnRE, with and without FEAT_S2FWB.
            (Memory::Device, _) => 0b0001,
        };
        attribute << MEM_ATTR_SHIFT
    }
}

impl Format for Vmsa {
    fn levels(&self) -> u32 {
        self.depth()
    }

    fn input_bits(&self) -> u32 {
        self.ipa_bits
    }

    /// Blocks exist at the two levels above pages. A walk of two levels has only one of them.
    fn largest_leaf(&self) -> PageSize {
        if self.depth() > 2 { PageSize::Size1G } else { PageSize::Size2M }
    }

    fn host_limit(&self) -> Hpa {
        Hpa(1 << self.pa_bits)
    }

    /// Pages may be readable, writable, both or neither; to be executed they must be readable.
    fn expresses(&self, access: Access) -> bool {
        access.read || !access.execute
    }

    fn table(&self, hpa: Hpa) -> u64 {
        hpa.0 | VALID | TABLE_OR_PAGE
    }

    /// The access flag is set from the start: a guest pays no fault for it.
    fn leaf(&self, hpa: Hpa, size: PageSize, access: Access, memory: Memory) -> u64 {
        hpa.0 | VALID | kind(size) | self.mem_attr(memory) | INNER_SHAREABLE | ACCESSED | rights(access)
    }

    fn decode(&self, level: u32, bits: u64) -> Entry {
        let hpa = Hpa(bits & ADDRESS);
        match (bits & VALID != 0, bits & TABLE_OR_PAGE != 0) {
            (false, _) => Entry::Empty,
            (true, true) if level > 0 => Entry::Table(hpa),
            // A block at level 0 is reserved, which the hardware takes for an invalid entry.
            (true, false) if level == 0 => Entry::Empty,
            (true, _) => {
                let read = bits & READ != 0;
                let access = Access { read, write: bits & WRITE != 0, execute: read && bits & EXECUTE_NEVER == 0 };
                Entry::Leaf { hpa, access }
            }
        }
    }

    fn with_access(&self, bits: u64, access: Access) -> u64 {
        bits & !(READ | WRITE | EXECUTE_NEVER) | rights(access)
    }

    fn part(&self, bits: u64, size: PageSize, index: u64) -> u64 {
        (bits & !TABLE_OR_PAGE | kind(size)) + (index << size.shift())
    }
}

const fn kind(size: PageSize) -> u64 {
    match size {
        PageSize::Size4K => TABLE_OR_PAGE,
        PageSize::Size2M | PageSize::Size1G => 0,
    }
}

fn rights(access: Access) -> u64 {
    let read = if access.read { READ } else { 0 };
    let write = if access.write { WRITE } else { 0 };
    let never = if access.execute { 0 } else { EXECUTE_NEVER };
    read | write | never
}

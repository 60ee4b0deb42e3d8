//! Stage-2 tables of Arm's 64-bit memory system architecture (VMSAv8-64): 4 KiB granule, output addresses up to 48 bits
//! (Arm ARM DDI 0487, D8.3).
//!
//! Arm counts levels downwards, from the root to level 3. Here level 0 is the 4 KiB leaf, as everywhere in this crate.
//!
//! The size of the guest's address space decides where the walk starts. Up to 16 adjacent tables may form one large
//! root. This saves a whole level for address spaces that are only a little too large: 40 bits need two root tables and
//! three levels instead of four levels with one root.
//!
//! The processor decides how to replace a live entry (FEAT_BBM, D8.16). The Contiguous bit stays clear, because a run
//! of 16 entries would have to be broken and made as one.
//!
//! The hardware records writes (FEAT_HAFDBS, with VTCR_EL2.HD) in leaves that have DBM set. Such a leaf looks read-only
//! until the first write, which sets S2AP[1]. So it is writable for the guest, and S2AP[1] tells whether it was
//! written.

use crate::{Access, Format, Memory, PageTableEntry, Replace, Source};
use addr::Hpa;

/// Bits of a descriptor (D8.3.1, D8.3.2).
const VALID: u64 = 1 << 0;
/// A table above level 0, a page at level 0. Clear in a block.
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEM_ATTR_SHIFT: u32 = 2;
/// S2AP[0] and S2AP[1].
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const INNER_SHAREABLE: u64 = 0b11 << 8;
const ACCESSED: u64 = 1 << 10;
/// nT: a block that must not be cached.
const NO_TRANSLATION_CACHED: u64 = 1 << 16;
/// DBM.
const DIRTY_MODIFIER: u64 = 1 << 51;
/// XN[1]: no execution at EL1 and EL0. XN[0], which separates the two with FEAT_XNX, stays clear.
const EXECUTE_NEVER: u64 = 1 << 54;
/// Bits 47:12.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// Bits 58:55 are for software. The guest may write, but a dirty log stops the next write.
const PROTECTED: u64 = 1 << 55;
/// Written, although the guest may no longer write.
const MARKED: u64 = 1 << 56;
/// The same two bits where the descriptor points to a table: hardware ignores its bits 58:51 (D8.3.1).
const QUIET: u64 = 1 << 55;
const IDLE: u64 = 1 << 56;
/// Set in an entry that was valid: it is not, because a processor is about to write it again.
const BUSY: u64 = 1 << 57;

/// The stage-2 format of Arm with the 4 KiB granule.
pub type Vmsa = VmsaOf<9>;

/// [`Vmsa`] with tables of 2^`INDEX_BITS` entries. Hardware has 9; tests of races use fewer.
#[derive(Clone, Copy, Debug)]
pub struct VmsaOf<const INDEX_BITS: u32> {
    ipa_bits: u32,
    levels: u32,
    pa_bits: u32,
    forced_write_back: bool,
    replace: Replace,
    records_writes: bool,
}

impl<const INDEX_BITS: u32> VmsaOf<INDEX_BITS> {
    /// The format for a guest address space of `ipa_bits` (the manual's IPA size) on a machine whose physical addresses
    /// have `pa_bits` (ID_AA64MMFR0_EL1.PARange). `None` if the machine cannot translate such a guest: its addresses
    /// must have 32 to 48 bits, and at most the machine's.
    ///
    /// `forced_write_back` says whether HCR_EL2.FWB is set (FEAT_S2FWB). It changes the encoding of memory types, so
    /// all processors that walk the tables must agree.
    ///
    /// By default the processor needs break-before-make and records no writes.
    #[must_use]
    pub const fn new(ipa_bits: u32, pa_bits: u32, forced_write_back: bool) -> Option<Self> {
        // Descriptors of this granule hold more than 48 bits only with VTCR_EL2.DS set.
        let pa_bits = if pa_bits > 48 { 48 } else { pa_bits };
        if ipa_bits < 14 + 2 * INDEX_BITS || ipa_bits > pa_bits {
            return None;
        }
        // The fewest levels that 16 concatenated root tables allow.
        let levels = (ipa_bits - 4 - 12).div_ceil(INDEX_BITS);
        Some(Self { ipa_bits, levels, pa_bits, forced_write_back, replace: Replace::BreakFirst, records_writes: false })
    }

    /// For processors with this level of FEAT_BBM (ID_AA64MMFR2_EL1.BBM): the lowest of all that walk the tables.
    ///
    /// From level 1 on, entries that are not flushed yet may raise a TLB conflict abort, which goes to EL2.
    #[must_use]
    pub const fn with_bbm(self, level: u32) -> Self {
        let replace = match level {
            0 => Replace::BreakFirst,
            1 => Replace::Uncached(NO_TRANSLATION_CACHED),
            _ => Replace::OneStore,
        };
        Self { replace, ..self }
    }

    /// For processors that all record writes in leaves: FEAT_HAFDBS (ID_AA64MMFR1_EL1.HAFDBS is 2), with VTCR_EL2.HA
    /// and HD set.
    #[must_use]
    pub const fn with_recorded_writes(self) -> Self {
        Self { records_writes: true, ..self }
    }

    /// VTCR_EL2.T0SZ.
    #[must_use]
    pub const fn t0sz(&self) -> u64 {
        64 - self.ipa_bits as u64
    }

    /// VTCR_EL2.SL0: the level where the walk starts, one for each level above two (D24.2, VTCR_EL2 for the 4 KiB
    /// granule).
    #[must_use]
    pub const fn sl0(&self) -> u64 {
        self.levels as u64 - 2
    }

    const fn mem_attr(&self, memory: Memory) -> u64 {
        let attribute = match (memory, self.forced_write_back) {
            // Normal, write-back in both domains: stage 1 can only restrict it.
            (Memory::Normal, false) => 0b1111,
            // Normal, write-back, regardless of stage 1.
            (Memory::Normal, true) => 0b0110,
            // Device-nGnRE, with and without FEAT_S2FWB.
            (Memory::Device, _) => 0b0001,
        };
        attribute << MEM_ATTR_SHIFT
    }
}

impl<const INDEX_BITS: u32> Format for VmsaOf<INDEX_BITS> {
    const INDEX_BITS: u32 = INDEX_BITS;

    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        self.ipa_bits
    }

    /// Blocks exist at the two levels above pages. A walk of two levels has only one of them.
    fn largest_leaf(&self) -> u32 {
        if self.levels > 2 { 2 } else { 1 }
    }

    fn host_limit(&self) -> Hpa {
        Hpa(1 << self.pa_bits)
    }

    /// Pages may be readable, writable, both or neither. To be executable they must be readable.
    fn expresses(&self, access: Access) -> bool {
        access.read || !access.execute
    }

    fn replace(&self) -> Replace {
        self.replace
    }

    /// Only descriptors that fault on translation, address size or access flag are never cached (R_XCLRD).
    fn denials_are_cached(&self) -> bool {
        true
    }

    fn records_writes(&self) -> bool {
        self.records_writes
    }

    fn table(&self, hpa: Hpa, _: u32) -> u64 {
        hpa.0 | VALID | TABLE_OR_PAGE
    }

    fn quiet(&self) -> u64 {
        QUIET
    }

    fn idle(&self) -> u64 {
        IDLE
    }

    fn broken(&self, bits: u64) -> u64 {
        bits & !VALID | BUSY
    }

    fn is_broken(&self, bits: u64) -> bool {
        bits & BUSY != 0
    }

    fn unbroken(&self, bits: u64) -> u64 {
        if self.is_broken(bits) { bits & !BUSY | VALID } else { bits }
    }

    /// The access flag is set at first, so the guest has no fault for it.
    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64 {
        let write = if access.write { WRITE } else { 0 };
        hpa.0
            | VALID
            | kind(level)
            | self.mem_attr(memory)
            | INNER_SHAREABLE
            | ACCESSED
            | write
            | read_and_execute(access)
    }

    fn decode(&self, level: u32, bits: u64) -> PageTableEntry {
        // A block has other fields in the low address bits.
        let hpa = Hpa(if bits & TABLE_OR_PAGE == 0 { bits & ADDRESS & !NO_TRANSLATION_CACHED } else { bits & ADDRESS });
        match (bits & VALID != 0, bits & TABLE_OR_PAGE != 0) {
            (false, _) if self.is_broken(bits) => PageTableEntry::Busy,
            (false, _) => PageTableEntry::Empty,
            (true, true) if level > 0 => PageTableEntry::Table(hpa),
            // A block at level 0 is reserved; the hardware treats it as invalid.
            (true, false) if level == 0 => PageTableEntry::Empty,
            (true, _) => {
                let read = bits & READ != 0;
                let access = Access { read, write: may_write(bits), execute: read && bits & EXECUTE_NEVER == 0 };
                PageTableEntry::Leaf { hpa, access }
            }
        }
    }

    fn with_access(&self, bits: u64, access: Access) -> u64 {
        let others = bits & !(READ | EXECUTE_NEVER) | read_and_execute(access);
        match (may_write(bits), access.write) {
            (true, true) | (false, false) => others,
            (false, true) => others | WRITE,
            (true, false) => {
                let marked = if bits & WRITE != 0 { MARKED } else { 0 };
                others & !(WRITE | DIRTY_MODIFIER | PROTECTED) | marked
            }
        }
    }

    fn part(&self, bits: u64, level: u32, index: u64) -> u64 {
        (bits & !(TABLE_OR_PAGE | NO_TRANSLATION_CACHED) | kind(level)) + (index << (12 + INDEX_BITS * level))
    }

    fn whole(&self, first: u64, level: u32) -> u64 {
        first & !TABLE_OR_PAGE | kind(level)
    }

    fn gathered(&self, bits: u64, other: u64) -> u64 {
        bits | other & (ACCESSED | MARKED)
    }

    fn attributes(&self, bits: u64) -> u64 {
        bits & !(ADDRESS | ACCESSED | MARKED | NO_TRANSLATION_CACHED)
    }

    fn is_touched(&self, bits: u64) -> bool {
        bits & ACCESSED != 0
    }

    fn touched(&self, bits: u64) -> u64 {
        bits | ACCESSED
    }

    fn aged(&self, bits: u64) -> u64 {
        bits & !ACCESSED
    }

    fn is_writable(&self, bits: u64) -> bool {
        bits & WRITE != 0 || (self.records_writes && bits & DIRTY_MODIFIER != 0)
    }

    fn is_executable(&self, _: u64) -> bool {
        true
    }

    /// Both sources use `S2AP[1]`: the hypervisor sets it, or the hardware.
    fn is_written(&self, bits: u64, _: Source) -> bool {
        bits & (WRITE | MARKED) != 0
    }

    fn write_protected(&self, bits: u64) -> u64 {
        let protected = if may_write(bits) { PROTECTED } else { 0 };
        bits & !(WRITE | DIRTY_MODIFIER | MARKED) | protected
    }

    fn recorded(&self, bits: u64) -> u64 {
        let modifier = if may_write(bits) { DIRTY_MODIFIER } else { 0 };
        bits & !(WRITE | PROTECTED | MARKED) | modifier
    }

    fn writable(&self, bits: u64) -> u64 {
        if may_write(bits) { bits & !PROTECTED | WRITE } else { bits }
    }

    fn released(&self, bits: u64) -> u64 {
        let write = if may_write(bits) { WRITE } else { 0 };
        bits & !(PROTECTED | DIRTY_MODIFIER | MARKED) | write
    }
}

/// Whether the guest has the right to write, ignoring a dirty log that stops it for now.
const fn may_write(bits: u64) -> bool {
    bits & (WRITE | DIRTY_MODIFIER | PROTECTED) != 0
}

const fn kind(level: u32) -> u64 {
    if level == 0 { TABLE_OR_PAGE } else { 0 }
}

const fn read_and_execute(access: Access) -> u64 {
    let read = if access.read { READ } else { 0 };
    let never = if access.execute { 0 } else { EXECUTE_NEVER };
    read | never
}

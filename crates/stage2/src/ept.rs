//! Extended page tables (EPT) of Intel VT-x (SDM vol. 3C, 29.3.2): four levels, with the rights to read, write and
//! execute in each entry, and the memory type in each leaf.
//!
//! An entry without any right is not present, and all its other bits are free. One with a right to write but none to
//! read, with a reserved memory type, or with a reserved bit is a misconfiguration (29.3.3.1): it exits with a reason
//! of its own, and there is no way on from there. No function here makes one.
//!
//! The processor never caches that an entry is not present, and an EPT violation drops what it has cached for the
//! address that caused it (29.4.3.1). So a denial is never cached, and added rights need no flush. Entries of different
//! page sizes for one address are no error as long as they agree. What is taken away, and what moves, needs INVEPT on
//! each pCPU that may have it.
//!
//! Some processors stop with a machine check where the page size of code changes and both sizes are cached
//! (CVE-2018-12207, itlb_multihit). A guest can do that in its own tables. It cannot where stage 2 maps code by 4 KiB:
//! a translation is cached in the smaller of both sizes. So [`EptOf::small_code`] lets no large leaf be executable. A
//! leaf that may be executed has a software bit instead; the first fetch splits it.
//!
//! # Devices walk the same tables
//!
//! VT-d (D51397, 9.8) reads bits 0, 1 and 7 as the processor does, and ignores bits 2 to 6, 8 to 10 and 52 to 61. It
//! reserves bits 11 and 62, which entries that are present have clear.

use crate::{Access, Format, Memory, PageTableEntry, Replace, Source};
use addr::Hpa;

/// Bits of an entry (SDM vol. 3C, tables 29-1 to 29-7).
const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const RIGHTS: u64 = READ | WRITE | EXECUTE;
/// Write-back memory, which the guest's PAT may restrict.
const WRITE_BACK: u64 = 6 << 3;
/// Uncacheable memory: the type that is zero.
const UNCACHEABLE: u64 = 0;
/// Leaf above level 0. At level 0 this bit is ignored, and stays clear.
const LARGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
/// Bits 51:12.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Software bits, ignored by the processor in entries of all levels. The guest may write, but a dirty log stops the
/// next write.
const PROTECTED: u64 = 1 << 52;
/// Written, although the guest may no longer write.
const MARKED: u64 = 1 << 53;
/// The same two bits where the entry names a table.
const QUIET: u64 = 1 << 52;
const IDLE: u64 = 1 << 53;
/// Set in an entry that was present: it is not, because a processor is about to write it again.
const BUSY: u64 = 1 << 11;
/// What such an entry allowed besides reading.
const WAS_WRITABLE: u64 = 1 << 54;
const WAS_EXECUTABLE: u64 = 1 << 55;
/// In a large leaf: the guest may execute the page, but not by a leaf this large.
const IN_PARTS: u64 = 1 << 56;

/// VT-x's format with four levels: GPAs below 2^48.
pub type Ept = EptOf<9>;

/// [`Ept`] with tables of 2^`INDEX_BITS` entries. Hardware has 9; tests of races use fewer.
#[derive(Clone, Copy, Debug)]
pub struct EptOf<const INDEX_BITS: u32> {
    /// Whether the processor has 1 GiB pages (IA32_VMX_EPT_VPID_CAP bit 17).
    pub one_gib_pages: bool,
    /// Whether it records accesses and writes in entries (bit 21, and bit 6 of the EPT pointer).
    pub accessed_dirty: bool,
    /// Whether only leaves of 4 KiB are executable.
    pub small_code: bool,
}

impl<const INDEX_BITS: u32> EptOf<INDEX_BITS> {
    /// The leaf, with the right to execute or without.
    fn with_execute(&self, bits: u64, may_execute: bool) -> u64 {
        let execute = if self.small_code && bits & LARGE != 0 { IN_PARTS } else { EXECUTE };
        bits & !(EXECUTE | IN_PARTS) | if may_execute { execute } else { 0 }
    }
}

impl<const INDEX_BITS: u32> Format for EptOf<INDEX_BITS> {
    const INDEX_BITS: u32 = INDEX_BITS;

    fn levels(&self) -> u32 {
        4
    }

    fn input_bits(&self) -> u32 {
        12 + 4 * INDEX_BITS
    }

    fn largest_leaf(&self) -> u32 {
        if self.one_gib_pages { 2 } else { 1 }
    }

    fn large_code(&self) -> bool {
        !self.small_code
    }

    fn host_limit(&self) -> Hpa {
        Hpa(1 << 52)
    }

    /// A right to write alone does not exist, and one to execute alone is not on all processors.
    fn expresses(&self, access: Access) -> bool {
        access.read
    }

    fn replace(&self) -> Replace {
        Replace::Freely
    }

    fn denials_are_cached(&self) -> bool {
        false
    }

    fn records_writes(&self) -> bool {
        self.accessed_dirty
    }

    fn table(&self, hpa: Hpa, _: u32) -> u64 {
        hpa.0 | RIGHTS
    }

    fn quiet(&self) -> u64 {
        QUIET
    }

    fn idle(&self) -> u64 {
        IDLE
    }

    fn broken(&self, bits: u64) -> u64 {
        let was = |right: u64, bit: u64| if bits & right != 0 { bit } else { 0 };
        bits & !RIGHTS | BUSY | was(WRITE, WAS_WRITABLE) | was(EXECUTE, WAS_EXECUTABLE)
    }

    fn is_broken(&self, bits: u64) -> bool {
        bits & BUSY != 0
    }

    fn unbroken(&self, bits: u64) -> u64 {
        if !self.is_broken(bits) {
            return bits;
        }
        let was = |bit: u64, right: u64| if bits & bit != 0 { right } else { 0 };
        let rights = READ | was(WAS_WRITABLE, WRITE) | was(WAS_EXECUTABLE, EXECUTE);
        bits & !(BUSY | WAS_WRITABLE | WAS_EXECUTABLE) | rights
    }

    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64 {
        let kind = match memory {
            Memory::Normal => WRITE_BACK,
            Memory::Device => UNCACHEABLE,
        };
        // Dirty at first: to a dirty log, a new mapping is a change.
        let write = if access.write { WRITE | DIRTY } else { 0 };
        self.with_execute(hpa.0 | READ | write | kind | large(level), access.execute)
    }

    fn decode(&self, level: u32, bits: u64) -> PageTableEntry {
        if bits & RIGHTS == 0 {
            return if self.is_broken(bits) { PageTableEntry::Busy } else { PageTableEntry::Empty };
        }
        let hpa = Hpa(bits & ADDRESS);
        if level == 0 || bits & LARGE != 0 {
            let access = Access { read: true, write: may_write(bits), execute: may_execute(bits) };
            PageTableEntry::Leaf { hpa, access }
        } else {
            PageTableEntry::Table(hpa)
        }
    }

    fn with_access(&self, bits: u64, access: Access) -> u64 {
        let others = self.with_execute(bits, access.execute);
        match (may_write(bits), access.write) {
            (true, true) | (false, false) => others,
            (false, true) => others | WRITE,
            (true, false) => {
                let marked = if bits & WRITE != 0 { MARKED } else { 0 };
                others & !(WRITE | PROTECTED) | marked
            }
        }
    }

    fn part(&self, bits: u64, level: u32, index: u64) -> u64 {
        let part = self.with_execute(bits & !LARGE | large(level), may_execute(bits));
        part + (index << (12 + INDEX_BITS * level))
    }

    fn whole(&self, first: u64, level: u32) -> u64 {
        self.with_execute(first | large(level), may_execute(first))
    }

    fn gathered(&self, bits: u64, other: u64) -> u64 {
        bits | other & (ACCESSED | DIRTY | MARKED)
    }

    fn attributes(&self, bits: u64) -> u64 {
        bits & !(ADDRESS | ACCESSED | DIRTY | MARKED)
    }

    /// Without accessed bits every page counts as accessed.
    fn is_touched(&self, bits: u64) -> bool {
        !self.accessed_dirty || bits & ACCESSED != 0
    }

    fn touched(&self, bits: u64) -> u64 {
        bits | ACCESSED
    }

    fn aged(&self, bits: u64) -> u64 {
        bits & !ACCESSED
    }

    fn is_writable(&self, bits: u64) -> bool {
        bits & WRITE != 0
    }

    fn is_executable(&self, bits: u64) -> bool {
        bits & IN_PARTS == 0
    }

    fn is_written(&self, bits: u64, source: Source) -> bool {
        let by = match source {
            Source::WriteProtect => WRITE,
            Source::Hardware | Source::Listed => DIRTY,
        };
        bits & (by | MARKED) != 0
    }

    fn write_protected(&self, bits: u64) -> u64 {
        let protected = if may_write(bits) { PROTECTED } else { 0 };
        bits & !(WRITE | DIRTY | MARKED) | protected
    }

    fn recorded(&self, bits: u64) -> u64 {
        let write = if may_write(bits) { WRITE } else { 0 };
        bits & !(PROTECTED | DIRTY | MARKED) | write
    }

    fn writable(&self, bits: u64) -> u64 {
        if may_write(bits) { bits & !PROTECTED | WRITE | DIRTY } else { bits }
    }

    fn released(&self, bits: u64) -> u64 {
        let write = if may_write(bits) { WRITE } else { 0 };
        bits & !(PROTECTED | MARKED) | write
    }
}

/// Whether the guest has the right to write, ignoring a dirty log that stops it for now.
const fn may_write(bits: u64) -> bool {
    bits & (WRITE | PROTECTED) != 0
}

const fn large(level: u32) -> u64 {
    if level == 0 { 0 } else { LARGE }
}

/// Whether the guest has the right to execute, by this leaf or by parts of it.
const fn may_execute(bits: u64) -> bool {
    bits & (EXECUTE | IN_PARTS) != 0
}

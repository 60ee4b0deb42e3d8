//! Nested page tables (NPT) of AMD SVM: the format of long-mode page tables (APM vol. 2, 5.3 and 15.25).
//!
//! Nested tables differ in two points. The processor walks them as for an access from user mode, so every entry has the
//! User bit (15.25.5). And VMRUN uses the *host's* CR4 and EFER for them: they have four levels because the host runs
//! with four, and No-Execute works because the host sets EFER.NXE.
//!
//! The processor walks again before it faults on a present entry that denies an access. Entries of different page sizes
//! for one address are no error as long as they agree. So added rights and splits need no flush.
//!
//! # Devices walk the same tables
//!
//! The host page tables of AMD's IOMMU (48882, 2.2.3) have the same shape: tables of 512 entries, bit 0 "present",
//! addresses in bits 51:12. What the IOMMU reads besides is free in an NPT, and the other way round:
//!
//! | bits | processor | IOMMU |
//! |---|---|---|
//! | 1-4, 7, 8 | writable, user, memory type, large page, global | ignored |
//! | 5, 6 | accessed, dirty | the same, written only if a device's entry turns this on; ours do not |
//! | 11:9 | free | next level: the level of a table, counted from 1; 0 is a leaf, as large as its level says |
//! | 58:52 | free | reserved |
//! | 59, 60 | free while CR4.PKE is clear | user (in answers to a device's own TLB), force coherence |
//! | 61, 62 | the same | a device may read, may write: in all levels |
//! | 63 | no execute | ignored |
//!
//! So each entry carries both, at no cost, and a VM that owns devices hands its root to the IOMMU.
//!
//! Intel's IOMMU (VT-d, D51397, 9.8) reads bit 0 as the right to read and bit 1 as the right to write, and knows large
//! pages by bit 7, too. It ignores what the processor has in bits 2-6, 8, 59, 60 and 63. But bits 11 and 62 are
//! reserved for it. So on a machine with VT-d entries go without the bits for AMD's ([`Iommu`]), and an entry that is
//! not present has no right to write. (Only an emulator has an AMD processor with VT-d. A processor of Intel has tables
//! of another format, whose bits 0, 1 and 7 mean the same.)
//!
//! A VM with devices has no dirty log: the IOMMU records no writes. It also refuses a write to a protected page for
//! good, where a guest would fault and try again. So the software bits of a log may be where they are: harmless in
//! leaves, and reserved where an entry points to a table. For the same reason such a VM's memory is mapped from the
//! start.

use crate::{Access, Format, Memory, PageTableEntry, Replace, Source};
use addr::Hpa;

/// Bits of an entry (APM vol. 2, 5.3.3 and 5.4).
/// Present, which is readable.
const PRESENT: u64 = 1 << 0;
/// May be written.
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// Leaf above level 0. At level 0 this bit belongs to the memory type and stays clear.
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// A device may read, may write: [`PRESENT`] and [`WRITE`] once more.
const DEVICE_SHIFT: u32 = 61;
const DEVICE: u64 = (PRESENT | WRITE) << DEVICE_SHIFT;
/// Next level.
const NEXT_LEVEL_SHIFT: u32 = 9;
/// Bits 51:12.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Software bits. The guest may write, but a dirty log stops the next write.
const PROTECTED: u64 = 1 << 59;
/// Written, although the guest may no longer write.
const MARKED: u64 = 1 << 60;
/// The same two bits where the entry names a table.
const QUIET: u64 = 1 << 59;
const IDLE: u64 = 1 << 60;
/// Set in an entry that was present: it is not, because a processor is about to write it again. The next level, below
/// four, leaves this bit free.
const BUSY: u64 = 1 << 11;
/// Set in such an entry that was writable: it cannot have [`WRITE`], which for VT-d is enough to be present.
const WAS_WRITABLE: u64 = 1 << 52;

/// SVM's nested page-table format with four levels: GPAs below 2^48.
pub type Npt = NptOf<9>;

/// [`Npt`] with tables of 2^`INDEX_BITS` entries. Hardware has 9; tests of races use fewer.
#[derive(Clone, Copy, Debug)]
pub struct NptOf<const INDEX_BITS: u32> {
    /// Whether the processor has 1 GiB pages (CPUID 8000_0001 EDX bit 26).
    pub one_gib_pages: bool,
    /// For which IOMMU's sake entries carry more than the processor reads.
    pub iommu: Iommu,
}

/// What walks the tables of a VM for its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Iommu {
    /// AMD's, or nothing.
    #[default]
    AmdVi,
    /// Intel's.
    VtD,
}

impl<const INDEX_BITS: u32> NptOf<INDEX_BITS> {
    /// With the same rights for devices.
    fn for_devices(&self, bits: u64) -> u64 {
        match self.iommu {
            Iommu::AmdVi => bits & !DEVICE | (bits & (PRESENT | WRITE)) << DEVICE_SHIFT,
            Iommu::VtD => bits,
        }
    }
}

impl<const INDEX_BITS: u32> Format for NptOf<INDEX_BITS> {
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

    fn host_limit(&self) -> Hpa {
        Hpa(1 << 52)
    }

    /// Present means readable, so only a readable page can be writable or executable.
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
        true
    }

    fn table(&self, hpa: Hpa, level: u32) -> u64 {
        let next = match self.iommu {
            Iommu::AmdVi => u64::from(level) << NEXT_LEVEL_SHIFT,
            Iommu::VtD => 0,
        };
        self.for_devices(hpa.0 | PRESENT | WRITE | USER | next)
    }

    fn quiet(&self) -> u64 {
        QUIET
    }

    fn idle(&self) -> u64 {
        IDLE
    }

    fn broken(&self, bits: u64) -> u64 {
        let was_writable = if bits & WRITE != 0 { WAS_WRITABLE } else { 0 };
        bits & !(PRESENT | WRITE | DEVICE) | BUSY | was_writable
    }

    fn is_broken(&self, bits: u64) -> bool {
        bits & BUSY != 0
    }

    fn unbroken(&self, bits: u64) -> u64 {
        if !self.is_broken(bits) {
            return bits;
        }
        let write = if bits & WAS_WRITABLE != 0 { WRITE } else { 0 };
        self.for_devices(bits & !(BUSY | WAS_WRITABLE) | PRESENT | write)
    }

    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64 {
        let cache = match memory {
            Memory::Normal => 0,
            // Entry 3 of the host's PAT, which is uncacheable after reset.
            Memory::Device => WRITE_THROUGH | CACHE_DISABLE,
        };
        // Dirty at first: to a dirty log, a new mapping is a change.
        let write = if access.write { WRITE | DIRTY } else { 0 };
        self.for_devices(hpa.0 | PRESENT | USER | large(level) | cache | write | no_execute(access))
    }

    fn decode(&self, level: u32, bits: u64) -> PageTableEntry {
        if bits & PRESENT == 0 {
            return if self.is_broken(bits) { PageTableEntry::Busy } else { PageTableEntry::Empty };
        }
        let hpa = Hpa(bits & ADDRESS);
        if level == 0 || bits & LARGE != 0 {
            let access = Access { read: true, write: may_write(bits), execute: bits & NO_EXECUTE == 0 };
            PageTableEntry::Leaf { hpa, access }
        } else {
            PageTableEntry::Table(hpa)
        }
    }

    fn with_access(&self, bits: u64, access: Access) -> u64 {
        let others = bits & !NO_EXECUTE | no_execute(access);
        self.for_devices(match (may_write(bits), access.write) {
            (true, true) | (false, false) => others,
            (false, true) => others | WRITE,
            (true, false) => {
                let marked = if bits & WRITE != 0 { MARKED } else { 0 };
                others & !(WRITE | PROTECTED) | marked
            }
        })
    }

    fn part(&self, bits: u64, level: u32, index: u64) -> u64 {
        (bits & !LARGE | large(level)) + (index << (12 + INDEX_BITS * level))
    }

    fn whole(&self, first: u64, level: u32) -> u64 {
        first | large(level)
    }

    fn gathered(&self, bits: u64, other: u64) -> u64 {
        bits | other & (ACCESSED | DIRTY | MARKED)
    }

    fn attributes(&self, bits: u64) -> u64 {
        bits & !(ADDRESS | ACCESSED | DIRTY | MARKED)
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
        bits & WRITE != 0
    }

    fn is_executable(&self, _: u64) -> bool {
        true
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
        self.for_devices(bits & !(WRITE | DIRTY | MARKED) | protected)
    }

    fn recorded(&self, bits: u64) -> u64 {
        let write = if may_write(bits) { WRITE } else { 0 };
        self.for_devices(bits & !(PROTECTED | DIRTY | MARKED) | write)
    }

    fn writable(&self, bits: u64) -> u64 {
        if may_write(bits) { self.for_devices(bits & !PROTECTED | WRITE | DIRTY) } else { bits }
    }

    fn released(&self, bits: u64) -> u64 {
        let write = if may_write(bits) { WRITE } else { 0 };
        self.for_devices(bits & !(PROTECTED | MARKED) | write)
    }
}

/// Whether the guest has the right to write, ignoring a dirty log that stops it for now.
const fn may_write(bits: u64) -> bool {
    bits & (WRITE | PROTECTED) != 0
}

const fn large(level: u32) -> u64 {
    if level == 0 { 0 } else { LARGE }
}

const fn no_execute(access: Access) -> u64 {
    if access.execute { 0 } else { NO_EXECUTE }
}

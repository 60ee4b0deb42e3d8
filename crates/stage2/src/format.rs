//! The format of stage-2 entries, and how to replace one: what the algorithms need from an architecture.

use crate::{Access, Memory};
use addr::Hpa;

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageTableEntry {
    /// Nothing is mapped here.
    Empty,
    /// A processor has [broken](Format::broken) the entry and is about to write it again. The hardware takes it for
    /// empty, and a guest that faults on it retries. Another processor that wants to change it waits. One that only
    /// reads still finds what the entry said: the new entry will mean the same.
    Busy,
    /// The next table is at this address.
    Table(Hpa),
    /// A page of the size of this level starts at `hpa`.
    Leaf {
        /// First byte of the page.
        hpa: Hpa,
        /// Access rights of the guest, ignoring a dirty log that write-protects the page for now.
        access: Access,
    },
}

/// How to replace a leaf by a table that means the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// By one store. Old and new entries may stay cached without limit.
    Freely,
    /// By one store, and a later flush of the old one: not both may stay cached (Arm: FEAT_BBM level 2).
    OneStore,
    /// Set this bit, which keeps the entry from being cached, then flush, then replace (FEAT_BBM level 1).
    Uncached(u64),
    /// Empty the entry, flush, then write the new one (FEAT_BBM level 0). An access in between faults.
    BreakFirst,
}

/// What records that a page was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Write protection: the first write faults.
    WriteProtect,
    /// The hardware, in the leaf.
    Hardware,
    /// The same, and the hardware lists what it records. Each address of the list is [reported](crate::Walk::report)
    /// before its processor enters the guest again.
    Listed,
}

impl Source {
    /// Whether the hardware records writes.
    #[must_use]
    pub const fn is_hardware(self) -> bool {
        matches!(self, Self::Hardware | Self::Listed)
    }
}

/// A page-table format with 64-bit entries.
///
/// The all-zero entry is [`PageTableEntry::Empty`] at every level, so a zeroed page is an empty table. Leaf sizes have
/// no gaps: if a size exists, all smaller ones exist.
///
/// Functions that take the `bits` of a leaf keep all bits that they do not name, above all those that the hardware
/// writes.
pub trait Format {
    /// Bits of an address that select an entry of one table: 9 in all hardware formats. Tests of races use smaller
    /// tables.
    const INDEX_BITS: u32 = 9;

    /// Number of levels, 1 to 5; the root is at level `levels() - 1`.
    fn levels(&self) -> u32;

    /// Bits of guest addresses that are translated. A tree with one root table may need up to 4 fewer. The extra bits
    /// select one of several adjacent tables that form the root.
    fn input_bits(&self) -> u32;

    /// The highest level that has leaves.
    fn largest_leaf(&self) -> u32;

    /// Whether large leaves can be executed. Otherwise the first fetch splits them.
    fn large_code(&self) -> bool {
        true
    }

    /// First host address that does not fit into an entry.
    fn host_limit(&self) -> Hpa;

    /// Whether a leaf can encode exactly `access`.
    fn expresses(&self, access: Access) -> bool;

    /// How to replace a leaf by a table.
    fn replace(&self) -> Replace;

    /// Whether a TLB may keep an entry that denies an access, and deny again after the tables allow it.
    fn denials_are_cached(&self) -> bool;

    /// Whether the hardware can record writes in leaves.
    fn records_writes(&self) -> bool;

    /// The entry, in a table at `level`, that points to the table at `hpa`, neither [quiet](Self::quiet) nor
    /// [idle](Self::idle). It restricts nothing: only leaves hold rights.
    fn table(&self, hpa: Hpa, level: u32) -> u64;

    /// A bit that the hardware ignores in entries that point to tables, clear at first. Set: no page below was written,
    /// and none can be without a fault or a [report](crate::Walk::report).
    fn quiet(&self) -> u64;

    /// Another such bit: nothing below was written between two rounds of a dirty log.
    fn idle(&self) -> u64;

    /// The entry, broken: [`PageTableEntry::Busy`]. The hardware takes it for empty, and it keeps what it says.
    fn broken(&self, bits: u64) -> u64;

    /// Whether an entry is broken.
    fn is_broken(&self, bits: u64) -> bool;

    /// What a broken entry said before. Another entry stays as it is.
    fn unbroken(&self, bits: u64) -> u64;

    /// The entry that maps a page at `level` to `hpa`, with rights that [`expresses`](Self::expresses) accepts.
    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64;

    /// Decodes `bits`, found in a table at `level`.
    fn decode(&self, level: u32, bits: u64) -> PageTableEntry;

    /// The leaf with other rights. A leaf that loses the right to write keeps whether it was written. A leaf that keeps
    /// the right stays write-protected by the log if it was.
    fn with_access(&self, bits: u64, access: Access) -> u64;

    /// Part `index` of the leaf `bits` one level above: a leaf at `level` with the same rights, accessed or written if
    /// that one was.
    fn part(&self, bits: u64, level: u32, index: u64) -> u64;

    /// The leaf at `level` that equals smaller ones, of which `first` is the first: [`part`](Self::part) reverses this.
    fn whole(&self, first: u64, level: u32) -> u64;

    /// The leaf, accessed and written if `other` is.
    fn gathered(&self, bits: u64, other: u64) -> u64;

    /// The bits in which two leaves must agree: all except address, accessed and written.
    fn attributes(&self, bits: u64) -> u64;

    /// Whether the guest has accessed the page since it was last [aged](Self::aged).
    fn is_touched(&self, bits: u64) -> bool;

    /// The leaf, accessed.
    fn touched(&self, bits: u64) -> u64;

    /// The leaf, not accessed. The next access sets it again, by the hardware or by a fault.
    fn aged(&self, bits: u64) -> u64;

    /// Whether a write does not fault.
    fn is_writable(&self, bits: u64) -> bool;

    /// Whether the guest can execute a leaf that allows it. If not, it can execute the parts: a fetch faults, and
    /// splits the leaf.
    fn is_executable(&self, bits: u64) -> bool;

    /// Whether the page may have been written since it was `write_protected` or `recorded`. A leaf that was neither
    /// counts as written.
    fn is_written(&self, bits: u64, source: Source) -> bool;

    /// The leaf, not written and write-protected: its next write faults.
    fn write_protected(&self, bits: u64) -> u64;

    /// The leaf, not written, and the hardware records the next write in it.
    fn recorded(&self, bits: u64) -> u64;

    /// The clean leaf: a page as `source` requires, a larger one write-protected.
    fn cleaned(&self, level: u32, bits: u64, source: Source) -> u64 {
        if level == 0 && source.is_hardware() { self.recorded(bits) } else { self.write_protected(bits) }
    }

    /// The leaf, written and writable, so that further writes cost nothing.
    fn writable(&self, bits: u64) -> u64;

    /// The leaf without a log: whether it was written is no longer known.
    fn released(&self, bits: u64) -> u64;
}

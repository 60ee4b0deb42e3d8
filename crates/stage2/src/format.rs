//! How a stage-2 entry is spelled, and how one may be replaced: what the algorithms ask of an architecture.

use crate::{Access, Memory};
use addr::Hpa;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing is mapped here.
    Empty,
    /// A processor has broken the entry and is about to make it anew. To the hardware it is empty; whoever else wants to
    /// change it waits, and a guest that faults on it tries again.
    Busy,
    /// The next table is at this address.
    Table(Hpa),
    /// A page of the size of this level starts at `hpa`.
    Leaf {
        /// First byte of the page.
        hpa: Hpa,
        /// What the guest may do with it, be it that a dirty log stops writes for the moment.
        access: Access,
    },
}

/// How a leaf may be replaced by a table that says the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// By one store. Old and new may both be cached for as long as they like.
    Freely,
    /// By one store, but both must not stay cached: the flush of the old one is owed (Arm: FEAT_BBM level 2).
    OneStore,
    /// First the entry gets this bit, which keeps it from being cached, then it is flushed, then replaced (FEAT_BBM level 1).
    Uncached(u64),
    /// First the entry is emptied and flushed, then made anew (FEAT_BBM level 0). A guest that comes between faults.
    BreakFirst,
}

/// Who records that a page was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// We do: the first write faults.
    WriteProtect,
    /// The hardware does, in the leaf.
    Hardware,
}

/// A page-table format with tables of 64-bit entries.
///
/// The all-zero entry is [`Entry::Empty`] at every level, so that a zeroed page is an empty table. Sizes of leaves have
/// no gaps: when a size exists, all smaller ones do.
///
/// Functions that take the `bits` of a leaf leave alone what they do not speak of, above all what the hardware writes.
pub trait Format {
    /// Bits of an address that select an entry of one table. 9 in all formats that hardware has; tests of races use
    /// smaller tables.
    const INDEX_BITS: u32 = 9;

    /// Number of levels, 1 to 5; the root is at level `levels() - 1`.
    fn levels(&self) -> u32;

    /// Bits of the guest addresses that are translated. What they need beyond those of a tree with one table at its root,
    /// at most 4, selects one of several tables that form the root side by side.
    fn input_bits(&self) -> u32;

    /// The highest level that has leaves.
    fn largest_leaf(&self) -> u32;

    /// First host address that does not fit into an entry.
    fn host_limit(&self) -> Hpa;

    /// Whether a leaf can say `access` and nothing else.
    fn expresses(&self, access: Access) -> bool;

    /// How a leaf may be replaced by a table.
    fn replace(&self) -> Replace;

    /// Whether a TLB may keep an entry that denies an access, and deny again, although the tables meanwhile allow it.
    fn denials_are_cached(&self) -> bool;

    /// Whether the hardware can record writes in leaves.
    fn records_writes(&self) -> bool;

    /// The entry that names the table at `hpa`, neither [quiet](Self::quiet) nor [idle](Self::idle). It restricts nothing:
    /// rights are kept in leaves alone.
    fn table(&self, hpa: Hpa) -> u64;

    /// A bit that the hardware ignores in entries that name tables, clear at first: no page below can be written without a
    /// fault, and none was.
    fn quiet(&self) -> u64;

    /// Another: nothing was written below between one round of a dirty log and the next.
    fn idle(&self) -> u64;

    /// The entry for [`Entry::Busy`].
    fn busy(&self) -> u64;

    /// The entry that maps a page at `level` to `hpa`, with rights that [`expresses`](Self::expresses) accepted.
    fn leaf(&self, hpa: Hpa, level: u32, access: Access, memory: Memory) -> u64;

    /// What `bits`, found in a table at `level`, say.
    fn decode(&self, level: u32, bits: u64) -> Entry;

    /// The leaf with other rights. A leaf that loses the right to write remembers whether it was written; one that
    /// keeps it stays as closed as it was.
    fn with_access(&self, bits: u64, access: Access) -> u64;

    /// The `index`th of the smaller leaves at `level` that together say the same as the leaf `bits` one level above: same
    /// rights, and touched or written when that one was.
    fn part(&self, bits: u64, level: u32, index: u64) -> u64;

    /// The leaf at `level` that says the same as smaller ones, of which `first` is the first: [`part`](Self::part) of it
    /// gives them again.
    fn whole(&self, first: u64, level: u32) -> u64;

    /// The leaf, touched and written when `other` is.
    fn gathered(&self, bits: u64, other: u64) -> u64;

    /// What makes two leaves equal in all but address, touched and written.
    fn attributes(&self, bits: u64) -> u64;

    /// Whether the guest has used the page since it was last [aged](Self::aged).
    fn is_touched(&self, bits: u64) -> bool;

    /// The leaf, touched.
    fn touched(&self, bits: u64) -> u64;

    /// The leaf, not touched. The next use touches it again, by the hardware or by a fault.
    fn aged(&self, bits: u64) -> u64;

    /// Whether a write meets no fault.
    fn is_writable(&self, bits: u64) -> bool;

    /// Whether the page may have been written since it was closed or watched. What was never either, counts as written.
    fn is_written(&self, bits: u64, source: Source) -> bool;

    /// The leaf, not written, and its next write faults.
    fn closed(&self, bits: u64) -> u64;

    /// The leaf, not written, and the hardware records the next write in it.
    fn watched(&self, bits: u64) -> u64;

    /// The leaf, written, so that further writes cost nothing.
    fn opened(&self, bits: u64) -> u64;

    /// The leaf as it is where nobody logs: written or not is no longer known.
    fn released(&self, bits: u64) -> u64;
}

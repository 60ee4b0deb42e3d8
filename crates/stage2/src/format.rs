//! How a stage-2 entry is spelled: what the walker asks of an architecture.

use crate::{Access, Memory};
use addr::{Hpa, PageSize};

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing is mapped here.
    Empty,
    /// The next table is at this address.
    Table(Hpa),
    /// A page of the size of this level starts at `hpa`.
    Leaf {
        /// First byte of the page.
        hpa: Hpa,
        /// What the guest may do with it.
        access: Access,
    },
}

/// A page-table format with 4 KiB tables of 512 entries.
///
/// The all-zero entry is [`Entry::Empty`] at every level, so that a zeroed page is an empty table. Sizes of leaves have
/// no gaps: when a size exists, all smaller ones do.
pub trait Format {
    /// Number of levels, 1 to 5; the root is at level `levels() - 1`.
    fn levels(&self) -> u32;

    /// Bits of the guest addresses that are translated. What they need beyond the `9 * levels() + 12` of a tree with one
    /// table at its root, at most 4, selects one of several tables that form the root side by side.
    fn input_bits(&self) -> u32;

    /// The largest page that one leaf can map.
    fn largest_leaf(&self) -> PageSize;

    /// First host address that does not fit into an entry.
    fn host_limit(&self) -> Hpa;

    /// Whether a leaf can say `access` and nothing else.
    fn expresses(&self, access: Access) -> bool;

    /// The entry that names the table at `hpa`. It restricts nothing: rights are kept in leaves alone.
    fn table(&self, hpa: Hpa) -> u64;

    /// The entry that maps a page of `size`, starting at `hpa`, with rights that [`expresses`](Self::expresses) accepted.
    fn leaf(&self, hpa: Hpa, size: PageSize, access: Access, memory: Memory) -> u64;

    /// What `bits`, found in a table at `level`, say.
    fn decode(&self, level: u32, bits: u64) -> Entry;

    /// The leaf `bits` with other rights; all else, the hardware's Accessed and Dirty bits too, stays.
    fn with_access(&self, bits: u64, access: Access) -> u64;

    /// The `index`th of the 512 smaller leaves of `size` that together say the same as the leaf `bits` of the next
    /// larger size: same rights, and touched or dirty when that one was.
    fn part(&self, bits: u64, size: PageSize, index: u64) -> u64;
}

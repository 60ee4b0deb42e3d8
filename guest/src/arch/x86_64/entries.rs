//! Entries of page tables (APM vol. 2, 5.3).

const PRESENT_WRITABLE: u64 = 3;
const FOR_USER: u64 = 4;
const UNCACHED: u64 = 0x18;

/// Points to a table of the next level. CPL 3 can use a page if every level allows it; here only the lowest level
/// decides.
pub(crate) const fn table(at: u64) -> u64 {
    at | PRESENT_WRITABLE | FOR_USER
}

/// Maps a page of memory.
pub(crate) const fn page(at: u64) -> u64 {
    at | PRESENT_WRITABLE
}

/// Maps a page of a device.
pub(crate) const fn device(at: u64) -> u64 {
    at | PRESENT_WRITABLE | UNCACHED
}

/// Does nothing: the processor sees stores to tables at once.
pub(crate) fn settle() {}

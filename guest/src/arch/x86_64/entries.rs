//! Entries of page tables (APM vol. 2, 5.3).

const PRESENT_WRITABLE: u64 = 3;
const FOR_USER: u64 = 4;
const UNCACHED: u64 = 0x18;

/// Names a table of the next level. A page is for CPL 3 if every level says so; here the lowest has the say.
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

/// Nothing has to be done so that the processor sees what a table holds now.
pub(crate) fn settle() {}

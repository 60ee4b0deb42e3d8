//! Page tables for a start in 64-bit mode.
//!
//! The kernel replaces them within its first instructions. They use 2 MiB pages, because 1 GiB pages are a CPU feature
//! that the guest may not have.

use addr::{Gpa, PAGE_BYTES, PageSize};
use alloc::vec::Vec;

use crate::layout::{BOOT_INFORMATION, BOOT_PAGE_TABLES};
use crate::{GuestMemory, OutsideMemory};

const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
const ENTRIES: u64 = 512;

/// Page directories: one per GiB, four map the first 4 GiB.
const DIRECTORIES: u64 = 4;

const _: () = assert!(BOOT_PAGE_TABLES.0 + (2 + DIRECTORIES) * PAGE_BYTES <= BOOT_INFORMATION.0);

/// Writes the tables, the root to this address and the others behind it.
pub(crate) fn write_tables(root: Gpa, memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
    let level_3 = Gpa(root.0 + PAGE_BYTES);
    let level_2 = Gpa(level_3.0 + PAGE_BYTES);
    memory.write(root, &table([level_3.0 | PRESENT_WRITABLE]))?;
    memory.write(level_3, &table((0..DIRECTORIES).map(|n| (level_2.0 + n * PAGE_BYTES) | PRESENT_WRITABLE)))?;
    let leaf = |n| (n * PageSize::Size2M.bytes()) | LARGE | PRESENT_WRITABLE;
    memory.write(level_2, &table((0..DIRECTORIES * ENTRIES).map(leaf)))
}

fn table(entries: impl IntoIterator<Item = u64>) -> Vec<u8> {
    entries.into_iter().flat_map(u64::to_le_bytes).collect()
}

//! Entries of page tables (Arm ARM, D8.3): 4 KiB pages.

use core::arch::asm;

const VALID: u64 = 3;
const ACCESSED: u64 = 1 << 10;
const INNER_SHAREABLE: u64 = 3 << 8;
/// Attribute 1 of MAIR_EL1: a device.
const DEVICE: u64 = 1 << 2;
/// EL0 may use it; EL1 then does not execute it.
const FOR_USER: u64 = 1 << 6;
const NO_EXECUTE: u64 = 3 << 53;

/// Names a table of the next level.
pub(crate) const fn table(at: u64) -> u64 {
    at | VALID
}

/// Maps a page of memory.
pub(crate) const fn page(at: u64) -> u64 {
    at | VALID | ACCESSED | INNER_SHAREABLE
}

/// Maps a page of memory for EL0 too.
pub(crate) const fn user_page(at: u64) -> u64 {
    page(at) | FOR_USER
}

/// Maps a page of a device.
pub(crate) const fn device(at: u64) -> u64 {
    at | VALID | ACCESSED | DEVICE | NO_EXECUTE
}

/// Waits until walks see the stores to tables (Arm ARM, D8.14).
pub(crate) fn settle() {
    // SAFETY: waits.
    unsafe { asm!("dsb ishst", "isb", options(nostack, preserves_flags)) };
}

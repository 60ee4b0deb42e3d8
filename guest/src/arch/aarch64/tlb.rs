//! Flushes of this CPU's TLB, or of all CPUs' TLBs.

use core::arch::asm;

/// Drops the page at `address` from this CPU's TLB.
pub(crate) fn flush_page(address: u64) {
    // SAFETY: removes a cached translation; the tables have the valid one.
    unsafe {
        asm!(
            "dsb nshst", "tlbi vaae1, {}", "dsb nsh", "isb",
            in(reg) address >> 12 & 0xfff_ffff_ffff,
            options(nostack, preserves_flags)
        );
    }
}

/// Drops all from this CPU's TLB.
pub(crate) fn flush_all() {
    // SAFETY: as above.
    unsafe { asm!("dsb nshst", "tlbi vmalle1", "dsb nsh", "isb", options(nostack, preserves_flags)) };
}

/// Whether QEMU flushes its TLB only on request.
pub(crate) const KEPT_BY_EMULATOR: bool = true;

/// Drops the pages from the TLBs of all CPUs.
pub(crate) fn flush_pages_of_all(addresses: impl Iterator<Item = u64>) {
    // SAFETY: waits until all walks see the tables.
    unsafe { asm!("dsb ishst", options(nostack, preserves_flags)) };
    for address in addresses {
        // SAFETY: removes a cached translation; the tables have the valid one.
        unsafe {
            asm!("tlbi vaae1is, {}", in(reg) address >> 12 & 0xfff_ffff_ffff, options(nostack, preserves_flags));
        }
    }
    finish();
}

/// Drops all from the TLBs of all CPUs.
pub(crate) fn flush_all_of_all() {
    // SAFETY: as above.
    unsafe { asm!("dsb ishst", "tlbi vmalle1is", options(nostack, preserves_flags)) };
    finish();
}

/// Waits until all CPUs have done it.
fn finish() {
    // SAFETY: waits.
    unsafe { asm!("dsb ish", "isb", options(nostack, preserves_flags)) };
}

/// Has instructions fetched as they were just stored on the line at `address`.
pub(super) fn synchronise_code(address: u64) {
    // SAFETY: the caches hold copies only.
    unsafe { asm!("dc cvau, {0}", "dsb ish", "ic ivau, {0}", "dsb ish", "isb", in(reg) address, options(nostack)) };
}

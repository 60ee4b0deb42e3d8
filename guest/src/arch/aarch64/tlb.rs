//! Dropping translations: from this CPU's TLB, or from those of all CPUs.

use core::arch::asm;

/// Drops the page at `address` from this CPU's TLB.
pub(crate) fn flush_page(address: u64) {
    // SAFETY: drops a translation; the tables say what holds.
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

/// Whether QEMU flushes its TLB only when it is told to.
pub(crate) const KEPT_BY_EMULATOR: bool = true;

/// Drops the pages from the TLBs of all CPUs.
pub(crate) fn flush_pages_of_all(addresses: impl Iterator<Item = u64>) {
    // SAFETY: waits until all walks find what the tables hold.
    unsafe { asm!("dsb ishst", options(nostack, preserves_flags)) };
    for address in addresses {
        // SAFETY: drops a translation; the tables say what holds.
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
    // SAFETY: what is cached are copies.
    unsafe { asm!("dc cvau, {0}", "dsb ish", "ic ivau, {0}", "dsb ish", "isb", in(reg) address, options(nostack)) };
}

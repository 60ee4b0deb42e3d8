//! Flushes of this CPU's TLB.

use core::arch::asm;

use super::attempt;

/// CR4.PGE: global pages are on.
pub(crate) const CR4_PGE: u64 = 1 << 7;

/// Drops the page at `address`, global or not.
pub(crate) fn flush_page(address: u64) {
    // SAFETY: removes a translation from this CPU's TLB; the tables have the valid one.
    unsafe { asm!("invlpg [{}]", in(reg) address, options(nostack)) };
}

/// Drops all that is not global.
pub(crate) fn flush_all() {
    // SAFETY: writes the same value back, which flushes translations; the tables have the valid ones.
    unsafe { asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _, options(nostack)) };
}

/// Whether QEMU flushes its TLB only on request. Here it flushes at each exit.
pub(crate) const KEPT_BY_EMULATOR: bool = false;

/// Root of this CPU's current page tables: CR3 without its flag bits.
pub(crate) fn root() -> u64 {
    attempt::read_cr3() & 0x000f_ffff_ffff_f000
}

/// Lets this CPU keep global translations, or not; either way all of its translations are dropped.
pub(crate) fn keep_global(on: bool) -> bool {
    let cr4 = attempt::read_cr4();
    let wanted = if on { cr4 | CR4_PGE } else { cr4 & !CR4_PGE };
    attempt::write_cr4(wanted).is_ok()
}

//! The guest's own address translation, done by reading its page tables as the processor does.
//!
//! All paging modes are one walk with different steps: so many levels, entries of 4 or 8 bytes, 10 or 9 bits of address
//! for each level (APM vol. 2, chapter 5). On the way the rights of all levels are combined. Only when the access is
//! allowed are the Accessed and Dirty bits set; should an entry have changed by then, the walk starts again.
//!
//! No table can lead the walk astray: it takes at most five steps, wherever they point.

use crate::cpu::bits::{AC, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE};
use crate::{CpuState, Exception, Memory};
use addr::Gpa;

/// What an access is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Data read.
    Read,
    /// Data write, or a read that is followed by a write.
    Write,
    /// Instruction fetch.
    Execute,
}

/// Why an address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The guest's tables refuse the access: #PF.
    Fault(Exception),
    /// A table lies where there is no memory, or none that can be written.
    Unbacked(Gpa),
    /// Other processors changed the tables again and again during the walk.
    Contended,
}

/// Bits of an entry, the same in all modes and levels (APM vol. 2, 5.4).
mod entry {
    pub(super) const PRESENT: u64 = 1 << 0;
    pub(super) const WRITE: u64 = 1 << 1;
    pub(super) const USER: u64 = 1 << 2;
    pub(super) const ACCESSED: u64 = 1 << 5;
    pub(super) const DIRTY: u64 = 1 << 6;
    /// Leaf above the lowest level.
    pub(super) const LARGE: u64 = 1 << 7;
    pub(super) const NO_EXECUTE: u64 = 1 << 63;
    /// Bits 51:12 of a 64-bit entry.
    pub(super) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
}

/// Bits of a page fault's error code (APM vol. 2, 8.4.2).
mod error {
    pub(super) const PRESENT: u32 = 1 << 0;
    pub(super) const WRITE: u32 = 1 << 1;
    pub(super) const USER: u32 = 1 << 2;
    pub(super) const RESERVED: u32 = 1 << 3;
    pub(super) const FETCH: u32 = 1 << 4;
}

/// How often a walk starts again because an entry changed under it.
const ATTEMPTS: usize = 8;

/// Translates `linear`, a guest virtual address that is canonical, for an access at the privilege of `state`.
pub fn translate(state: &CpuState, memory: &impl Memory, linear: u64, access: Access) -> Result<Gpa, Stop> {
    if state.cr0 & CR0_PG == 0 {
        return Ok(Gpa(linear & 0xffff_ffff));
    }
    for _ in 0..ATTEMPTS {
        if let Some(gpa) = walk(state, memory, linear, access)? {
            return Ok(gpa);
        }
    }
    Err(Stop::Contended)
}

/// Shape of the guest's tables.
#[derive(Clone, Copy)]
struct Paging {
    /// Number of tables from the root to the page.
    levels: u32,
    /// Bits of address that select an entry; an entry has 8 bytes if 9, 4 if 10.
    index_bits: u32,
    root: Gpa,
}

impl Paging {
    fn of(state: &CpuState) -> Self {
        if state.efer & EFER_LMA != 0 {
            let levels = if state.cr4 & CR4_LA57 != 0 { 5 } else { 4 };
            Self { levels, index_bits: 9, root: Gpa(state.cr3 & entry::ADDRESS) }
        } else if state.cr4 & CR4_PAE != 0 {
            Self { levels: 3, index_bits: 9, root: Gpa(state.cr3 & 0xffff_ffe0) }
        } else {
            Self { levels: 2, index_bits: 10, root: Gpa(state.cr3 & 0xffff_f000) }
        }
    }

    fn has_pointer_table(&self) -> bool {
        self.levels == 3
    }

    fn is_legacy(&self) -> bool {
        self.index_bits == 10
    }

    /// Number of address bits below those that select an entry at `level`.
    fn shift(&self, level: u32) -> u32 {
        12 + level * self.index_bits
    }

    fn entry_address(&self, table: Gpa, level: u32, linear: u64) -> Gpa {
        // The four entries of PAE's top table are selected by the two bits that are left of 32.
        let bits = if self.has_pointer_table() && level == 2 { 2 } else { self.index_bits };
        let index = linear >> self.shift(level) & ((1 << bits) - 1);
        Gpa(table.0 + index * if self.is_legacy() { 4 } else { 8 })
    }

    fn read(&self, memory: &impl Memory, gpa: Gpa) -> Result<u64, Stop> {
        let found = if self.is_legacy() { memory.read_u32(gpa).map(u64::from) } else { memory.read_u64(gpa) };
        found.ok_or(Stop::Unbacked(gpa))
    }

    /// Sets `more` in the entry if it is still `found`; says whether it was.
    fn set(&self, memory: &impl Memory, gpa: Gpa, found: u64, more: u64) -> Result<bool, Stop> {
        if found & more == more {
            return Ok(true);
        }
        let done = match (self.is_legacy(), u32::try_from(found), u32::try_from(found | more)) {
            (true, Ok(current), Ok(new)) => memory.compare_exchange_u32(gpa, current, new),
            _ => memory.compare_exchange_u64(gpa, found, found | more),
        };
        done.ok_or(Stop::Unbacked(gpa))
    }

    /// Where the leaf `bits` at `level` maps the page that starts `linear & !mask`.
    fn page(&self, bits: u64, level: u32) -> u64 {
        let mask = (1 << self.shift(level)) - 1;
        if self.is_legacy() && level == 1 {
            // PSE-36: bits 39:32 of the address are in bits 20:13.
            (bits & 0xffc0_0000) | (bits & 0x001f_e000) << 19
        } else {
            bits & entry::ADDRESS & !mask
        }
    }

    /// Bits that must be zero in a present entry.
    fn reserved(&self, state: &CpuState, level: u32, is_leaf: bool) -> u64 {
        if self.is_legacy() {
            return if is_leaf && level == 1 { 1 << 21 } else { 0 };
        }
        let width = u32::from(state.physical_bits).clamp(32, 52);
        let mut reserved = entry::ADDRESS & !((1 << width) - 1);
        if state.efer & EFER_NXE == 0 {
            reserved |= entry::NO_EXECUTE;
        }
        if is_leaf && level > 0 {
            // Address bits within the page, but for bit 12, which selects a memory type.
            reserved |= ((1 << self.shift(level)) - 1) & !0x1fff;
        }
        if level >= 3 {
            reserved |= entry::LARGE;
        }
        if self.has_pointer_table() && level == 2 {
            reserved |= entry::WRITE | entry::USER | entry::NO_EXECUTE;
        }
        reserved
    }
}

/// One walk. `None` when an entry changed before its Accessed or Dirty bit could be set.
fn walk(state: &CpuState, memory: &impl Memory, linear: u64, access: Access) -> Result<Option<Gpa>, Stop> {
    let paging = Paging::of(state);
    let fault = |code| Err(Stop::Fault(Exception::page_fault(code | intent(state, &paging, access), linear)));

    let mut seen = [(Gpa(0), 0); 5];
    let mut rights = entry::WRITE | entry::USER;
    let mut no_execute = 0;
    let mut table = paging.root;
    let mut level = paging.levels - 1;
    let page = loop {
        let at = paging.entry_address(table, level, linear);
        let bits = paging.read(memory, at)?;
        if bits & entry::PRESENT == 0 {
            return fault(0);
        }
        let is_leaf = level == 0 || (bits & entry::LARGE != 0 && may_be_large(state, &paging, level));
        if bits & paging.reserved(state, level, is_leaf) != 0 {
            return fault(error::PRESENT | error::RESERVED);
        }

        // The pointers at the top of PAE have no rights and no Accessed bit.
        if !(paging.has_pointer_table() && level == 2) {
            rights &= bits;
            no_execute |= bits & entry::NO_EXECUTE;
            seen[level as usize] = (at, bits);
        }
        if is_leaf {
            break paging.page(bits, level);
        }
        table = Gpa(if paging.is_legacy() { bits & 0xffff_f000 } else { bits & entry::ADDRESS });
        level -= 1;
    };

    if !is_allowed(state, access, rights, no_execute) {
        return fault(error::PRESENT);
    }

    for (place, (at, bits)) in seen.iter().enumerate().skip(level as usize) {
        let is_leaf = place == level as usize;
        let more = if is_leaf && access == Access::Write { entry::DIRTY } else { 0 } | entry::ACCESSED;
        if *bits != 0 && !paging.set(memory, *at, *bits, more)? {
            return Ok(None);
        }
    }
    Ok(Some(Gpa(page | linear & ((1 << paging.shift(level)) - 1))))
}

/// Whether entries at `level` can be leaves.
fn may_be_large(state: &CpuState, paging: &Paging, level: u32) -> bool {
    match level {
        1 => !paging.is_legacy() || state.cr4 & CR4_PSE != 0,
        2 => !paging.has_pointer_table(),
        _ => false,
    }
}

/// Whether the combined `rights` of all levels allow the access (APM vol. 2, 5.6).
fn is_allowed(state: &CpuState, access: Access, rights: u64, no_execute: u64) -> bool {
    let is_user_page = rights & entry::USER != 0;
    let by_user = state.cpl == 3;
    if by_user && !is_user_page {
        return false;
    }
    let is_kept_off = |feature| !by_user && is_user_page && state.cr4 & feature != 0;
    let smap = is_kept_off(CR4_SMAP) && state.rflags & AC == 0;
    match access {
        Access::Read => !smap,
        Access::Write => !smap && (rights & entry::WRITE != 0 || !by_user && state.cr0 & CR0_WP == 0),
        Access::Execute => no_execute == 0 && !is_kept_off(CR4_SMEP),
    }
}

/// The part of the error code that says what was tried.
fn intent(state: &CpuState, paging: &Paging, access: Access) -> u32 {
    let by_user = if state.cpl == 3 { error::USER } else { 0 };
    let tells_fetches = state.cr4 & CR4_SMEP != 0 || !paging.is_legacy() && state.efer & EFER_NXE != 0;
    by_user
        | match access {
            Access::Write => error::WRITE,
            Access::Execute if tells_fetches => error::FETCH,
            Access::Read | Access::Execute => 0,
        }
}

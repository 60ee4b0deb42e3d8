//! The guest's own address translation: reads its page tables like the processor.
//!
//! All paging modes are one walk with different parameters: number of levels, entries of 4 or 8 bytes, 10 or 9 address
//! bits per level (APM vol. 2, chapter 5). The walk combines the rights of all levels. It sets the Accessed and Dirty
//! bits only if the access is allowed. If an entry has changed by then, the walk restarts.
//!
//! No table can make the walk endless: it takes at most five steps, wherever entries point.

use crate::cpu::bits::{
    AC, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PKE, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE,
};
use crate::walks::{LEVELS, Step, Steps, page_of};
use crate::{Cpu, Exception, Memory};
use addr::Gpa;

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
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
    /// The guest's tables do not allow the access: #PF.
    Fault(Exception),
    /// A table is at an address without memory, or without writable memory.
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
    /// Bits 62:52 of a 64-bit entry, reserved without long mode.
    pub(super) const HIGH: u64 = 0x7ff0_0000_0000_0000;
    /// Bits 8:5, reserved in the page-directory pointers of PAE.
    pub(super) const NOT_OF_POINTERS: u64 = 0x1e0;
    /// Position of a leaf's protection key, four bits, in long mode.
    pub(super) const KEY_SHIFT: u32 = 59;
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
    pub(super) const PROTECTION_KEY: u32 = 1 << 5;
}

/// How often a walk restarts because an entry changed meanwhile.
const ATTEMPTS: usize = 8;

/// Translates the page of `linear`, a canonical guest virtual address, for an access at the vCPU's privilege. Returns
/// the first byte of its 4 KiB page, and leaves the entries that it has read, with their current values, in `steps`.
pub(crate) fn walk<M: Memory>(
    cpu: &impl Cpu,
    memory: &M,
    linear: u64,
    access: Access,
    steps: &mut Steps<M>,
) -> Result<Gpa, Stop> {
    steps.clear();
    if cpu.cr0() & CR0_PG == 0 {
        return Ok(page_of(Gpa(linear & 0xffff_ffff)));
    }
    for _ in 0..ATTEMPTS {
        if let Some(gpa) = attempt(cpu, memory, linear, access, true, steps)? {
            return Ok(gpa);
        }
        steps.clear();
    }
    Err(Stop::Contended)
}

/// The same for somebody outside of the guest, who chooses whether the Accessed and Dirty bits are set.
///
/// # Errors
/// Why the address has no translation.
pub fn probe<M: Memory>(cpu: &impl Cpu, memory: &M, linear: u64, access: Access, sets_bits: bool) -> Result<Gpa, Stop> {
    let mut steps = Steps::none();
    if sets_bits || cpu.cr0() & CR0_PG == 0 {
        return walk(cpu, memory, linear, access, &mut steps);
    }
    for _ in 0..ATTEMPTS {
        steps.clear();
        if let Some(gpa) = attempt(cpu, memory, linear, access, false, &mut steps)? {
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
    reserved_everywhere: u64,
}

impl Paging {
    fn of(cpu: &impl Cpu) -> Self {
        let (cr3, cr4) = (cpu.cr3(), cpu.cr4());
        let (levels, index_bits, root) = if cpu.efer() & EFER_LMA != 0 {
            (if cr4 & CR4_LA57 != 0 { 5 } else { 4 }, 9, cr3 & entry::ADDRESS)
        } else if cr4 & CR4_PAE != 0 {
            (3, 9, cr3 & 0xffff_ffe0)
        } else {
            (2, 10, cr3 & 0xffff_f000)
        };
        Self { levels, index_bits, root: Gpa(root), reserved_everywhere: reserved_everywhere(cpu, levels) }
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
        // PAE's top table has four entries, selected by the two bits that are left of 32.
        let bits = if self.has_pointer_table() && level == 2 { 2 } else { self.index_bits };
        let index = linear >> self.shift(level) & ((1 << bits) - 1);
        Gpa(table.0 + index * if self.is_legacy() { 4 } else { 8 })
    }

    /// The 4 KiB page of `linear` in the leaf `bits` at `level`.
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
    #[inline]
    fn reserved(&self, level: u32, is_leaf: bool) -> u64 {
        if self.is_legacy() {
            return if is_leaf && level == 1 { 1 << 21 } else { 0 };
        }
        let mut reserved = self.reserved_everywhere;
        if is_leaf && level > 0 {
            // Address bits within the page, except bit 12, which selects a memory type.
            reserved |= ((1 << self.shift(level)) - 1) & !0x1fff;
        }
        if level >= 3 {
            reserved |= entry::LARGE;
        }
        if self.has_pointer_table() && level == 2 {
            reserved |= entry::WRITE | entry::USER | entry::NO_EXECUTE | entry::NOT_OF_POINTERS;
        }
        reserved
    }
}

/// Bits that must be zero in a present 64-bit entry of any level.
fn reserved_everywhere(cpu: &impl Cpu, levels: u32) -> u64 {
    let width = u32::from(cpu.physical_bits()).clamp(32, 52);
    let addresses = entry::ADDRESS & !((1 << width) - 1);
    let no_execute = if cpu.efer() & EFER_NXE == 0 { entry::NO_EXECUTE } else { 0 };
    addresses | no_execute | if levels == 3 { entry::HIGH } else { 0 }
}

/// The word with the entry at `gpa`, and the entry. `None` if the word was gone before it was read.
#[inline]
fn read_entry<M: Memory>(paging: &Paging, memory: &M, gpa: Gpa) -> Result<Option<(Step<M>, u64)>, Stop> {
    let word = memory.find(gpa).ok_or(Stop::Unbacked(gpa))?;
    let value = memory.load(word, 0);
    // A word that is gone reads as zero, which would be an entry that is not present.
    if value == 0 && !memory.is_current(Some(word)) {
        return Ok(None);
    }
    let bits = if paging.is_legacy() { value >> half_shift(gpa) & 0xffff_ffff } else { value };
    Ok(Some((Step { word, value }, bits)))
}

/// Lowest bit, in its 64-bit word, of the 32-bit entry at `gpa`; zero for a 64-bit entry.
fn half_shift(gpa: Gpa) -> u32 {
    if gpa.0 % 8 == 4 { 32 } else { 0 }
}

/// One attempt. `None` if an entry changed before its Accessed or Dirty bit could be set, or was gone before it was
/// read.
fn attempt<M: Memory>(
    cpu: &impl Cpu,
    memory: &M,
    linear: u64,
    access: Access,
    sets_bits: bool,
    steps: &mut Steps<M>,
) -> Result<Option<Gpa>, Stop> {
    let paging = Paging::of(cpu);
    let fault = |code| Err(Stop::Fault(Exception::page_fault(code | intent(cpu, &paging, access), linear)));

    let mut halves = [0; LEVELS];
    let mut rights = entry::WRITE | entry::USER;
    let mut no_execute = 0;
    let mut table = paging.root;
    let mut level = paging.levels - 1;
    let (page, leaf) = loop {
        let at = paging.entry_address(table, level, linear);
        let Some((step, bits)) = read_entry(&paging, memory, at)? else { return Ok(None) };
        if bits & entry::PRESENT == 0 {
            return fault(0);
        }
        let is_leaf = level == 0 || (bits & entry::LARGE != 0 && may_be_large(cpu, &paging, level));
        if bits & paging.reserved(level, is_leaf) != 0 {
            return fault(error::PRESENT | error::RESERVED);
        }

        // PAE's page-directory pointers have no rights.
        if !(paging.has_pointer_table() && level == 2) {
            rights &= bits;
            no_execute |= bits & entry::NO_EXECUTE;
        }
        halves[level as usize] = half_shift(at);
        steps.push(step);
        if is_leaf {
            break (paging.page(bits, level), bits);
        }
        table = Gpa(if paging.is_legacy() { bits & 0xffff_f000 } else { bits & entry::ADDRESS });
        level -= 1;
    };

    if !is_allowed(cpu, access, rights, no_execute) {
        return fault(error::PRESENT);
    }
    if !is_allowed_by_key(cpu, access, rights, leaf) {
        return fault(error::PRESENT | error::PROTECTION_KEY);
    }

    let walked = if sets_bits { paging.levels } else { level };
    for (step, at) in steps.iter_mut().zip((level..walked).rev()) {
        // PAE's page-directory pointers have no Accessed bit either.
        if paging.has_pointer_table() && at == 2 {
            continue;
        }
        let dirty = if at == level && access == Access::Write { entry::DIRTY } else { 0 };
        let new = step.value | (entry::ACCESSED | dirty) << halves[at as usize];
        if new != step.value {
            if !memory.compare_exchange(step.word, step.value, new) {
                return Ok(None);
            }
            step.value = new;
        }
    }
    Ok(Some(page_of(Gpa(page | linear & ((1 << paging.shift(level)) - 1)))))
}

/// The walk to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    tables: [Gpa; LEVELS],
    count: usize,
    /// First byte of the 4 KiB page.
    pub gpa: Gpa,
}

impl Path {
    /// The pages of the tables, from the root on.
    #[must_use]
    pub fn tables(&self) -> &[Gpa] {
        &self.tables[..self.count]
    }
}

/// The walk that translates `linear`, without side effects: it ignores rights and sets no bit. `None` if there is no
/// translation.
pub fn path(cpu: &impl Cpu, memory: &impl Memory, linear: u64) -> Option<Path> {
    let mut path = Path { tables: [Gpa(0); LEVELS], count: 0, gpa: page_of(Gpa(linear & 0xffff_ffff)) };
    if cpu.cr0() & CR0_PG == 0 {
        return Some(path);
    }
    let paging = Paging::of(cpu);
    let mut table = paging.root;
    for level in (0..paging.levels).rev() {
        path.tables[path.count] = page_of(table);
        path.count += 1;
        let (_, bits) = read_entry(&paging, memory, paging.entry_address(table, level, linear)).ok()??;
        if bits & entry::PRESENT == 0 {
            return None;
        }
        if level == 0 || (bits & entry::LARGE != 0 && may_be_large(cpu, &paging, level)) {
            let offset = linear & ((1 << paging.shift(level)) - 1);
            path.gpa = page_of(Gpa(paging.page(bits, level) | offset));
            return Some(path);
        }
        table = Gpa(if paging.is_legacy() { bits & 0xffff_f000 } else { bits & entry::ADDRESS });
    }
    None
}

/// Whether entries at `level` can be leaves.
fn may_be_large(cpu: &impl Cpu, paging: &Paging, level: u32) -> bool {
    match level {
        1 => !paging.is_legacy() || cpu.cr4() & CR4_PSE != 0,
        2 => !paging.has_pointer_table(),
        _ => false,
    }
}

/// Whether the combined `rights` of all levels allow the access (APM vol. 2, 5.6).
fn is_allowed(cpu: &impl Cpu, access: Access, rights: u64, no_execute: u64) -> bool {
    let is_user_page = rights & entry::USER != 0;
    let by_user = cpu.cpl() == 3;
    if by_user && !is_user_page {
        return false;
    }
    let is_kept_off = |feature| !by_user && is_user_page && cpu.cr4() & feature != 0;
    let smap = is_kept_off(CR4_SMAP) && cpu.rflags() & AC == 0;
    match access {
        Access::Read => !smap,
        Access::Write => !smap && (rights & entry::WRITE != 0 || !by_user && cpu.cr0() & CR0_WP == 0),
        Access::Execute => no_execute == 0 && !is_kept_off(CR4_SMEP),
    }
}

/// Whether the protection key in `leaf` allows the access. Keys apply to data on user pages (APM vol. 2, 5.6.7).
fn is_allowed_by_key(cpu: &impl Cpu, access: Access, rights: u64, leaf: u64) -> bool {
    let has_key = cpu.cr4() & CR4_PKE != 0 && cpu.efer() & EFER_LMA != 0 && rights & entry::USER != 0;
    if !has_key || access == Access::Execute {
        return true;
    }
    let key = leaf >> entry::KEY_SHIFT & 0xf;
    let (no_access, no_write) = (cpu.pkru() >> (2 * key) & 1 != 0, cpu.pkru() >> (2 * key + 1) & 1 != 0);
    let is_bound = cpu.cpl() == 3 || cpu.cr0() & CR0_WP != 0;
    let denies_write = no_write && access == Access::Write && is_bound;
    !no_access && !denies_write
}

/// The bits of the error code that describe the access.
fn intent(cpu: &impl Cpu, paging: &Paging, access: Access) -> u32 {
    let by_user = if cpu.cpl() == 3 { error::USER } else { 0 };
    let tells_fetches = cpu.cr4() & CR4_SMEP != 0 || !paging.is_legacy() && cpu.efer() & EFER_NXE != 0;
    by_user
        | match access {
            Access::Write => error::WRITE,
            Access::Execute if tells_fetches => error::FETCH,
            Access::Read | Access::Execute => 0,
        }
}

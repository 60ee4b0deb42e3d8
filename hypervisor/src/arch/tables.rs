//! Pages for stage-2 tables, accessed through the direct map.
//!
//! The tree names its tables by host physical address. Each step of a fault accesses an entry in the pool, on all pCPUs
//! at once. So the pool is one run of host memory whose length is a power of two, allocated when the VM is created. A
//! mask finds an entry, without a lock or a comparison, and no address leads out of the run. Only allocating and
//! freeing a page take a lock.
//!
//! The run is long enough for all of the VM's memory in the smallest pages: one byte for each 512, or for each 256 at
//! worst. In return no guest stops because the host has no page for a table.
//!
//! A child's tables are pages that its parent has deposited, from anywhere in the parent's memory. Its pool is given
//! them one by one. The run of such a pool is all of the host's memory, and its mask changes no address.

#![expect(unsafe_code, reason = "finds an entry by a mask")]

use core::sync::atomic::{AtomicU64, Ordering};

use addr::{GpaRange, Hpa, Hva, PAGE_BYTES, PageSize};
use crossbeam_utils::CachePadded;
use spin::Mutex;
use stage2::{BATCH, Cell, ENTRIES, Format, Pages};

/// Does work on a stage-2 tree, compiled for each format that the machine may walk.
pub(crate) use super::machine::format::with_known_format;
use super::paging::direct_map;
use super::trace::{self, TraceEvent};
use super::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::exhaustion;
use crate::frames::{Exhausted, Frames};
use crate::mutants::{self, Mutant};
use crate::sync::point;
use crate::vm::memory::ZEROED_AT_ONCE;

/// Tables for the upper levels of any VM, its root among them: side by side, up to 16.
const ROOT_TABLES: u64 = 32;
/// Tables that wait for walkers to leave, or for the next batch of splits, harvests and repairs.
const TABLES_AT_HAND: u64 = 4 * BATCH as u64;
/// Tables that each vCPU has ready for its next faults.
const TABLES_OF_A_VCPU: u64 = 4;

/// The tables of one VM.
pub(crate) struct TablePool {
    /// Its length is a power of two, to which its start is aligned. `None`: the pool is [given](Self::give) its pages.
    run: Option<Frames>,
    /// The run's first byte in the direct map.
    base: Hva,
    /// The bits of an address that select an entry.
    mask: u64,
    /// On lines of its own: all faults read the fields next to it.
    free: CachePadded<Mutex<Free>>,
}

/// An empty table.
#[repr(align(4096))]
struct Nothing([AtomicU64; ENTRIES]);

static NOTHING: Nothing = Nothing([const { AtomicU64::new(0) }; ENTRIES]);

/// Pages that are in no tree.
struct Free {
    /// Free pages that were used before: the first page of a list, which continues in the first entry of each page, and
    /// their number. Freeing a page allocates nothing. Such an entry maps nothing.
    used: Option<Hpa>,
    used_count: u64,
    /// Pages that the pool was given, besides its run.
    given_count: u64,
    /// The part of the run that was never taken. It is zero.
    fresh: Hpa,
}

impl TablePool {
    /// For a VM with this memory, in pages of any size, and this many vCPUs, and `more` tables.
    ///
    /// # Errors
    /// The host has no such run.
    pub(crate) fn new(regions: &[GpaRange], vcpus: u32, more: u64) -> Result<Self, Exhausted> {
        let spanned = |size: PageSize| {
            let whole = |region: &GpaRange| region.end().0.div_ceil(size.bytes()) - region.start.0 / size.bytes();
            regions.iter().map(whole).sum::<u64>()
        };
        let below_root = spanned(PageSize::Size2M) + spanned(PageSize::Size1G) + regions.len() as u64;
        let tables = ROOT_TABLES + below_root + TABLES_AT_HAND + TABLES_OF_A_VCPU * u64::from(vcpus) + more;
        let bytes = (tables * PAGE_BYTES).next_power_of_two();
        let run = Frames::allocate(bytes, bytes)?;
        for at in (0..bytes.div_ceil(ZEROED_AT_ONCE)).map(|part| part * ZEROED_AT_ONCE) {
            run.zero_part(at, ZEROED_AT_ONCE);
            preemption_point();
        }
        let fresh = run.hpa();
        let free = CachePadded::new(Mutex::new(Free { used: None, used_count: 0, given_count: 0, fresh }));
        Ok(Self { base: direct_map(fresh), mask: bytes - size_of::<AtomicU64>() as u64, run: Some(run), free })
    }

    /// A pool without any page, which is [given](Self::give) its pages one by one.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn of_given_pages() -> Self {
        let free = CachePadded::new(Mutex::new(Free { used: None, used_count: 0, given_count: 0, fresh: Hpa(0) }));
        Self { base: direct_map(Hpa(0)), mask: !(size_of::<AtomicU64>() as u64 - 1), run: None, free }
    }

    /// A pool that has an empty table at each address, for a tree that was taken apart.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn of_nothing() -> Self {
        let base = Hva(NOTHING.0.as_ptr() as u64);
        Self { base, mask: PAGE_BYTES - size_of::<AtomicU64>() as u64, ..Self::of_given_pages() }
    }

    /// Gives a pool of given pages one more. It returns from [`take_back`](Self::take_back).
    ///
    /// # Safety
    /// It is a page of host RAM, present in the direct map. From now on until it returns, nothing else accesses it: no
    /// guest, no device, and no Rust code. The pool has no run of its own.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(in crate::arch) unsafe fn give(&self, page: Hpa) {
        debug_assert!(self.run.is_none(), "only pools of given pages can name any page");
        let mut free = self.free.lock();
        free.given_count += 1;
        self.put(&mut free, page);
    }

    /// Number of given pages that are in no tree now.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn spare_pages(&self) -> u64 {
        self.free.lock().used_count
    }

    /// Whether none of the pages that the pool was given is in a tree.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn has_all(&self) -> bool {
        let free = self.free.lock();
        free.used_count == free.given_count
    }

    /// Takes back one of the pages that the pool was given and that is in no tree, to return it to its owner.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn take_back(&self) -> Option<Hpa> {
        if self.run.is_some() {
            return None;
        }
        let mut free = self.free.lock();
        let page = self.pop(&mut free)?;
        free.given_count -= 1;
        Some(page)
    }

    /// Host memory that tables use now, of the reserved memory.
    pub(crate) fn bytes(&self) -> u64 {
        let free = self.free.lock();
        let start = self.run.as_ref().map_or(0, |run| run.hpa().0);
        free.fresh.0 - start + free.given_count * PAGE_BYTES - free.used_count * PAGE_BYTES
    }

    /// Host memory that is set aside for tables.
    pub(crate) fn reserved(&self) -> u64 {
        self.run.as_ref().map_or_else(|| self.free.lock().given_count * PAGE_BYTES, Frames::bytes)
    }

    /// Takes a free page that was used before, with any content.
    fn pop(&self, free: &mut Free) -> Option<Hpa> {
        let table = free.used?;
        let next = self.entry(Cell::new(table, 0)).load(Ordering::Relaxed);
        (free.used, free.used_count) = ((next != 0).then_some(Hpa(next)), free.used_count - 1);
        Some(table)
    }

    /// Adds a free page.
    fn put(&self, free: &mut Free, page: Hpa) {
        let next = free.used.replace(page).map_or(0, |next| next.0);
        free.used_count += 1;
        self.entry(Cell::new(page, 0)).store(next, Ordering::Relaxed);
    }

    /// The entry at this place, or the one to which the mask maps it: as if the run repeated through all addresses.
    #[inline]
    fn entry(&self, cell: Cell) -> &AtomicU64 {
        let entry = self.address(cell.hpa()) as *const AtomicU64;
        // SAFETY: the run is ours as long as the pool lives, and present in the direct map. The masked offset is below
        // its length and a multiple of 8. Rust code accesses it only through atomics. A pool of given pages names only
        // those: its entries hold no other table (`Pages`), and `give` promises the rest. A pool of nothing names only
        // a static table.
        unsafe { &*entry }
    }

    /// All entries of a table.
    #[inline]
    fn entries(&self, table: Hpa) -> &[AtomicU64; ENTRIES] {
        let first = self.address(table.page(PageSize::Size4K)) as *const [AtomicU64; ENTRIES];
        // SAFETY: as in `entry`. The run consists of whole pages, so all of the table's page is in it.
        unsafe { &*first }
    }

    #[inline]
    fn address(&self, hpa: Hpa) -> u64 {
        let is_in = |run: &Frames| hpa.0.wrapping_sub(run.hpa().0) < run.bytes();
        debug_assert!(self.run.as_ref().is_none_or(is_in), "{hpa}: a tree names only tables of its own pool");
        self.base.0 + (hpa.0 & self.mask)
    }
}

impl Pages for TablePool {
    fn allocate(&self) -> Option<Hpa> {
        if exhaustion::strikes() {
            return None;
        }
        let mut free = self.free.lock();
        if let Some(table) = self.pop(&mut free) {
            drop(free);
            self.entries(table).iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
            trace::note(|| TraceEvent::Allocate { table, count: 1 });
            return Some(table);
        }
        take_fresh(&mut free, self.run.as_ref()?, 1)
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        if exhaustion::strikes() {
            return None;
        }
        take_fresh(&mut self.free.lock(), self.run.as_ref()?, count)
    }

    fn free(&self, hpa: Hpa) {
        let mut free = self.free.lock();
        trace::note(|| TraceEvent::Free { table: hpa });
        self.put(&mut free, hpa);
    }

    #[inline]
    fn load(&self, cell: Cell) -> u64 {
        point();
        self.entry(cell).load(Ordering::SeqCst)
    }

    #[inline]
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        point();
        let [old, new] = if mutants::is(Mutant::BrokenEntriesEmptied) { [old, new].map(emptied) } else { [old, new] };
        trace::step(
            || self.entry(cell).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ()),
            |done| done.is_ok().then_some(TraceEvent::Exchange { cell, old, new }),
        )
    }

    #[inline]
    fn write_private(&self, cell: Cell, bits: u64) {
        trace::step(|| self.entry(cell).store(bits, Ordering::Relaxed), |()| Some(TraceEvent::Store { cell, bits }));
    }

    #[inline]
    fn fill_private(&self, table: Hpa, count: usize, first: u64, step: u64) {
        let mut bits = first;
        for (index, entry) in self.entries(table).iter().enumerate().take(count) {
            let cell = Cell::new(table, index);
            trace::step(|| entry.store(bits, Ordering::Relaxed), |()| Some(TraceEvent::Store { cell, bits }));
            bits += step;
        }
    }
}

/// A mistake: a broken entry says nothing.
fn emptied(bits: u64) -> u64 {
    if Machine::stage2_format().is_broken(bits) { 0 } else { bits }
}

/// Tables that were never taken.
fn take_fresh(free: &mut Free, run: &Frames, count: u32) -> Option<Hpa> {
    let table = free.take_fresh(run, count.into())?;
    trace::note(|| TraceEvent::Allocate { table, count });
    Some(table)
}

impl Free {
    /// Takes `count` tables side by side, a power of two, at a multiple of their size.
    fn take_fresh(&mut self, run: &Frames, count: u64) -> Option<Hpa> {
        let start = Hpa(self.fresh.0.next_multiple_of(count * PAGE_BYTES));
        let end = Hpa(start.0 + count * PAGE_BYTES);
        (end.0 <= run.hpa().0 + run.bytes()).then(|| {
            self.fresh = end;
            start
        })
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use addr::{Gpa, GpaRange};
    use stage2::Access;

    use super::*;
    use crate::arch::fake::machine::{Simulation, run};
    use crate::tests::{config, prepare};
    use crate::vm::address_space::NoTlb;
    use crate::vm::memory::Memory;
    use crate::vm::tags::VmTags;

    /// Pages from all over a run of frames, which must outlive their use.
    fn scattered(frames: &Frames, count: u64) -> Vec<Hpa> {
        (0..count)
            .map(|number| Hpa(frames.hpa().0 + (number * 7 % (frames.bytes() / PAGE_BYTES)) * PAGE_BYTES))
            .collect()
    }

    fn pool_of(pages: &[Hpa]) -> TablePool {
        let pool = TablePool::of_given_pages();
        for &page in pages {
            // SAFETY: a page of frames that the test has taken, and uses for nothing else while the pool lives.
            unsafe { pool.give(page) };
        }
        pool
    }

    #[test]
    fn memory_of_a_child_returns_every_page_that_its_tables_were_given() {
        run(1, |_: &Simulation| {
            let config = config("child", 1);
            prepare(core::slice::from_ref(&config));
            let frames = Frames::allocate(64 * PAGE_BYTES, PAGE_BYTES).expect("the machine has room");
            // The tables clear what was in their pages.
            assert!(frames.write(7 * PAGE_BYTES, &[0xff; 4096]));
            let pages = scattered(&frames, 16);

            let tags = || VmTags::new(&config).expect("there are tags");
            let none = Memory::of_child(tags(), pool_of(&[]));
            assert!(none.is_err(), "the root takes a page");
            let Ok(mut memory) = Memory::of_child(tags(), pool_of(&pages[..2])) else { panic!("one page is enough") };
            assert_eq!((memory.table_bytes(), memory.tables().spare_pages()), (PAGE_BYTES, 1));

            let map = |at: u64| {
                let range = GpaRange::new(Gpa(at), PAGE_BYTES).expect("a page");
                let mut shape = memory.shape();
                let mut walk = memory.tree().walk_mut(memory.tables(), &NoTlb, &mut shape);
                walk.map(range, Hpa(0x1234_5000), Access::ALL)
            };
            assert!(map(0).is_err(), "three tables are missing, and two of them cannot be had");
            for &page in &pages[2..] {
                // SAFETY: as in `pool_of`.
                unsafe { memory.tables().give(page) };
            }
            assert_eq!([map(0), map(1 << 21), map(1 << 30), map(1 << 39)], [Ok(()); 4]);
            assert_eq!(memory.tables().spare_pages(), 16 - (1 + 3 + 1 + 2 + 3));
            assert_eq!((memory.table_bytes(), memory.reserved_table_bytes()), (10 * PAGE_BYTES, 16 * PAGE_BYTES));

            // A table at a time, as if there was time for no more: nine below the root, and a look that finds no other.
            let mut parts = 1;
            while !memory.take_tree_apart(|| false) {
                parts += 1;
            }
            assert_eq!(parts, 10);
            let mut back: Vec<Hpa> = core::iter::from_fn(|| memory.take_table()).collect();
            let mut shape = memory.shape();
            let walk = memory.tree().walk_mut(memory.tables(), &NoTlb, &mut shape);
            assert_eq!(walk.walk().lookup(Gpa(0)), None, "nothing is left");
            back.sort_unstable();
            let mut given = pages;
            given.sort_unstable();
            assert_eq!(back, given);
        });
    }
}

//! Pages for stage-2 tables, accessed through the direct map.
//!
//! The tree names its tables by host physical address. Each step of a fault accesses an entry in the pool, on all pCPUs
//! at once. So the pool is one run of host memory whose length is a power of two, allocated when the VM is created. A
//! mask finds an entry, without a lock or a comparison, and no address leads out of the run. Only allocating and
//! freeing a page take a lock.
//!
//! The run is long enough for all of the VM's memory in the smallest pages: one byte for each 512, or for each 256 at
//! worst. In return no guest stops because the host has no page for a table.

#![expect(unsafe_code, reason = "finds an entry by a mask")]

use core::sync::atomic::{AtomicU64, Ordering};

use addr::{GpaRange, Hpa, Hva, PAGE_BYTES, PageSize};
use crossbeam_utils::CachePadded;
use spin::Mutex;
use stage2::{BATCH, Cell, ENTRIES, Pages};

use super::paging::direct_map;
use super::trace::{self, TraceEvent};
use crate::exhaustion;
use crate::frames::{Exhausted, Frames};
use crate::sync::point;

/// Tables for the upper levels of any VM, its root among them: side by side, up to 16.
const ROOT_TABLES: u64 = 32;
/// Tables that wait for walkers to leave, or for the next batch of splits, harvests and repairs.
const TABLES_AT_HAND: u64 = 4 * BATCH as u64;
/// Tables that each vCPU has ready for its next faults.
const TABLES_OF_A_VCPU: u64 = 4;

/// The tables of one VM.
pub(crate) struct TablePool {
    /// Its length is a power of two, to which its start is aligned.
    run: Frames,
    /// Its first byte in the direct map.
    base: Hva,
    /// The bits of an address that select an entry.
    mask: u64,
    /// On lines of its own: all faults read the fields next to it.
    free: CachePadded<Mutex<Free>>,
}

/// Pages that are in no tree.
struct Free {
    /// Free pages that were used before: the first page of a list, which continues in the first entry of each page, and
    /// their number. Freeing a page allocates nothing. Such an entry maps nothing.
    used: Option<Hpa>,
    used_count: u64,
    /// The part of the run that was never taken. It is zero.
    fresh: Hpa,
}

impl TablePool {
    /// For a VM with this memory, in pages of any size, and this many vCPUs.
    ///
    /// # Errors
    /// The host has no such run.
    pub(crate) fn new(regions: &[GpaRange], vcpus: u32) -> Result<Self, Exhausted> {
        let spanned = |size: PageSize| {
            let whole = |region: &GpaRange| region.end().0.div_ceil(size.bytes()) - region.start.0 / size.bytes();
            regions.iter().map(whole).sum::<u64>()
        };
        let below_root = spanned(PageSize::Size2M) + spanned(PageSize::Size1G) + regions.len() as u64;
        let tables = ROOT_TABLES + below_root + TABLES_AT_HAND + TABLES_OF_A_VCPU * u64::from(vcpus);
        let bytes = (tables * PAGE_BYTES).next_power_of_two();
        let run = Frames::allocate(bytes, bytes)?;
        run.zero();
        let fresh = run.hpa();
        let free = CachePadded::new(Mutex::new(Free { used: None, used_count: 0, fresh }));
        Ok(Self { base: direct_map(fresh), mask: bytes - size_of::<AtomicU64>() as u64, run, free })
    }

    /// Host memory that tables use now, of the reserved memory.
    pub(crate) fn bytes(&self) -> u64 {
        let free = self.free.lock();
        free.fresh.0 - self.run.hpa().0 - free.used_count * PAGE_BYTES
    }

    /// Host memory that is set aside for tables.
    pub(crate) fn reserved(&self) -> u64 {
        self.run.bytes()
    }

    /// The entry at this place, or the one to which the mask maps it: as if the run repeated through all addresses.
    #[inline]
    fn entry(&self, cell: Cell) -> &AtomicU64 {
        let entry = self.address(cell.hpa()) as *const AtomicU64;
        // SAFETY: the run is ours as long as the pool lives, and present in the direct map. The masked offset is below
        // its length and a multiple of 8. Rust code accesses it only through atomics.
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
        let run = &self.run;
        debug_assert!(hpa.0.wrapping_sub(run.hpa().0) < run.bytes(), "{hpa}: a tree names only tables of its own pool");
        self.base.0 + (hpa.0 & self.mask)
    }
}

impl Pages for TablePool {
    fn allocate(&self) -> Option<Hpa> {
        if exhaustion::strikes() {
            return None;
        }
        let mut free = self.free.lock();
        if let Some(table) = free.used {
            let next = self.entry(Cell::new(table, 0)).load(Ordering::Relaxed);
            (free.used, free.used_count) = ((next != 0).then_some(Hpa(next)), free.used_count - 1);
            drop(free);
            self.entries(table).iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
            trace::note(|| TraceEvent::Allocate { table, count: 1 });
            return Some(table);
        }
        take_fresh(&mut free, &self.run, 1)
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        if exhaustion::strikes() {
            return None;
        }
        take_fresh(&mut self.free.lock(), &self.run, count)
    }

    fn free(&self, hpa: Hpa) {
        let mut free = self.free.lock();
        trace::note(|| TraceEvent::Free { table: hpa });
        let next = free.used.replace(hpa).map_or(0, |next| next.0);
        free.used_count += 1;
        self.entry(Cell::new(hpa, 0)).store(next, Ordering::Relaxed);
    }

    #[inline]
    fn load(&self, cell: Cell) -> u64 {
        point();
        self.entry(cell).load(Ordering::SeqCst)
    }

    #[inline]
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        point();
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

//! Pages for stage-2 tables, reached through the direct map.
//!
//! The tree names its tables by host physical address. The pool answers only for pages that it owns and keeps them until it
//! is dropped itself, so a reference to a table stays good for as long as the pool does.
//!
//! Every step of a fault asks the pool, on all pCPUs at once, so that takes no lock: the pool consists of a few *blocks*, each
//! larger than the one before, that are never given back and can be looked through at any time. Only who takes a page or
//! gives one back waits for others who do the same.

#![expect(unsafe_code, reason = "turns a frame of host memory into a table")]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Hpa, PAGE_BYTES, PageSize};
use spin::{Mutex, Once};
use stage2::{Cell, ENTRIES, Pages};

use super::ram::Frames;

/// Bytes of the first block, and of the largest.
const FIRST_BLOCK: u64 = 16 * PAGE_BYTES;
const LARGEST_BLOCK: u64 = 4096 * PAGE_BYTES;
/// With them, what 900 GiB need in small pages; less where host memory is in pieces.
const BLOCKS: usize = 128;

type Table = [AtomicU64; ENTRIES];

/// The tables of one VM.
pub(crate) struct TablePool {
    /// [`BLOCKS`] places, filled from the front. On the heap: stacks are small.
    blocks: Vec<Once<Frames>>,
    free: Mutex<Free>,
}

/// Pages that are in no tree.
#[derive(Default)]
struct Free {
    /// Given back.
    used: Vec<Hpa>,
    /// The part of the last block that was never taken.
    fresh: Hpa,
    end: Hpa,
    /// Number of blocks.
    blocks: usize,
}

impl TablePool {
    /// An empty pool.
    pub(crate) fn new() -> Self {
        Self { blocks: (0..BLOCKS).map(|_| Once::new()).collect(), free: Mutex::new(Free::default()) }
    }

    /// Host memory that the pool has taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks().map(Frames::bytes).sum()
    }

    fn blocks(&self) -> impl Iterator<Item = &Frames> {
        self.blocks.iter().map_while(Once::get)
    }

    /// # Panics
    /// When the page is not of this pool: the tree is damaged.
    #[inline]
    fn table(&self, hpa: Hpa) -> &Table {
        let offset_in = |block: &Frames| hpa.0.checked_sub(block.hpa().0).filter(|offset| *offset < block.bytes());
        let pointer = self.blocks().find_map(|block| {
            let offset = usize::try_from(offset_in(block)?).ok()?;
            hpa.is_aligned(PageSize::Size4K).then(|| block.pointer().wrapping_add(offset))
        });
        let page = pointer.expect("a tree names only tables of its own pool");
        // SAFETY: the page is a whole frame, aligned, in the direct map, and ours until the pool is dropped, which the
        // borrow of `self` outlives. It is only ever accessed as atomics, by us and by the hardware's walker.
        unsafe { &*page.cast::<Table>() }
    }

    /// Takes a zeroed block of `bytes`, a power of two, at a multiple of its size.
    fn grow(&self, free: &mut Free, bytes: u64) -> Option<Hpa> {
        let place = self.blocks.get(free.blocks)?;
        let frames = Frames::allocate(bytes, bytes).ok()?;
        frames.zero();
        let hpa = place.call_once(|| frames).hpa();
        free.blocks += 1;
        Some(hpa)
    }
}

impl Pages for TablePool {
    fn allocate(&self) -> Option<Hpa> {
        let mut free = self.free.lock();
        if let Some(hpa) = free.used.pop() {
            drop(free);
            self.table(hpa).iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
            return Some(hpa);
        }
        if free.fresh == free.end {
            // As much again as there is, or what the host still has in one piece.
            let wanted = self.bytes().next_power_of_two().clamp(FIRST_BLOCK, LARGEST_BLOCK);
            let mut sizes = core::iter::successors(Some(wanted), |bytes| (*bytes > PAGE_BYTES).then(|| bytes / 2));
            let (start, bytes) = sizes.find_map(|bytes| Some((self.grow(&mut free, bytes)?, bytes)))?;
            (free.fresh, free.end) = (start, Hpa(start.0 + bytes));
        }
        let hpa = free.fresh;
        free.fresh = Hpa(hpa.0 + PAGE_BYTES);
        Some(hpa)
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        self.grow(&mut self.free.lock(), u64::from(count) * PAGE_BYTES)
    }

    fn free(&self, hpa: Hpa) {
        self.free.lock().used.push(hpa);
    }

    #[inline]
    fn load(&self, cell: Cell) -> u64 {
        self.table(cell.table)[cell.index].load(Ordering::SeqCst)
    }

    #[inline]
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        let entry = &self.table(cell.table)[cell.index];
        entry.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    #[inline]
    fn write_private(&self, cell: Cell, bits: u64) {
        self.table(cell.table)[cell.index].store(bits, Ordering::Relaxed);
    }
}

//! Pages for stage-2 tables, reached through the direct map.
//!
//! The tree names its tables by host physical address. The pool answers only for pages that it has handed out and keeps
//! them until it is dropped itself, so a reference to a table stays good for as long as the pool does.

#![expect(unsafe_code, reason = "turns a frame of host memory into a table")]

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use addr::{Hpa, PAGE_BYTES, PageSize};
use spin::Mutex;
use stage2::{Pages, Table};

use super::ram::Frames;

/// The tables of one VM.
pub(crate) struct TablePool(Mutex<Pool>);

#[derive(Default)]
struct Pool {
    /// All that this pool owns, by first address: single pages, and the runs of large roots.
    runs: BTreeMap<Hpa, Frames>,
    /// Pages that are in no tree.
    unused: Vec<Hpa>,
}

impl Pool {
    /// Takes a run of `bytes` at a multiple of its size, all zero.
    fn grow(&mut self, bytes: u64) -> Option<Hpa> {
        let frames = Frames::allocate(bytes, bytes).ok()?;
        frames.zero();
        let hpa = frames.hpa();
        self.runs.insert(hpa, frames);
        Some(hpa)
    }

    /// The page at `hpa`, if it is the pool's.
    fn page(&self, hpa: Hpa) -> Option<*mut u8> {
        let (start, frames) = self.runs.range(..=hpa).next_back()?;
        let offset = hpa.0 - start.0;
        (offset < frames.bytes() && hpa.is_aligned(PageSize::Size4K))
            .then(|| frames.pointer().wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX)))
    }
}

impl TablePool {
    /// An empty pool; it grows by a page at a time.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Pool::default()))
    }

    /// Host memory that the pool has taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().runs.values().map(Frames::bytes).sum()
    }
}

impl Pages for TablePool {
    /// # Panics
    /// When the page is not of this pool: the tree is damaged.
    fn table(&self, hpa: Hpa) -> &Table {
        let page = self.0.lock().page(hpa).expect("a tree names only tables of its own pool");
        // SAFETY: the page is a whole frame, aligned, in the direct map, and ours until the pool is dropped, which the
        // borrow of `self` outlives. It is only ever accessed as atomics, by us and by the hardware's walker.
        unsafe { &*page.cast::<Table>() }
    }

    fn allocate(&self) -> Option<Hpa> {
        let unused = self.0.lock().unused.pop();
        let Some(hpa) = unused else { return self.0.lock().grow(PAGE_BYTES) };
        self.table(hpa).iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
        Some(hpa)
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        self.0.lock().grow(u64::from(count) * PAGE_BYTES)
    }

    fn free(&self, hpa: Hpa) {
        self.0.lock().unused.push(hpa);
    }
}

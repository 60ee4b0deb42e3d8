//! Pages for stage-2 tables, reached through the direct map.
//!
//! The tree names its tables by host physical address. The pool answers only for pages that it has handed out and keeps
//! them until it is dropped itself, so a reference to a table stays good for as long as the pool does.

#![expect(unsafe_code, reason = "turns a frame of host memory into a table")]

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use addr::{Hpa, PAGE_BYTES};
use spin::Mutex;
use stage2::{Pages, Table};

use super::ram::Frames;

/// The tables of one VM.
pub(crate) struct TablePool(Mutex<Pool>);

#[derive(Default)]
struct Pool {
    /// All pages of this pool, by address.
    pages: BTreeMap<Hpa, Frames>,
    /// Those that are in no tree.
    unused: Vec<Hpa>,
}

impl TablePool {
    /// An empty pool; it grows by a page at a time.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Pool::default()))
    }

    /// Host memory that the pool has taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().pages.len() as u64 * PAGE_BYTES
    }
}

impl Pages for TablePool {
    /// # Panics
    /// When the page is not of this pool: the tree is damaged.
    fn table(&self, hpa: Hpa) -> &Table {
        let pool = self.0.lock();
        let frames = pool.pages.get(&hpa).expect("a tree names only tables of its own pool");
        // SAFETY: the page is a whole frame, aligned, in the direct map, and ours until the pool is dropped, which the
        // borrow of `self` outlives. It is only ever accessed as atomics, by us and by the hardware's walker.
        unsafe { &*frames.pointer().cast::<Table>() }
    }

    fn allocate(&self) -> Option<Hpa> {
        let mut pool = self.0.lock();
        let hpa = match pool.unused.pop() {
            Some(hpa) => hpa,
            None => {
                let frames = Frames::allocate(PAGE_BYTES, PAGE_BYTES).ok()?;
                let hpa = frames.hpa();
                pool.pages.insert(hpa, frames);
                hpa
            }
        };
        pool.pages.get(&hpa)?.zero();
        Some(hpa)
    }

    fn free(&self, hpa: Hpa) {
        self.0.lock().unused.push(hpa);
    }
}

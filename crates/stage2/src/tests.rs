//! What the tests of this crate share: a pool of tables, and a tree with the right to change it.

mod devices;
mod dirty_log;
mod faults;
mod formats;
mod operations;
mod pace;
mod quiet;
mod sequences;
mod stale;
mod tlbi;

use crate::{
    Access, Cell, ENTRIES, Ept, Fault, Format, Granularity, Iommu, Leaf, MapError, Npt, Pages, Shape, Spare, Stale,
    Tlb, Tree, Walk, WalkMut,
};
use addr::{Gpa, GpaRange, Hpa, PageSize};
use core::cell::{Cell as CoreCell, RefCell};
use core::sync::atomic::{AtomicU64, Ordering};

extern crate std;
use std::collections::BTreeSet;
use std::vec::Vec;

type Table = [AtomicU64; ENTRIES];

/// A pool of a few tables, at host addresses that start above zero.
struct Pool {
    tables: Vec<Table>,
    free: RefCell<BTreeSet<usize>>,
    /// Flushes in the middle of operations.
    flushes: CoreCell<u32>,
    /// Entries that were read.
    loads: CoreCell<u64>,
}

const POOL_START: u64 = 0x7_0000_0000;

impl Pool {
    fn of(count: usize) -> Self {
        let table = || core::array::from_fn::<_, ENTRIES, _>(|_| AtomicU64::new(0));
        Self {
            tables: (0..count).map(|_| table()).collect(),
            free: RefCell::new((0..count).collect()),
            flushes: CoreCell::new(0),
            loads: CoreCell::new(0),
        }
    }

    fn left(&self) -> usize {
        self.free.borrow().len()
    }

    fn number(hpa: Hpa) -> usize {
        assert!(hpa.is_aligned(PageSize::Size4K) && hpa.0 >= POOL_START, "{hpa} is no table");
        usize::try_from((hpa.0 - POOL_START) >> 12).expect("small")
    }

    fn table(&self, hpa: Hpa) -> &Table {
        let number = Self::number(hpa);
        assert!(!self.free.borrow().contains(&number), "table {hpa} is used after it was freed");
        &self.tables[number]
    }
}

impl Pages for Pool {
    fn allocate(&self) -> Option<Hpa> {
        let number = self.free.borrow_mut().pop_last()?;
        for entry in &self.tables[number] {
            entry.store(0, Ordering::Relaxed);
        }
        Some(Hpa(POOL_START + ((number as u64) << 12)))
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        let count = count as usize;
        let is_free = |first: &usize| (*first..first + count).all(|number| self.free.borrow().contains(&number));
        let first = (0..self.tables.len()).step_by(count).find(is_free)?;
        self.free.borrow_mut().retain(|number| !(first..first + count).contains(number));
        Some(Hpa(POOL_START + ((first as u64) << 12)))
    }

    fn free(&self, hpa: Hpa) {
        let number = Self::number(hpa);
        assert!(self.free.borrow_mut().insert(number), "table {hpa} is freed twice");
    }

    fn load(&self, cell: Cell) -> u64 {
        self.loads.set(self.loads.get() + 1);
        self.table(cell.table())[cell.index()].load(Ordering::SeqCst)
    }

    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        let entry = &self.table(cell.table())[cell.index()];
        entry.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    fn write_private(&self, cell: Cell, bits: u64) {
        self.table(cell.table())[cell.index()].store(bits, Ordering::Relaxed);
    }
}

impl Tlb for Pool {
    fn publish(&self) {}
    fn flush(&self, stale: Stale) {
        assert!(!stale.is_empty());
        self.flushes.set(self.flushes.get() + 1);
    }
    fn relax(&self) {
        unreachable!("nobody else changes this tree");
    }
}

/// A tree with the right to change it.
struct Guest<F> {
    tree: Tree<F>,
    shape: Shape,
}

impl<F: Format> Guest<F> {
    fn new(format: F, pool: &Pool) -> Result<Self, MapError> {
        let (tree, shape) = Tree::new(format, pool)?;
        Ok(Self { tree, shape })
    }
    /// A walk by the one who has the shape: nobody else collapses meanwhile.
    fn walk<'a>(&'a self, pool: &'a Pool) -> Walk<'a, F, Pool, Pool> {
        self.tree.walk(pool, pool, &self.shape)
    }
    fn walk_mut<'a>(&'a mut self, pool: &'a Pool) -> WalkMut<'a, F, Pool, Pool> {
        self.tree.walk_mut(pool, pool, &mut self.shape)
    }
    fn map(&mut self, pool: &Pool, range: GpaRange, hpa: Hpa, access: Access) -> Result<Stale, MapError> {
        self.walk_mut(pool).map(range, hpa, access).map(|()| Stale::EMPTY)
    }
    fn unmap(&mut self, pool: &Pool, range: GpaRange) -> Result<Stale, MapError> {
        self.walk_mut(pool).unmap(range)
    }
    fn protect(&mut self, pool: &Pool, range: GpaRange, access: Access) -> Result<Stale, MapError> {
        self.walk_mut(pool).protect(range, access)
    }
    fn protect_page(&self, pool: &Pool, gpa: Gpa, access: Access) -> Result<Stale, MapError> {
        self.walk(pool).protect_page(gpa, access)
    }
    /// Handles a fault. Returns the result and the flush that its splits need.
    fn fault(
        &self,
        pool: &Pool,
        gpa: Gpa,
        wanted: Access,
        granularity: Granularity,
        spare: &mut Spare,
    ) -> (Fault, Stale) {
        let (walk, mut later) = (self.walk(pool), Stale::EMPTY);
        loop {
            match walk.fault(gpa, wanted, granularity) {
                Fault::Large => match walk.split_at_fault(gpa, granularity, 0, spare) {
                    Ok((owed, _)) => later = later.merge(owed),
                    Err(_) => return (walk.fault(gpa, wanted, Granularity::Whole), later),
                },
                fault => return (fault, later),
            }
        }
    }
    fn lookup(&self, pool: &Pool, gpa: Gpa) -> Option<Leaf> {
        self.walk(pool).lookup(gpa)
    }
    fn root(&self) -> Hpa {
        self.tree.root()
    }
    fn destroy(self, pool: &Pool) {
        self.tree.destroy(pool);
    }
}

const NPT: Npt = Npt { one_gib_pages: true, iommu: Iommu::AmdVi };
const EPT: Ept = Ept { one_gib_pages: true, accessed_dirty: true, small_code: false };
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(start), bytes).expect("fits")
}

fn leaf_at(tree: &Guest<impl Format>, pool: &Pool, gpa: u64) -> Option<Leaf> {
    tree.lookup(pool, Gpa(gpa))
}

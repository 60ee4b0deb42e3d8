//! Several threads protect and release single pages of one large leaf at once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, GpaRange, Hpa};
use stage2::{Access, Cell, ENTRIES, Epochs, Format, Iommu, Npt, Pages, Stale, Tlb, Tree, Vmsa, Walker};

type Table = [AtomicU64; ENTRIES];

/// Tables at host addresses from 4 GiB on.
struct Pool {
    tables: Vec<Table>,
    free: Mutex<Vec<usize>>,
}

const START: u64 = 4 << 30;

impl Pool {
    fn of(count: usize) -> Self {
        let table = || core::array::from_fn::<_, ENTRIES, _>(|_| AtomicU64::new(0));
        Self { tables: (0..count).map(|_| table()).collect(), free: Mutex::new((0..count).collect()) }
    }

    fn left(&self) -> usize {
        self.free.lock().expect("nobody panics").len()
    }
}

impl Pool {
    fn entry(&self, cell: Cell) -> &AtomicU64 {
        &self.tables[usize::try_from((cell.table().0 - START) >> 12).expect("small")][cell.index()]
    }
}

impl Pages for Pool {
    fn allocate(&self) -> Option<Hpa> {
        let number = self.free.lock().expect("nobody panics").pop()?;
        self.tables[number].iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
        Some(Hpa(START + ((number as u64) << 12)))
    }

    fn allocate_root(&self, _: u32) -> Option<Hpa> {
        unreachable!("these trees have one table at their root")
    }

    fn free(&self, hpa: Hpa) {
        self.free.lock().expect("nobody panics").push(usize::try_from((hpa.0 - START) >> 12).expect("small"));
    }

    fn load(&self, cell: Cell) -> u64 {
        self.entry(cell).load(Ordering::SeqCst)
    }

    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        self.entry(cell).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    fn write_private(&self, cell: Cell, bits: u64) {
        self.entry(cell).store(bits, Ordering::Relaxed);
    }
}

/// No TLB holds anything.
impl Tlb for Pool {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {}
    fn relax(&self) {
        std::thread::yield_now();
    }
}

#[test]
fn threads_that_protect_pages_of_one_leaf_split_it_once_and_lose_nothing() {
    protect_in_parallel(Npt { one_gib_pages: true, iommu: Iommu::AmdVi });
    for bbm in 0..=2 {
        protect_in_parallel(Vmsa::new(39, 40, false).expect("possible").with_bbm(bbm));
    }
}

fn protect_in_parallel(format: impl Format + Copy + Sync) {
    const THREADS: usize = 4;
    for _ in 0..60 {
        let pool = Pool::of(16);
        let (tree, mut shape) = Tree::new(format, &pool).expect("pool");
        let gib = GpaRange::new(Gpa(0), 1 << 30).expect("a range");
        tree.walk_mut(&pool, &pool, &mut shape).map(gib, Hpa(1 << 30), Access::ALL).expect("maps");
        let before = pool.left();
        let walkers = Epochs::new(core::array::from_fn::<_, THREADS, _>(|_| Walker::new()));

        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (tree, pool, walkers) = (&tree, &pool, &walkers);
                scope.spawn(move || {
                    let walking = walkers.enter(thread).expect("is away");
                    let walk = tree.walk(pool, pool, &walking);
                    // Pages of all threads are interleaved in the same 2 MiB.
                    for page in (thread as u64..512).step_by(THREADS) {
                        let stale = walk.protect_page(Gpa(page << 12), Access::READ_EXECUTE).expect("tables");
                        assert!(!stale.is_empty(), "a right was lost");
                        if page % 3 == 0 {
                            let stale = walk.protect_page(Gpa(page << 12), Access::ALL).expect("tables");
                            assert!(stale.is_empty(), "rights only grew");
                        }
                    }
                });
            }
        });

        assert_eq!(before - pool.left(), 2, "one table for the gigabyte, one for the two megabytes");
        let walk = tree.walk(&pool, &pool, &shape);
        for page in 0..1024_u64 {
            let leaf = walk.lookup(Gpa(page << 12)).expect("still mapped");
            let is_protected = page < 512 && page % 3 != 0;
            assert_eq!(leaf.translate(Gpa(page << 12)), Hpa((1 << 30) + (page << 12)));
            assert_eq!(leaf.access, if is_protected { Access::READ_EXECUTE } else { Access::ALL }, "page {page}");
        }
    }
}

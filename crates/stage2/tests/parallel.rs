//! Single pages of one large leaf, protected and freed by several threads at once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, GpaRange, Hpa};
use stage2::{Access, ENTRIES, Npt, Pages, Table, Tree};

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

impl Pages for Pool {
    fn table(&self, hpa: Hpa) -> &Table {
        &self.tables[usize::try_from((hpa.0 - START) >> 12).expect("small")]
    }

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
}

#[test]
fn threads_that_protect_pages_of_one_leaf_split_it_once_and_lose_nothing() {
    const THREADS: usize = 4;
    for _ in 0..200 {
        let pool = Pool::of(16);
        let mut tree = Tree::new(Npt { one_gib_pages: true }, &pool).expect("pool");
        let gib = GpaRange::new(Gpa(0), 1 << 30).expect("a range");
        assert!(tree.map(&pool, gib, Hpa(1 << 30), Access::ALL).expect("maps").is_empty());
        let before = pool.left();

        std::thread::scope(|scope| {
            for thread in 0..THREADS as u64 {
                let (tree, pool) = (&tree, &pool);
                scope.spawn(move || {
                    // Pages of all threads lie side by side in the same two megabytes.
                    for page in (thread..512).step_by(THREADS) {
                        let stale = tree.protect_page(pool, Gpa(page << 12), Access::READ_EXECUTE).expect("tables");
                        assert!(!stale.is_empty(), "a right was lost");
                        if page % 3 == 0 {
                            let stale = tree.protect_page(pool, Gpa(page << 12), Access::ALL).expect("tables");
                            assert!(stale.is_empty(), "rights only grew");
                        }
                    }
                });
            }
        });

        assert_eq!(before - pool.left(), 2, "one table for the gigabyte, one for the two megabytes");
        for page in 0..1024_u64 {
            let leaf = tree.lookup(&pool, Gpa(page << 12)).expect("still mapped");
            let is_protected = page < 512 && page % 3 != 0;
            assert_eq!(leaf.translate(Gpa(page << 12)), Hpa((1 << 30) + (page << 12)));
            assert_eq!(leaf.access, if is_protected { Access::READ_EXECUTE } else { Access::ALL }, "page {page}");
        }
    }
}

//! Native cost of faults, marks and rounds of a dirty log, in nanoseconds each.
//!
//! `cargo bench -p dunlin-stage2 --bench faults`
//!
//! Instructions of each kind of fault, without the pool's and without the exit around it:
//!
//! `valgrind --tool=callgrind --toggle-collect='*a_fault*' target/release/deps/faults-... count-write` makes
//! [`COUNTED`] faults, or one for each large page. Other kinds are `count-touch` and `count-split`, each with an
//! optional suffix `-arm`.
//!
//! Samples of one thread and of two threads alternate, so that other work of the machine affects both. The threads
//! never fault on the same page. The median of all samples is shown.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES};
use stage2::{
    Access, Cell, DirtyLog, ENTRIES, Epochs, Fault, Format, Granularity, Iommu, MarkWord, Npt, Pages, Policy, Rounds,
    Source, Spare, Stale, Start, Tlb, Tree, Vmsa, Walk, Walker,
};

type Table = [AtomicU64; ENTRIES];

/// Tables that are never freed.
struct Pool {
    tables: Vec<Table>,
    next: AtomicUsize,
}

const START: u64 = 1 << 32;
const LARGE: u64 = 2 << 20;
const SAMPLES: usize = 31;
/// Memory of one sample, in large pages.
const REGIONS: u64 = 64;
const PAGES: u64 = REGIONS * 512;

impl Pool {
    fn of(count: usize) -> Self {
        let tables = (0..count).map(|_| core::array::from_fn(|_| AtomicU64::new(0))).collect();
        Self { tables, next: AtomicUsize::new(0) }
    }

    #[inline]
    fn entry(&self, cell: Cell) -> &AtomicU64 {
        let number = usize::try_from((cell.table().0 - START) / PAGE_BYTES).expect("a table of ours");
        &self.tables[number][cell.index()]
    }
}

impl Pages for Pool {
    fn allocate(&self) -> Option<Hpa> {
        self.allocate_root(1)
    }
    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        let first = self.next.fetch_add(count as usize, Ordering::Relaxed);
        (first + count as usize <= self.tables.len()).then(|| Hpa(START + first as u64 * PAGE_BYTES))
    }
    fn free(&self, _: Hpa) {}
    #[inline]
    fn load(&self, cell: Cell) -> u64 {
        self.entry(cell).load(Ordering::SeqCst)
    }
    #[inline]
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        self.entry(cell).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }
    #[inline]
    fn write_private(&self, cell: Cell, bits: u64) {
        self.entry(cell).store(bits, Ordering::Relaxed);
    }
    #[inline]
    fn fill_private(&self, table: Hpa, count: usize, first: u64, step: u64) {
        let number = usize::try_from((table.0 - START) / PAGE_BYTES).expect("a table of ours");
        let mut bits = first;
        for entry in self.tables[number].iter().take(count) {
            entry.store(bits, Ordering::Relaxed);
            bits += step;
        }
    }
}

impl Tlb for Pool {
    fn publish(&self) {}
    fn flush(&self, stale: Stale) {
        black_box(stale.range());
    }
    fn relax(&self) {
        std::hint::spin_loop();
    }
}

struct Guest<F> {
    pool: Pool,
    tree: Tree<F>,
    log: DirtyLog<Vec<MarkWord>>,
    epochs: Epochs<Vec<Walker>>,
}

fn guest<F: Format>(format: F, source: Source, policy: Policy) -> Guest<F> {
    let pool = Pool::of(64 + usize::try_from(REGIONS).expect("few") * 2);
    let (tree, mut shape) = Tree::new(format, &pool).expect("tables");
    let all = GpaRange::new(Gpa(0), REGIONS * LARGE).expect("a range");
    tree.walk_mut(&pool, &pool, &mut shape).map(all, Hpa(1 << 30), Access::ALL).expect("tables");
    let marks = (0..PAGES / 64).map(|_| MarkWord::new()).collect();
    let log = DirtyLog::new(all, source, policy, marks).expect("enough marks");
    let walk = tree.walk(&pool, &pool, &shape);
    log.start(walk, Start::Clean, &mut Spare::new()).expect("nothing to split").pay(&pool);
    Guest { pool, tree, log, epochs: Epochs::new((0..2).map(|_| Walker::new()).collect()) }
}

impl<F: Format + Sync> Guest<F> {
    /// The same, where the instructions are counted.
    #[inline(never)]
    fn a_fault_to_count(&self, gpa: u64, spare: &mut Spare, granularity: Granularity) {
        self.fault(0, gpa, spare, granularity);
    }

    /// A first touch of a page whose table exists.
    #[inline(never)]
    fn a_fault_of_a_first_touch(&self, gpa: u64, spare: &mut Spare) {
        let walking = self.epochs.enter(0).expect("is away");
        let (at, frame) = (Gpa(gpa), Hpa((1 << 36) + gpa));
        let leaf = self.tree.walk(&self.pool, &self.pool, &walking).populate(spare, at, frame, 0, Access::ALL);
        drop(walking);
        assert!(black_box(leaf).is_ok());
    }

    /// One write fault of a vCPU on pCPU `cpu`.
    #[inline(never)]
    fn fault(&self, cpu: usize, gpa: u64, spare: &mut Spare, granularity: Granularity) {
        let walking = self.epochs.enter(cpu).expect("is away");
        let (walk, wanted) = (self.tree.walk(&self.pool, &self.pool, &walking), Access::READ_WRITE);
        let mut fault = walk.fault(Gpa(gpa), wanted, granularity);
        let mut later = Stale::EMPTY;
        while let Fault::Large = fault {
            later = later.merge(walk.split_at_fault(Gpa(gpa), granularity, 0, spare).expect("tables").0);
            fault = walk.fault(Gpa(gpa), wanted, granularity);
        }
        drop(walking);
        let Fault::Retry(denial) = fault else { panic!("{fault:?}") };
        let _ = black_box((denial, later));
    }

    /// Walks as pCPU 0.
    fn walk<R>(&self, does: impl FnOnce(Walk<'_, F, Pool, Pool>) -> R) -> R {
        let walking = self.epochs.enter(0).expect("is away");
        does(self.tree.walk(&self.pool, &self.pool, &walking))
    }

    /// Clears and flushes, as the end of a round does.
    fn clear(&self, rounds: &mut Rounds<Vec<u64>>, wanted: &[u64]) {
        let me = self.epochs.enter(0).expect("is away");
        let cleared = rounds.clear(&self.log, self.tree.walk(&self.pool, &self.pool, &me), 0, wanted);
        let _ = black_box(cleared.flush(&self.pool, me, &self.epochs));
    }

    /// Splits all memory into small pages, all write-protected.
    fn split_all(&self) {
        let mut spare = Spare::new();
        spare.fill(&self.pool, REGIONS).expect("tables");
        let (stale, _) = self.walk(|walk| self.log.split_ahead(walk, Gpa(0), &mut spare));
        stale.pay(&self.pool);
    }
}

/// Nanoseconds per step of `work`, with this many threads at once.
fn time(threads: usize, steps: u64, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let longest = thread::scope(|scope| {
        let run = |cpu| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                let started = Instant::now();
                work(cpu);
                started.elapsed()
            })
        };
        let handles: Vec<_> = (0..threads).map(run).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).max()
    });
    longest.map_or(0.0, |time| time.as_nanos() as f64) / steps as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One and two threads in turn. Each does every step on its half of the regions.
fn one_and_two(name: &str, sample: impl Fn(usize) -> f64) {
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        one.push(sample(1));
        two.push(sample(2));
    }
    let (one, two) = (median(one), median(two));
    println!("{name:44} {one:8.1} ns  {two:8.1} ns with two ({:+.0} %)", (two / one - 1.0) * 100.0);
}

fn faults<F: Format + Copy + Sync>(name: &str, format: F) {
    let half = PAGES / 2;
    one_and_two(&format!("{name}: write to a protected page"), |threads| {
        let guest = guest(format, Source::WriteProtect, Policy::Lazy);
        guest.split_all();
        time(threads, half, |cpu| {
            let mut spare = Spare::new();
            let first = cpu as u64 * half;
            (first..first + half)
                .for_each(|page| guest.fault(cpu, page << 12, &mut spare, Granularity::WriteProtected));
        })
    });
    let half = REGIONS / 2;
    one_and_two(&format!("{name}: write to a protected large page"), |threads| {
        let guest = guest(format, Source::Hardware, Policy::Adaptive);
        time(threads, half, |cpu| {
            let mut spare = Spare::new();
            spare.fill(&guest.pool, half).expect("tables");
            let first = cpu as u64 * half;
            (first..first + half).for_each(|large| guest.fault(cpu, large * LARGE, &mut spare, Granularity::Recorded));
        })
    });
}

fn marks() {
    const STEPS: u64 = 1 << 14;
    let cases = [
        ("mark of a page that is marked already", true, false),
        ("the same by a walker", true, true),
        ("mark of a page that is not", false, false),
        ("the same by a walker", false, true),
    ];
    for (name, is_set, walks) in cases {
        one_and_two(name, |threads| {
            let words: Vec<MarkWord> = (0..STEPS / 64 * 2).map(|_| MarkWord::new()).collect();
            let epochs = Epochs::new([Walker::new(), Walker::new()]);
            let mark = |cpu: usize| {
                let words = &words[cpu * words.len() / 2..][..words.len() / 2];
                let walking = epochs.enter(cpu).expect("is away");
                for word in words {
                    // One page after another, like a guest's writes: not all of a word at once.
                    for bit in 0..64 {
                        let page = black_box(1 << bit);
                        if walks { word.write_as_walker(&walking, page, || {}) } else { word.write(page, || {}) }
                    }
                }
            };
            if is_set {
                (0..threads).for_each(mark);
            }
            time(threads, STEPS, mark)
        });
    }
}

/// Nanoseconds of one cycle, from a chain of steps of four cycles: a multiplication (three) and an exclusive or (one).
fn cycle() -> f64 {
    const STEPS: u32 = 1 << 16;
    let sample = || {
        let mut value = black_box(3_u64);
        let (by, with) = (black_box(0x9e37_79b9_7f4a_7c15), black_box(5));
        let started = Instant::now();
        (0..STEPS).for_each(|_| value = value.wrapping_mul(by) ^ with);
        black_box(value);
        started.elapsed().as_nanos() as f64 / f64::from(STEPS) / 4.0
    };
    median((0..SAMPLES).map(|_| sample()).collect())
}

/// A round of a guest whose memory is all in small pages. It writes every n-th page in some of the large pages, after
/// rounds without writes.
fn rounds<F: Format + Copy + Sync>(name: &str, format: F, source: Source, policy: Policy) {
    let all = REGIONS;
    for (what, regions, every) in [
        ("all pages", all, 1),
        ("one page in 8", all, 8),
        ("one page in 64", all, 64),
        ("one page in 512", all, 512),
        ("one page in 64 of a quarter", all / 4, 64),
        ("no page", 0, 1),
    ] {
        let (mut gets, mut clears) = (Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let guest = guest(format, source, policy);
            guest.split_all();
            let mut words = vec![0; usize::try_from(PAGES / 64).expect("small")];
            let mut rounds = Rounds::new(&guest.log, vec![0; words.len()], || {}).expect("enough bits");
            let mut spare = Spare::new();
            let mut round = |words: &mut [u64]| {
                let started = Instant::now();
                guest.walk(|walk| guest.log.get(walk, 0, words));
                let get = started.elapsed().as_nanos() as f64;
                let started = Instant::now();
                guest.clear(&mut rounds, words);
                (get, started.elapsed().as_nanos() as f64)
            };
            (0..3).for_each(|_| {
                let _ = round(&mut words);
            });
            for region in 0..regions {
                for page in (0..512).step_by(every) {
                    // Written by any means: there is no hardware here.
                    guest.fault(0, region * LARGE + (page << 12), &mut spare, Granularity::WriteProtected);
                }
            }
            let (get, clear) = round(&mut words);
            gets.push(get);
            clears.push(clear);
        }
        let (get, clear) = (median(gets) / 1000.0, median(clears) / 1000.0);
        let dirty = regions * 512 / every as u64;
        let each = (get + clear) * 1000.0 / dirty as f64;
        let each = if dirty > 0 { format!("{each:7.1} ns for each written page") } else { String::new() };
        println!("{name}: {what:27} written of {REGIONS} x 512   get {get:6.2} us  clear {clear:6.2} us  {each}");
    }
}

/// Cost of a round after a time without writes, per GiB, in small pages and in large ones.
fn clean<F: Format + Copy + Sync>(name: &str, format: F, source: Source, policy: Policy) {
    for splits in [true, false] {
        let guest = guest(format, source, policy);
        if splits {
            guest.split_all();
        }
        let mut words = vec![0; usize::try_from(PAGES / 64).expect("small")];
        let mut rounds = Rounds::new(&guest.log, vec![0; words.len()], || {}).expect("enough bits");
        let mut samples = Vec::new();
        for _ in 0..SAMPLES * 20 {
            let started = Instant::now();
            guest.walk(|walk| guest.log.get(walk, 0, &mut words));
            guest.clear(&mut rounds, &words);
            samples.push(started.elapsed().as_nanos() as f64);
        }
        let gib = median(samples) * ((1 << 30) / LARGE / REGIONS) as f64 / 1000.0;
        let size = if splits { "small" } else { "large" };
        println!("{name}: a round of 1 GiB in {size} pages to which nobody writes  {gib:6.2} us");
    }
}

/// Number of counted faults.
const COUNTED: u64 = 500;

/// Makes faults of one kind.
fn count<F: Format + Copy + Sync>(kind: &str, format: F) {
    let guest = guest(format, Source::Hardware, Policy::Adaptive);
    let mut spare = Spare::new();
    spare.fill(&guest.pool, 64).expect("tables");
    match kind {
        "write" => {
            guest.split_all();
            let pages = (0..COUNTED).map(|page| page << 12);
            pages.for_each(|gpa| guest.a_fault_to_count(gpa, &mut spare, Granularity::WriteProtected));
        }
        "touch" => {
            let above = REGIONS * LARGE;
            // The first page brings the tables.
            guest.walk(|walk| walk.populate(&mut spare, Gpa(above), Hpa(0), 0, Access::ALL)).expect("tables");
            (1..=COUNTED).for_each(|page| guest.a_fault_of_a_first_touch(above + (page << 12), &mut spare));
        }
        _ => {
            let pages = (0..REGIONS).map(|number| number * LARGE);
            pages.for_each(|gpa| guest.a_fault_to_count(gpa, &mut spare, Granularity::Recorded));
        }
    }
}

fn main() {
    let arm = Vmsa::new(40, 40, false).expect("possible").with_bbm(2).with_recorded_writes();
    if let Some(kind) = std::env::args().find_map(|argument| argument.strip_prefix("count-").map(str::to_owned)) {
        return match kind.strip_suffix("-arm") {
            Some(kind) => count(kind, arm),
            None => count(&kind, Npt { one_gib_pages: true, iommu: Iommu::AmdVi }),
        };
    }
    println!("a cycle takes {:.2} ns", cycle());
    faults("nested", Npt { one_gib_pages: true, iommu: Iommu::AmdVi });
    faults("arm", arm);
    marks();
    for (source, policy) in [(Source::WriteProtect, Policy::Lazy), (Source::Hardware, Policy::Adaptive)] {
        println!("writes are recorded by {source:?}");
        rounds("nested", Npt { one_gib_pages: true, iommu: Iommu::AmdVi }, source, policy);
        clean("nested", Npt { one_gib_pages: true, iommu: Iommu::AmdVi }, source, policy);
        rounds("arm", arm, source, policy);
        clean("arm", arm, source, policy);
    }
}

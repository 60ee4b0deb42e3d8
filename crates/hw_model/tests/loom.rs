//! Deadlocks where the algorithms meet. Replacing a stage-2 entry takes a flush. The flush waits for a vCPU whose
//! instruction is being emulated. That instruction writes to a page with cached decoded instructions. Loom reports a
//! state in which all of them wait.
//!
//! ```text
//!  housekeeping             vCPU 0, emulated              vCPU 1
//!
//!  entries of 2 pages busy  presence.emulate()            lock of the page's slot
//!  flush: until vCPU 0      write: lock of the slot       rights of the page: the entry is busy
//!    has left               presence.leave()
//! ```
//!
//! If vCPU 1 waited there until the entry is made again, none of them would continue.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-hw-model --test loom --release`

#![cfg(loom)]

use std::cell::Cell as Remembered;
use std::process::Command;

use addr::{Gpa, GpaRange, Hpa};
use decode_cache::{
    Bytes, Decoded, DropCause, ModeNumber, Place, Protect, Protection, Size, Unprotection, Vouching, WriteProtect,
};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use shootdown::Presence;
use stage2::{Access, Attempt, Cell, Collapse, Epochs, Format, Iommu, Limbo, NptOf, Pages, Stale, Tlb, Tree, Walker};

/// One byte long.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Instruction(u8);

impl Decoded for Instruction {
    fn length(&self) -> u8 {
        1
    }
    fn pack(&self) -> [u64; 4] {
        [u64::from(self.0); 4]
    }
    fn unpack(words: [u64; 4]) -> Option<Self> {
        u8::try_from(words[0]).ok().map(Self)
    }
}

const OLD: u8 = 1;
const NEW: u8 = 2;
/// The page with the instruction: the first of two that form one large page without a log.
const PAGE: Gpa = Gpa(0);
const HERE: Place = Place { rip: 0, space: 0, mode: ModeNumber(0), gpa: Some(PAGE) };
const FORMAT: NptOf<1> = NptOf { one_gib_pages: false, iommu: Iommu::AmdVi };

/// Whether code that holds the lock may wait for other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnderLock {
    /// It never waits.
    Attempt,
    /// A planted mistake: it waits for a busy entry.
    Wait,
    /// The same, except for a vCPU whose instruction is being emulated.
    WaitUnlessEmulated,
}

/// What vCPU 1 does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// It has executed the instruction, and caches it.
    Remembers,
    /// It faulted on a write to the page, of which an instruction is cached.
    Faults,
}

/// A VM with two pages.
struct Vm {
    pool: Pool,
    tree: Tree<NptOf<1>>,
    /// vCPU 0, vCPU 1, and housekeeping.
    walkers: Epochs<[Walker; 3]>,
    cache: WriteProtect<Instruction>,
    code: AtomicU64,
    /// Presences of vCPU 0 and vCPU 1.
    presence: [Presence; 2],
    bell: Bell,
    under_lock: UnderLock,
}

/// Rings after each event that others may wait for: pollers wait for it, so that loom knows.
struct Bell {
    rung: Mutex<u64>,
    waiting: Condvar,
}

/// Tables of two entries.
struct Pool {
    tables: Vec<[AtomicU64; 2]>,
    next: core::sync::atomic::AtomicUsize,
}

const TABLES: u64 = 1 << 20;

/// A thread that runs hypervisor code, and how often the bell had rung when it last looked.
struct Cpu<'a> {
    vm: &'a Vm,
    /// Its number among the walkers.
    number: usize,
    heard: Remembered<u64>,
    is_emulating: Remembered<bool>,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().expect("no panic") += 1;
        self.waiting.notify_all();
    }
}

impl Vm {
    fn new(under_lock: UnderLock) -> (Arc<Self>, stage2::Shape) {
        let tables = (0..6).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect();
        let pool = Pool { tables, next: Default::default() };
        let (tree, mut shape) = Tree::new(FORMAT, &pool).expect("tables");
        for page in [0, 1 << 12] {
            let range = GpaRange::new(Gpa(page), 1 << 12).expect("a range");
            tree.walk_mut(&pool, &NoTlb, &mut shape).map(range, Hpa(page), Access::ALL).expect("tables");
        }
        let cache = WriteProtect::new(Size { slots: 1, pages: 1 }, Vouching::Walk);
        let bell = Bell { rung: Mutex::new(0), waiting: Condvar::new() };
        let (code, presence) = (AtomicU64::new(OLD.into()), [Presence::new(), Presence::new()]);
        let walkers = Epochs::new([Walker::new(), Walker::new(), Walker::new()]);
        (Arc::new(Self { pool, tree, walkers, cache, code, presence, bell, under_lock }), shape)
    }
}

impl<'a> Cpu<'a> {
    fn of(vm: &'a Vm, number: usize) -> Self {
        Self { vm, number, heard: Remembered::new(0), is_emulating: Remembered::new(false) }
    }

    /// Returns when there was an event since the last call.
    fn wait(&self) {
        let mut rung = self.vm.bell.rung.lock().expect("no panic");
        while *rung == self.heard.get() {
            rung = self.vm.bell.waiting.wait(rung).expect("no panic");
        }
        self.heard.set(*rung);
    }

    /// What the dirty log does after its end.
    fn collapses(&self, shape: &mut stage2::Shape) {
        let mut limbo = Limbo::<1>::new();
        let outcome = self.vm.tree.walk_mut(self, self, shape).collapse(&mut limbo, &self.vm.walkers, PAGE, 1);
        assert!(matches!(outcome, Collapse::Done | Collapse::NotAlike));
    }

    fn carries_out_a_write(&self) {
        self.vm.presence[0].emulate(0);
        self.is_emulating.set(true);
        let _ = self.vm.cache.write_as_host(PAGE, self, || self.vm.code.store(NEW.into(), Ordering::Relaxed));
        self.vm.presence[0].leave();
        self.vm.bell.ring();
    }

    fn remembers(&self) {
        let mut byte = [0];
        assert!(self.read(PAGE, &mut byte));
        let _ = self.vm.cache.insert(&HERE, &Bytes::new(&byte), Instruction(byte[0]), &[], self, || true);
    }

    /// Stage 2's result for a change of the page's rights; `None` while another thread replaces the entry.
    fn change(&self, access: Access) -> Option<Stale> {
        let waits = match self.vm.under_lock {
            UnderLock::Attempt => false,
            UnderLock::Wait => true,
            UnderLock::WaitUnlessEmulated => !self.is_emulating.get(),
        };
        let walking = self.vm.walkers.enter(self.number).expect("is away");
        let walk = self.vm.tree.walk(self, self, &walking);
        if waits {
            return Some(walk.protect_page(PAGE, access).expect("small"));
        }
        match walk.try_protect_page(PAGE, access).expect("small") {
            Attempt::Done(stale) => Some(stale),
            Attempt::Busy(_) => None,
        }
    }
}

impl Protect for Cpu<'_> {
    fn protect(&self, _: Gpa) -> Protection {
        match self.change(Access::READ_EXECUTE) {
            Some(stale) if stale.is_empty() => Protection::Already,
            Some(_) => Protection::Owed,
            None => Protection::Busy,
        }
    }
    fn flush(&self) {
        Tlb::flush(self, Stale::EMPTY);
    }
    fn unprotect(&self, _: Gpa) -> Unprotection {
        self.change(Access::ALL).map_or(Unprotection::Busy, |_| Unprotection::Done)
    }
    fn read(&self, _: Gpa, bytes: &mut [u8]) -> bool {
        bytes[0] = u8::try_from(self.vm.code.load(Ordering::Relaxed)).expect("a byte");
        true
    }
}

impl Tlb for Cpu<'_> {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {
        let _ = shootdown::run(self.vm.presence.iter(), |it| it, |_| {}, |_| {}, || {}, |_| self.wait());
    }
    fn relax(&self) {
        self.wait();
    }
}

impl Pages for Cpu<'_> {
    fn allocate(&self) -> Option<Hpa> {
        self.vm.pool.allocate()
    }
    fn allocate_root(&self, _: u32) -> Option<Hpa> {
        None
    }
    fn free(&self, _: Hpa) {}
    fn load(&self, cell: Cell) -> u64 {
        self.vm.pool.load(cell)
    }
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        let result = self.vm.pool.compare_exchange(cell, old, new);
        if result.is_ok() && FORMAT.is_broken(old) {
            self.vm.bell.ring();
        }
        result
    }
    fn write_private(&self, cell: Cell, bits: u64) {
        self.vm.pool.write_private(cell, bits);
    }
}

impl Pool {
    fn entry(&self, cell: Cell) -> &AtomicU64 {
        &self.tables[usize::try_from((cell.table().0 - TABLES) >> 12).expect("a table of ours")][cell.index()]
    }
}

impl Pages for Pool {
    fn allocate(&self) -> Option<Hpa> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.tables.len()).then(|| Hpa(TABLES + ((number as u64) << 12)))
    }
    fn allocate_root(&self, _: u32) -> Option<Hpa> {
        None
    }
    fn free(&self, _: Hpa) {}
    fn load(&self, cell: Cell) -> u64 {
        self.entry(cell).load(Ordering::Acquire)
    }
    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        self.entry(cell).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }
    fn write_private(&self, cell: Cell, bits: u64) {
        self.entry(cell).store(bits, Ordering::Relaxed);
    }
}

/// The TLB of a VM that does not run yet.
struct NoTlb;

impl Tlb for NoTlb {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {}
    fn relax(&self) {}
}

/// The three threads, in every interleaving with few preemptions.
fn explore(under_lock: UnderLock, doing: Doing) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let (vm, mut shape) = Vm::new(under_lock);
        if doing == Doing::Faults {
            let cpu = Cpu::of(&vm, 2);
            cpu.remembers();
            assert_eq!(vm.cache.find(&HERE), Some(Instruction(OLD)));
            // Otherwise the two would not form a large page. (Of real ones, all 512 are read-only then.)
            let _ = vm.tree.walk(&cpu, &cpu, &shape).protect_page(Gpa(1 << 12), Access::READ_EXECUTE).expect("small");
        }
        let emulated = {
            let vm = vm.clone();
            thread::spawn(move || Cpu::of(&vm, 0).carries_out_a_write())
        };
        let other = {
            let vm = vm.clone();
            thread::spawn(move || match doing {
                Doing::Remembers => Cpu::of(&vm, 1).remembers(),
                Doing::Faults => {
                    let _ = vm.cache.written(PAGE, DropCause::Write, &Cpu::of(&vm, 1));
                }
            })
        };
        Cpu::of(&vm, 2).collapses(&mut shape);
        emulated.join().expect("no panic");
        other.join().expect("no panic");
        assert_ne!(vm.cache.find(&HERE), Some(Instruction(OLD)), "it was overwritten");
    });
}

#[test]
fn writing_while_a_large_page_comes_back_and_its_code_is_remembered_ends() {
    explore(UnderLock::Attempt, Doing::Remembers);
}

#[test]
fn writing_while_a_large_page_comes_back_and_another_write_faults_ends() {
    explore(UnderLock::Attempt, Doing::Faults);
}

// Loom's panic cannot be caught while a thread waits with a lock held. So the planted mistakes are tests that fail.
// They are ignored by default, and run in processes of their own.

const MISTAKES: [&str; 4] =
    ["all_wait_to_remember", "all_wait_to_fault", "others_wait_to_remember", "others_wait_to_fault"];

#[test]
#[ignore = "a mistake"]
fn all_wait_to_remember() {
    explore(UnderLock::Wait, Doing::Remembers);
}

#[test]
#[ignore = "a mistake"]
fn all_wait_to_fault() {
    explore(UnderLock::Wait, Doing::Faults);
}

#[test]
#[ignore = "a mistake"]
fn others_wait_to_remember() {
    explore(UnderLock::WaitUnlessEmulated, Doing::Remembers);
}

#[test]
#[ignore = "a mistake"]
fn others_wait_to_fault() {
    explore(UnderLock::WaitUnlessEmulated, Doing::Faults);
}

#[test]
fn who_waits_for_a_busy_page_under_a_lock_is_waited_for_by_all() {
    let tests = std::env::current_exe().expect("it runs");
    for mistake in MISTAKES {
        let run = Command::new(&tests)
            .args(["--exact", mistake, "--ignored", "--nocapture"])
            .output()
            .expect("it runs again");
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && said.contains("deadlock; threads"), "{mistake}: {said}");
    }
}

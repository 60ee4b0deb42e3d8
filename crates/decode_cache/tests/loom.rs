//! Races of the write-protecting design, in every interleaving with few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-decode-cache --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use addr::Gpa;
use decode_cache::{
    Bytes, Decoded, DropCause, ModeNumber, Place, Protect, Protection, Size, Unprotection, Vouching, WriteProtect,
};
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// One byte long; all words repeat that byte.
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
        assert!(words.iter().all(|word| *word == words[0]), "torn: {words:?}");
        u8::try_from(words[0]).ok().map(Self)
    }
}

const OLD: u8 = 1;
const NEW: u8 = 2;
const PAGE: Gpa = Gpa(0x1000);

fn place(gpa: u64) -> Place {
    Place { rip: gpa, space: 0, mode: ModeNumber(0), gpa: Some(Gpa(gpa)) }
}

/// A VM with one byte of code in each of two pages.
struct Vm {
    cache: WriteProtect<Instruction>,
    code: [AtomicU64; 2],
    /// Rights to write. A writer holds them during its write, so that no right is left over when they are taken away.
    writable: Mutex<[bool; 2]>,
}

impl Vm {
    fn new(pages: usize) -> Arc<Self> {
        Arc::new(Self {
            cache: WriteProtect::new(Size { slots: 1, pages }, Vouching::Walk),
            code: [AtomicU64::new(u64::from(OLD)), AtomicU64::new(u64::from(OLD))],
            writable: Mutex::new([true; 2]),
        })
    }

    fn fetch(&self, gpa: Gpa) -> u8 {
        u8::try_from(self.code[at(gpa)].load(Ordering::Relaxed)).expect("a byte")
    }

    /// What a vCPU does after a miss.
    fn decode_and_insert(&self, gpa: u64) {
        let byte = self.fetch(Gpa(gpa));
        let _ = self.cache.insert(&place(gpa), &Bytes::new(&[byte]), Instruction(byte), &[], self, || true);
    }

    /// A guest writes; it faults at most once each time the page is protected.
    fn guest_writes(&self, gpa: Gpa, byte: u8) {
        for _ in 0..3 {
            {
                let rights = self.writable.lock().expect("no panic");
                if rights[at(gpa)] {
                    self.code[at(gpa)].store(u64::from(byte), Ordering::Relaxed);
                    return;
                }
            }
            let _ = self.cache.written(gpa, DropCause::Write, self);
        }
        panic!("faults for ever");
    }
}

fn at(gpa: Gpa) -> usize {
    usize::from(gpa.0 >= 0x2000)
}

impl Protect for Vm {
    fn protect(&self, page: Gpa) -> Protection {
        self.writable.lock().expect("no panic")[at(page)] = false;
        Protection::Owed
    }
    fn flush(&self) {}
    fn unprotect(&self, page: Gpa) -> Unprotection {
        self.writable.lock().expect("no panic")[at(page)] = true;
        Unprotection::Done
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        bytes[0] = self.fetch(gpa);
        true
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn who_begins_after_a_write_never_finds_what_was_before() {
    explore(|| {
        let vm = Vm::new(1);
        let inserter = {
            let vm = vm.clone();
            thread::spawn(move || vm.decode_and_insert(PAGE.0))
        };
        vm.guest_writes(PAGE, NEW);
        assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
        inserter.join().expect("no panic");
        assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
    });
}

#[test]
fn also_not_who_was_told_of_the_write_by_another() {
    explore(|| {
        let vm = Vm::new(1);
        vm.decode_and_insert(PAGE.0);
        assert_eq!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
        let done = Arc::new(AtomicBool::new(false));
        let writer = {
            let (vm, done) = (vm.clone(), done.clone());
            thread::spawn(move || {
                vm.guest_writes(PAGE, NEW);
                done.store(true, Ordering::Release);
            })
        };
        let inserter = {
            let vm = vm.clone();
            thread::spawn(move || vm.decode_and_insert(PAGE.0))
        };
        if done.load(Ordering::Acquire) {
            assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
        }
        writer.join().expect("no panic");
        inserter.join().expect("no panic");
        assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
    });
}

/// Stage 2 as a pCPU sees it: a word that other pCPUs change, without ordering.
struct Leaf(AtomicBool);

impl Protect for Leaf {
    fn protect(&self, _: Gpa) -> Protection {
        self.0.store(false, Ordering::Relaxed);
        Protection::Owed
    }
    fn flush(&self) {}
    fn unprotect(&self, _: Gpa) -> Unprotection {
        self.0.store(true, Ordering::Relaxed);
        Unprotection::Done
    }
    fn read(&self, _: Gpa, bytes: &mut [u8]) -> bool {
        bytes[0] = OLD;
        true
    }
}

#[test]
fn who_may_write_because_another_one_has_faulted_finds_nothing_old_afterwards() {
    explore(|| {
        let cache = WriteProtect::new(Size { slots: 1, pages: 1 }, Vouching::Walk);
        let vm = Arc::new((cache, Leaf(AtomicBool::new(true))));
        let (here, bytes) = (place(PAGE.0), Bytes::new(&[OLD]));
        let _ = vm.0.insert(&here, &bytes, Instruction(OLD), &[], &vm.1, || true);
        assert_eq!(vm.0.find(&here), Some(Instruction(OLD)));
        let faults = {
            let vm = vm.clone();
            thread::spawn(move || vm.0.written(PAGE, DropCause::Write, &vm.1).is_some())
        };
        if vm.1.0.load(Ordering::Relaxed) {
            fence(Ordering::Acquire);
            assert_eq!(vm.0.find(&here), None, "it may be overwritten by now");
        }
        assert!(faults.join().expect("no panic"));
    });
}

/// Two vCPUs insert into the same slot, and with `pages` 1 evict each other's page as well, while a third looks.
fn two_insert_and_one_looks(pages: usize) {
    explore(move || {
        let vm = Vm::new(pages);
        vm.code[1].store(u64::from(NEW), Ordering::Relaxed);
        let inserters = [0x1000, 0x2000].map(|gpa| {
            let vm = vm.clone();
            thread::spawn(move || vm.decode_and_insert(gpa))
        });
        // `unpack` checks that nothing is torn.
        let found = vm.cache.find(&place(0x1000));
        assert!(matches!(found, None | Some(Instruction(OLD))), "{found:?}");
        for inserter in inserters {
            inserter.join().expect("no panic");
        }
        let found = vm.cache.find(&place(0x2000));
        assert!(matches!(found, None | Some(Instruction(NEW))), "{found:?}");
    });
}

#[test]
fn nothing_torn_is_found() {
    two_insert_and_one_looks(2);
}

#[test]
fn nothing_torn_is_found_where_pages_evict_each_other() {
    two_insert_and_one_looks(1);
}

/// The hypervisor writes while a vCPU inserts.
fn host_writes(write: impl Fn(&Vm, &dyn Fn()) + Copy + Sync + Send + 'static) {
    explore(move || {
        let vm = Vm::new(1);
        let inserter = {
            let vm = vm.clone();
            thread::spawn(move || vm.decode_and_insert(PAGE.0))
        };
        write(&vm, &|| vm.code[0].store(u64::from(NEW), Ordering::Relaxed));
        assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
        inserter.join().expect("no panic");
        assert_ne!(vm.cache.find(&place(PAGE.0)), Some(Instruction(OLD)));
    });
}

#[test]
fn write_by_the_hypervisor_is_never_missed() {
    host_writes(|vm, write| {
        let _ = vm.cache.write_as_host(PAGE, vm, write);
    });
}

#[test]
fn asking_only_before_the_write_misses_it() {
    let ask_once = |vm: &Vm, write: &dyn Fn()| {
        if vm.cache.covers(PAGE) {
            let _ = vm.cache.written(PAGE, DropCause::Host, vm);
        }
        write();
    };
    assert!(catch_unwind(|| host_writes(ask_once)).is_err());
}

#[test]
fn asking_after_the_write_without_a_fence_misses_it() {
    let ask_twice = |vm: &Vm, write: &dyn Fn()| {
        write();
        if vm.cache.covers(PAGE) {
            let _ = vm.cache.written(PAGE, DropCause::Host, vm);
        }
    };
    assert!(catch_unwind(|| host_writes(ask_twice)).is_err());
}

//! Arbitrary page tables that change all the time: a cached walk must give the result of a fresh one.
//!
//! Used with pseudorandom numbers, and with the bytes of a fuzzer (`fuzzed.rs`).

use fastrand::Rng;

use super::random::Source;
use super::std::vec::Vec;
use super::x86_emulate::{Access, CpuState, Memory, Mode, Stop, Walks, path, translate};
use addr::Gpa;
use core::cell::RefCell;

/// Pages of memory, all of them tables.
const PAGES: usize = 8;
const STEPS: usize = 100;

/// Memory with tables only.
#[derive(Clone, PartialEq, Eq)]
struct Tables(RefCell<Vec<u64>>);

impl Tables {
    /// Entries that mostly are present and point to other tables; some point to nothing.
    fn arbitrary(source: &mut impl Source) -> Self {
        let mut random = Rng::with_seed(source.word());
        let small = random.rarely(3);
        let entry = |_| {
            let target = if random.rarely(40) { PAGES } else { random.below(PAGES) } as u64;
            let mut entry = target << 12 | if random.rarely(2) { 0x67 } else { 0x07 };
            if random.rarely(30) {
                entry ^= 1 << random.pick(&[0, 1, 2, 7, 7, 8, 12, 13, 20, 21, 40, 52, 59, 60, 63, 63]);
            }
            // Two entries of 32 bits instead of one of 64.
            if small { entry & 0xffff_ffff | (entry ^ (random.word() & 0x2000)) << 32 } else { entry }
        };
        Self(RefCell::new((0..PAGES * 512).map(entry).collect()))
    }

    fn flip(&self, word: usize, bit: usize) {
        self.0.borrow_mut()[word] ^= 1 << bit;
    }
}

impl Memory for Tables {
    type Word = usize;

    fn find(&self, gpa: Gpa) -> Option<usize> {
        usize::try_from(gpa.0 / 8).ok().filter(|&word| word < PAGES * 512)
    }
    fn load(&self, word: usize, ahead: usize) -> u64 {
        assert!(word % 512 + ahead < 512, "a word beyond the page");
        self.0.borrow()[word + ahead]
    }
    fn compare_exchange(&self, word: usize, current: u64, new: u64) -> bool {
        let entry = &mut self.0.borrow_mut()[word];
        let matches = *entry == current;
        assert_eq!((current ^ new) & !0x60_0000_0060, 0, "more than Accessed and Dirty is set");
        if matches {
            *entry = new;
        }
        matches
    }
    fn read(&self, _: Gpa, _: &mut [u8]) -> Option<()> {
        None
    }
    fn write(&self, _: Gpa, _: &[u8]) -> Option<()> {
        None
    }
}

/// A random state that uses the tables.
fn arbitrary_state(source: &mut impl Source) -> CpuState {
    let mut state = CpuState::flat(Mode::Bits64, 0);
    state.cr0 = 0x8001_0001;
    state.cr3 = source.below(PAGES) as u64 * 0x1000 + source.pick(&[0, 0, 0x18, 0x20]);
    state.efer = if source.rarely(3) { 0 } else { 1 << 10 };
    state.cr4 = if source.rarely(3) { 0 } else { 1 << 5 };
    state.physical_bits = source.pick(&[40, 36, 48, 52]);
    for _ in 0..source.below(4) {
        change(&mut state, source);
    }
    state
}

/// Changes one input of walks.
fn change(state: &mut CpuState, source: &mut impl Source) {
    match source.below(12) {
        0 => state.cr0 ^= 1 << source.pick(&[16, 16, 31]),
        1..=4 => state.cr4 ^= 1 << source.pick(&[4, 5, 12, 20, 21, 22]),
        5 => state.efer ^= 1 << source.pick(&[10, 11, 11]),
        6 => state.rflags ^= 1 << 18,
        7 => state.cpl = source.pick(&[0, 3, 3, 1]),
        8 | 9 => state.pkru ^= 1 << source.below(32),
        _ => state.cr3 = source.below(PAGES) as u64 * 0x1000,
    }
}

/// A sequence of walks, edits and changes of state. Returns how many walks were requested and how many were done.
pub(crate) fn check_walks(source: &mut impl Source) -> (u64, u64) {
    let tables = Tables::arbitrary(source);
    let fresh_tables = tables.clone();
    let mut state = arbitrary_state(source);
    let base = CpuState { physical_bits: state.physical_bits, ..arbitrary_state(source) };
    let mut walks = Walks::new();
    let mut asked = 0;
    let pages = [source.word(), source.word(), 0, 0xfee0_0000].map(|word| (word << 16).cast_signed() >> 16);

    for _ in 0..STEPS {
        let linear = source.pick(&pages).cast_unsigned() & !0xfff | source.word() & 0xfff;
        match source.below(20) {
            0 => {
                // An entry that is likely to be on the walk.
                let index = linear >> source.pick(&[12, 21, 30, 39, 13, 23]) & 511;
                let word = source.below(PAGES) * 512 + usize::try_from(index).unwrap_or(0);
                let bit = source.below(64);
                tables.flip(word, bit);
                fresh_tables.flip(word, bit);
            }
            1 => change(&mut state, source),
            2 => state = base.clone(),
            _ => {
                let access = source.pick(&[Access::Read, Access::Write, Access::Execute]);
                let fresh = translate(&state, &fresh_tables, &mut Walks::forgetful(), linear, access);
                let remembered = translate(&state, &tables, &mut walks, linear, access);
                assert_eq!(remembered, fresh, "{linear:x} {access:?} {state:x?}");
                asked += 1;
                is_plausible(&state, &tables, linear, fresh);
            }
        }
    }
    assert!(tables == fresh_tables, "the tables differ");
    (asked, walks.done())
}

/// Checks of the result that need only the tables and the kind of result.
fn is_plausible(state: &CpuState, tables: &Tables, linear: u64, found: Result<Gpa, Stop>) {
    match found {
        Ok(gpa) => {
            let looked = path(state, tables, linear).map(|path| path.gpa.0 | linear & 0xfff);
            assert_eq!(looked, Some(gpa.0), "another place");
        }
        Err(Stop::Fault(exception)) => {
            assert_eq!((exception.vector, exception.cr2), (14, Some(linear)));
            assert_eq!(exception.error_code & !0x3f, 0);
        }
        Err(Stop::Unbacked(gpa)) => assert_eq!(tables.find(gpa), None),
        Err(Stop::Contended) => panic!("nobody else was there"),
    }
}

//! Corner cases of the bytes, and of the cache by bytes.

extern crate std;

use std::vec::Vec;

use crate::{ByBytes, Bytes, Decoded, InsertOutcome, ModeNumber, Refusal};

/// A length and a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    length: u8,
    name: u64,
    known: bool,
}

pub(crate) fn instruction(length: u8, name: u64) -> Instruction {
    Instruction { length, name, known: true }
}

impl Decoded for Instruction {
    fn length(&self) -> u8 {
        self.length
    }
    fn pack(&self) -> [u64; 4] {
        [u64::from(self.length), self.name, !self.name, u64::from(self.known)]
    }
    fn unpack([length, name, inverse, known]: [u64; 4]) -> Option<Self> {
        let whole = inverse == !name && known <= 1;
        whole.then_some(Self { length: u8::try_from(length).ok()?, name, known: known == 1 })
    }
}

pub(crate) const MODE: ModeNumber = ModeNumber(2);
pub(crate) const MOST: [u8; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

// Bytes

#[test]
fn bytes_are_at_most_fifteen_and_zero_beyond() {
    assert_eq!(Bytes::new(&[]), Bytes::NONE);
    assert_eq!(Bytes::new(&[0xff; 40]).length(), 15);
    assert_eq!(Bytes::new(&[0xff; 40]).words(), [u64::MAX, u64::MAX >> 8]);
    assert_eq!(Bytes::from_words([u64::MAX; 2], 200), Bytes::new(&[0xff; 15]));
    assert_eq!(Bytes::new(&[1, 2]).words(), [0x0201, 0]);
    for length in 0..=15 {
        let short = Bytes::new(&MOST).prefix(length);
        assert_eq!(short, Bytes::new(&MOST[..usize::from(length)]));
        assert_eq!(short.prefix(15), short, "a prefix does not grow");
    }
}

// By bytes

#[test]
fn every_length_is_found_by_its_own_bytes_and_no_shorter_ones() {
    for length in 1..=15 {
        let mut cache = ByBytes::<_, 1>::new();
        assert_eq!(cache.insert(MODE, &Bytes::new(&MOST), instruction(length, 7)), InsertOutcome::Stored);
        assert_eq!(cache.find(MODE, &Bytes::new(&MOST)), Some(&instruction(length, 7)));
        let own = Bytes::new(&MOST).prefix(length);
        assert_eq!(cache.find(MODE, &own), Some(&instruction(length, 7)));
        assert_eq!(cache.find(MODE, &own.prefix(length - 1)), None);
    }
}

#[test]
fn every_byte_of_an_instruction_counts_and_none_after_it() {
    for length in 1..=15 {
        let mut cache = ByBytes::<_, 1>::new();
        assert_eq!(cache.insert(MODE, &Bytes::new(&MOST), instruction(length, 7)), InsertOutcome::Stored);
        for at in 0..15 {
            for bit in 0..8 {
                let mut changed = MOST;
                changed[at] ^= 1 << bit;
                let found = cache.find(MODE, &Bytes::new(&changed)).is_some();
                assert_eq!(found, at >= usize::from(length), "length {length}, byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn zeros_beyond_the_end_of_a_page_are_not_an_instructions_bytes() {
    let mut cache = ByBytes::<_, 1>::new();
    assert_eq!(cache.insert(MODE, &Bytes::new(&[9, 0, 0, 0]), instruction(4, 1)), InsertOutcome::Stored);
    assert_eq!(cache.find(MODE, &Bytes::new(&[9, 0, 0])), None);
    assert_eq!(cache.find(MODE, &Bytes::new(&[9, 0, 0, 0])), Some(&instruction(4, 1)));
}

#[test]
fn instruction_that_is_cut_off_is_not_remembered() {
    let mut cache = ByBytes::<_, 4>::new();
    let crosses = InsertOutcome::Refused(Refusal::Crosses);
    assert_eq!(cache.insert(MODE, &Bytes::new(&MOST[..3]), instruction(4, 1)), crosses);
    assert_eq!(cache.insert(MODE, &Bytes::new(&MOST), instruction(16, 1)), crosses);
    assert_eq!(cache.insert(MODE, &Bytes::new(&MOST), instruction(0, 1)), crosses);
    assert_eq!(cache.insert(MODE, &Bytes::NONE, instruction(1, 1)), crosses);
    assert_eq!(cache.find(MODE, &Bytes::new(&MOST)), None);
}

#[test]
fn equal_bytes_in_another_mode_are_another_instruction() {
    let mut cache = ByBytes::<_, 1>::new();
    let bytes = Bytes::new(&MOST);
    for mode in [0, 1, 2, 0xff] {
        assert_eq!(cache.find(ModeNumber(mode), &bytes), None);
        let _ = cache.insert(ModeNumber(mode), &bytes, instruction(3, u64::from(mode)));
        assert_eq!(cache.find(ModeNumber(mode), &bytes), Some(&instruction(3, u64::from(mode))));
    }
    assert_eq!(cache.find(ModeNumber(0), &bytes), None);
}

#[test]
fn empty_cache_finds_nothing_not_even_zeros() {
    let cache = ByBytes::<Instruction, 64>::default();
    for length in 0..=15 {
        assert_eq!(cache.find(ModeNumber(0), &Bytes::new(&[0; 15]).prefix(length)), None);
    }
}

#[test]
fn slot_has_room_for_one() {
    let mut cache = ByBytes::<_, 1>::new();
    let (one, other) = (Bytes::new(&[1, 2, 3]), Bytes::new(&[4, 5, 6]));
    assert_eq!(cache.insert(MODE, &one, instruction(2, 1)), InsertOutcome::Stored);
    assert_eq!(cache.insert(MODE, &one, instruction(2, 1)), InsertOutcome::Stored, "the same once more");
    assert_eq!(cache.insert(MODE, &other, instruction(2, 2)), InsertOutcome::Replaced);
    assert_eq!(cache.find(MODE, &one), None);
    assert_eq!(cache.find(MODE, &other), Some(&instruction(2, 2)));
}

#[test]
fn most_instructions_of_a_small_working_set_find_room() {
    // mov eax, [rip + displacement]: the instructions differ in few bits, those of the displacement.
    let mut cache = ByBytes::<_, 64>::new();
    let all: Vec<_> = (0..32_u32)
        .map(|n| {
            let [a, b, c, d] = (0x1000_u32 - 16 * n).to_le_bytes();
            Bytes::new(&[0x8b, 0x05, a, b, c, d, 0x90, 0x90])
        })
        .collect();
    for bytes in &all {
        let _ = cache.insert(MODE, bytes, instruction(6, 0));
    }
    let found = all.iter().filter(|bytes| cache.find(MODE, bytes).is_some()).count();
    assert!(found >= 20, "{found} of 32");
}

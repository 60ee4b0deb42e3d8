//! Corner cases of the write-protecting design.

extern crate std;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

use addr::{Gpa, PAGE_BYTES};

use super::{Size, Vouching, WriteProtect};
use crate::tests::{Instruction, MODE, MOST, instruction};
use crate::{
    Bytes, DropCause, InsertOutcome, Lost, ModeNumber, Place, Protect, Protection, Refusal, Unprotection, WALK_LIMIT,
};

/// A VM's memory: bytes, and a record of calls.
pub(crate) struct Memory {
    bytes: RefCell<Vec<u8>>,
    read_only: RefCell<BTreeSet<u64>>,
    refused: Cell<Option<u64>>,
    /// The page whose stage-2 entry another processor is about to replace.
    busy: Cell<Option<u64>>,
    already: Cell<bool>,
    flushes: Cell<u32>,
}

const PAGES: u64 = 32;

impl Memory {
    pub(crate) fn new() -> Self {
        let bytes = (0..PAGES * PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        Self {
            bytes: RefCell::new(bytes),
            read_only: RefCell::default(),
            refused: Cell::new(None),
            busy: Cell::new(None),
            already: Cell::new(false),
            flushes: Cell::new(0),
        }
    }

    pub(crate) fn at(&self, gpa: Gpa) -> Bytes {
        let left = usize::try_from(PAGE_BYTES - gpa.0 % PAGE_BYTES).expect("small");
        let mut bytes = [0; 15];
        let bytes = &mut bytes[..left.min(15)];
        assert!(self.read(gpa, bytes));
        Bytes::new(bytes)
    }

    fn read_only(&self) -> Vec<u64> {
        self.read_only.borrow().iter().copied().collect()
    }
}

impl Protect for Memory {
    fn protect(&self, page: Gpa) -> Protection {
        assert!(page.0.is_multiple_of(PAGE_BYTES));
        if self.refused.get() == Some(page.0 / PAGE_BYTES) {
            return Protection::Refused;
        }
        if self.busy.get() == Some(page.0 / PAGE_BYTES) {
            return Protection::Busy;
        }
        assert!(self.read_only.borrow_mut().insert(page.0 / PAGE_BYTES), "protected twice");
        if self.already.get() { Protection::Already } else { Protection::Owed }
    }

    fn flush(&self) {
        self.flushes.set(self.flushes.get() + 1);
    }

    fn unprotect(&self, page: Gpa) -> Unprotection {
        if self.busy.get() == Some(page.0 / PAGE_BYTES) {
            return Unprotection::Busy;
        }
        assert!(self.read_only.borrow_mut().remove(&(page.0 / PAGE_BYTES)), "was not protected");
        Unprotection::Done
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        let memory = self.bytes.borrow();
        let from = usize::try_from(gpa.0).ok().and_then(|start| memory.get(start..start + bytes.len()));
        from.map(|from| bytes.copy_from_slice(from)).is_some()
    }
}

pub(crate) fn page(number: u64) -> Gpa {
    Gpa(number * PAGE_BYTES)
}

pub(crate) fn place(rip: u64, gpa: u64) -> Place {
    Place { rip, space: 0x1000, mode: MODE, gpa: Some(Gpa(gpa)) }
}

pub(crate) fn cache(slots: usize, pages: usize, vouching: Vouching) -> WriteProtect<Instruction> {
    WriteProtect::new(Size { slots, pages }, vouching)
}

/// Inserts what is in memory now; nothing changes meanwhile.
fn insert(
    cache: &WriteProtect<Instruction>,
    place: &Place,
    decoded: Instruction,
    tables: &[Gpa],
    memory: &Memory,
) -> InsertOutcome {
    let bytes = memory.at(place.gpa.expect("given"));
    cache.insert(place, &bytes, decoded, tables, memory, || true).outcome
}

#[test]
fn what_is_inserted_is_found_at_its_place_only() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let here = place(0x40_0010, 0x3010);
    let decoded = instruction(3, 1);
    assert_eq!(cache.find(&here), None);
    assert_eq!(insert(&cache, &here, decoded, &[], &memory), InsertOutcome::Stored);
    assert_eq!((memory.flushes.get(), memory.read_only()), (1, vec![3]));

    assert_eq!(cache.find(&here), Some(decoded));
    assert_eq!(cache.find(&Place { rip: here.rip + 1, ..here }), None);
    assert_eq!(cache.find(&Place { space: 0x2000, ..here }), None);
    assert_eq!(cache.find(&Place { mode: ModeNumber(1), ..here }), None);
    assert_eq!(cache.find(&Place { gpa: Some(Gpa(0x4010)), ..here }), None);
    assert_eq!(cache.find(&Place { gpa: Some(Gpa(1 << 52 | 0x3010)), ..here }), None);
    assert_eq!(cache.find(&Place { gpa: None, ..here }), None, "nobody has walked");
}

#[test]
fn key_differs_in_one_slot_as_well() {
    let (cache, memory) = (cache(1, 8, Vouching::Walk), Memory::new());
    let here = place(0x10, 0x3010);
    assert_eq!(insert(&cache, &here, instruction(3, 1), &[], &memory), InsertOutcome::Stored);
    for other in [
        Place { rip: 0x11, ..here },
        Place { space: 0, ..here },
        Place { mode: ModeNumber(0), ..here },
        Place { gpa: Some(Gpa(0x3011)), ..here },
    ] {
        assert_eq!(cache.find(&other), None);
    }
    assert_eq!(cache.find(&here), Some(instruction(3, 1)));
}

#[test]
fn empty_slot_is_not_the_place_zero() {
    for vouching in [Vouching::Walk, Vouching::Tables] {
        let cache = cache(1, 1, vouching);
        assert_eq!(cache.find(&Place { rip: 0, space: 0, mode: ModeNumber(0), gpa: Some(Gpa(0)) }), None);
    }
}

#[test]
fn write_forgets_all_of_its_page_and_no_other() {
    let (cache, memory) = (cache(1024, 8, Vouching::Walk), Memory::new());
    for n in 0..5 {
        assert_eq!(insert(&cache, &place(n, 0x3000 + n), instruction(1, n), &[], &memory), InsertOutcome::Stored);
    }
    assert_eq!(insert(&cache, &place(9, 0x4000), instruction(1, 9), &[], &memory), InsertOutcome::Stored);
    assert_eq!(memory.flushes.get(), 2, "one for each page");

    assert_eq!(cache.written(Gpa(0x5000), DropCause::Write, &memory), None, "not one of ours");
    assert_eq!(cache.written(Gpa(0x3fff), DropCause::Write, &memory), Some(Lost { code: 5, tables: 0 }));
    assert_eq!(cache.written(Gpa(0x3fff), DropCause::Write, &memory), None, "done already");
    assert_eq!(memory.read_only(), [4]);
    assert!((0..5).all(|n| cache.find(&place(n, 0x3000 + n)).is_none()));
    assert_eq!(cache.find(&place(9, 0x4000)), Some(instruction(1, 9)));

    // And it can be inserted again.
    assert_eq!(insert(&cache, &place(0, 0x3000), instruction(1, 0), &[], &memory), InsertOutcome::Stored);
    assert_eq!(cache.find(&place(0, 0x3000)), Some(instruction(1, 0)));
    assert_eq!(cache.find(&place(1, 0x3001)), None, "of a generation that is gone");
}

#[test]
fn bytes_that_changed_meanwhile_are_not_remembered() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let here = place(7, 0x3000);
    let before = memory.at(Gpa(0x3000));
    memory.bytes.borrow_mut()[0x3002] ^= 1;
    let insertion = cache.insert(&here, &before, instruction(3, 1), &[], &memory, || true);
    assert_eq!(insertion.outcome, InsertOutcome::Refused(Refusal::Changed));
    assert_eq!(cache.find(&here), None);
    // The change is behind the instruction.
    assert_eq!(cache.insert(&here, &before, instruction(2, 1), &[], &memory, || true).outcome, InsertOutcome::Stored);
}

#[test]
fn instruction_that_leaves_its_page_is_not_remembered() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let crosses = InsertOutcome::Refused(Refusal::Crosses);
    let end = place(7, 0x3ffd);
    assert_eq!(insert(&cache, &end, instruction(4, 1), &[], &memory), crosses);
    // Not even if the caller claims to have read more.
    let more = Bytes::new(&MOST);
    assert_eq!(cache.insert(&end, &more, instruction(4, 1), &[], &memory, || true).outcome, crosses);
    assert_eq!(insert(&cache, &end, instruction(0, 1), &[], &memory), crosses);
    assert!(memory.read_only().is_empty());
    assert_eq!(insert(&cache, &end, instruction(3, 1), &[], &memory), InsertOutcome::Stored);
    let most = place(8, 0x3ff1);
    assert_eq!(insert(&cache, &most, instruction(15, 2), &[], &memory), InsertOutcome::Stored);
    assert_eq!(cache.find(&most), Some(instruction(15, 2)));
}

#[test]
fn place_without_a_gpa_or_with_one_that_cannot_be_is_refused() {
    for vouching in [Vouching::Walk, Vouching::Tables] {
        let (cache, memory) = (cache(64, 8, vouching), Memory::new());
        let bytes = Bytes::new(&MOST);
        let nowhere = Place { gpa: None, ..place(1, 0) };
        let insertion = cache.insert(&nowhere, &bytes, instruction(1, 1), &[], &memory, || true);
        assert_eq!(insertion.outcome, InsertOutcome::Refused(Refusal::Unplaced));
        let beyond = place(1, u64::MAX - 20);
        let insertion = cache.insert(&beyond, &bytes, instruction(1, 1), &[], &memory, || true);
        assert!(matches!(insertion.outcome, InsertOutcome::Refused(_)));
        assert_eq!(cache.find(&beyond), None);
    }
}

#[test]
fn page_that_cannot_be_protected_is_refused_and_left_alone() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    memory.refused.set(Some(3));
    assert_eq!(
        insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory),
        InsertOutcome::Refused(Refusal::Unprotected)
    );
    assert!(!cache.covers(Gpa(0x3000)));
    assert_eq!(cache.written(Gpa(0x3000), DropCause::Write, &memory), None);
    assert_eq!(memory.flushes.get(), 0);
}

#[test]
fn page_that_was_read_only_before_needs_no_flush() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    memory.already.set(true);
    let bytes = memory.at(Gpa(0x3000));
    let insertion = cache.insert(&place(1, 0x3000), &bytes, instruction(1, 1), &[], &memory, || true);
    assert_eq!((insertion.outcome, insertion.flushed), (InsertOutcome::Stored, false));
}

#[test]
fn second_instruction_of_a_page_needs_no_flush() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let _ = insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory);
    let _ = insert(&cache, &place(2, 0x3001), instruction(1, 2), &[], &memory);
    assert_eq!(memory.flushes.get(), 1);
}

/// A vCPU registered a page and did not flush, because it could not read the rest of the walk: the next vCPU must
/// flush.
#[test]
fn debt_of_a_flush_goes_to_the_next_one() {
    let (cache, memory) = (cache(64, 16, Vouching::Tables), Memory::new());
    memory.refused.set(Some(4));
    let refused = insert(&cache, &place(1, 0x3000), instruction(1, 1), &[page(4)], &memory);
    assert_eq!((refused, memory.flushes.get()), (InsertOutcome::Refused(Refusal::Unprotected), 0));
    assert_eq!(memory.read_only(), [3]);

    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    assert_eq!(memory.flushes.get(), 1);
}

/// Two vCPUs insert from one page: the second must not rely on a flush that the first has only begun.
#[test]
fn page_that_another_one_still_flushes_for_is_flushed_for_again() {
    struct Second<'a>(&'a WriteProtect<Instruction>, &'a Memory, Cell<bool>);
    impl Protect for Second<'_> {
        fn protect(&self, page: Gpa) -> Protection {
            self.1.protect(page)
        }
        fn flush(&self) {
            let bytes = self.1.at(Gpa(0x3001));
            let insertion = self.0.insert(&place(2, 0x3001), &bytes, instruction(1, 2), &[], self.1, || true);
            self.2.set(insertion.flushed);
            self.1.flush();
        }
        fn unprotect(&self, page: Gpa) -> Unprotection {
            self.1.unprotect(page)
        }
        fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
            self.1.read(gpa, bytes)
        }
    }
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let second = Second(&cache, &memory, Cell::new(false));
    let bytes = memory.at(Gpa(0x3000));
    let insertion = cache.insert(&place(1, 0x3000), &bytes, instruction(1, 1), &[], &second, || true);
    assert_eq!((insertion.flushed, second.2.get(), memory.flushes.get()), (true, true, 2));
}

/// A page is evicted and registered again during a flush for the first registration: that flush began too early for the
/// second.
#[test]
fn flush_does_not_pay_for_what_was_registered_since() {
    struct Meanwhile<'a>(&'a WriteProtect<Instruction>, &'a Memory);
    impl Protect for Meanwhile<'_> {
        fn protect(&self, page: Gpa) -> Protection {
            self.1.protect(page)
        }
        fn flush(&self) {
            assert!(self.0.written(Gpa(0x3000), DropCause::Write, self.1).is_some());
            let refused = insert(self.0, &place(2, 0x3001), instruction(1, 2), &[page(4)], self.1);
            assert_eq!(refused, InsertOutcome::Refused(Refusal::Unprotected));
        }
        fn unprotect(&self, page: Gpa) -> Unprotection {
            self.1.unprotect(page)
        }
        fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
            self.1.read(gpa, bytes)
        }
    }
    let (cache, memory) = (cache(64, 8, Vouching::Tables), Memory::new());
    memory.refused.set(Some(4));
    let bytes = memory.at(Gpa(0x3000));
    let first = cache.insert(&place(1, 0x3000), &bytes, instruction(1, 1), &[], &Meanwhile(&cache, &memory), || true);
    assert_eq!(first.outcome, InsertOutcome::Refused(Refusal::Changed));
    let next = cache.insert(&place(1, 0x3000), &bytes, instruction(1, 1), &[], &memory, || true);
    assert_eq!((next.outcome, next.flushed), (InsertOutcome::Stored, true));
}

#[test]
fn page_that_needs_the_registrys_slot_evicts_the_other() {
    let (cache, memory) = (cache(64, 1, Vouching::Walk), Memory::new());
    let (one, other) = (place(1, 0x3000), place(2, 0x4000));
    assert_eq!(insert(&cache, &one, instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    let bytes = memory.at(Gpa(0x4000));
    let insertion = cache.insert(&other, &bytes, instruction(1, 2), &[], &memory, || true);
    assert_eq!((insertion.outcome, insertion.lost), (InsertOutcome::Stored, Lost { code: 1, tables: 0 }));
    assert_eq!(memory.read_only(), [4]);
    assert_eq!((cache.find(&one), cache.find(&other)), (None, Some(instruction(1, 2))));
}

#[test]
fn page_that_is_busy_is_not_protected_and_nobody_waits_for_it() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    memory.busy.set(Some(3));
    assert_eq!(
        insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory),
        InsertOutcome::Refused(Refusal::Busy)
    );
    assert!(!cache.covers(Gpa(0x3000)) && memory.read_only().is_empty());
    memory.busy.set(None);
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
}

#[test]
fn what_depends_on_a_busy_page_is_forgotten_and_the_page_is_read_only_until_somebody_asks_again() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let here = place(1, 0x3000);
    assert_eq!(insert(&cache, &here, instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    memory.busy.set(Some(3));
    assert_eq!(cache.written(Gpa(0x3000), DropCause::Write, &memory), Some(Lost { code: 1, tables: 0 }));
    assert_eq!(cache.find(&here), None);
    assert_eq!(memory.read_only(), [3]);
    assert!(cache.covers(Gpa(0x3000)), "who writes is still stopped, and must find the page here");
    assert_eq!(cache.write_as_host(Gpa(0x3000), &memory, || ()).1, Lost::default(), "nothing is left to forget");

    memory.busy.set(None);
    assert_eq!(cache.written(Gpa(0x3000), DropCause::Write, &memory), Some(Lost::default()));
    assert!(!cache.covers(Gpa(0x3000)) && memory.read_only().is_empty());
}

/// It may be inserted again: it was read-only all the time, and its content is read once more.
#[test]
fn page_that_stayed_read_only_owes_what_it_owed_before() {
    let (cache, memory) = (cache(64, 16, Vouching::Tables), Memory::new());
    memory.refused.set(Some(4));
    let refused = insert(&cache, &place(1, 0x3000), instruction(1, 1), &[page(4)], &memory);
    assert_eq!((refused, memory.flushes.get()), (InsertOutcome::Refused(Refusal::Unprotected), 0));
    memory.busy.set(Some(3));
    assert!(cache.written(Gpa(0x3000), DropCause::Write, &memory).is_some());
    memory.busy.set(None);
    let again = insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory);
    assert_eq!((again, memory.flushes.get()), (InsertOutcome::Stored, 1));
    assert!(cache.find(&place(1, 0x3000)).is_some());
}

#[test]
fn busy_page_keeps_its_slot_from_another() {
    let (cache, memory) = (cache(64, 1, Vouching::Walk), Memory::new());
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    memory.busy.set(Some(3));
    let bytes = memory.at(Gpa(0x4000));
    let insertion = cache.insert(&place(2, 0x4000), &bytes, instruction(1, 2), &[], &memory, || true);
    assert_eq!((insertion.outcome, insertion.lost.code), (InsertOutcome::Refused(Refusal::Busy), 1));
    assert_eq!((cache.find(&place(1, 0x3000)), memory.read_only()), (None, vec![3]));
}

#[test]
fn walks_that_find_a_page_busy_count_once() {
    let (cache, memory) = (cache(64, 1, Vouching::Walk), Memory::new());
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    memory.busy.set(Some(3));
    (0..2 * WALK_LIMIT).for_each(|_| assert!(cache.written(Gpa(0x3000), DropCause::Walk, &memory).is_some()));
    memory.busy.set(None);
    assert!(cache.written(Gpa(0x3000), DropCause::Walk, &memory).is_some());
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
}

#[test]
fn slot_conflict_replaces_and_the_count_of_its_page_goes_down() {
    let (cache, memory) = (cache(1, 8, Vouching::Walk), Memory::new());
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored, "the same");
    assert_eq!(insert(&cache, &place(2, 0x4000), instruction(1, 2), &[], &memory), InsertOutcome::Replaced);
    assert_eq!(cache.written(Gpa(0x3000), DropCause::Write, &memory), Some(Lost::default()));
    assert_eq!(cache.written(Gpa(0x4000), DropCause::Write, &memory), Some(Lost { code: 1, tables: 0 }));
    // A void entry is not replaced.
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
}

#[test]
fn tables_vouch_for_the_walk_and_forget_when_written() {
    let tables: Vec<_> = (8..13).map(page).collect();
    let (cache, memory) = (cache(64, 16, Vouching::Tables), Memory::new());
    let here = place(1, 0x3000);
    let asked = Place { gpa: None, ..here };
    for table in &tables {
        assert_eq!(insert(&cache, &here, instruction(1, 1), &tables, &memory), InsertOutcome::Stored);
        assert_eq!(memory.read_only(), [3, 8, 9, 10, 11, 12]);
        assert_eq!(cache.find(&asked), Some(instruction(1, 1)));
        assert_eq!(cache.written(*table, DropCause::Write, &memory), Some(Lost { code: 0, tables: 1 }));
        assert_eq!(cache.find(&asked), None);
    }
    assert_eq!(insert(&cache, &here, instruction(1, 1), &tables, &memory), InsertOutcome::Stored);
    assert_eq!(cache.written(Gpa(0x3abc), DropCause::Host, &memory), Some(Lost { code: 1, tables: 0 }));
    assert_eq!(cache.find(&asked), None);
}

#[test]
fn tables_that_are_one_page_or_the_code_itself_are_registered_once() {
    let (cache, memory) = (cache(64, 16, Vouching::Tables), Memory::new());
    let here = place(1, 0x3000);
    let tables = [page(8), page(8), page(3), page(8)];
    assert_eq!(insert(&cache, &here, instruction(1, 1), &tables, &memory), InsertOutcome::Stored);
    assert_eq!(cache.find(&here), Some(instruction(1, 1)));
    assert_eq!(cache.written(page(8), DropCause::Write, &memory), Some(Lost { code: 0, tables: 1 }));
    assert_eq!(cache.written(page(3), DropCause::Write, &memory), Some(Lost { code: 1, tables: 0 }));
}

#[test]
fn walk_whose_pages_collide_protects_nothing() {
    let (cache, memory) = (cache(64, 8, Vouching::Tables), Memory::new());
    let here = place(1, 0x3000);
    let refused = InsertOutcome::Refused(Refusal::Pages);
    assert_eq!(insert(&cache, &here, instruction(1, 1), &[page(9), page(17)], &memory), refused);
    assert_eq!(insert(&cache, &here, instruction(1, 1), &[page(11)], &memory), refused);
    let six: Vec<_> = (8..14).map(page).collect();
    assert_eq!(insert(&cache, &here, instruction(1, 1), &six, &memory), refused);
    assert!(memory.read_only().is_empty());
}

#[test]
fn walk_that_leads_elsewhere_by_now_is_not_remembered() {
    let (cache, memory) = (cache(64, 8, Vouching::Tables), Memory::new());
    let here = place(1, 0x3000);
    let bytes = memory.at(Gpa(0x3000));
    let insertion = cache.insert(&here, &bytes, instruction(1, 1), &[page(5)], &memory, || false);
    assert_eq!(insertion.outcome, InsertOutcome::Refused(Refusal::Changed));
    assert_eq!(cache.find(&here), None);
}

#[test]
fn page_evicted_while_it_was_flushed_for_voids_the_insertion() {
    let (cache, memory) = (cache(64, 8, Vouching::Tables), Memory::new());
    let here = place(1, 0x3000);
    let bytes = memory.at(Gpa(0x3000));
    let evict = || cache.written(Gpa(0x3000), DropCause::Write, &memory).is_some();
    let insertion = cache.insert(&here, &bytes, instruction(1, 1), &[page(5)], &memory, evict);
    assert_eq!(insertion.outcome, InsertOutcome::Refused(Refusal::Changed));
    assert_eq!(cache.find(&here), None);
    // The table was counted before the code was found to be gone, or not at all: no count is left.
    assert_eq!(cache.written(page(5), DropCause::Write, &memory), Some(Lost::default()));
}

#[test]
fn page_that_walks_evict_too_often_is_not_protected_again() {
    let (cache, memory) = (cache(64, 1, Vouching::Walk), Memory::new());
    for _ in 0..=WALK_LIMIT {
        assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
        assert!(cache.written(Gpa(0x3000), DropCause::Walk, &memory).is_some());
        assert_eq!(cache.written(Gpa(0x3000), DropCause::Walk, &memory), None, "counts only what it evicts");
    }
    let walked = InsertOutcome::Refused(Refusal::Walked);
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), walked);
    // Nor after another page was in its slot; that page has a count of its own.
    assert_eq!(insert(&cache, &place(2, 0x4000), instruction(1, 2), &[], &memory), InsertOutcome::Stored);
    assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), walked);
    assert_eq!(cache.find(&place(2, 0x4000)), Some(instruction(1, 2)));
}

#[test]
fn writes_may_evict_a_page_as_often_as_they_like() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    for _ in 0..1000 {
        assert_eq!(insert(&cache, &place(1, 0x3000), instruction(1, 1), &[], &memory), InsertOutcome::Stored);
        assert!(cache.written(Gpa(0x3000), DropCause::Write, &memory).is_some());
    }
}

#[test]
fn write_by_the_hypervisor_looks_before_and_after() {
    let (cache, memory) = (cache(64, 8, Vouching::Walk), Memory::new());
    let here = place(1, 0x3000);
    assert_eq!(cache.write_as_host(Gpa(0x3000), &memory, || 5), (5, Lost::default()));
    assert_eq!(insert(&cache, &here, instruction(1, 1), &[], &memory), InsertOutcome::Stored);
    assert!(cache.covers(Gpa(0x3fff)) && !cache.covers(Gpa(0x4000)) && !cache.covers(Gpa(0xb000)));

    let ((), lost) = cache.write_as_host(Gpa(0x3800), &memory, || {
        assert_eq!(cache.find(&here), None, "forgotten before it is written");
        // Another vCPU is so fast: memory still has the old bytes.
        assert_eq!(insert(&cache, &here, instruction(1, 1), &[], &memory), InsertOutcome::Stored);
        memory.bytes.borrow_mut()[0x3000] ^= 1;
    });
    assert_eq!((lost, cache.find(&here)), (Lost { code: 2, tables: 0 }, None));
    assert!(!cache.covers(Gpa(0x3000)) && memory.read_only().is_empty());
}

#[test]
#[should_panic(expected = "some bits of a hash")]
fn size_that_is_no_power_of_two_is_the_callers_mistake() {
    let _ = cache(3, 8, Vouching::Walk);
}

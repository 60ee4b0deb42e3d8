//! Flushes, and the instructions that do them.

use super::range;
use crate::tlbi::{Barrier, Maintenance, Tlbi, TlbiFeatures};
use crate::{Scope, Stale, What};
use addr::Gpa;
use core::cell::RefCell;
use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

extern crate std;
use std::vec;
use std::vec::Vec;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Instruction {
    Dsb(Barrier),
    Isb,
    Tlbi(Tlbi),
}

#[derive(Default)]
struct Recorder(RefCell<Vec<Instruction>>);

impl Maintenance for Recorder {
    fn dsb(&self, barrier: Barrier) {
        self.0.borrow_mut().push(Instruction::Dsb(barrier));
    }
    fn isb(&self) {
        self.0.borrow_mut().push(Instruction::Isb);
    }
    fn tlbi(&self, operation: Tlbi) {
        self.0.borrow_mut().push(Instruction::Tlbi(operation));
    }
}

fn pay(features: TlbiFeatures, stale: Stale) -> Vec<Instruction> {
    let recorder = Recorder::default();
    features.pay(stale, &recorder);
    recorder.0.into_inner()
}

const NONE: TlbiFeatures = TlbiFeatures { ttl: false, ranges: false };
const ALL: TlbiFeatures = TlbiFeatures { ttl: true, ranges: true };

#[test]
fn nothing_owed_is_paid_by_nothing() {
    assert!(pay(ALL, Stale::EMPTY).is_empty());
}

#[test]
fn one_page_takes_both_invalidations_with_a_barrier_on_each_side() {
    let (ipa, everywhere) = (Gpa(0x5000), true);
    let expected = |level| {
        vec![
            Instruction::Dsb(Barrier::Stores),
            Instruction::Tlbi(Tlbi::Ipa { leaves: true, everywhere, ipa, level }),
            Instruction::Dsb(Barrier::Full),
            Instruction::Tlbi(Tlbi::Combined { everywhere }),
            Instruction::Dsb(Barrier::Full),
            Instruction::Isb,
        ]
    };
    assert_eq!(pay(NONE, Stale::leaf(range(0x5000, 4096), 0)), expected(None));
    assert_eq!(pay(ALL, Stale::leaf(range(0x5000, 4096), 0)), expected(Some(0)));
    assert_eq!(pay(ALL, Stale::leaf(range(0x5000, 4096), 0).of_any_size()), expected(None));
}

#[test]
fn local_debt_is_broadcast_to_nobody() {
    let paid = pay(ALL, Stale::local(range(0x5000, 4096), 0));
    let is_local = |instruction: &Instruction| match instruction {
        Instruction::Dsb(barrier) => matches!(barrier, Barrier::LocalStores | Barrier::Local),
        Instruction::Isb => true,
        Instruction::Tlbi(Tlbi::Ipa { everywhere, .. } | Tlbi::Combined { everywhere }) => !everywhere,
        Instruction::Tlbi(_) => false,
    };
    assert!(paid.iter().all(is_local), "{paid:?}");
    assert_eq!(paid.len(), 6);
}

#[test]
fn large_range_without_instructions_for_ranges_is_all_of_the_vm_at_once() {
    let paid = pay(NONE, Stale::of(range(0, 64 << 20)));
    let all = Instruction::Tlbi(Tlbi::All { everywhere: true });
    let dsb = Instruction::Dsb;
    assert_eq!(paid, [dsb(Barrier::Stores), all, dsb(Barrier::Full), Instruction::Isb]);
}

#[test]
fn operands_are_spelled_as_the_manual_says() {
    let ipa = Gpa(0x12_3456_7000);
    let page = Tlbi::Ipa { leaves: false, everywhere: true, ipa, level: None };
    assert_eq!(page.operand(), 0x0123_4567);
    // TTL is bits 47:44: 01 for 4 KiB, then Arm's level, 3 for pages and 1 for 1 GiB.
    let with_level = |level| Tlbi::Ipa { leaves: false, everywhere: true, ipa, level: Some(level) }.operand();
    assert_eq!(with_level(0), 0b0111 << 44 | 0x0123_4567);
    assert_eq!(with_level(2), 0b0101 << 44 | 0x0123_4567);
    // TG 47:46, SCALE 45:44, NUM 43:39.
    let piece = Tlbi::Range { leaves: true, ipa, scale: 2, num: 5 };
    assert_eq!(piece.operand(), 0b01 << 46 | 2 << 44 | 5 << 39 | 0x0123_4567);
    assert_eq!(piece.bytes(), 6 << 23);
}

#[test]
fn debts_merge_into_one_that_covers_both() {
    let page = |gpa| Stale::leaf(range(gpa, 4096), 0);
    let both = page(0x1000).merge(Stale::EMPTY).merge(page(0x8000)).merge(page(0x1000));
    assert_eq!(both.range(), range(0x1000, 0x8000));
    let What::Pages(pages) = both.what() else { panic!("few pages stay pages: {both:?}") };
    assert_eq!(pages.as_slice(), [Gpa(0x1000), Gpa(0x8000)]);
    assert_eq!((both.level(), both.tables(), both.scope()), (Some(0), false, Scope::AllCpus));

    let mixed = both.merge(Stale::leaf(range(0x20_0000, 0x20_0000), 1));
    assert_eq!(mixed.level(), None, "no level is certain any more");
    let local = Stale::local(range(0, 4096), 0);
    assert_eq!(local.merge(local).scope(), Scope::Local);
    assert_eq!(local.merge(page(0)).scope(), Scope::AllCpus, "the larger of the two");

    let many = (0..9).map(|number| page(number << 12)).fold(Stale::EMPTY, Stale::merge);
    assert_eq!(many.what(), What::Range(range(0, 9 << 12)));
    assert_eq!(many.merge(Stale::WHOLE).what(), What::Whole);
    assert!(many.merge(Stale::of(range(0, 4096))).tables(), "pointers to tables stay owed");
    assert!(Stale::EMPTY.merge(Stale::EMPTY).is_empty());
    assert_eq!(Stale::of(range(0, 0)), Stale::EMPTY);
}

proptest! {
    #[test]
    fn instructions_for_a_range_cover_it_exactly(first in 0..1_u64 << 28, pages in 1..1_u64 << 22, ranges: bool) {
        let whole = range(first << 12, pages << 12);
        let mut next = whole.start;
        for instruction in pay(TlbiFeatures { ttl: true, ranges }, Stale::of(whole)) {
            match instruction {
                Instruction::Tlbi(piece @ (Tlbi::Range { ipa, leaves, .. } | Tlbi::Ipa { ipa, leaves, .. })) => {
                    prop_assert!(!leaves, "pointers to tables are owed");
                    prop_assert_eq!(ipa, next);
                    next = Gpa(ipa.0 + piece.bytes());
                    if let Tlbi::Range { scale, num, .. } = piece {
                        prop_assert!(scale < 4 && num < 32);
                    }
                }
                Instruction::Tlbi(Tlbi::All { .. }) => {
                    prop_assert!(!ranges);
                    next = whole.end();
                }
                _ => {}
            }
        }
        prop_assert_eq!(next, whole.end());
    }
}

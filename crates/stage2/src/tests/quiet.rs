//! Memory that is not written costs nothing: no table, and hardly a read.

use super::dirty_log::{Case, Hardware, LARGE, Logged, SLOT_START, arm, each_machine, on};
use super::{EPT, Guest, MIB, NPT, Pool, range};
use crate::{Access, Collapse, Epochs, Limbo, Policy, Source, Start, Walker};
use addr::{Gpa, Hpa};

extern crate std;
use std::vec;

/// Entries that one round reads.
fn looks_of_a_round<F: Hardware>(logged: &mut Logged<F>) -> u64 {
    logged.pool.loads.set(0);
    logged.clear_all();
    logged.pool.loads.get()
}

fn split_all<F: Hardware>(logged: &mut Logged<F>) {
    let Logged { guest, pool, log, spare, .. } = logged;
    let (_, end) = log.split_ahead(guest.walk(pool), Gpa(0), spare);
    assert_eq!(end, log.slot().end());
}

/// After these rounds without writes, tables are quiet.
const ROUNDS: usize = 3;

#[test]
fn round_looks_once_at_each_table_to_whose_pages_nobody_writes() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            assert!(looks_of_a_round(&mut logged) > 4 * LARGE);
            for _ in 0..ROUNDS {
                logged.clear_all();
            }
            // To read and to clear: the descent to the first table, and its three neighbours.
            assert!(looks_of_a_round(&mut logged) <= 2 * (4 + 3));

            // A write costs reads of its own table, at most three times.
            let _ = logged.write(LARGE + 3);
            assert_eq!(logged.dirty(), [LARGE + 3]);
            assert!(looks_of_a_round(&mut logged) < 3 * LARGE + 100);
            assert!(logged.dirty().is_empty());
        });
    });
}

#[test]
fn write_to_a_page_of_a_quiet_table_is_found() {
    each_machine(None, |make| {
        for policy in [Policy::Lazy, Policy::Adaptive] {
            on!(make(policy), logged => {
                logged.start(Start::Clean);
                split_all(&mut logged);
                for round in 0..12 {
                    // Sometimes after a pause, sometimes not.
                    (0..round % 4).for_each(|_| logged.clear_all());
                    let page = round * 211 % (4 * LARGE);
                    let _ = logged.write(page);
                    assert_eq!(logged.dirty(), [page], "round {round}");
                    logged.clear_all();
                }
            });
        }
    });
}

#[test]
fn first_write_after_a_pause_takes_one_fault_for_a_whole_table() {
    each_machine(Some(Source::Hardware), |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            assert_eq!(logged.write(3), 1);
            for _ in 0..ROUNDS {
                logged.clear_all();
            }
            assert_eq!(logged.write(5), 1);
            assert!([6, 3, 0, 511].into_iter().all(|page| logged.write(page) == 0), "the hardware records");
            assert_eq!(logged.dirty(), [0, 3, 5, 6, 511]);

            // A guest that writes in every second round never faults.
            for page in 0..6 {
                logged.clear_all();
                assert_eq!(logged.write(page), 0);
                logged.clear_all();
            }
        });
    });
}

#[test]
fn table_whose_writes_are_listed_is_quiet_at_once_and_takes_no_fault() {
    each_machine(Some(Source::Listed), |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            logged.clear_all();
            for round in 0..4 {
                // To read and to clear: the descent to the first table, and its three neighbours.
                assert!(looks_of_a_round(&mut logged) <= 2 * (4 + 3), "round {round}");
                assert_eq!(logged.write(LARGE + round), 0, "the hardware records");
                assert_eq!(logged.write(LARGE + round), 0);
                assert_eq!(logged.dirty(), [LARGE + round]);
                assert!(looks_of_a_round(&mut logged) < 3 * LARGE + 100, "only this table is searched");
            }
        });
    });
}

#[test]
fn write_that_is_not_reported_yet_is_found_by_a_later_round() {
    each_machine(Some(Source::Listed), |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            logged.clear_all();
            assert_eq!(logged.write_and_stay(7), 0);
            // This is late, not wrong: nothing was copied.
            assert!(logged.dirty().is_empty());
            logged.clear_all();
            assert_eq!(logged.write_and_stay(7), 0);
            logged.report();
            assert_eq!(logged.dirty(), [7]);
            // What lies elsewhere, or nowhere, is no error.
            logged.listed = vec![Gpa(1 << 40), Gpa(u64::MAX), Gpa(0), Gpa(SLOT_START + LARGE * 4096)];
            logged.report();
            assert_eq!(logged.dirty(), [7]);
        });
    });
}

#[test]
fn page_of_a_round_that_took_part_of_its_table_keeps_the_table_awake() {
    each_machine(Some(Source::Listed), |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            logged.clear_all();
            let _ = (logged.write(3), logged.write(9));
            logged.clear([3]);
            assert_eq!(logged.dirty(), [9], "it is not listed a second time");
            logged.clear_all();
            assert!(logged.dirty().is_empty());
        });
    });
}

#[test]
fn pages_that_come_or_gain_rights_wake_their_table() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            let page = |number: u64| Gpa(SLOT_START + (number << 12));
            let _ = logged.guest.protect_page(&logged.pool, page(7), Access::READ).expect("no table needed");
            (0..ROUNDS).for_each(|_| logged.clear_all());
            let _ = logged.guest.protect_page(&logged.pool, page(7), Access::ALL).expect("no table needed");
            assert_eq!(logged.write(7), 0);
            assert_eq!(logged.dirty(), [7]);

            (0..ROUNDS).for_each(|_| logged.clear_all());
            let Logged { guest, pool, .. } = &mut logged;
            let _ = guest.unmap(pool, range(page(9).0, 4096)).expect("no table needed");
            let _ = guest.map(pool, range(page(9).0, 4096), Hpa(0x5000), Access::ALL).expect("no table needed");
            assert_eq!(logged.dirty(), [9], "what is mapped while a log runs is dirty");
        });
    });
}

#[test]
fn quiet_table_can_be_collapsed_and_what_is_left_of_it_is_logged() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            (0..ROUNDS).for_each(|_| logged.clear_all());
            let (walkers, mut limbo) = (Epochs::new([Walker::new()]), Limbo::<4>::new());
            let Logged { guest, pool, .. } = &mut logged;
            let result = guest.walk_mut(pool).collapse(&mut limbo, &walkers, Gpa(SLOT_START), 1);
            assert_eq!(result, Collapse::Done);
            assert!(logged.dirty().is_empty());
            // Quiet pages that stay writable, as where the hardware lists writes, become a large one that is.
            assert!(logged.write(3) <= 1);
            assert!(logged.dirty().contains(&3));
        });
    });
}

#[test]
fn after_a_log_that_made_tables_quiet_the_guest_writes_freely_and_the_next_log_sees_it() {
    each_machine(None, |make| {
        on!(make(Policy::Adaptive), logged => {
            logged.start(Start::Clean);
            split_all(&mut logged);
            (0..ROUNDS).for_each(|_| logged.clear_all());
            logged.log.stop(logged.guest.walk(&logged.pool));
            assert!((0..4).all(|large| logged.write(large * LARGE) == 0));
            logged.start(Start::Clean);
            assert!(logged.dirty().is_empty());
            let _ = logged.write(LARGE);
            assert_eq!(logged.dirty(), [LARGE]);
        });
    });
}

/// Tables that a log needs, and large pages that it splits, when the guest writes to a tenth of them.
fn price<F: Hardware>(format: F, source: Source, policy: Policy) -> (usize, usize) {
    const REGIONS: u64 = 60;
    let mut logged = Logged::of(format, source, policy, range(SLOT_START, REGIONS * 2 * MIB));
    let before = logged.pool.left();
    logged.start(Start::Clean);
    if policy == Policy::Eager {
        logged.spare.fill(&logged.pool, REGIONS).expect("pool");
        split_all(&mut logged);
    }
    for round in 0..3 {
        for region in (0..REGIONS).step_by(10) {
            for page in [0, 17, 100 + round, 511] {
                let _ = logged.write(region * LARGE + page);
            }
        }
        assert_eq!(logged.dirty().len(), 4 * 6, "round {round}");
        logged.clear_all();
    }
    let Logged { guest, pool, spare, .. } = &mut logged;
    core::mem::take(spare).give_back(pool);
    let leaf = |region: u64| guest.lookup(pool, Gpa(SLOT_START + region * 2 * MIB)).expect("mapped");
    let splits = (0..REGIONS).filter(|region| leaf(*region).level == 0).count();
    (before + 8 - pool.left(), splits)
}

#[test]
fn cold_memory_stays_unsplit() {
    fn compare<F: Hardware + Copy>(format: F, source: Source) {
        let (adaptive, eager) = (price(format, source, Policy::Adaptive), price(format, source, Policy::Eager));
        assert_eq!(eager, (60, 60));
        assert!(adaptive.0 * 100 <= eager.0 * 15, "tables: {adaptive:?}");
        assert!(adaptive.1 * 100 <= eager.1 * 15, "splits: {adaptive:?}");
    }
    for source in [Source::WriteProtect, Source::Hardware] {
        compare(NPT, source);
        compare(EPT, source);
        for bbm in 0..=2 {
            let format = arm(bbm);
            compare(if source == Source::Hardware { format.with_recorded_writes() } else { format }, source);
        }
    }
}

#[test]
fn hole_in_a_table_that_is_quiet_is_filled_by_a_first_touch() {
    let pool = Pool::of(8);
    let mut guest = Guest::new(NPT, &pool).expect("pool");
    let _ = guest.map(&pool, range(0, MIB), Hpa(MIB), Access::ALL).expect("maps");
    let all = range(0, 2 * MIB);
    let clean = |guest: &Guest<_>| {
        let _ = guest.walk(&pool).clean(all, Source::WriteProtect, |_| true, |_| {});
    };
    let written = |guest: &Guest<_>| {
        let mut count = 0;
        guest.walk(&pool).written(all, Source::WriteProtect, |_| count += 1);
        count
    };
    clean(&guest);
    assert_eq!(written(&guest), 0);
    let mut spare = crate::Spare::new();
    let touched = guest.walk(&pool).populate(&mut spare, Gpa(MIB), Hpa(0x3000), 0, Access::ALL);
    assert!(touched.is_ok());
    assert_eq!(written(&guest), 1);
}

//! The machine with walkers does everything that the manuals allow, and nothing else.

use hw_model::walks::{Barrier, EARLIER_LIFE, Geometry, Invalidate, Rules, Violation, Walks};

const ARM: Rules = Rules::Arm { bbm: 0, hafdbs: false };
const GEOMETRY: Geometry = Geometry { index_bits: 2, levels: 2 };
/// A page: valid, read and write, access flag.
const PAGE: u64 = 0b11 | 0b11 << 6 | 1 << 10;
const BLOCK: u64 = PAGE & !0b10;
const READ_ONLY: u64 = !(1 << 7);
const HOST: u64 = 0x10_0000;
const ALL: (u64, u64) = (0, 4);

/// One table at the root, one below it for the first four pages, which are mapped.
fn machine(rules: Rules, seed: u64) -> (Walks, u64, u64) {
    let mut walks = Walks::new(rules, GEOMETRY, 2, seed);
    let (root, table) = (walks.allocate(0, 1), walks.allocate(0, 1));
    walks.set_root(root);
    for page in 0..4 {
        walks.store(0, (table, page), (HOST + ((page as u64) << 12)) | PAGE, false);
    }
    walks.store(0, (root, 0), table | 0b11, true);
    walks.barrier(0, Barrier::Stores);
    (walks, root, table)
}

/// Whether `happens` is true in some runs of the machine.
fn ever(mut happens: impl FnMut(u64) -> bool) -> bool {
    (1..400).any(|seed| happens(seed * 0x9e37_79b9))
}

fn stir(walks: &mut Walks) {
    (0..100).for_each(|_| walks.stir(ALL.0, ALL.1));
}

fn page(number: u64) -> Invalidate {
    Invalidate::Guest { start: number << 12, end: (number + 1) << 12, level: None, leaves: false }
}

#[test]
fn store_is_seen_late_until_a_barrier() {
    let sees_old = |barrier| {
        ever(|seed| {
            let (mut walks, _, table) = machine(ARM, seed);
            walks.enter(1);
            walks.store(0, (table, 2), 0, true);
            if barrier {
                walks.barrier(0, Barrier::Stores);
            }
            walks.access(1, 0x2000, true).is_ok()
        })
    };
    assert!(sees_old(false));
    assert!(!sees_old(true));
}

#[test]
fn local_barrier_makes_stores_known_to_one_processor() {
    let sees_old = |cpu, barrier| {
        ever(|seed| {
            let (mut walks, _, table) = machine(ARM, seed);
            walks.enter(cpu);
            walks.store(0, (table, 2), 0, true);
            walks.barrier(0, barrier);
            walks.access(cpu, 0x2000, true).is_ok()
        })
    };
    for barrier in [Barrier::LocalStores, Barrier::Local] {
        assert!(!sees_old(0, barrier) && sees_old(1, barrier), "{barrier:?}");
    }
}

#[test]
fn table_that_is_linked_without_a_release_may_be_seen_as_it_was_in_an_earlier_life() {
    let seen = |rules, release| {
        ever(|seed| {
            let (mut walks, root, _) = machine(rules, seed);
            let table = walks.allocate(0, 1);
            walks.store(0, (root, 1), table | if rules == ARM { 0b11 } else { 0b111 }, release);
            walks.enter(1);
            walks.access(1, 0x5000, true).is_ok_and(|hpa| hpa == EARLIER_LIFE)
        })
    };
    assert!(seen(ARM, false));
    assert!(!seen(ARM, true));
    assert!(!seen(Rules::Nested, false), "stores are seen in order");
}

#[test]
fn invalidation_may_be_acted_on_before_the_store_that_it_is_meant_for_is_known() {
    let stays = |barrier_before| {
        ever(|seed| {
            let (mut walks, _, table) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (table, 2), 0, true);
            if barrier_before {
                walks.barrier(0, Barrier::Stores);
            }
            walks.invalidate(0, Invalidate::All, true);
            stir(&mut walks);
            walks.barrier(0, Barrier::Full);
            walks.access(1, 0x2000, true).is_ok()
        })
    };
    assert!(stays(false));
    assert!(!stays(true));
}

#[test]
fn table_that_is_linked_by_a_release_is_never_seen_half_written() {
    let half = |release| {
        ever(|seed| {
            let (mut walks, root, _) = machine(ARM, seed);
            let table = walks.allocate(0, 1);
            walks.store(0, (table, 0), HOST | PAGE, false);
            walks.store(0, (table, 1), HOST | PAGE, false);
            walks.store(0, (root, 1), table | 0b11, release);
            walks.enter(1);
            // A walker that reaches one page has seen the pointer, and with it the other page.
            walks.access(1, 0x5000, true).is_ok() && walks.access(1, 0x4000, true).is_err()
        })
    };
    assert!(half(false));
    assert!(!half(true));
}

#[test]
fn translation_stays_until_it_is_invalidated_and_that_is_complete() {
    let stays = |steps: &[(bool, Barrier)]| {
        ever(|seed| {
            let (mut walks, _, table) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (table, 2), 0, true);
            walks.barrier(0, Barrier::Stores);
            for (invalidate, barrier) in steps {
                if *invalidate {
                    walks.invalidate(0, page(2), true);
                    walks.barrier(0, *barrier);
                }
                walks.invalidate(0, Invalidate::Combined, true);
                walks.barrier(0, *barrier);
            }
            walks.access(1, 0x2000, true).is_ok()
        })
    };
    assert!(stays(&[]), "nothing is invalidated");
    assert!(stays(&[(false, Barrier::Full)]), "what stage 2 alone says brings it back");
    assert!(stays(&[(true, Barrier::Stores)]), "a barrier for stores does not wait");
    assert!(stays(&[(true, Barrier::Local)]), "nor does one for this processor");
    assert!(!stays(&[(true, Barrier::Full)]));
}

#[test]
fn combined_translation_outlives_an_invalidation_by_guest_address() {
    let stays = |both| {
        ever(|seed| {
            let (mut walks, _, table) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (table, 2), 0, true);
            walks.barrier(0, Barrier::Stores);
            walks.invalidate(0, page(2), true);
            walks.barrier(0, Barrier::Full);
            if both {
                walks.invalidate(0, Invalidate::Combined, true);
                walks.barrier(0, Barrier::Full);
            }
            walks.access(1, 0x2000, true).is_ok()
        })
    };
    assert!(stays(false));
    assert!(!stays(true));
}

#[test]
fn local_invalidation_reaches_one_processor() {
    assert!(ever(|seed| {
        let (mut walks, _, table) = machine(ARM, seed);
        walks.enter(1);
        stir(&mut walks);
        walks.store(0, (table, 2), 0, true);
        walks.barrier(0, Barrier::Stores);
        walks.invalidate(0, Invalidate::All, false);
        walks.barrier(0, Barrier::Full);
        walks.access(1, 0x2000, true).is_ok()
    }));
}

#[test]
fn denial_is_cached_on_one_architecture_and_not_on_the_other() {
    let denied = |rules, read_only: u64, bits: u64| {
        ever(|seed| {
            let (mut walks, root, table) = machine(rules, seed);
            walks.store(0, (root, 0), table | 0b11, true);
            walks.store(0, (table, 2), ((HOST + 0x2000) | bits) & read_only, true);
            walks.barrier(0, Barrier::Stores);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (table, 2), (HOST + 0x2000) | bits, true);
            walks.barrier(0, Barrier::Stores);
            walks.access(1, 0x2000, true).is_err()
        })
    };
    assert!(denied(ARM, READ_ONLY, PAGE));
    // Present, writable, user, accessed, dirty.
    assert!(!denied(Rules::Nested, !0b10, 0b110_0111));
}

#[test]
fn two_sizes_for_one_address_are_found_unless_the_processor_allows_them() {
    let found = |bbm| {
        ever(|seed| {
            let (mut walks, root, _) = machine(Rules::Arm { bbm, hafdbs: false }, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (root, 0), HOST | BLOCK, true);
            walks.barrier(0, Barrier::Stores);
            stir(&mut walks);
            walks.violations().iter().any(|violation| matches!(violation, Violation::MultiHit(_)))
        })
    };
    assert!(found(0) && found(1));
    assert!(!found(2));
}

#[test]
fn pointer_to_a_table_outlives_an_invalidation_of_leaves() {
    let freed_early = |leaves| {
        ever(|seed| {
            let (mut walks, root, table) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (root, 0), 0, true);
            walks.barrier(0, Barrier::Stores);
            walks.invalidate(0, Invalidate::Guest { start: 0, end: 0x4000, level: None, leaves }, true);
            walks.barrier(0, Barrier::Full);
            walks.free(table);
            !walks.violations().is_empty()
        })
    };
    assert!(freed_early(true));
    assert!(!freed_early(false));
}

#[test]
fn write_is_recorded_once_and_not_again_while_that_is_remembered() {
    let rules = Rules::Arm { bbm: 2, hafdbs: true };
    let unrecorded = |invalidated: bool| {
        ever(|seed| {
            let (mut walks, _, table) = machine(rules, seed);
            // Clean, but writable (DBM).
            let clean = ((HOST + 0x2000) | PAGE | 1 << 51) & READ_ONLY;
            walks.store(0, (table, 2), clean, true);
            walks.barrier(0, Barrier::Stores);
            walks.enter(1);
            assert_eq!(walks.access(1, 0x2000, true), Ok(HOST + 0x2000));
            assert_ne!(walks.load(0, (table, 2)), clean, "it is recorded");

            walks.store(0, (table, 2), clean, true);
            walks.barrier(0, Barrier::Stores);
            if invalidated {
                walks.invalidate(0, Invalidate::All, true);
                walks.barrier(0, Barrier::Full);
            }
            let _ = walks.access(1, 0x2000, true);
            walks.load(0, (table, 2)) == clean
        })
    };
    assert!(unrecorded(false));
    assert!(!unrecorded(true));
}

#[test]
fn use_of_what_was_declared_gone_is_found() {
    let (mut walks, _, _) = machine(ARM, 7);
    walks.enter(1);
    walks.declare_read_only(0, 0x2abc);
    assert!(walks.access(1, 0x2000, false).is_ok() && walks.violations().is_empty());
    assert!(walks.access(1, 0x2000, true).is_ok());
    assert_eq!(walks.violations(), [Violation::StaleUse(0x2000)]);
}

#[test]
fn guest_that_is_entered_too_early_is_found() {
    let (mut walks, _, _) = machine(ARM, 7);
    walks.invalidate(0, Invalidate::Combined, false);
    walks.enter(0);
    assert_eq!(walks.violations(), [Violation::NotCompleted]);
}

#[test]
fn vmid_that_is_given_to_another_vm_without_an_invalidation_is_found() {
    let found = |invalidated: bool, vmid: u32| {
        ever(|seed| {
            let (mut walks, root, _) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.leave(1);
            if invalidated {
                walks.invalidate(0, Invalidate::All, true);
                walks.barrier(0, Barrier::Full);
            }
            let (other, table) = (walks.allocate(0, 1), walks.allocate(0, 1));
            walks.store(0, (table, 0), (2 * HOST) | PAGE, false);
            walks.store(0, (other, 0), table | 0b11, true);
            walks.barrier(0, Barrier::Stores);
            walks.load_vm(1, vmid, other);
            assert_ne!(walks.loaded_vm(1), (0, root));
            walks.enter(1);
            stir(&mut walks);
            !walks.violations().is_empty()
        })
    };
    assert!(found(false, 0));
    assert!(!found(true, 0));
    assert!(!found(false, 1), "another number");
}

#[test]
fn invalidation_concerns_the_vm_that_is_loaded_where_it_is_asked_for() {
    let stays = |vmid| {
        ever(|seed| {
            let (mut walks, root, table) = machine(ARM, seed);
            walks.enter(1);
            stir(&mut walks);
            walks.store(0, (table, 2), 0, true);
            walks.barrier(0, Barrier::Stores);
            walks.load_vm(0, vmid, root);
            walks.invalidate(0, Invalidate::All, true);
            walks.barrier(0, Barrier::Full);
            walks.access(1, 0x2000, true).is_ok()
        })
    };
    assert!(stays(1));
    assert!(!stays(0));
}

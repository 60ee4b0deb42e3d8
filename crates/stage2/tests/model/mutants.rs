//! Leaves out each required step: the model must notice, in one of the settings in which the step matters.
//!
//! `WokenFirst` is about quiet tables. If the hardware records writes and a fault makes all pages of a table writable,
//! each page wakes it, and hides that the one before did so too early. The only loss then is a page that is
//! write-protected alone, among pages that the guest may only read. At most one clear comes between the steps of a
//! fault, because a sender waits for walkers after each.

use hw_model::walks::Rules;
use stage2::{Policy, Source};

use crate::machine::Mutant;
use crate::scenario::{Kind, Setting, caught, run, seen};

/// Far more than needed: the run ends with the first failure.
const SCHEDULES: usize = 200_000;

/// The message that the model must print.
const LOST: &str = "is lost";
const OLD: &str = "an old translation";
const TWO: &str = "two translations";
const FREED: &str = "after it was freed";
const EARLY: &str = "was freed while a TLB leads to it";
const OPEN: &str = "before an invalidation was complete";
const ELSEWHERE: &str = "the guest writes elsewhere";
const FOR_EVER: &str = "faults for ever";
const MISSED: &str = "is not found";
const GONE: &str = "where there is memory";
const ALIAS: &str = "two VMs are cached under";

fn expect(setting: Setting, findings: &[&str]) {
    let found = caught(setting, SCHEDULES).expect("nobody has noticed");
    println!("{:?} after {} schedules: {found}", setting.mutant, seen().schedules);
    assert!(findings.iter().any(|finding| found.contains(finding)), "noticed for another reason: {found}");
}

const fn arm(bbm: u32, hafdbs: bool) -> Rules {
    Rules::Arm { bbm, hafdbs }
}

macro_rules! mutants {
    ($($name:ident: $mutant:ident, $kind:ident, $rules:expr, $source:ident, $policy:ident => $($finding:ident)|*;)*) => {
        const TRIED: &[Mutant] = &[Mutant::NotPublished, $(Mutant::$mutant),*];

        $(
            #[test]
            fn $name() {
                let (source, policy) = (Source::$source, Policy::$policy);
                let setting =
                    Setting { rules: $rules, kind: Kind::$kind, source, policy, mutant: Mutant::$mutant };
                expect(setting, &[$($finding),*]);
            }
        )*
    };
}

mutants! {
    missing_barrier_before_the_first_invalidation_is_caught: NoBarrierBefore, TakePages, arm(0, true), Hardware, Adaptive => OLD | TWO | OPEN;
    missing_barrier_between_the_invalidations_is_caught: NoBarrierBetween, TakePages, arm(0, true), Hardware, Adaptive => OLD | TWO | OPEN;
    missing_barrier_after_the_last_invalidation_is_caught: NoBarrierAfter, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | OPEN;
    barrier_that_waits_for_stores_only_is_caught: BarrierForStores, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | OPEN;
    barrier_that_waits_for_one_processor_only_is_caught: BarrierForOne, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | OPEN;
    missing_invalidation_of_both_stages_is_caught: NoCombined, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | FOR_EVER;
    invalidation_that_is_not_broadcast_is_caught: NotBroadcast, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO;
    shootdown_that_reaches_nobody_else_is_caught: NotBroadcast, TakeAway, Rules::Nested, Hardware, Adaptive => OLD;
    leaf_that_is_not_broken_before_it_is_made_anew_is_caught: NoBreak, Follow, arm(0, true), Hardware, Adaptive => TWO | LOST;
    table_that_is_not_broken_before_it_is_collapsed_is_caught: NoBreak, Collapse, arm(0, true), Hardware, Adaptive => TWO | EARLY;
    broken_leaf_that_says_nothing_is_caught: Emptied, Follow, arm(0, true), Hardware, Adaptive => MISSED | GONE;
    broken_table_that_says_nothing_is_caught: Emptied, Collapse, arm(2, true), Hardware, Adaptive => MISSED | GONE;
    broken_table_that_says_nothing_is_caught_on_nested_pages: Emptied, Collapse, Rules::Nested, Hardware, Adaptive => MISSED | GONE;
    break_without_a_flush_is_caught: NoFlushInside, TakePages, arm(0, true), Hardware, Adaptive => TWO;
    replacement_in_two_steps_without_a_flush_is_caught: NoFlushInside, TakePages, arm(1, true), Hardware, Adaptive => TWO;
    collapse_without_a_flush_is_caught: NoFlushInside, Collapse, arm(2, true), Hardware, Adaptive => EARLY | FREED;
    collapse_without_a_flush_is_caught_on_nested_pages: NoFlushInside, Collapse, Rules::Nested, Hardware, Adaptive => EARLY | FREED;
    first_touch_by_a_store_is_caught: PlainStore, FirstTouch, arm(2, true), Hardware, Adaptive => ELSEWHERE | TWO;
    store_in_the_place_of_an_exchange_is_caught: PlainStore, Awake, arm(0, true), Hardware, Adaptive => LOST | TWO;
    store_in_the_place_of_an_exchange_is_caught_on_nested_pages: PlainStore, Follow, Rules::Nested, Hardware, Adaptive => LOST;
    invalidation_that_names_the_wrong_level_is_caught: WrongLevel, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | FOR_EVER;
    invalidation_of_another_vm_is_caught: OtherVm, TakeAway, arm(0, true), Hardware, Adaptive => OLD | TWO | FOR_EVER;
    store_that_only_its_processor_knows_is_caught: StoresForOne, TakePages, arm(0, true), Hardware, Adaptive => OLD | TWO;
    table_that_is_linked_before_it_is_written_is_caught: NoRelease, SideBySide, arm(2, true), Hardware, Adaptive => ELSEWHERE | TWO | FREED;
    new_table_that_is_linked_before_it_is_empty_is_caught: NoRelease, FirstTouch, arm(0, false), Hardware, Adaptive => ELSEWHERE | TWO | FREED;
    vmid_that_two_vms_have_is_caught: SharedVmid, SideBySide, arm(2, true), Hardware, Adaptive => ALIAS | ELSEWHERE | OLD;
    vmid_that_two_vms_have_is_caught_on_nested_pages: SharedVmid, SideBySide, Rules::Nested, Hardware, Adaptive => ALIAS | ELSEWHERE;
    invalidation_of_the_vm_beside_is_caught: OtherVm, SideBySide, arm(0, true), Hardware, Adaptive => OLD | TWO | FOR_EVER | LOST | EARLY;
    invalidation_of_the_vm_beside_is_caught_on_nested_pages: OtherVm, SideBySide, Rules::Nested, Hardware, Adaptive => OLD | LOST | EARLY;
    table_that_is_woken_before_its_page_is_opened_is_caught_where_writes_are_recorded: WokenFirst, Awake, arm(2, true), Hardware, Lazy => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught_where_writes_are_recorded_on_nested_pages: WokenFirst, Awake, Rules::Nested, Hardware, Lazy => LOST;
    table_that_is_woken_before_its_pages_are_opened_is_caught: WokenFirst, Awake, arm(2, true), Hardware, Adaptive => LOST;
    table_that_is_woken_before_its_pages_are_opened_is_caught_on_nested_pages: WokenFirst, Awake, Rules::Nested, Hardware, Adaptive => LOST;
    table_that_is_not_broken_before_it_is_collapsed_is_caught_on_nested_pages: NoBreak, Collapse, Rules::Nested, Hardware, Adaptive => EARLY | FREED;
    level_that_is_named_too_soon_is_caught: LevelNamed, TakePages, arm(2, true), Hardware, Adaptive => OLD;
    conflict_that_is_not_resolved_is_caught: ConflictStays, TakePages, arm(2, true), Hardware, Adaptive => FOR_EVER;
    invalidation_that_leaves_pointers_to_tables_is_caught: LeavesOnly, Collapse, arm(0, true), Hardware, Adaptive => TWO | FREED | EARLY;
    table_that_is_freed_under_a_walker_is_caught: FreedEarly, Collapse, arm(2, true), Hardware, Adaptive => FREED;
    table_that_is_freed_under_a_walker_is_caught_on_nested_pages: FreedEarly, Collapse, Rules::Nested, WriteProtect, Lazy => FREED;
    denial_that_is_not_flushed_is_caught: NoLocal, Follow, arm(0, false), WriteProtect, Adaptive => FOR_EVER;
    copy_before_the_flush_is_caught: NoFlush, Follow, arm(0, true), Hardware, Adaptive => LOST;
    copy_before_the_flush_is_caught_on_nested_pages: NoFlush, Awake, Rules::Nested, Hardware, Adaptive => LOST;
    copy_before_the_clear_is_caught: CopiedFirst, Follow, arm(2, true), Hardware, Adaptive => LOST;
    copy_before_the_clear_is_caught_on_nested_pages: CopiedFirst, Follow, Rules::Nested, Hardware, Adaptive => LOST;
    mark_before_the_write_is_caught: MarkedFirst, Follow, arm(2, true), Hardware, Adaptive => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught: WokenFirst, Awake, arm(0, false), WriteProtect, Adaptive => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught_on_nested_pages: WokenFirst, Awake, Rules::Nested, WriteProtect, Adaptive => LOST;
    table_that_is_not_woken_is_caught: NotWoken, Awake, arm(0, false), WriteProtect, Adaptive => LOST;
    table_that_is_not_woken_is_caught_on_nested_pages: NotWoken, Awake, Rules::Nested, Hardware, Adaptive => LOST;
    list_that_is_not_reported_is_caught: NotReported, Awake, Rules::Nested, Listed, Adaptive => LOST;
    report_that_wakes_nothing_is_caught: NotWoken, Awake, Rules::Nested, Listed, Adaptive => LOST;
    invvpid_that_leaves_what_combined_entries_are_made_from_is_caught: CombinedOnly, TakeAway, Rules::Extended, Hardware, Adaptive => OLD;
    shootdown_on_extended_pages_that_reaches_nobody_else_is_caught: NotBroadcast, TakeAway, Rules::Extended, Hardware, Adaptive => OLD;
    list_on_extended_pages_that_is_not_reported_is_caught: NotReported, Awake, Rules::Extended, Listed, Adaptive => LOST;
    broken_table_that_says_nothing_is_caught_on_extended_pages: Emptied, Collapse, Rules::Extended, Hardware, Adaptive => MISSED | GONE;
    collapse_without_a_flush_is_caught_on_extended_pages: NoFlushInside, Collapse, Rules::Extended, Hardware, Adaptive => EARLY | FREED;
    store_in_the_place_of_an_exchange_is_caught_on_extended_pages: PlainStore, Follow, Rules::Extended, Hardware, Adaptive => LOST;
    invalidation_of_the_vm_beside_is_caught_on_extended_pages: OtherVm, SideBySide, Rules::Extended, Hardware, Adaptive => OLD | LOST | EARLY;
    table_that_is_woken_before_its_page_is_opened_is_caught_where_writes_are_recorded_on_extended_pages: WokenFirst, Awake, Rules::Extended, Hardware, Lazy => LOST;
    table_that_is_woken_before_its_pages_are_opened_is_caught_on_extended_pages: WokenFirst, Awake, Rules::Extended, Hardware, Adaptive => LOST;
    table_that_is_not_broken_before_it_is_collapsed_is_caught_on_extended_pages: NoBreak, Collapse, Rules::Extended, Hardware, Adaptive => EARLY | FREED;
    table_that_is_freed_under_a_walker_is_caught_on_extended_pages: FreedEarly, Collapse, Rules::Extended, WriteProtect, Lazy => FREED;
    copy_before_the_flush_is_caught_on_extended_pages: NoFlush, Awake, Rules::Extended, Hardware, Adaptive => LOST;
    copy_before_the_clear_is_caught_on_extended_pages: CopiedFirst, Follow, Rules::Extended, Hardware, Adaptive => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught_on_extended_pages: WokenFirst, Awake, Rules::Extended, WriteProtect, Adaptive => LOST;
    table_that_is_not_woken_is_caught_on_extended_pages: NotWoken, Awake, Rules::Extended, Hardware, Adaptive => LOST;
    missing_flush_after_unmap_is_caught_on_extended_pages: NoFlushOfRange, TakeAway, Rules::Extended, Hardware, Adaptive => OLD;
    cancel_that_forgets_is_caught: ForgottenOnCancel, Follow, Rules::Nested, Hardware, Adaptive => LOST;
    missing_flush_after_unmap_is_caught: NoFlushOfRange, TakeAway, arm(2, true), Hardware, Adaptive => OLD | TWO;
    missing_flush_after_unmap_is_caught_on_nested_pages: NoFlushOfRange, TakeAway, Rules::Nested, Hardware, Adaptive => OLD;
}

/// The one step whose omission is harmless: a processor that faults on an old entry flushes it and sees the new one.
#[test]
fn new_entry_that_is_not_published_costs_faults_and_nothing_else() {
    let stops = |mutant| {
        let (source, policy) = (Source::WriteProtect, Policy::Adaptive);
        let before = seen().stops;
        run(Setting { rules: arm(0, true), kind: Kind::FirstTouch, source, policy, mutant }, 400);
        seen().stops - before
    };
    assert!(stops(Mutant::NotPublished) > stops(Mutant::Nothing) * 5 / 4);
}

/// What to leave out, and the mutants that do so.
const DEMANDED: &[(&str, &[Mutant])] = &[
    (
        "each barrier",
        &[Mutant::NoBarrierBefore, Mutant::NoBarrierBetween, Mutant::NoBarrierAfter, Mutant::NotPublished],
    ),
    ("what each barrier waits for", &[Mutant::BarrierForStores, Mutant::BarrierForOne, Mutant::StoresForOne]),
    ("release order", &[Mutant::NoRelease]),
    ("VMALLE1", &[Mutant::NoCombined]),
    ("INVEPT", &[Mutant::CombinedOnly]),
    ("IS", &[Mutant::NotBroadcast, Mutant::NoLocal]),
    ("the break store", &[Mutant::NoBreak, Mutant::NoFlushInside]),
    ("what a broken entry says", &[Mutant::Emptied]),
    ("exchange, not store", &[Mutant::PlainStore]),
    ("TTL", &[Mutant::WrongLevel, Mutant::LevelNamed]),
    ("no L suffix for tables", &[Mutant::LeavesOnly]),
    ("VMID", &[Mutant::OtherVm, Mutant::SharedVmid]),
    ("conflicts", &[Mutant::ConflictStays]),
    ("late free", &[Mutant::FreedEarly, Mutant::NoFlushOfRange]),
    ("order of a harvest", &[Mutant::NoFlush, Mutant::CopiedFirst, Mutant::ForgottenOnCancel]),
    ("written, then marked", &[Mutant::MarkedFirst]),
    ("what the hardware lists", &[Mutant::NotReported]),
    ("made writable, then marked", &[Mutant::WokenFirst, Mutant::NotWoken]),
];

#[test]
fn every_mutant_is_tried() {
    let demanded = |one: &Mutant| DEMANDED.iter().any(|(_, mutants)| mutants.contains(one));
    for mutant in Mutant::ALL.iter().filter(|one| **one != Mutant::Nothing) {
        assert!(demanded(mutant) && TRIED.contains(mutant), "{mutant:?}");
    }
}

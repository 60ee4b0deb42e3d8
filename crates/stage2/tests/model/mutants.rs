//! Each step that the rules demand, left out: the model must notice, in one of the settings in which the step counts.

use hw_model::walks::Rules;
use stage2::{Format, Policy, Source};

use crate::machine::Mutant;
use crate::scenario::{Kind, Setting, caught};
use crate::{arm, nested};

/// Far more than is needed: the run ends with the first that shows it.
const SCHEDULES: usize = 200_000;

/// What must have been found to be wrong.
const LOST: &str = "is lost";
const OLD: &str = "an old translation";
const TWO: &str = "two translations";
const FREED: &str = "after it was freed";
const EARLY: &str = "was freed while a TLB leads to it";
const OPEN: &str = "before an invalidation was complete";
const ELSEWHERE: &str = "the guest writes elsewhere";
const FOR_EVER: &str = "faults for ever";

fn expect<F: Format + Copy + Send + Sync + 'static>(
    (format, rules): (F, Rules),
    kind: Kind,
    mutant: Mutant,
    findings: &[&str],
) {
    // Where the hardware records writes, a table takes two rounds to become quiet: it would have to be left open for both.
    let faults = rules == (Rules::Arm { bbm: 0, hafdbs: false }) || mutant == Mutant::WokenFirst;
    let source = if faults { Source::WriteProtect } else { Source::Hardware };
    let setting = Setting { format, rules, kind, source, policy: Policy::Adaptive, mutant };
    let found = caught(setting, SCHEDULES).expect("nobody has noticed");
    assert!(findings.iter().any(|finding| found.contains(finding)), "noticed for another reason: {found}");
}

macro_rules! mutants {
    ($($name:ident: $mutant:ident, $kind:ident, $machine:expr => $($finding:ident)|*;)*) => {
        $(
            #[test]
            fn $name() {
                expect($machine, Kind::$kind, Mutant::$mutant, &[$($finding),*]);
            }
        )*
    };
}

mutants! {
    missing_barrier_before_the_first_invalidation_is_caught: NoBarrierBefore, TakeAway, arm(0, true) => OLD | TWO | OPEN;
    missing_barrier_between_the_invalidations_is_caught: NoBarrierBetween, TakeAway, arm(0, true) => OLD | TWO | OPEN;
    missing_barrier_after_the_last_invalidation_is_caught: NoBarrierAfter, TakeAway, arm(0, true) => OLD | TWO | OPEN;
    barrier_that_waits_for_stores_only_is_caught: BarrierForStores, TakeAway, arm(0, true) => OLD | TWO | OPEN;
    barrier_that_waits_for_one_processor_only_is_caught: BarrierForOne, TakeAway, arm(0, true) => OLD | TWO | OPEN;
    missing_invalidation_of_both_stages_is_caught: NoCombined, TakeAway, arm(0, true) => OLD | TWO | FOR_EVER;
    invalidation_that_is_not_broadcast_is_caught: NotBroadcast, TakeAway, arm(0, true) => OLD | TWO;
    shootdown_that_reaches_nobody_else_is_caught: NotBroadcast, TakeAway, nested() => OLD;
    leaf_that_is_not_broken_before_it_is_made_anew_is_caught: NoBreak, Follow, arm(0, true) => TWO | LOST;
    table_that_is_not_broken_before_it_is_collapsed_is_caught: NoBreak, Collapse, arm(0, true) => TWO | EARLY;
    break_without_a_flush_is_caught: NoFlushInside, Follow, arm(0, true) => TWO;
    replacement_in_two_steps_without_a_flush_is_caught: NoFlushInside, Follow, arm(1, true) => TWO;
    collapse_without_a_flush_is_caught: NoFlushInside, Collapse, arm(2, true) => EARLY | FREED;
    collapse_without_a_flush_is_caught_on_nested_pages: NoFlushInside, Collapse, nested() => EARLY | FREED;
    first_touch_by_a_store_is_caught: PlainStore, FirstTouch, arm(2, true) => ELSEWHERE | TWO;
    store_in_the_place_of_an_exchange_is_caught: PlainStore, Follow, arm(0, true) => LOST | TWO;
    store_in_the_place_of_an_exchange_is_caught_on_nested_pages: PlainStore, Follow, nested() => LOST;
    invalidation_that_names_the_wrong_level_is_caught: WrongLevel, TakeAway, arm(0, true) => OLD | TWO | FOR_EVER;
    level_that_is_named_too_soon_is_caught: LevelNamed, TakePages, arm(2, true) => OLD;
    conflict_that_is_not_resolved_is_caught: ConflictStays, TakePages, arm(2, true) => FOR_EVER;
    invalidation_that_leaves_pointers_to_tables_is_caught: LeavesOnly, Collapse, arm(0, true) => TWO | FREED | EARLY;
    table_that_is_freed_under_a_walker_is_caught: FreedEarly, Collapse, arm(0, true) => FREED;
    table_that_is_freed_under_a_walker_is_caught_on_nested_pages: FreedEarly, Collapse, nested() => FREED;
    denial_that_is_not_flushed_is_caught: NoLocal, Follow, arm(0, false) => FOR_EVER;
    copy_before_the_flush_is_caught: NoFlush, Follow, arm(0, true) => LOST;
    copy_before_the_flush_is_caught_on_nested_pages: NoFlush, Follow, nested() => LOST;
    copy_before_the_clear_is_caught: CopiedFirst, Follow, arm(2, true) => LOST;
    copy_before_the_clear_is_caught_on_nested_pages: CopiedFirst, Follow, nested() => LOST;
    mark_before_the_write_is_caught: MarkedFirst, Follow, nested() => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught: WokenFirst, Follow, arm(0, false) => LOST;
    table_that_is_woken_before_its_page_is_opened_is_caught_on_nested_pages: WokenFirst, Follow, nested() => LOST;
    table_that_is_not_woken_is_caught: NotWoken, Follow, arm(0, false) => LOST;
    table_that_is_not_woken_is_caught_on_nested_pages: NotWoken, Follow, nested() => LOST;
    cancel_that_forgets_is_caught: ForgottenOnCancel, Follow, nested() => LOST;
    missing_flush_after_unmap_is_caught: NoFlushOfRange, TakeAway, arm(2, true) => OLD | TWO;
    missing_flush_after_unmap_is_caught_on_nested_pages: NoFlushOfRange, TakeAway, nested() => OLD;
}

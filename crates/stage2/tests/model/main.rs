//! The code that ships, on a machine that takes every liberty: random schedules of vCPUs that write and fault, of a sender
//! that follows with a copy, of ranges that come and go, for both architectures and all that their processors may have.
//!
//! Tables have four entries instead of 512, so that all that can happen does, soon. Some thousand schedules by default; for more,
//! `DUNLIN_SCHEDULES=100000 cargo test --release -p dunlin-stage2 --test model`.
//!
//! Every step that the rules demand is also left out once: the [`mutants`] must be caught, or the machine is too kind.

mod machine;
mod mutants;
mod scenario;

use std::sync::atomic::Ordering;

use hw_model::walks::Rules;
use machine::Mutant;
use scenario::{Kind, Setting};
use stage2::{NptOf, Policy, Source, VmsaOf};

const POLICIES: [Policy; 3] = [Policy::Lazy, Policy::Eager, Policy::Adaptive];

/// How many schedules of one setting are tried.
fn schedules() -> usize {
    let by_default = if cfg!(debug_assertions) { 60 } else { 600 };
    std::env::var("DUNLIN_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(by_default)
}

fn arm(bbm: u32, hafdbs: bool) -> (VmsaOf<2>, Rules) {
    let format = VmsaOf::<2>::new(21, 40, false).expect("possible").with_bbm(bbm);
    (if hafdbs { format.with_recorded_writes() } else { format }, Rules::Arm { bbm, hafdbs })
}

fn nested() -> (NptOf<2>, Rules) {
    (NptOf::<2> { one_gib_pages: true }, Rules::Nested)
}

fn try_all<F: stage2::Format + Copy + Send + Sync + 'static>(
    (format, rules): (F, Rules),
    kind: Kind,
    sources: &[Source],
) {
    for &source in sources {
        for policy in POLICIES {
            let setting = Setting { format, rules, kind, source, policy, mutant: Mutant::Nothing };
            scenario::run(setting, schedules());
        }
    }
}

#[test]
fn copy_equals_the_guest_on_nested_pages() {
    try_all(nested(), Kind::Follow, &[Source::WriteProtect, Source::Hardware]);
}

#[test]
fn copy_equals_the_guest_on_arm_without_any_feature() {
    try_all(arm(0, false), Kind::Follow, &[Source::WriteProtect]);
}

#[test]
fn copy_equals_the_guest_on_arm_that_records_writes() {
    try_all(arm(0, true), Kind::Follow, &[Source::WriteProtect, Source::Hardware]);
}

#[test]
fn copy_equals_the_guest_on_arm_that_replaces_in_two_steps() {
    try_all(arm(1, true), Kind::Follow, &[Source::WriteProtect, Source::Hardware]);
}

#[test]
fn copy_equals_the_guest_on_arm_that_replaces_in_one_store() {
    try_all(arm(2, true), Kind::Follow, &[Source::WriteProtect, Source::Hardware]);
}

#[test]
fn what_the_model_is_there_for_does_happen() {
    for (kind, bbm) in [(Kind::Follow, 0), (Kind::Collapse, 0), (Kind::TakePages, 2)] {
        let (format, rules) = arm(bbm, true);
        let policy = Policy::Adaptive;
        scenario::run(Setting { format, rules, kind, source: Source::Hardware, policy, mutant: Mutant::Nothing }, 400);
    }
    let seen = &scenario::SEEN;
    let counts = [
        &seen.recorded,
        &seen.broadcasts,
        &seen.locals,
        &seen.stops,
        &seen.collapsed,
        &seen.disturbed,
        &seen.conflicts,
    ];
    for count in counts.into_iter().chain([&seen.hushed, &seen.awakened]) {
        assert!(count.load(Ordering::Relaxed) > 100, "{seen:?}");
    }
}

#[test]
fn what_is_taken_away_is_never_used_again() {
    try_all(nested(), Kind::TakeAway, &[Source::WriteProtect]);
    for bbm in 0..=2 {
        try_all(arm(bbm, true), Kind::TakeAway, &[Source::WriteProtect]);
    }
}

#[test]
fn pages_of_one_leaf_are_protected_by_two_at_once() {
    try_all(nested(), Kind::TakePages, &[Source::WriteProtect]);
    for bbm in 0..=2 {
        try_all(arm(bbm, true), Kind::TakePages, &[Source::WriteProtect]);
    }
}

#[test]
fn all_agree_on_the_frame_of_a_page_that_several_touch_first() {
    try_all(nested(), Kind::FirstTouch, &[Source::WriteProtect]);
    for bbm in 0..=2 {
        try_all(arm(bbm, true), Kind::FirstTouch, &[Source::WriteProtect]);
    }
}

#[test]
fn large_pages_come_back_under_a_writing_guest() {
    try_all(nested(), Kind::Collapse, &[Source::Hardware]);
    for bbm in 0..=2 {
        try_all(arm(bbm, true), Kind::Collapse, &[Source::Hardware]);
    }
}

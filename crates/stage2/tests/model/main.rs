//! The released code, on a machine that does anything that the manuals allow, with random schedules. vCPUs write and
//! fault, a sender follows with a copy, ranges come and go, and VMs run side by side. It covers both architectures and
//! all features of their processors.
//!
//! Tables have four entries instead of 512, so that rare events are frequent. By default a test tries some thousand
//! schedules. For a million on nested pages, a million on extended ones and a million on Arm, some minutes of one core
//! each:
//!
//! ```text
//! export DUNLIN_SCHEDULES=1000000
//! cargo test --release -p dunlin-stage2 --test model -- --test-threads=1 --nocapture --skip mutants on_nested_pages
//! cargo test --release -p dunlin-stage2 --test model -- --test-threads=1 --nocapture --skip mutants on_extended_pages
//! cargo test --release -p dunlin-stage2 --test model -- --test-threads=1 --nocapture --skip mutants on_arm
//! ```
//!
//! Each test prints how many schedules it has tried, and how many per second. `DUNLIN_SEED` (default 0) selects others.
//!
//! Each required step is also left out once: the tests must catch the [`mutants`], or the machine is too kind.

mod machine;
mod mutants;
mod scenario;
mod sender;
mod vcpu;

use std::time::Instant;

use hw_model::walks::Rules;
use machine::Mutant;
use scenario::{Kind, Setting, seen};
use stage2::{Policy, Source};

const POLICIES: [Policy; 3] = [Policy::Lazy, Policy::Eager, Policy::Adaptive];
const KINDS: [Kind; 7] =
    [Kind::Follow, Kind::Awake, Kind::TakeAway, Kind::TakePages, Kind::Collapse, Kind::FirstTouch, Kind::SideBySide];

const NESTED: &[Rules] = &[Rules::Nested];
const EXTENDED: &[Rules] = &[Rules::Extended];
const ARM: &[Rules] = &[
    Rules::Arm { bbm: 0, hafdbs: false },
    Rules::Arm { bbm: 1, hafdbs: false },
    Rules::Arm { bbm: 2, hafdbs: false },
    Rules::Arm { bbm: 0, hafdbs: true },
    Rules::Arm { bbm: 1, hafdbs: true },
    Rules::Arm { bbm: 2, hafdbs: true },
];

/// Number of schedules for one architecture, in all settings together.
fn schedules() -> usize {
    let by_default = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
    std::env::var("DUNLIN_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(by_default)
}

/// The settings of this kind on these processors.
fn settings(processors: &[Rules], kind: Kind) -> Vec<Setting> {
    let sources = |rules: Rules| match (kind, rules) {
        // No log is active.
        (Kind::TakeAway | Kind::TakePages | Kind::FirstTouch, _) => &[Source::WriteProtect][..],
        (_, Rules::Arm { hafdbs: false, .. }) => &[Source::WriteProtect],
        (_, Rules::Arm { .. }) => &[Source::WriteProtect, Source::Hardware],
        (_, Rules::Nested | Rules::Extended) => &[Source::WriteProtect, Source::Hardware, Source::Listed],
    };
    let policies = match kind {
        Kind::TakeAway | Kind::TakePages | Kind::FirstTouch => &POLICIES[..1],
        Kind::Follow | Kind::Awake | Kind::Collapse | Kind::SideBySide => &POLICIES,
    };
    let mut settings = Vec::new();
    for &rules in processors {
        for &source in sources(rules) {
            for &policy in policies {
                settings.push(Setting { rules, kind, source, policy, mutant: Mutant::Nothing });
            }
        }
    }
    settings
}

/// Tries an equal share of all schedules in each setting.
fn try_all(processors: &[Rules], kind: Kind) {
    let all: usize = KINDS.iter().map(|kind| settings(processors, *kind).len()).sum();
    let start = Instant::now();
    for setting in settings(processors, kind) {
        scenario::run(setting, schedules().div_ceil(all).next_multiple_of(2));
    }
    let (count, elapsed) = (seen().schedules, start.elapsed());
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let rate = count as f64 / elapsed.as_secs_f64();
    println!("{kind:?}: {count} schedules in {elapsed:.1?}, {rate:.0} in a second");
}

macro_rules! schedules {
    ($($name:ident: $kind:ident on $processors:ident;)*) => {
        $(
            #[test]
            fn $name() {
                try_all($processors, Kind::$kind);
            }
        )*
    };
}

schedules! {
    copy_equals_the_guest_on_nested_pages: Follow on NESTED;
    copy_equals_the_guest_on_extended_pages: Follow on EXTENDED;
    copy_equals_the_guest_on_arm: Follow on ARM;
    copy_equals_a_guest_that_wakes_up_on_nested_pages: Awake on NESTED;
    copy_equals_a_guest_that_wakes_up_on_extended_pages: Awake on EXTENDED;
    copy_equals_a_guest_that_wakes_up_on_arm: Awake on ARM;
    what_is_taken_away_is_never_used_again_on_nested_pages: TakeAway on NESTED;
    what_is_taken_away_is_never_used_again_on_extended_pages: TakeAway on EXTENDED;
    what_is_taken_away_is_never_used_again_on_arm: TakeAway on ARM;
    pages_of_one_leaf_are_protected_by_two_at_once_on_nested_pages: TakePages on NESTED;
    pages_of_one_leaf_are_protected_by_two_at_once_on_extended_pages: TakePages on EXTENDED;
    pages_of_one_leaf_are_protected_by_two_at_once_on_arm: TakePages on ARM;
    large_pages_come_back_under_a_writing_guest_on_nested_pages: Collapse on NESTED;
    large_pages_come_back_under_a_writing_guest_on_extended_pages: Collapse on EXTENDED;
    large_pages_come_back_under_a_writing_guest_on_arm: Collapse on ARM;
    all_agree_on_the_frame_of_a_page_that_several_touch_first_on_nested_pages: FirstTouch on NESTED;
    all_agree_on_the_frame_of_a_page_that_several_touch_first_on_extended_pages: FirstTouch on EXTENDED;
    all_agree_on_the_frame_of_a_page_that_several_touch_first_on_arm: FirstTouch on ARM;
    vms_side_by_side_do_not_meet_on_nested_pages: SideBySide on NESTED;
    vms_side_by_side_do_not_meet_on_extended_pages: SideBySide on EXTENDED;
    vms_side_by_side_do_not_meet_on_arm: SideBySide on ARM;
}

#[test]
fn what_the_model_is_there_for_does_happen() {
    for (kind, bbm, schedules) in [(Kind::Follow, 0, 200), (Kind::Collapse, 0, 100), (Kind::TakePages, 2, 600)] {
        let rules = Rules::Arm { bbm, hafdbs: true };
        let (source, policy) = (Source::Hardware, Policy::Adaptive);
        scenario::run(Setting { rules, kind, source, policy, mutant: Mutant::Nothing }, schedules);
    }
    let (rules, kind, policy) = (Rules::Nested, Kind::Follow, Policy::Adaptive);
    scenario::run(Setting { rules, kind, source: Source::Listed, policy, mutant: Mutant::Nothing }, 100);
    let seen = seen();
    let counts =
        [seen.reported, seen.recorded, seen.broadcasts, seen.locals, seen.stops, seen.collapsed, seen.disturbed];
    for count in counts.into_iter().chain([seen.conflicts, seen.hushed, seen.awakened, seen.cancelled, seen.restarted])
    {
        assert!(count > 10, "{seen:?}");
    }
}

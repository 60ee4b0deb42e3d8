//! How fast large leaves are split.

use crate::Pace;
use proptest::prelude::{prop, prop_assert, proptest};

#[test]
fn what_is_not_used_is_kept_for_one_period_only() {
    let mut pace = Pace::new(10, 1000, 50);
    assert_eq!(pace.allowed(50), 10);
    pace.spend(10);
    assert_eq!(pace.allowed(149), 0);
    assert_eq!(pace.allowed(150), 1);
    assert_eq!(pace.allowed(350), 3);
    assert_eq!(pace.allowed(u64::MAX), 10);
    assert_eq!(pace.allowed(0), 10, "a clock that goes back gives nothing and takes nothing");
}

#[test]
fn no_splits_are_no_splits_for_ever() {
    let mut pace = Pace::new(0, 0, 0);
    assert_eq!((pace.allowed(0), pace.allowed(5), pace.allowed(u64::MAX)), (0, 0, 0));
}

proptest! {
    #[test]
    fn never_more_than_the_pace_and_one_period_at_once(
        splits in 1..100_u64, period in 1..10_000_u64, steps in prop::collection::vec(0..3_000_u64, 1..60),
    ) {
        let (mut now, mut done) = (0, 0);
        let mut pace = Pace::new(splits, period, now);
        for step in steps {
            now += step;
            let allowed = pace.allowed(now);
            pace.spend(allowed);
            done += allowed;
            prop_assert!(done <= splits + now * splits / period, "{done} until {now}");
        }
        // The allowed splits do come.
        let mut slow = Pace::new(splits, period, 0);
        slow.spend(splits);
        let due: u64 = (1..=period).map(|at| { let allowed = slow.allowed(at); slow.spend(allowed); allowed }).sum();
        prop_assert!(due == splits, "{due} of {splits}");
    }
}

//! Which batches count.

use super::*;

fn batch(start: f64, end: f64) -> Batch {
    Batch { start, end, until: end }
}

#[test]
fn batch_counts_if_the_other_was_at_it_for_most_of_it() {
    let this = batch(0.0, 100.0);
    assert!(this.was_beside(batch(0.0, 100.0), 1.0));
    assert!(this.was_beside(batch(35.0, 135.0), 1.0));
    assert!(!this.was_beside(batch(36.0, 136.0), 1.0));
    assert!(!this.was_beside(batch(200.0, 300.0), 1.0));
}

#[test]
fn who_is_done_first_is_there_until_the_other_is_done() {
    let (slow, fast) = (batch(0.0, 100.0), Batch { start: 0.0, end: 50.0, until: 104.0 });
    assert!(slow.was_beside(fast, 1.0) && fast.was_beside(slow, 1.0));
    assert!(!slow.was_beside(batch(0.0, 50.0), 1.0));
}

#[test]
fn thread_that_lost_its_core_does_not_count_as_running() {
    let this = batch(0.0, 100.0);
    assert!(!this.was_beside(batch(0.0, 401.0), 1.0), "in the midst of its batch");
    assert!(!batch(0.0, 401.0).was_beside(this, 1.0), "nor does the batch itself count");
    assert!(!this.was_beside(Batch { start: 0.0, end: 90.0, until: 5000.0 }, 1.0), "while it waited for the other");
}

#[test]
fn sides_may_differ_as_they_always_do() {
    let (slow, fast) = (batch(0.0, 100.0), Batch { start: 0.0, end: 10.0, until: 104.0 });
    assert!(!slow.was_beside(fast, 1.0));
    assert!(slow.was_beside(fast, 10.0) && fast.was_beside(slow, 0.1));
    let all = [(slow, fast); 3];
    assert_eq!(lengths(all.into_iter()), [100.0; 3]);
    // Three are as usual; in the fourth the slow side was faster than ever: the other one did not run.
    let alone = (batch(0.0, 9.0), Batch { start: 0.0, end: 10.0, until: 10.0 });
    assert_eq!(lengths(all.into_iter().chain([alone])), [100.0; 3]);
    assert!(lengths(std::iter::empty()).is_empty());
}

#[test]
fn only_the_side_that_had_company_counts() {
    let pairs = [(batch(0.0, 100.0), batch(0.0, 100.0)), (batch(200.0, 300.0), batch(290.0, 390.0))];
    assert_eq!(lengths(pairs.into_iter()), [100.0]);
}

#[test]
fn figure_is_the_lower_quartile_and_needs_enough_batches() {
    let lengths: Vec<f64> = (0..400).rev().map(f64::from).collect();
    assert_eq!(quartile(lengths, 10), Some(10.0));
    assert_eq!(quartile(vec![1.0; LEAST_BATCHES - 1], 1), None);
}

#[test]
fn both_sides_do_all_their_batches_and_nobody_waits_for_ever() {
    let counts = [AtomicU32::new(0), AtomicU32::new(0)];
    let side = |who: usize| {
        let count = &counts[who];
        move |times: u32| {
            count.fetch_add(times, Ordering::Relaxed);
        }
    };
    // On a computer with other things to do there may be no figure; there are always batches.
    let _ = beside(&mut side(0), &mut side(1), 64);
    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) >= 64));
    let before = counts[1].load(Ordering::Relaxed);
    let _ = alone(&mut side(0), 64);
    assert_eq!(counts[1].load(Ordering::Relaxed), before);
}

#[test]
fn turns_without_figures_are_left_out_and_too_many_are_too_many() {
    assert_eq!(in_turns(|turn| (turn % 2 == 0).then_some(turn)).map(|turns| turns.len()), Some(LEAST_TURNS));
    assert_eq!(in_turns(|turn| (turn % 3 == 0).then_some(turn)), None);
    let mut count = 0;
    let nothing: Option<Vec<()>> = in_turns(|_| {
        count += 1;
        None
    });
    assert_eq!((nothing, count), (None, FIRST_TURNS));
}

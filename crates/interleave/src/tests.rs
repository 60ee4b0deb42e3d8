use std::sync::Arc;

use super::{AtomicBool, Ordering, STEPS, Schedules, find, spawn};

/// Each raises its flag, and lowers it again if the other's is up: for ever, if both are equally fast.
fn after_you() {
    let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
    let go = |flags: &[AtomicBool; 2], own: usize| {
        // Until threads go in step, if they will.
        for _ in 0..2_000 {
            flags[own].load(Ordering::SeqCst);
        }
        loop {
            flags[own].store(true, Ordering::SeqCst);
            if !flags[1 - own].load(Ordering::SeqCst) {
                break;
            }
            flags[own].store(false, Ordering::SeqCst);
        }
        flags[own].store(false, Ordering::SeqCst);
    };
    let others = flags.clone();
    let thread = spawn(move || go(&others, 1));
    go(&flags, 0);
    thread.join();
}

#[test]
fn threads_in_step_give_way_to_each_other_for_ever_and_random_ones_do_not() {
    assert_eq!(find(Schedules::Random, 1, 200, STEPS, after_you), Ok(200));
    let (_, why) = find(Schedules::InStep, 1, 200, STEPS, after_you).expect_err("nobody gives up");
    assert!(why.contains("max_steps"), "{why}");
}

#[test]
fn interleaving_in_step_is_repeated_by_its_seed() {
    let number = |seed| find(Schedules::InStep, seed, 200, STEPS, after_you).map_err(|(number, _)| number);
    assert_eq!(number(7), number(7));
}

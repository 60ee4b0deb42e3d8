use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::*;

/// A device whose line is its one bit.
struct Bit(bool);

impl Interrupts for Bit {
    fn interrupt(&self) -> bool {
        self.0
    }
}

#[test]
fn only_changes_are_told() {
    let (device, told) = (Wired::new(Bit(false)), Cell::new(0));
    let set = |to: bool| {
        device.with(
            |bit| bit.0 = to,
            |asserted| {
                assert_eq!(asserted, to);
                told.set(told.get() + 1);
            },
        );
    };
    set(false);
    set(true);
    set(true);
    set(false);
    assert_eq!(told.get(), 2);
}

#[test]
fn changes_by_several_processors_are_told_in_the_order_in_which_they_happen() {
    const ROUNDS: u32 = 200_000;
    let (device, told, line) = (Wired::new(Bit(false)), AtomicU32::new(0), AtomicU32::new(0));
    let toggle = || {
        for _ in 0..ROUNDS {
            // An interrupt controller that hears of the same level twice has missed an edge.
            let tell = |asserted: bool| {
                told.fetch_add(1, Ordering::Relaxed);
                assert_ne!(line.swap(asserted.into(), Ordering::Relaxed), asserted.into());
            };
            device.with(|bit| bit.0 = !bit.0, tell);
        }
    };
    thread::scope(|scope| {
        scope.spawn(toggle);
        scope.spawn(toggle);
    });
    assert_eq!((told.into_inner(), line.into_inner()), (2 * ROUNDS, 0));
}

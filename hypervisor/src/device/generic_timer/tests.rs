//! The timer's registers and its level, at increasing counts.

use super::{GenericTimer, Register, State};

fn armed(compare: u64, control: u64) -> GenericTimer {
    let mut timer = GenericTimer::default();
    timer.write(Register::Compare, compare, 0);
    timer.write(Register::Control, control, 0);
    timer
}

#[test]
fn level_follows_the_condition_up_and_down() {
    let mut timer = armed(100, 1);
    assert_eq!((timer.settle(99), timer.deadline()), (None, Some(100)));
    assert_eq!(timer.read(Register::Control, 99), 1);
    assert_eq!((timer.settle(100), timer.deadline()), (Some(true), None));
    assert_eq!(timer.read(Register::Control, 100), 5);
    // It stays up, and is reported once.
    assert_eq!(timer.settle(5000), None);
    timer.write(Register::Compare, 6000, 5000);
    assert_eq!((timer.settle(5000), timer.deadline()), (Some(false), Some(6000)));
}

#[test]
fn mask_hides_the_interrupt_and_not_the_condition() {
    let mut timer = armed(100, 3);
    assert_eq!((timer.settle(200), timer.deadline(), timer.interrupts()), (None, None, false));
    assert_eq!(timer.read(Register::Control, 200), 7);
    timer.write(Register::Control, 1, 200);
    assert_eq!(timer.settle(200), Some(true));
    timer.write(Register::Control, 3, 200);
    assert_eq!(timer.settle(200), Some(false));
}

#[test]
fn timer_that_is_off_has_neither_condition_nor_interrupt() {
    let mut timer = armed(0, 0);
    assert_eq!((timer.settle(1000), timer.deadline(), timer.read(Register::Control, 1000)), (None, None, 0));
    timer.write(Register::Control, 1, 1000);
    assert_eq!(timer.settle(1000), Some(true));
    timer.write(Register::Control, 0, 1000);
    assert_eq!(timer.settle(1000), Some(false));
}

#[test]
fn value_is_signed_and_relative() {
    let mut timer = armed(0, 1);
    timer.write(Register::Value, 50, 1000);
    assert_eq!(timer.read(Register::Compare, 1000), 1050);
    assert_eq!(timer.read(Register::Value, 1010), 40);
    // In the past: it keeps counting down.
    assert_eq!(timer.read(Register::Value, 1051), 0xffff_ffff);
    // -1, and the upper half means nothing.
    timer.write(Register::Value, 0x1234_5678_ffff_ffff, 1000);
    assert_eq!(timer.read(Register::Compare, 1000), 999);
    assert_eq!(timer.settle(1000), Some(true));
    timer.write(Register::Value, 0x7fff_ffff, 1000);
    assert_eq!(timer.read(Register::Compare, 1000), 1000 + 0x7fff_ffff);
}

#[test]
fn control_keeps_what_can_be_written() {
    let mut timer = armed(u64::MAX, u64::MAX);
    assert_eq!(timer.read(Register::Control, 5), 3);
    // The largest count is far, not past.
    timer.write(Register::Control, 1, 5);
    assert_eq!((timer.settle(5), timer.deadline()), (None, Some(u64::MAX)));
}

#[test]
fn timer_that_goes_on_from_a_state_is_the_same() {
    let mut random = fastrand::Rng::with_seed(11);
    let (mut timer, mut now) = (GenericTimer::default(), 0);
    for _ in 0..20_000 {
        let mut other = GenericTimer::with_state(&timer.state());
        assert_eq!(other, timer);
        // Both do the same from here on.
        let register = [Register::Value, Register::Control, Register::Compare][random.usize(..3)];
        let value = match register {
            Register::Value => random.u64(..100),
            Register::Control => random.u64(..8),
            Register::Compare => now + random.u64(..100),
        };
        for timer in [&mut timer, &mut other] {
            timer.write(register, value, now);
        }
        for register in [Register::Value, Register::Control, Register::Compare] {
            assert_eq!(timer.read(register, now), other.read(register, now));
        }
        assert_eq!((timer.settle(now), timer.deadline()), (other.settle(now), other.deadline()));
        now += random.u64(..50);
    }
    let odd = State { control: u64::MAX, compare: 7, is_asserted: true };
    let timer = GenericTimer::with_state(&odd);
    assert_eq!((timer.read(Register::Control, 0), timer.is_asserted()), (3, true));
}

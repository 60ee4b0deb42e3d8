//! The counter as software uses it, at times in nanoseconds.

use super::{CONTROL, COUNTER_2, GATE_PORT, Pit, State};

const OUTPUT: u8 = 0x20;
const MILLISECOND: u64 = 1_000_000;

/// A counter with an open gate, in this mode, after both bytes of this count.
fn counting(mode: u8, count: u16) -> Pit {
    let mut pit = Pit::new();
    pit.write(GATE_PORT, 1, 0);
    pit.write(CONTROL, 0xb0 | mode << 1, 0);
    let [low, high] = count.to_le_bytes();
    pit.write(COUNTER_2, low, 0);
    pit.write(COUNTER_2, high, 0);
    pit
}

fn output(pit: &mut Pit, now: u64) -> bool {
    pit.read(GATE_PORT, now) & OUTPUT != 0
}

/// The count, latched and read.
fn count(pit: &mut Pit, now: u64) -> u16 {
    pit.write(CONTROL, 0x80, now);
    let low = pit.read(COUNTER_2, now);
    // The time between the two reads does not change a latched count.
    let high = pit.read(COUNTER_2, now + 10 * MILLISECOND);
    u16::from_le_bytes([low, high])
}

/// The time at which this many ticks have passed.
fn after(ticks: u64) -> u64 {
    (ticks * 1_000_000_000).div_ceil(1_193_182)
}

#[test]
fn fifty_milliseconds_pass_until_the_output_of_mode_0_rises() {
    let mut pit = counting(0, 59_659);
    assert!(!output(&mut pit, 0));
    assert!(!output(&mut pit, 49 * MILLISECOND));
    assert!(output(&mut pit, after(59_659)));
    assert!(output(&mut pit, 1_000_000 * MILLISECOND));
    // A new count restarts the counter.
    pit.write(COUNTER_2, 0, 100 * MILLISECOND);
    pit.write(COUNTER_2, 1, 100 * MILLISECOND);
    assert!(!output(&mut pit, 100 * MILLISECOND));
}

#[test]
fn closed_gate_holds_the_count_and_open_gate_goes_on() {
    let mut pit = counting(0, 1000);
    pit.write(GATE_PORT, 0, after(400));
    assert_eq!(count(&mut pit, after(5000)), 600);
    pit.write(GATE_PORT, 1, after(5000));
    assert!(!output(&mut pit, after(5500)));
    assert!(output(&mut pit, after(5602)));
}

#[test]
fn count_goes_on_behind_zero_at_the_largest() {
    let mut pit = counting(0, 10);
    assert_eq!(count(&mut pit, after(10)), 0);
    assert_eq!(count(&mut pit, after(11)), 0xffff);
    let mut pit = counting(0, 0);
    assert_eq!(count(&mut pit, after(1)), 0xffff);
    assert!(!output(&mut pit, after(0xffff)));
    assert!(output(&mut pit, after(0x1_0000)));
}

#[test]
fn rate_generator_and_square_wave_repeat() {
    let mut pit = counting(2, 100);
    for period in 0..3 {
        let start = 100 * period;
        assert!(output(&mut pit, after(start + 98)));
        assert!(!output(&mut pit, after(start + 99)));
        assert_eq!(count(&mut pit, after(start + 30)), 70);
    }
    let mut pit = counting(3, 100);
    for period in 0..3 {
        let start = 100 * period;
        assert!(output(&mut pit, after(start + 49)));
        assert!(!output(&mut pit, after(start + 50)));
        assert_eq!(count(&mut pit, after(start + 10)), 80);
        assert_eq!(count(&mut pit, after(start + 60)), 80);
    }
    // The gate restarts them, with the output high.
    pit.write(GATE_PORT, 0, after(380));
    assert!(output(&mut pit, after(380)));
    pit.write(GATE_PORT, 1, after(1000));
    assert_eq!(count(&mut pit, after(1000)), 100);
}

#[test]
fn one_shot_and_strobe_wait_for_the_gate_to_open() {
    for mode in [1, 5] {
        let mut pit = counting(mode, 100);
        assert!(output(&mut pit, after(500)), "{mode}");
        pit.write(GATE_PORT, 0, after(500));
        pit.write(GATE_PORT, 1, after(600));
        assert_eq!(count(&mut pit, after(600) + after(40)), 60, "{mode}");
        // The level of the gate does not matter afterwards.
        pit.write(GATE_PORT, 0, after(650));
        assert_eq!(output(&mut pit, after(600) + after(60)), mode == 5);
        assert_eq!(output(&mut pit, after(600) + after(100)), mode == 1);
        assert!(output(&mut pit, after(702)), "{mode}");
    }
}

#[test]
fn software_strobe_is_low_for_one_tick() {
    let mut pit = counting(4, 100);
    assert!(output(&mut pit, after(99)));
    assert!(!output(&mut pit, after(100)));
    assert!(output(&mut pit, after(101)));
}

#[test]
fn single_bytes_of_a_count_can_be_chosen() {
    let mut pit = Pit::new();
    pit.write(GATE_PORT, 1, 0);
    pit.write(CONTROL, 0x90, 0);
    pit.write(COUNTER_2, 200, 0);
    assert_eq!([pit.read(COUNTER_2, after(50)), pit.read(COUNTER_2, after(60))], [150, 140]);
    pit.write(CONTROL, 0xa0, 0);
    pit.write(COUNTER_2, 2, 0);
    assert_eq!([pit.read(COUNTER_2, after(1)), pit.read(COUNTER_2, after(257))], [1, 0]);
}

#[test]
fn read_back_gives_status_and_then_the_count() {
    let mut pit = counting(2, 0x1234);
    pit.write(CONTROL, 0xc8, after(4));
    assert_eq!(pit.read(COUNTER_2, after(9)), 0x80 | 0x34);
    assert_eq!([pit.read(COUNTER_2, after(9)), pit.read(COUNTER_2, after(9))], [0x30, 0x12]);
    // Of another counter, or of neither: nothing is latched.
    pit.write(CONTROL, 0xc4, after(4));
    pit.write(CONTROL, 0xf8, after(4));
    assert_eq!([pit.read(COUNTER_2, after(5)), pit.read(COUNTER_2, after(5))], [0x2f, 0x12]);
    // Without a count the status says so.
    pit.write(CONTROL, 0xb0, 0);
    pit.write(CONTROL, 0xe8, 0);
    assert_eq!(pit.read(COUNTER_2, 0), 0x40 | 0x30);
}

#[test]
fn refresh_of_memory_goes_on_and_no_error_is_reported() {
    let mut pit = Pit::new();
    let seen: Vec<u8> = (0..4).map(|half| pit.read(GATE_PORT, half * 15_085) & 0x10).collect();
    assert_eq!(seen, [0, 0x10, 0, 0x10]);
    pit.write(GATE_PORT, 0xff, 0);
    assert_eq!(pit.read(GATE_PORT, 0) & 0xcf, 0x0f, "bits 7 and 6 would be errors of memory and bus");
}

#[test]
fn other_counters_read_zero_and_nothing_ends_a_counter_for_ever() {
    let mut pit = Pit::new();
    assert_eq!([0x40, 0x41, 0x43].map(|port| pit.read(port, 5)), [0; 3]);
    // A hostile order of everything, at times that go backwards and to the end.
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..200_000 {
        let port = [0x40, 0x42, 0x42, 0x43, 0x61][rng.usize(..5)];
        let value = rng.u8(..);
        let now = [0, 1, u64::MAX, after(value.into()), rng.u64(..)][rng.usize(..5)];
        if rng.bool() {
            pit.write(port, value, now);
        } else {
            let _ = pit.read(port, now);
        }
    }
}

/// One access in a random order of everything.
fn access(pit: &mut Pit, rng: &mut fastrand::Rng, now: u64) -> Option<u8> {
    let port = [0x42, 0x42, 0x42, 0x43, 0x61][rng.usize(..5)];
    if rng.bool() {
        return Some(pit.read(port, now));
    }
    let value = if port == CONTROL && rng.bool() { 0x80 | rng.u8(..) & 0x3f } else { rng.u8(..) };
    pit.write(port, value, now);
    None
}

#[test]
fn counter_that_is_restored_in_another_host_goes_on_as_the_saved_one() {
    let mut rng = fastrand::Rng::with_seed(2);
    for round in 0..2_000 {
        let (mut saved, mut now) = (Pit::new(), rng.u64(..1 << 40));
        for _ in 0..rng.u32(..60) {
            now += rng.u64(..MILLISECOND);
            let _ = access(&mut saved, &mut rng, now);
        }
        let state = saved.state(now);
        // The other host's clock differs by whole periods of what port 0x61 shows, and stood still for some.
        let [differs, stood_still] = [1_u64 << 20, 1 << 10].map(|most| 2 * 15_085 * rng.u64(..most));
        let mut restored = Pit::with_state(&state, now + differs).expect("it is a counter's");
        restored.stood_still(stood_still);
        let mut same = rng.clone();
        for _ in 0..60 {
            now += rng.u64(..MILLISECOND);
            let _the_same = same.u64(..MILLISECOND);
            let expected = access(&mut saved, &mut rng, now);
            assert_eq!(access(&mut restored, &mut same, now + differs + stood_still), expected, "round {round}");
        }
    }
}

#[test]
fn counter_older_than_the_hosts_clock_keeps_its_count() {
    let mut pit = counting(2, 50_000);
    let state = pit.state(after(123_456));
    let mut young = Pit::with_state(&state, 10).expect("it is a counter's");
    assert_eq!(count(&mut young, 10), count(&mut pit, after(123_456)));
}

#[test]
fn state_that_no_counter_has_is_refused() {
    let good = counting(0, 5).state(0);
    assert!(Pit::with_state(&good, 0).is_some());
    let bad = [
        State { count: Some(0), ..good.clone() },
        State { count: Some(65_537), ..good.clone() },
        State { gate_port: 0x10, ..good.clone() },
        State { count: None, ..good },
    ];
    assert!(bad.iter().all(|state| Pit::with_state(state, 0).is_none()));
}

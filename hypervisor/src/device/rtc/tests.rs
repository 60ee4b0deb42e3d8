//! The clock at known moments, the calendar, and the accesses of drivers.

use super::{Date, Rtc, State};

/// 2026-11-21 03:13:04 UTC, a Saturday.
const NOW: u64 = 1_795_230_784;

fn read(rtc: &mut Rtc, index: u8, now: u64) -> u8 {
    rtc.write(0, index);
    rtc.read(1, now)
}

fn all(rtc: &mut Rtc, now: u64) -> [u8; 8] {
    [0, 2, 4, 6, 7, 8, 9, 0x32].map(|index| read(rtc, index, now))
}

#[test]
fn time_is_told_in_bcd_at_first() {
    assert_eq!(all(&mut Rtc::new(), NOW), [0x04, 0x13, 0x03, 7, 0x21, 0x11, 0x26, 0x20]);
}

#[test]
fn time_is_told_in_binary_on_request() {
    let mut rtc = Rtc::new();
    rtc.write(0, 0x0b);
    rtc.write(1, 0x06);
    assert_eq!(all(&mut rtc, NOW), [4, 13, 3, 7, 21, 11, 26, 20]);
}

#[test]
fn known_moments_are_right() {
    let mut rtc = Rtc::new();
    assert_eq!(all(&mut rtc, 0), [0, 0, 0, 5, 0x01, 0x01, 0x70, 0x19]);
    assert_eq!(all(&mut rtc, 951_782_399), [0x59, 0x59, 0x23, 2, 0x28, 0x02, 0x00, 0x20]);
    assert_eq!(all(&mut rtc, 951_782_400), [0, 0, 0, 3, 0x29, 0x02, 0x00, 0x20]);
    assert_eq!(all(&mut rtc, 4_107_542_399), [0x59, 0x59, 0x23, 1, 0x28, 0x02, 0x00, 0x21]);
    assert_eq!(all(&mut rtc, 4_107_542_400), [0, 0, 0, 2, 0x01, 0x03, 0x00, 0x21]);
}

#[test]
fn dates_of_a_thousand_years_follow_the_calendar_day_by_day() {
    let (mut year, mut month, mut day) = (1970, 1, 1);
    for days in 0..366_000 {
        let date = Date::of(days);
        assert_eq!((date.year, date.month, date.day), (year, month, day));

        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let length = match month {
            4 | 6 | 9 | 11 => 30,
            2 if leap => 29,
            2 => 28,
            _ => 31,
        };
        day += 1;
        if day > length {
            (month, day) = (month + 1, 1);
        }
        if month > 12 {
            (year, month) = (year + 1, 1);
        }
    }
}

#[test]
fn status_registers_show_a_running_clock_that_is_never_being_updated() {
    let mut rtc = Rtc::new();
    for now in 0..3 {
        assert_eq!(read(&mut rtc, 0x0a, now), 0x26);
        assert_eq!(read(&mut rtc, 0x0c, now), 0);
        assert_eq!(read(&mut rtc, 0x0d, now), 0x80);
    }
}

#[test]
fn setting_the_time_changes_nothing() {
    let mut rtc = Rtc::new();
    let before = all(&mut rtc, NOW);
    for index in [0x0b, 0x0a, 0, 2, 4, 6, 7, 8, 9, 0x32] {
        rtc.write(0, index);
        rtc.write(1, 0x82);
    }
    assert_eq!(all(&mut rtc, NOW), before);
    assert_eq!(read(&mut rtc, 0x0b, NOW), 0x82, "SET reads back, as drivers expect");
}

#[test]
fn interrupts_and_12_hours_cannot_be_enabled() {
    let mut rtc = Rtc::new();
    rtc.write(0, 0x0b);
    rtc.write(1, 0x79);
    assert_eq!(rtc.read(1, NOW), 0x02);
}

#[test]
fn alarm_and_memory_read_as_zero() {
    let mut rtc = Rtc::new();
    for index in [1, 3, 5].into_iter().chain(0x0e..0x32).chain(0x33..0x80) {
        rtc.write(0, index);
        rtc.write(1, 0xaa);
        assert_eq!(rtc.read(1, NOW), 0);
    }
}

#[test]
fn nmi_mask_is_not_part_of_the_index() {
    assert_eq!(read(&mut Rtc::new(), 0x80, NOW), 0x04);
}

#[test]
fn index_port_cannot_be_read() {
    assert_eq!(Rtc::new().read(0, NOW), 0xff);
}

#[test]
fn absurd_times_are_still_answered() {
    let mut rtc = Rtc::new();
    for now in [u64::MAX, u64::MAX / 2, 1 << 62] {
        for index in 0..=255 {
            let _ = read(&mut rtc, index, now);
        }
        rtc.write(0, 0x0b);
        rtc.write(1, 0x04);
        assert!(all(&mut rtc, now).into_iter().all(|number| number < 100));
    }
}

#[test]
fn restored_clock_answers_as_the_saved_one() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..1_000 {
        let mut saved = Rtc::new();
        for _ in 0..rng.u32(..8) {
            saved.write(rng.u16(..2), rng.u8(..));
        }
        let mut restored = Rtc::with_state(&saved.state());
        assert_eq!(restored.read(1, NOW), saved.read(1, NOW));
        for index in 0..=u8::MAX {
            assert_eq!(read(&mut restored, index, NOW), read(&mut saved, index, NOW));
        }
    }
    let odd = Rtc::with_state(&State { index: 0xff, b: 0xff });
    assert_eq!(odd.state(), State { index: 0x7f, b: 0x86 });
}

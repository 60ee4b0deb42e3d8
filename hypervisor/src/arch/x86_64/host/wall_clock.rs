//! The wall clock: the CMOS RTC, read once at boot. From then on the TSC counts the time.

use core::sync::atomic::{AtomicU64, Ordering};

use super::acpi::Machine;
use super::{port, tsc};

const INDEX: u16 = 0x70;
const DATA: u16 = 0x71;

const SECONDS: u8 = 0;
const MINUTES: u8 = 2;
const HOURS: u8 = 4;
const DAY: u8 = 7;
const MONTH: u8 = 8;
const YEAR: u8 = 9;
const STATUS_A: u8 = 0xa;
const STATUS_B: u8 = 0xb;

const UPDATING: u8 = 1 << 7;
const BINARY: u8 = 1 << 2;
const HOURS_24: u8 = 1 << 1;
const PM: u8 = 1 << 7;

/// Readings before a clock that never settles is given up.
const PATIENCE: usize = 10_000;

static BOOT_SECONDS: AtomicU64 = AtomicU64::new(0);

/// Seconds from 1970-01-01 00:00 UTC to boot (where [`tsc::nanos`] begins); 0 when there is no clock.
pub(crate) fn boot_seconds() -> u64 {
    BOOT_SECONDS.load(Ordering::Relaxed)
}

/// Reads the clock.
pub(super) fn init(machine: &Machine) {
    match read(machine.rtc_century) {
        Some(seconds) => {
            BOOT_SECONDS.store(seconds.saturating_sub(tsc::nanos() / 1_000_000_000), Ordering::Relaxed);
        }
        None => log::warn!("the real-time clock cannot be read; guests start at 1970"),
    }
}

/// Seconds since 1970, from two equal readings in a row with no update under way.
fn read(century_index: u8) -> Option<u64> {
    let mut last = None;
    let fields = (0..PATIENCE).find_map(|_| {
        if register(STATUS_A) & UPDATING != 0 {
            last = None;
            return None;
        }
        let century = if century_index == 0 { 0 } else { register(century_index) };
        let now = [SECONDS, MINUTES, HOURS, DAY, MONTH, YEAR].map(register);
        let same = last == Some((now, century));
        last = Some((now, century));
        same.then_some((now, century))
    })?;

    let ([seconds, minutes, raw_hours, day, month, year], century) = fields;
    let mode = register(STATUS_B);
    let number = |field: u8| {
        let binary = if mode & BINARY != 0 { field } else { (field >> 4) * 10 + (field & 0xf) };
        u64::from(binary)
    };
    let mut hours = number(raw_hours & !PM);
    if mode & HOURS_24 == 0 {
        hours = hours % 12 + if raw_hours & PM != 0 { 12 } else { 0 };
    }
    let century = if century == 0 { 20 } else { number(century) };
    let days = days_since_1970(century * 100 + number(year), number(month), number(day))?;
    Some(((days * 24 + hours) * 60 + number(minutes)) * 60 + number(seconds))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    if year < 1970 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years that begin in March have their leap day at the end, so that all months before it are as long as ever.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days_before_month = (153 * month + 2) / 5;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + days_before_month + day - 1;
    // The same sum for 1970-01-01.
    days.checked_sub(719_468)
}

fn register(index: u8) -> u8 {
    port::write_u8(INDEX, index);
    port::read_u8(DATA)
}

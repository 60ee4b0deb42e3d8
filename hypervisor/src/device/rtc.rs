//! The real-time clock: an MC146818 at ports 0x70 (index) and 0x71 (data).
//!
//! It only gives the time, in UTC. The caller passes the time of each read, so the clock's only state is its index and
//! its format. A guest's writes to the time are dropped: each VM has the time of its host. There are no alarm, periodic
//! or update interrupts (their enables read back as zero) and no non-volatile memory (reads as 0).

use serde::{Deserialize, Serialize};

/// Register numbers (data sheet of the MC146818A; ACPI's FADT gives the position of the century).
mod register {
    pub(super) const SECONDS: u8 = 0x00;
    pub(super) const MINUTES: u8 = 0x02;
    pub(super) const HOURS: u8 = 0x04;
    pub(super) const DAY_OF_WEEK: u8 = 0x06;
    pub(super) const DAY: u8 = 0x07;
    pub(super) const MONTH: u8 = 0x08;
    pub(super) const YEAR: u8 = 0x09;
    pub(super) const A: u8 = 0x0a;
    pub(super) const B: u8 = 0x0b;
    pub(super) const D: u8 = 0x0d;
    pub(super) const CENTURY: u8 = 0x32;
}

/// Register A: 32768 Hz time base, 1024 Hz rate. Its bit 7, update in progress, is never seen: the time that the caller
/// gives does not change while it is read.
const A_RUNNING: u8 = 0x26;
/// Register B: updates are stopped to set the time. Stored, without effect.
const B_SET: u8 = 1 << 7;
/// Register B: numbers are binary, not BCD.
const B_BINARY: u8 = 1 << 2;
/// Register B: hours count to 24. Always so.
const B_24_HOURS: u8 = 1 << 1;
/// Register D: the battery is good.
const D_VALID: u8 = 1 << 7;

const SECONDS_PER_DAY: u64 = 86_400;

/// What a file keeps of the clock: not the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    index: u8,
    b: u8,
}

/// The clock of one VM.
#[derive(Debug)]
pub struct Rtc {
    index: u8,
    b: u8,
}

impl Default for Rtc {
    fn default() -> Self {
        Self::new()
    }
}

impl Rtc {
    /// A clock after power-on: BCD, 24 hours.
    #[must_use]
    pub fn new() -> Self {
        Self { index: 0, b: B_24_HOURS }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        State { index: self.index, b: self.b }
    }

    /// A clock with this state. Bits that no clock has are ignored.
    #[must_use]
    pub fn with_state(&State { index, b }: &State) -> Self {
        Self { index: index & 0x7f, b: b & (B_SET | B_BINARY) | B_24_HOURS }
    }

    /// The guest reads port 0x70 + `offset` when it is `now`, in seconds since 1970 (UTC).
    #[must_use]
    pub fn read(&self, offset: u16, now: u64) -> u8 {
        // The index cannot be read back on a PC.
        if offset != 1 {
            return 0xff;
        }

        let seconds = now % SECONDS_PER_DAY;
        let days = now / SECONDS_PER_DAY;
        match self.index {
            register::SECONDS => self.number(seconds % 60),
            register::MINUTES => self.number(seconds / 60 % 60),
            register::HOURS => self.number(seconds / 3600),
            // Sunday is 1; 1970 began with a Thursday.
            register::DAY_OF_WEEK => self.number((days + 4) % 7 + 1),
            register::DAY => self.number(Date::of(days).day),
            register::MONTH => self.number(Date::of(days).month),
            register::YEAR => self.number(Date::of(days).year % 100),
            register::CENTURY => self.number(Date::of(days).year / 100 % 100),
            register::A => A_RUNNING,
            register::B => self.b,
            register::D => D_VALID,
            _ => 0,
        }
    }

    /// The guest writes `value` to port 0x70 + `offset`.
    pub fn write(&mut self, offset: u16, value: u8) {
        match offset {
            // Bit 7 masks NMIs on a PC and is not part of the index.
            0 => self.index = value & 0x7f,
            1 if self.index == register::B => self.b = (value & (B_SET | B_BINARY)) | B_24_HOURS,
            _ => {}
        }
    }

    /// A number below 100 in the format that register B asks for.
    fn number(&self, value: u64) -> u8 {
        let encoded = if self.b & B_BINARY != 0 { value } else { value / 10 * 16 + value % 10 };
        u8::try_from(encoded).unwrap_or(u8::MAX)
    }
}

/// A day of the Gregorian calendar.
struct Date {
    year: u64,
    /// 1 to 12.
    month: u64,
    /// 1 to 31.
    day: u64,
}

impl Date {
    /// The day `days` after 1 January 1970.
    ///
    /// Years are counted from 1 March, so that the leap day is the last of its year. From March on, the months have
    /// 31 30 31 30 31 days, again and again, which a division by 153 / 5 reproduces.
    fn of(days: u64) -> Self {
        const DAYS_400_YEARS: u64 = 146_097;
        const DAYS_100_YEARS: u64 = 36_524;
        const DAYS_4_YEARS: u64 = 1461;
        /// From 1 March 1600 to 1 January 1970.
        const EPOCH: u64 = 135_080;

        let days = days + EPOCH;
        let (cycle, rest) = (days / DAYS_400_YEARS, days % DAYS_400_YEARS);
        // The last century of a cycle and the last year of a leap cycle have one day more than the others.
        let century = (rest / DAYS_100_YEARS).min(3);
        let rest = rest - century * DAYS_100_YEARS;
        let (leap_cycle, rest) = (rest / DAYS_4_YEARS, rest % DAYS_4_YEARS);
        let year = (rest / 365).min(3);
        let day_of_year = rest - year * 365;

        let since_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * since_march + 2) / 5 + 1;
        let march_year = 1600 + 400 * cycle + 100 * century + 4 * leap_cycle + year;
        if since_march < 10 {
            Self { year: march_year, month: since_march + 3, day }
        } else {
            Self { year: march_year + 1, month: since_march - 9, day }
        }
    }
}

#[cfg(test)]
mod tests;

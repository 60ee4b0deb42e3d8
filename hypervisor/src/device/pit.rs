//! Counter 2 of the interval timer, an i8254, at ports 0x42 (count) and 0x43 (control word), with its gate and output
//! at port 0x61.
//!
//! Software measures its processor's clock with this counter, because its rate is the same on each PC:
//!
//! ```text
//!   port 0x61 bit 0 ──► gate ──►┌───────────┐
//!   1.193182 MHz ──────────────►│ counter 2 │──► output ──► port 0x61 bit 5
//!                               └───────────┘
//! ```
//!
//! The other two counters do not exist, and read zero. One raised an interrupt, for which this machine has better
//! timers; the other refreshed memory. The speaker on counter 2 makes no sound. Counts are always binary, even if
//! software selects BCD.
//!
//! The caller passes the time of each access. The counter is a number of elapsed ticks, from which everything else is
//! computed.
//!
//! [`State`] is what a file keeps of it.
//!
//! Source: Intel 8254 data sheet (231164-005); port 0x61: Intel 82801 (ICH9) data sheet, 13.7.1.

use serde::{Deserialize, Serialize};

/// Ports, and the bits that a control word and port 0x61 consist of.
mod bits {
    /// Control word, bits 7 to 6: the counter, or the read-back command.
    pub(super) const SELECT_SHIFT: u8 = 6;
    pub(super) const SELECT_COUNTER_2: u8 = 2;
    pub(super) const SELECT_READ_BACK: u8 = 3;
    /// Control word, bits 5 to 4: which bytes of the count are read and written, or a latch command.
    pub(super) const ACCESS_SHIFT: u8 = 4;
    /// Control word, bits 3 to 1.
    pub(super) const MODE_SHIFT: u8 = 1;

    /// Read-back command: do *not* latch the count, do *not* latch the status; of counter 2.
    pub(super) const READ_BACK_NO_COUNT: u8 = 1 << 5;
    pub(super) const READ_BACK_NO_STATUS: u8 = 1 << 4;
    pub(super) const READ_BACK_COUNTER_2: u8 = 1 << 3;
    /// Status: the output; no count has been written since the control word.
    pub(super) const STATUS_OUTPUT: u8 = 1 << 7;
    pub(super) const STATUS_NO_COUNT: u8 = 1 << 6;

    /// Port 0x61: the gate, the writable bits, the memory refresh, the output.
    pub(super) const GATE: u8 = 1 << 0;
    pub(super) const WRITABLE: u8 = 0b1111;
    pub(super) const REFRESH: u8 = 1 << 4;
    pub(super) const OUTPUT: u8 = 1 << 5;
}

/// The ports of counter 2, of the control word, and of gate and output. The first port of the timer is counter 0's.
pub const FIRST_PORT: u16 = 0x40;
const COUNTER_2: u16 = 0x42;
const CONTROL: u16 = 0x43;
/// The last port of the counters.
pub const LAST_PORT: u16 = CONTROL;
/// The port with the gate of counter 2, and its output.
pub const GATE_PORT: u16 = 0x61;

/// Ticks per second.
const HERTZ: u128 = 1_193_182;
const NANOS_PER_SECOND: u128 = 1_000_000_000;
/// Half of the memory refresh period. Software sees bit 4 of port 0x61 change.
const REFRESH_NANOS: u64 = 15_085;
/// A count of zero means this, the largest.
const LARGEST: u64 = 1 << 16;

/// Behaviour of the output (8254 data sheet, "Mode Definitions").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Mode {
    /// 0: low until the count has run out.
    TerminalCount,
    /// 1: the same, started by the gate.
    OneShot,
    /// 2: low for the last tick of each period.
    RateGenerator,
    /// 3: high for half of each period.
    SquareWave,
    /// 4: low for the one tick after the count has run out.
    SoftwareStrobe,
    /// 5: the same, started by the gate.
    HardwareStrobe,
}

/// Which bytes of a count are read and written, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Access {
    Low,
    High,
    LowThenHigh,
}

/// The counter's state, without the time at which it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    mode: Mode,
    access: Access,
    gate_port: u8,
    count: Option<u64>,
    low_written: Option<u8>,
    ticks: u64,
    /// For how long it has counted since `ticks`.
    running_nanos: Option<u64>,
    latched_count: Option<u16>,
    latched_status: Option<u8>,
    low_was_read: bool,
}

/// The counter of one VM.
#[derive(Debug)]
pub struct Pit {
    mode: Mode,
    access: Access,
    /// Bits 3 to 0 of port 0x61, as written.
    gate_port: u8,
    /// The counter counts down from here, 1 to 65536. `None` after a control word until software has written it.
    count: Option<u64>,
    /// The low byte of a count whose high byte is not written yet.
    low_written: Option<u8>,
    /// Ticks before `running_since`.
    ticks: u64,
    /// When the counter last began to count, in nanoseconds. `None` while it is stopped.
    running_since: Option<u64>,
    /// What reads return instead of the running count, and status.
    latched_count: Option<u16>,
    latched_status: Option<u8>,
    /// A read has given the low byte; the next gives the high one.
    low_was_read: bool,
}

impl Default for Pit {
    fn default() -> Self {
        Self::new()
    }
}

impl Pit {
    /// The counter after power-on. Its behaviour then is undefined; here it does nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            mode: Mode::TerminalCount,
            access: Access::LowThenHigh,
            gate_port: 0,
            count: None,
            low_written: None,
            ticks: 0,
            running_since: None,
            latched_count: None,
            latched_status: None,
            low_was_read: false,
        }
    }

    /// Its state at `now`.
    #[must_use]
    pub fn state(&self, now: u64) -> State {
        State {
            mode: self.mode,
            access: self.access,
            gate_port: self.gate_port,
            count: self.count,
            low_written: self.low_written,
            ticks: self.ticks,
            running_nanos: self.running_since.map(|since| now.saturating_sub(since)),
            latched_count: self.latched_count,
            latched_status: self.latched_status,
            low_was_read: self.low_was_read,
        }
    }

    /// A counter that goes on from this state at `now`. `None` for a state that no counter has.
    #[must_use]
    pub fn with_state(state: &State, now: u64) -> Option<Self> {
        let is_possible = state.count.is_none_or(|count| (1..=LARGEST).contains(&count))
            && state.gate_port & !bits::WRITABLE == 0
            && (state.running_nanos.is_none() || state.count.is_some());
        // The host's clock may be younger than the counter.
        let (ticks, running_since) = match state.running_nanos.map(|nanos| (nanos, now.checked_sub(nanos))) {
            None => (state.ticks, None),
            Some((_, Some(since))) => (state.ticks, Some(since)),
            Some((nanos, None)) => (state.ticks.saturating_add(ticks_in(nanos)), Some(now)),
        };
        is_possible.then_some(Self {
            mode: state.mode,
            access: state.access,
            gate_port: state.gate_port,
            count: state.count,
            low_written: state.low_written,
            ticks,
            running_since,
            latched_count: state.latched_count,
            latched_status: state.latched_status,
            low_was_read: state.low_was_read,
        })
    }

    /// Time stood still for so many nanoseconds.
    pub fn stood_still(&mut self, nanos: u64) {
        self.running_since = self.running_since.map(|since| since.saturating_add(nanos));
    }

    /// The guest reads this port of the timer, or port 0x61, when it is `now`, in nanoseconds.
    #[must_use]
    pub fn read(&mut self, port: u16, now: u64) -> u8 {
        match port {
            COUNTER_2 => self.read_count(now),
            GATE_PORT => {
                let refresh = if now / REFRESH_NANOS % 2 == 1 { bits::REFRESH } else { 0 };
                let output = if self.output(now) { bits::OUTPUT } else { 0 };
                self.gate_port | refresh | output
            }
            _ => 0,
        }
    }

    /// The guest writes `value` to this port of the timer, or to port 0x61, when it is `now`, in nanoseconds.
    pub fn write(&mut self, port: u16, value: u8, now: u64) {
        match port {
            COUNTER_2 => self.write_count(value, now),
            CONTROL => self.control(value, now),
            GATE_PORT => self.write_gate(value, now),
            _ => {}
        }
    }

    fn control(&mut self, word: u8, now: u64) {
        match word >> bits::SELECT_SHIFT {
            bits::SELECT_COUNTER_2 => {}
            bits::SELECT_READ_BACK => return self.read_back(word, now),
            _ => return,
        }
        self.access = match word >> bits::ACCESS_SHIFT & 3 {
            0 => return self.latch_count(now),
            1 => Access::Low,
            2 => Access::High,
            _ => Access::LowThenHigh,
        };
        // Bit 2 of the mode does not matter to modes 2 and 3.
        self.mode = match word >> bits::MODE_SHIFT & 7 {
            0 => Mode::TerminalCount,
            1 => Mode::OneShot,
            2 | 6 => Mode::RateGenerator,
            3 | 7 => Mode::SquareWave,
            4 => Mode::SoftwareStrobe,
            _ => Mode::HardwareStrobe,
        };
        self.count = None;
        self.low_written = None;
        self.ticks = 0;
        self.running_since = None;
        self.latched_count = None;
        self.latched_status = None;
        self.low_was_read = false;
    }

    fn read_back(&mut self, word: u8, now: u64) {
        if word & bits::READ_BACK_COUNTER_2 == 0 {
            return;
        }
        if word & bits::READ_BACK_NO_COUNT == 0 {
            self.latch_count(now);
        }
        if word & bits::READ_BACK_NO_STATUS == 0 {
            self.latched_status = Some(self.status(now));
        }
    }

    /// The first latch holds until it has been read.
    fn latch_count(&mut self, now: u64) {
        if self.latched_count.is_none() {
            self.latched_count = Some(self.counter(now));
        }
    }

    fn status(&self, now: u64) -> u8 {
        let access = match self.access {
            Access::Low => 1,
            Access::High => 2,
            Access::LowThenHigh => 3,
        };
        let output = if self.output(now) { bits::STATUS_OUTPUT } else { 0 };
        let no_count = if self.count.is_none() { bits::STATUS_NO_COUNT } else { 0 };
        output | no_count | access << bits::ACCESS_SHIFT | (self.mode as u8) << bits::MODE_SHIFT
    }

    fn read_count(&mut self, now: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        let [low, high] = self.latched_count.unwrap_or_else(|| self.counter(now)).to_le_bytes();
        let (byte, is_last) = match self.access {
            Access::Low => (low, true),
            Access::High => (high, true),
            Access::LowThenHigh if self.low_was_read => (high, true),
            Access::LowThenHigh => (low, false),
        };
        self.low_was_read = !is_last;
        if is_last {
            self.latched_count = None;
        }
        byte
    }

    fn write_count(&mut self, value: u8, now: u64) {
        let [low, high] = match (self.access, self.low_written) {
            (Access::Low, _) => [value, 0],
            (Access::High, _) => [0, value],
            (Access::LowThenHigh, Some(low)) => [low, value],
            (Access::LowThenHigh, None) => {
                self.low_written = Some(value);
                return;
            }
        };
        self.low_written = None;
        self.count = Some(match u16::from_le_bytes([low, high]) {
            0 => LARGEST,
            count => count.into(),
        });
        self.ticks = 0;
        self.running_since = (self.gate() && !self.begins_with_gate()).then_some(now);
    }

    fn write_gate(&mut self, value: u8, now: u64) {
        let was_open = self.gate();
        self.gate_port = value & bits::WRITABLE;
        let rises = self.gate() && !was_open;
        match self.mode {
            Mode::OneShot | Mode::HardwareStrobe if rises => self.begin(now, 0),
            Mode::OneShot | Mode::HardwareStrobe => {}
            Mode::RateGenerator | Mode::SquareWave if rises => self.begin(now, 0),
            _ if rises => self.begin(now, self.ticks),
            _ if !self.gate() => {
                self.ticks = self.elapsed(now);
                self.running_since = None;
            }
            _ => {}
        }
    }

    fn begin(&mut self, now: u64, ticks: u64) {
        self.ticks = ticks;
        self.running_since = self.count.map(|_| now);
    }

    const fn gate(&self) -> bool {
        self.gate_port & bits::GATE != 0
    }

    const fn begins_with_gate(&self) -> bool {
        matches!(self.mode, Mode::OneShot | Mode::HardwareStrobe)
    }

    /// Ticks since the counter began with its count.
    fn elapsed(&self, now: u64) -> u64 {
        self.ticks.saturating_add(self.running_since.map_or(0, |since| ticks_in(now.saturating_sub(since))))
    }

    /// The current count.
    fn counter(&self, now: u64) -> u16 {
        let Some(count) = self.count else { return 0 };
        let elapsed = self.elapsed(now);
        let left = match self.mode {
            Mode::RateGenerator => count - elapsed % count,
            // It counts by two, and once through for each half of the wave.
            Mode::SquareWave => count.next_multiple_of(2) - 2 * (elapsed % count.div_ceil(2)),
            // After zero it continues at the largest count.
            _ => count.wrapping_sub(elapsed),
        };
        let [low, high, ..] = left.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// The output.
    fn output(&self, now: u64) -> bool {
        let high_before = self.mode != Mode::TerminalCount;
        let Some(count) = self.count else { return high_before };
        let elapsed = self.elapsed(now);
        let has_begun = self.running_since.is_some() || elapsed > 0;
        match self.mode {
            Mode::TerminalCount => elapsed >= count,
            Mode::OneShot => !has_begun || elapsed >= count,
            // Modes 2 and 3 keep their output high while the gate is closed.
            Mode::RateGenerator => self.running_since.is_none() || elapsed % count != count - 1,
            Mode::SquareWave => self.running_since.is_none() || elapsed % count < count.div_ceil(2),
            Mode::SoftwareStrobe | Mode::HardwareStrobe => elapsed != count,
        }
    }
}

/// Whole ticks in this time.
fn ticks_in(nanos: u64) -> u64 {
    u64::try_from(u128::from(nanos) * HERTZ / NANOS_PER_SECOND).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

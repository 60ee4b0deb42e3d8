//! Synthetic timers: four for each vCPU, on the reference clock of the VM, which counts units of 100 ns.
//!
//! A timer is one-shot or periodic. Its expiry is a message to a SINT or, in *direct mode*, an interrupt vector of the
//! vCPU's local APIC. A timer with an undelivered message does not expire again; the guest never sees the expirations
//! in between.

use hyperv_defs::msr;
use hyperv_defs::page::{TimerState, TimersState};
use hyperv_defs::wire::{U32, U64};

use crate::message::Message;
use crate::registers::{Interrupt, Outbox, Refused, SINTS};

/// Timers of a vCPU.
pub const TIMERS: usize = 4;

/// The shortest period, in units of 100 ns: 50 µs. A guest that asks for less would do nothing but take interrupts.
const SHORTEST_PERIOD: u64 = 500;

/// The configuration of a timer (HV_X64_MSR_STIMER_CONFIG_REGISTER).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimerConfig(pub u64);

impl TimerConfig {
    const ENABLED: u64 = 1 << 0;
    const PERIODIC: u64 = 1 << 1;
    const AUTO_ENABLE: u64 = 1 << 3;
    const DIRECT: u64 = 1 << 12;
    /// Enabled, periodic, lazy, auto-enable, vector, direct mode, SINT.
    const KNOWN: u64 = 0x000f_1fff;

    /// Whether it runs.
    #[must_use]
    pub const fn is_enabled(self) -> bool {
        self.0 & Self::ENABLED != 0
    }

    /// Whether it expires again and again.
    #[must_use]
    pub const fn is_periodic(self) -> bool {
        self.0 & Self::PERIODIC != 0
    }

    /// Whether a write to its count starts it.
    #[must_use]
    pub const fn is_auto_enabled(self) -> bool {
        self.0 & Self::AUTO_ENABLE != 0
    }

    /// Whether it raises a vector of its own, and sends no message.
    #[must_use]
    pub const fn is_direct(self) -> bool {
        self.0 & Self::DIRECT != 0
    }

    /// That vector.
    #[must_use]
    pub const fn vector(self) -> u8 {
        (self.0 >> 4).to_le_bytes()[0]
    }

    /// The SINT that its messages go to.
    #[must_use]
    pub const fn sint(self) -> usize {
        (self.0 >> 16 & 0xf) as usize
    }

    const fn with_enabled(self, enabled: bool) -> Self {
        Self(if enabled { self.0 | Self::ENABLED } else { self.0 & !Self::ENABLED })
    }
}

/// One timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Timer {
    config: TimerConfig,
    /// When it expires, or its period.
    count: u64,
    /// When it expires next, while it runs.
    next: Option<u64>,
    /// The time of an expiry whose message is undelivered, and the time since when it waits.
    undelivered: Option<(u64, u64)>,
}

/// The effect of an expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// This interrupt.
    Direct(Interrupt),
    /// A message waits for this SINT.
    Message(usize),
}

/// The timers of one vCPU.
#[derive(Clone, Debug, Default)]
pub struct Timers {
    timers: [Timer; TIMERS],
}

impl Timers {
    /// As after a reset: all are off.
    #[must_use]
    pub const fn new() -> Self {
        const OFF: Timer = Timer { config: TimerConfig(0), count: 0, next: None, undelivered: None };
        Self { timers: [OFF; TIMERS] }
    }

    /// Reads a register.
    ///
    /// # Errors
    /// `number` is not a register of the timers.
    pub fn read(&self, number: u32) -> Result<u64, Refused> {
        let (timer, is_count) = place_of(number)?;
        let timer = &self.timers[timer];
        Ok(if is_count { timer.count } else { timer.config.0 })
    }

    /// Writes a register at the reference time `now`. This may change the [deadline](Self::deadline), which may have
    /// passed already.
    ///
    /// # Errors
    /// `number` is not a register of the timers, or the value has reserved bits, or the vector of a direct mode belongs
    /// to exceptions.
    pub fn write(&mut self, number: u32, value: u64, now: u64) -> Result<(), Refused> {
        let (timer, is_count) = place_of(number)?;
        let timer = &mut self.timers[timer];
        if is_count {
            timer.write_count(value, now);
            Ok(())
        } else {
            timer.write_config(TimerConfig(value), now)
        }
    }

    /// Their state, for a parent that saves the vCPU. Times are reference times.
    #[must_use]
    pub fn state(&self) -> TimersState {
        TimersState { timers: self.timers.map(Timer::state), ..TimersState::default() }
    }

    /// Takes over a state at the reference time `now`.
    ///
    /// # Errors
    /// A timer has a configuration that a guest cannot write. Then nothing has changed.
    pub fn set_state(&mut self, state: &TimersState, now: u64) -> Result<(), Refused> {
        let mut timers = self.timers;
        for (timer, state) in timers.iter_mut().zip(&state.timers) {
            timer.set_state(state, now)?;
        }
        self.timers = timers;
        Ok(())
    }

    /// The reference time at which one of them expires next.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.timers.iter().filter_map(Timer::deadline).min()
    }

    /// Lets one timer expire whose deadline is `now` or earlier. Call it until it returns `None`.
    pub fn expire(&mut self, now: u64) -> Option<Expiry> {
        let timer = self.timers.iter_mut().find(|timer| timer.deadline().is_some_and(|at| at <= now))?;
        Some(timer.expire(now))
    }
}

impl Timer {
    /// When it expires next. It does not while a message of it waits.
    fn deadline(&self) -> Option<u64> {
        self.next.filter(|_| self.undelivered.is_none())
    }

    fn write_config(&mut self, config: TimerConfig, now: u64) -> Result<(), Refused> {
        let is_vector_bad = config.is_direct() && config.vector() < 16;
        if config.0 & !TimerConfig::KNOWN != 0 || is_vector_bad {
            return Err(Refused);
        }
        // SINT 0 belongs to the hypervisor: a timer cannot send there, and stays off.
        let can_run = config.is_direct() || config.sint() != 0;
        self.config = if can_run { config } else { config.with_enabled(false) };
        self.start(now);
        Ok(())
    }

    fn write_count(&mut self, count: u64, now: u64) {
        self.count = count;
        if count == 0 {
            self.config = self.config.with_enabled(false);
        } else if self.config.is_auto_enabled() && (self.config.is_direct() || self.config.sint() != 0) {
            self.config = self.config.with_enabled(true);
        }
        self.start(now);
    }

    /// The adjustment of a periodic timer is when it expires next.
    fn state(self) -> TimerState {
        TimerState {
            flags: U32::new(self.undelivered.is_some().into()),
            config: U64::new(self.config.0),
            count: U64::new(self.count),
            adjustment: U64::new(self.next.filter(|_| self.config.is_periodic()).unwrap_or(0)),
            undelivered_expiry: U64::new(self.undelivered.map_or(0, |(at, _)| at)),
            ..TimerState::default()
        }
    }

    fn set_state(&mut self, state: &TimerState, now: u64) -> Result<(), Refused> {
        self.count = state.count.get();
        self.write_config(TimerConfig(state.config.get()), now)?;
        let next = state.adjustment.get();
        if self.config.is_periodic() && self.runs() && next != 0 {
            // Not later than its period: whoever wrote this does not stop the timer. One that began early enough may
            // expire before the end of time, although a whole period does not fit any more.
            self.next = Some(next.min(now.saturating_add(self.period())));
        }
        if state.flags.get() & 1 != 0 && !self.config.is_direct() && self.config.sint() != 0 {
            let at = state.undelivered_expiry.get();
            self.undelivered = Some((at, at));
            self.next = self.next.filter(|_| self.config.is_periodic());
        }
        Ok(())
    }

    /// Restarts the timer from its registers. An undelivered message from before is dropped.
    fn start(&mut self, now: u64) {
        self.undelivered = None;
        self.next = if self.config.is_periodic() { now.checked_add(self.period()) } else { Some(self.count) };
        self.next = self.next.filter(|_| self.runs());
    }

    fn runs(&self) -> bool {
        self.config.is_enabled() && self.count != 0
    }

    fn period(&self) -> u64 {
        self.count.max(SHORTEST_PERIOD)
    }

    fn expire(&mut self, now: u64) -> Expiry {
        let at = self.next.unwrap_or(now);
        // Missed expirations are skipped; the period keeps its phase. Time ends before the next one at its very end,
        // where a parent may have set it: the next must be later than now, or this one would come for ever.
        let behind = now.saturating_sub(at) % self.period();
        let next = now.max(at).checked_add(self.period() - behind);
        self.next = next.filter(|_| self.config.is_periodic());
        if self.config.is_direct() {
            self.has_told();
            return Expiry::Direct(Interrupt { vector: self.config.vector(), auto_eoi: false });
        }
        self.undelivered = Some((at, now));
        Expiry::Message(self.config.sint())
    }

    /// The guest knows: a timer that expires once is off now.
    fn has_told(&mut self) {
        self.undelivered = None;
        if !self.config.is_periodic() {
            self.config = self.config.with_enabled(false);
        }
    }

    fn waits_for(&self, sint: usize) -> bool {
        self.undelivered.is_some() && self.config.sint() == sint
    }
}

impl Outbox for Timers {
    fn front(&self, sint: usize) -> Option<(Message, bool)> {
        let mut waiting = (0_u32..).zip(&self.timers).filter(|(_, timer)| timer.waits_for(sint));
        let (index, timer) = waiting.next()?;
        let (expired_at, delivered_at) = timer.undelivered?;
        // HV_TIMER_MESSAGE_PAYLOAD: index, reserved, expiration time, delivery time.
        let mut payload = [0; 24];
        payload[..4].copy_from_slice(&index.to_le_bytes());
        payload[8..16].copy_from_slice(&expired_at.to_le_bytes());
        payload[16..].copy_from_slice(&delivered_at.to_le_bytes());
        Some((Message::new(Message::TIMER_EXPIRED, 0, &payload)?, waiting.next().is_some()))
    }

    fn delivered(&mut self, sint: usize) {
        if let Some(timer) = self.timers.iter_mut().find(|timer| timer.waits_for(sint)) {
            timer.has_told();
        }
    }
}

/// The timer that a register belongs to, and whether it is its count.
fn place_of(number: u32) -> Result<(usize, bool), Refused> {
    match number {
        msr::STIMER0_CONFIG..=msr::STIMER3_COUNT => {
            let offset = number - msr::STIMER0_CONFIG;
            Ok(((offset / 2) as usize, offset % 2 == 1))
        }
        _ => Err(Refused),
    }
}

const _: () = assert!(SINTS == 16, "a configuration has four bits for its SINT");

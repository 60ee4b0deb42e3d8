//! The state of a local APIC from outside: a parent saves that of a child's vCPU, and writes it.
//!
//! It is a list of registers as the guest would read them ([`LocalApicState`]). The task priority is not among them (it
//! is CR8), nor is the deadline of the timer, which has a register of its own. An APIC that takes over the state of
//! another goes on where that was: the same vectors are requested and in service, and the timer has as long to go.
//!
//! The writer is outside of the guest, but not trusted: whatever it writes, the sets of classes agree with each other.

use hyperv_defs::page::LocalApicState;
use hyperv_defs::wire::U32;

use super::registers::{
    COMMAND_BUSY, COMMAND_FIELDS, DIVIDE_FIELDS, LVT_FIELDS, SPURIOUS_ENABLE, SPURIOUS_FIELDS, VERSION, halves,
};
use super::{
    BASE_ADDRESS, BASE_BOOTSTRAP, BASE_ENABLE, BASE_X2APIC, Errors, GeneralProtection, LVT_ENTRIES, LVT_MASKED,
    LVT_TIMER, LocalApic, Mode, join, timer,
};

/// The entries that an APIC without corrected machine checks has, in the order of its registers.
const LVT_CMCI: u32 = LVT_MASKED;

impl LocalApic {
    /// Its state at `now`. A timer that is due has expired.
    pub fn state(&mut self, now: u64) -> LocalApicState {
        self.catch_up(now);
        let [icr_low, icr_high] = halves(self.command).map(U32::new);
        let (id, logical_destination) = match self.mode {
            Mode::X2Apic => (self.config.id, self.x2apic_logical_destination()),
            Mode::XApic | Mode::Disabled => (self.config.id << 24, self.logical_destination),
        };
        let [lvt_timer, lvt_thermal, lvt_performance, lvt_lint0, lvt_lint1, lvt_error] =
            self.local_vector_table.map(U32::new);
        LocalApicState {
            id: U32::new(id),
            version: U32::new(VERSION),
            logical_destination: U32::new(logical_destination),
            destination_format: U32::new(self.destination_format),
            spurious: U32::new(self.spurious),
            isr: words(|class| self.service_bit(class)),
            tmr: words(|class| self.trigger_level[class]),
            irr: words(|class| self.request[class]),
            esr: U32::new(self.errors_shown.bits()),
            icr_high,
            icr_low,
            lvt_timer,
            lvt_thermal,
            lvt_performance,
            lvt_lint0,
            lvt_lint1,
            lvt_error,
            lvt_cmci: U32::new(LVT_CMCI),
            error_status: U32::new(self.errors.bits()),
            initial_count: U32::new(self.timer.initial_count()),
            current_count: U32::new(self.timer.current_count(now)),
            divide: U32::new(self.timer.divide()),
            remote_read: U32::new(0),
        }
    }

    /// Takes over a state at `now`. The id, the version, the task priority and the mode stay, and reserved bits are
    /// ignored. Afterwards the deadline and the logical id may be others.
    pub fn set_state(&mut self, state: &LocalApicState, now: u64) {
        self.spurious = state.spurious.get() & SPURIOUS_FIELDS;
        let is_on = self.mode != Mode::Disabled && self.spurious & SPURIOUS_ENABLE != 0;
        self.enabled = if is_on { u16::MAX } else { 0 };

        self.logical_destination = state.logical_destination.get() & 0xff00_0000;
        self.destination_format = state.destination_format.get() | 0x0fff_ffff;
        let command = state.icr_low.get() & COMMAND_FIELDS & !COMMAND_BUSY;
        self.command = u64::from(state.icr_high.get()) << 32 | u64::from(command);
        self.errors_shown = Errors::from_bits_truncate(state.esr.get());
        self.errors = Errors::from_bits_truncate(state.error_status.get());

        let table = [
            state.lvt_timer,
            state.lvt_thermal,
            state.lvt_performance,
            state.lvt_lint0,
            state.lvt_lint1,
            state.lvt_error,
        ];
        let masked = if self.spurious & SPURIOUS_ENABLE == 0 { LVT_MASKED } else { 0 };
        for index in 0..LVT_ENTRIES {
            self.local_vector_table[index] = table[index].get() & LVT_FIELDS[index] | masked;
        }
        let saved = timer::Saved {
            mode: timer::Mode::from_lvt(self.local_vector_table[LVT_TIMER]),
            initial_count: state.initial_count.get(),
            current_count: state.current_count.get(),
            divide: state.divide.get() & DIVIDE_FIELDS,
        };
        self.timer.restore(saved, now);

        (self.in_service, self.requested, self.has_level) = (0, 0, 0);
        for class in 0..16 {
            // Vectors below 16 are none.
            let of = |set: &[U32; 8]| if class == 0 { 0 } else { class_of(set, class) };
            self.request[class] = of(&state.irr);
            self.trigger_level[class] = of(&state.tmr);
            let there = |vectors: u16| u16::from(vectors != 0) << class;
            self.requested |= there(self.request[class]);
            self.has_level |= there(self.trigger_level[class]);
            // Of one class only one vector is ever in service: the last one.
            let service = of(&state.isr);
            self.in_service |= there(service);
            self.service_vector[class] = if service == 0 { 0 } else { join(class, super::highest(service)) };
        }
        self.reopen();
    }

    /// Somebody outside of the guest sets MSR 0x1b: the mode and the address change, and nothing else does.
    ///
    /// # Errors
    ///
    /// A mode that does not exist or is not offered, and reserved bits, as for the guest.
    pub fn place_base_msr(&mut self, value: u64) -> Result<(), GeneralProtection> {
        let mode = match (value & BASE_ENABLE != 0, value & BASE_X2APIC != 0) {
            (false, false) => Mode::Disabled,
            (true, false) => Mode::XApic,
            (true, true) if self.config.x2apic_offered => Mode::X2Apic,
            _ => return Err(GeneralProtection),
        };
        if value & !(BASE_ENABLE | BASE_X2APIC | BASE_BOOTSTRAP | BASE_ADDRESS) != 0 {
            return Err(GeneralProtection);
        }
        self.mode = mode;
        self.base = value & BASE_ADDRESS;
        let is_on = mode != Mode::Disabled && self.spurious & SPURIOUS_ENABLE != 0;
        self.enabled = if is_on { u16::MAX } else { 0 };
        self.reopen();
        Ok(())
    }

    /// Somebody outside of the guest sets the tick of the next interrupt; zero disarms. If the timer is not in deadline
    /// mode, the tick counts from when a state is set in which it is.
    pub fn place_tsc_deadline(&mut self, deadline: u64, now: u64) {
        self.timer.place_deadline(deadline);
        self.catch_up(now);
    }
}

/// When the guest's counter is moved.
impl LocalApic {
    /// A deadline comes by this many ticks later. A timer that counts does not notice.
    pub fn move_deadline(&mut self, later: i64) {
        self.timer.move_deadline(later);
    }

    /// Time stood still for this number of ticks: a timer that counts has as long to go as before. One in deadline mode
    /// does not notice.
    pub fn move_count(&mut self, later: u64) {
        self.timer.move_count(later);
    }
}

/// A set of vectors as eight registers.
fn words(class: impl Fn(usize) -> u16) -> [U32; 8] {
    core::array::from_fn(|word| U32::new(u32::from(class(2 * word + 1)) << 16 | u32::from(class(2 * word))))
}

/// One class of such a set.
fn class_of(set: &[U32; 8], class: usize) -> u16 {
    let [a, b, c, d] = set[class / 2].get().to_le_bytes();
    u16::from_le_bytes(if class.is_multiple_of(2) { [a, b] } else { [c, d] })
}

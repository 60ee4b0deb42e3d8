//! The registers of the local APIC: the guest's reads and writes, in x2APIC mode by MSRs and in xAPIC mode by MMIO.
//!
//! Both modes have the same registers with a few exceptions: identity, logical destination and the command register
//! (ICR) have different formats. The modes also differ for invalid accesses. An x2APIC raises #GP for reserved bits and
//! registers. An xAPIC ignores reserved bits and records a reserved register in its error register.
//!
//! Register numbers are those of the x2APIC: MSR 0x800 + n is offset n * 16 in the page.

use super::{Effect, Errors, FIRST_MSR, GeneralProtection, LVT_ENTRIES, LVT_MASKED, LocalApic, Mode, split, timer};
use crate::device::interrupt::{Kind, Message, Target};

/// Registers as MSRs, in x2APIC mode.
impl LocalApic {
    /// A read of MSR `msr`, 0x800 to 0x8ff. It calls `now` only for registers that depend on the time, because reading
    /// the clock takes time.
    ///
    /// # Errors
    ///
    /// The APIC is in another mode, or the register does not exist or cannot be read.
    pub fn read_msr(&mut self, msr: u32, now: impl FnOnce() -> u64) -> Result<u64, GeneralProtection> {
        if self.mode != Mode::X2Apic {
            return Err(GeneralProtection);
        }
        match msr.wrapping_sub(FIRST_MSR) {
            register::ID => Ok(self.config.id.into()),
            register::LOGICAL_DESTINATION => Ok(self.x2apic_logical_destination().into()),
            register::COMMAND => Ok(self.command),
            register => self.read(register, now).map(u64::from).ok_or(GeneralProtection),
        }
    }

    /// A write of MSR `msr`, 0x800 to 0x8ff.
    ///
    /// # Errors
    ///
    /// In other modes, if the register does not exist or cannot be written, and if a reserved bit is set.
    #[inline]
    pub fn write_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Effect, GeneralProtection> {
        // Every interrupt ends here, so the caller gets this much inlined.
        if msr == FIRST_MSR + register::END_OF_INTERRUPT && value == 0 && self.mode == Mode::X2Apic {
            return Ok(self.end_of_interrupt());
        }
        self.write_any_msr(msr, value, now)
    }

    fn write_any_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Effect, GeneralProtection> {
        let register = msr.wrapping_sub(FIRST_MSR);
        if self.mode != Mode::X2Apic || value & !writable_bits(register) != 0 {
            return Err(GeneralProtection);
        }
        match register {
            register::COMMAND => Ok(self.set_x2apic_command(value)),
            register::SELF_IPI => Ok(self.send_to_self(value.to_le_bytes()[0])),
            register => self.write(register, halves(value)[0], now).ok_or(GeneralProtection),
        }
    }

    fn set_x2apic_command(&mut self, value: u64) -> Effect {
        let [low, high] = halves(value);
        self.command = value & !u64::from(COMMAND_BUSY);
        self.send(low, Target::from_x2apic(high, low & COMMAND_LOGICAL != 0))
    }

    /// Members and clusters of x2APIC logical mode follow from the id (APM vol. 2, chapter 16).
    pub(super) const fn x2apic_logical_destination(&self) -> u32 {
        let id = self.config.id;
        (id >> 4) << 16 | 1 << (id & 0xf)
    }
}

/// Registers as a page of memory, in xAPIC mode.
impl LocalApic {
    /// A 32-bit read at `offset` in the page. In other modes there is no page: all bits read one. `now` is asked
    /// as by [`Self::read_msr`].
    pub fn read_mmio(&mut self, offset: u16, now: impl FnOnce() -> u64) -> u32 {
        if self.mode != Mode::XApic {
            return u32::MAX;
        }
        let value = match mmio_register(offset) {
            register::ID => Some(self.config.id << 24),
            register::LOGICAL_DESTINATION => Some(self.logical_destination),
            register::DESTINATION_FORMAT => Some(self.destination_format),
            register::COMMAND => Some(halves(self.command)[0]),
            register::COMMAND_HIGH => Some(halves(self.command)[1]),
            // Arbitration and remote read belong to the serial APIC bus, which is long gone.
            register::ARBITRATION_PRIORITY | register::END_OF_INTERRUPT | register::REMOTE_READ => Some(0),
            register => self.read(register, now),
        };
        value.unwrap_or_else(|| {
            self.note_error(Errors::ILLEGAL_REGISTER);
            0
        })
    }

    /// A 32-bit write at `offset` in the page. In other modes there is no page: nothing happens.
    pub fn write_mmio(&mut self, offset: u16, value: u32, now: u64) -> Effect {
        if self.mode != Mode::XApic {
            return Effect::None;
        }
        match mmio_register(offset) {
            register::COMMAND => {
                let value = value & COMMAND_FIELDS & !COMMAND_BUSY;
                let [_, high] = halves(self.command);
                self.command = u64::from(high) << 32 | u64::from(value);
                self.send(value, Target::from_xapic(high.to_be_bytes()[0], value & COMMAND_LOGICAL != 0))
            }
            register::COMMAND_HIGH => {
                let [low, _] = halves(self.command);
                self.command = u64::from(value & 0xff00_0000) << 32 | u64::from(low);
                Effect::None
            }
            register::LOGICAL_DESTINATION => {
                self.logical_destination = value & 0xff00_0000;
                Effect::LogicalIdChanged
            }
            register::DESTINATION_FORMAT => {
                self.destination_format = value | 0x0fff_ffff;
                Effect::LogicalIdChanged
            }
            register => match self.write(register, value, now) {
                Some(effect) => effect,
                None if is_read_only(register) => Effect::None,
                None => {
                    self.note_error(Errors::ILLEGAL_REGISTER);
                    Effect::None
                }
            },
        }
    }
}

/// Registers as MSRs of the Hyper-V interface, in both modes: the command register has the xAPIC's format (TLFS,
/// "Virtual Interrupt Controller").
impl LocalApic {
    /// A read of the command register.
    ///
    /// # Errors
    ///
    /// The APIC is off.
    pub fn xapic_command(&self) -> Result<u64, GeneralProtection> {
        let [low, high] = halves(self.command);
        match self.mode {
            Mode::Disabled => Err(GeneralProtection),
            Mode::XApic => Ok(self.command),
            Mode::X2Apic => Ok(u64::from(high << 24) << 32 | u64::from(low)),
        }
    }

    /// A write of the command register. Reserved bits are ignored, as in the page.
    ///
    /// # Errors
    ///
    /// The APIC is off.
    pub fn set_xapic_command(&mut self, value: u64) -> Result<Effect, GeneralProtection> {
        let [low, high] = halves(value);
        let (low, destination) = (low & COMMAND_FIELDS & !COMMAND_BUSY, high.to_be_bytes()[0]);
        let shift = match self.mode {
            Mode::Disabled => return Err(GeneralProtection),
            Mode::XApic => 56,
            Mode::X2Apic => 32,
        };
        self.command = u64::from(destination) << shift | u64::from(low);
        Ok(self.send(low, Target::from_xapic(destination, low & COMMAND_LOGICAL != 0)))
    }

    /// A read of the task priority.
    ///
    /// # Errors
    ///
    /// The APIC is off.
    pub fn task_priority(&self) -> Result<u8, GeneralProtection> {
        if self.mode == Mode::Disabled { Err(GeneralProtection) } else { Ok(self.task_priority) }
    }

    /// A write of the task priority.
    ///
    /// # Errors
    ///
    /// The APIC is off, or a reserved bit is set.
    pub fn write_task_priority(&mut self, value: u64) -> Result<Effect, GeneralProtection> {
        let priority = u8::try_from(value).map_err(|_| GeneralProtection)?;
        self.task_priority()?;
        self.set_task_priority(priority);
        Ok(Effect::None)
    }
}

/// The common part of both modes.
impl LocalApic {
    /// Reads a register; `None` if it cannot be read.
    fn read(&self, register: u32, now: impl FnOnce() -> u64) -> Option<u32> {
        let value = match register {
            register::VERSION => VERSION,
            register::TASK_PRIORITY => self.task_priority.into(),
            register::PROCESSOR_PRIORITY => self.processor_priority().into(),
            register::SPURIOUS => self.spurious,
            register::IN_SERVICE..=register::IN_SERVICE_LAST => two_classes(register, |class| self.service_bit(class)),
            register::TRIGGER_MODE..=register::TRIGGER_MODE_LAST => {
                two_classes(register, |class| self.trigger_level[class])
            }
            register::REQUEST..=register::REQUEST_LAST => two_classes(register, |class| self.request[class]),
            register::ERROR_STATUS => self.errors_shown.bits(),
            register::LVT_TIMER..=register::LVT_ERROR => self.local_vector_table[lvt_index(register)],
            register::INITIAL_COUNT => self.timer.initial_count(),
            register::CURRENT_COUNT => self.timer.current_count(now()),
            register::DIVIDE => self.timer.divide(),
            _ => return None,
        };
        Some(value)
    }

    /// Writes a register, ignoring reserved bits; `None` if it cannot be written.
    fn write(&mut self, register: u32, value: u32, now: u64) -> Option<Effect> {
        let effect = match register {
            register::END_OF_INTERRUPT => self.end_of_interrupt(),
            register::TASK_PRIORITY => {
                self.set_task_priority(value.to_le_bytes()[0]);
                Effect::None
            }
            register::SPURIOUS => self.set_spurious(value, now),
            register::ERROR_STATUS => {
                // A read shows the errors up to the last write; the write also re-arms the error interrupt.
                self.errors_shown = self.errors;
                self.errors = Errors::empty();
                Effect::None
            }
            register::LVT_TIMER..=register::LVT_ERROR => self.set_local_vector(register, value, now),
            register::INITIAL_COUNT => {
                self.catch_up(now);
                self.timer.start(value, now);
                Effect::TimerChanged
            }
            register::DIVIDE => {
                self.catch_up(now);
                self.timer.set_divide(value & DIVIDE_FIELDS, now);
                Effect::TimerChanged
            }
            _ => return None,
        };
        Some(effect)
    }

    pub(super) fn service_bit(&self, class: usize) -> u16 {
        if self.in_service >> class & 1 == 0 { 0 } else { split(self.service_vector[class]).1 }
    }

    fn set_spurious(&mut self, value: u32, now: u64) -> Effect {
        self.catch_up(now);
        self.spurious = value & SPURIOUS_FIELDS;
        self.enabled = if value & SPURIOUS_ENABLE != 0 { u16::MAX } else { 0 };
        self.reopen();
        if self.enabled != 0 {
            return Effect::None;
        }
        // An APIC that software switches off masks all its local interrupts (APM vol. 2, 16.4.7).
        for entry in &mut self.local_vector_table {
            *entry |= LVT_MASKED;
        }
        Effect::TimerChanged
    }

    fn set_local_vector(&mut self, register: u32, value: u32, now: u64) -> Effect {
        let index = lvt_index(register);
        // Expiries while the timer was masked do not interrupt later.
        self.catch_up(now);
        let mut entry = value & LVT_FIELDS[index];
        if self.enabled == 0 {
            entry |= LVT_MASKED;
        }
        self.local_vector_table[index] = entry;
        if register != register::LVT_TIMER {
            return Effect::None;
        }
        self.timer.set_mode(timer::Mode::from_lvt(entry));
        Effect::TimerChanged
    }

    fn send_to_self(&mut self, vector: u8) -> Effect {
        if vector < 16 {
            self.note_error(Errors::SENT_ILLEGAL_VECTOR);
        } else {
            self.accept(vector, false);
        }
        Effect::None
    }

    /// Decodes the lower half of the command register and sends the message, with `target` for the destination field.
    fn send(&mut self, command: u32, target: Target) -> Effect {
        let Some(kind) = Kind::from_delivery_mode(command >> 8) else {
            return Effect::None;
        };
        // De-asserting a level, which once synchronised arbitration ids, means nothing since the serial bus is gone.
        if command & COMMAND_LEVEL_TRIGGERED != 0 && command & COMMAND_ASSERT == 0 {
            return Effect::None;
        }
        let target = match command >> 18 & 3 {
            0 => target,
            1 => Target::SelfOnly,
            2 => Target::AllIncludingSelf,
            _ => Target::AllButSelf,
        };
        let vector = command.to_le_bytes()[0];

        if kind.has_vector() {
            // A message to the vCPU itself need not leave.
            if target == Target::SelfOnly || target == Target::Physical(self.config.id) {
                return self.send_to_self(vector);
            }
            if vector < 16 {
                self.note_error(Errors::SENT_ILLEGAL_VECTOR);
                return Effect::None;
            }
        }
        // A vCPU cannot restart itself by shorthand (APM vol. 2, table 16-4).
        let restarts = matches!(kind, Kind::Init | Kind::Startup);
        if restarts && command >> 18 & 3 != 0 && target != Target::AllButSelf {
            return Effect::None;
        }
        Effect::Send(Message { vector, kind, target, level: false })
    }
}

/// Register numbers (APM vol. 2, table 16-2; offset in the page divided by 16).
mod register {
    pub(super) const ID: u32 = 0x02;
    pub(super) const VERSION: u32 = 0x03;
    pub(super) const TASK_PRIORITY: u32 = 0x08;
    pub(super) const ARBITRATION_PRIORITY: u32 = 0x09;
    pub(super) const PROCESSOR_PRIORITY: u32 = 0x0a;
    pub(super) const END_OF_INTERRUPT: u32 = 0x0b;
    pub(super) const REMOTE_READ: u32 = 0x0c;
    pub(super) const LOGICAL_DESTINATION: u32 = 0x0d;
    pub(super) const DESTINATION_FORMAT: u32 = 0x0e;
    pub(super) const SPURIOUS: u32 = 0x0f;
    pub(super) const IN_SERVICE: u32 = 0x10;
    pub(super) const IN_SERVICE_LAST: u32 = 0x17;
    pub(super) const TRIGGER_MODE: u32 = 0x18;
    pub(super) const TRIGGER_MODE_LAST: u32 = 0x1f;
    pub(super) const REQUEST: u32 = 0x20;
    pub(super) const REQUEST_LAST: u32 = 0x27;
    pub(super) const ERROR_STATUS: u32 = 0x28;
    pub(super) const COMMAND: u32 = 0x30;
    pub(super) const COMMAND_HIGH: u32 = 0x31;
    pub(super) const LVT_TIMER: u32 = 0x32;
    pub(super) const LVT_THERMAL: u32 = 0x33;
    pub(super) const LVT_PERFORMANCE: u32 = 0x34;
    pub(super) const LVT_LINT0: u32 = 0x35;
    pub(super) const LVT_LINT1: u32 = 0x36;
    pub(super) const LVT_ERROR: u32 = 0x37;
    pub(super) const INITIAL_COUNT: u32 = 0x38;
    pub(super) const CURRENT_COUNT: u32 = 0x39;
    pub(super) const DIVIDE: u32 = 0x3e;
    pub(super) const SELF_IPI: u32 = 0x3f;
}

/// Version 0x14 with six entries in the local vector table; EOI broadcasts cannot be suppressed.
pub(super) const VERSION: u32 = 0x14 | 5 << 16;
const _: () = assert!(VERSION as usize >> 16 == LVT_ENTRIES - 1);

pub(super) const SPURIOUS_ENABLE: u32 = 1 << 8;
/// Vector, enable, and focus checking, which has no effect.
pub(super) const SPURIOUS_FIELDS: u32 = 0x3ff;

const LVT_STATUS: u32 = 1 << 12;
const LVT_REMOTE_IRR: u32 = 1 << 14;
/// The writable bits of each entry, in the order of the registers.
pub(super) const LVT_FIELDS: [u32; LVT_ENTRIES] = [
    LVT_MASKED | 3 << 17 | 0xff,
    LVT_MASKED | 0x7ff,
    LVT_MASKED | 0x7ff,
    LVT_MASKED | 1 << 15 | 1 << 13 | 0x7ff,
    LVT_MASKED | 1 << 15 | 1 << 13 | 0x7ff,
    LVT_MASKED | 0x7ff,
];

const COMMAND_LOGICAL: u32 = 1 << 11;
pub(super) const COMMAND_BUSY: u32 = 1 << 12;
const COMMAND_ASSERT: u32 = 1 << 14;
const COMMAND_LEVEL_TRIGGERED: u32 = 1 << 15;
pub(super) const COMMAND_FIELDS: u32 =
    3 << 18 | COMMAND_LEVEL_TRIGGERED | COMMAND_ASSERT | COMMAND_BUSY | COMMAND_LOGICAL | 0x7ff;

pub(super) const DIVIDE_FIELDS: u32 = 0b1011;

/// The bits that an x2APIC guest may set in a writable register; zero for others.
#[inline]
fn writable_bits(register: u32) -> u64 {
    WRITABLE_BITS.get(register as usize).copied().unwrap_or(0)
}

/// [`writable_bits`] of the registers up to the last one.
static WRITABLE_BITS: [u64; register::SELF_IPI as usize + 1] = {
    let mut bits = [0; register::SELF_IPI as usize + 1];
    bits[register::TASK_PRIORITY as usize] = 0xff;
    bits[register::SPURIOUS as usize] = SPURIOUS_FIELDS as u64;
    bits[register::COMMAND as usize] = 0xffff_ffff << 32 | COMMAND_FIELDS as u64;
    // Bits that only the APIC sets may be written back, and are ignored.
    bits[register::LVT_TIMER as usize] = (LVT_FIELDS[0] | LVT_STATUS) as u64;
    bits[register::LVT_THERMAL as usize] = (LVT_FIELDS[1] | LVT_STATUS) as u64;
    bits[register::LVT_PERFORMANCE as usize] = (LVT_FIELDS[2] | LVT_STATUS) as u64;
    bits[register::LVT_LINT0 as usize] = (LVT_FIELDS[3] | LVT_STATUS | LVT_REMOTE_IRR) as u64;
    bits[register::LVT_LINT1 as usize] = (LVT_FIELDS[4] | LVT_STATUS | LVT_REMOTE_IRR) as u64;
    bits[register::LVT_ERROR as usize] = (LVT_FIELDS[5] | LVT_STATUS) as u64;
    bits[register::INITIAL_COUNT as usize] = u32::MAX as u64;
    bits[register::DIVIDE as usize] = DIVIDE_FIELDS as u64;
    bits[register::SELF_IPI as usize] = 0xff;
    bits
};

/// Registers of an xAPIC that exist, and where a write is no error.
const fn is_read_only(register: u32) -> bool {
    matches!(
        register,
        register::ID
            | register::VERSION
            | register::ARBITRATION_PRIORITY
            | register::PROCESSOR_PRIORITY
            | register::REMOTE_READ
            | register::IN_SERVICE..=register::REQUEST_LAST | register::CURRENT_COUNT
    )
}

/// The register at `offset` in the page; bytes between two registers belong to none.
const fn mmio_register(offset: u16) -> u32 {
    if offset & 0xf == 0 { offset as u32 >> 4 } else { u32::MAX }
}

/// Entry of a register between `LVT_TIMER` and `LVT_ERROR` in the local vector table.
const fn lvt_index(register: u32) -> usize {
    (register - register::LVT_TIMER) as usize
}

/// One of the eight 32-bit registers that show a 256-bit set, put together from `class`es.
fn two_classes(register: u32, class: impl Fn(usize) -> u16) -> u32 {
    let even = (register & 7) as usize * 2;
    u32::from(class(even + 1)) << 16 | u32::from(class(even))
}

/// The lower and the upper half of a 64-bit register.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "each half is 32 bits")]
pub(super) const fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

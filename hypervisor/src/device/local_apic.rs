//! The local APIC of one vCPU, for the pCPU that runs the vCPU.
//!
//! Only the owner touches this state, so nothing here is atomic. Other vCPUs post vectors elsewhere, and the owner
//! merges them by [`LocalApic::accept_words`]. What must leave the vCPU (an IPI, news for the I/O APIC) is returned as
//! an [`Effect`]. Time is the guest's time-stamp counter, in ticks.
//!
//! An interrupt has three steps: *accepted* (requested, bit in IRR), *delivered* to the vCPU (in service, bit in ISR),
//! *ended* by the guest's EOI. A requested vector may be delivered when its priority class, the upper four bits, is
//! above the class of the task priority and of everything in service (APM vol. 2, 16.6.4).
//!
//! So this code compares classes, and keeps sets of the sixteen classes. At most one vector per class can be in
//! service. The next vector is one AND and one bit scan, and an EOI clears the highest bit of a set; no code searches a
//! 256-bit register. Both are on the path of every interrupt.
//!
//! This file has the life of an interrupt. `registers` has the guest's reads and writes, `timer` the counting, `state`
//! what a parent saves and restores.

mod registers;
mod state;
#[cfg(test)]
mod tests;
mod timer;

use core::mem::offset_of;

use bitflags::bitflags;

use super::interrupt::{LogicalId, Message, Pin};
use timer::Timer;

/// Ticks of the time-stamp counter per step of the APIC timer, before the guest's divider.
pub const TSC_TICKS_PER_TIMER_TICK: u64 = 4;

/// Where the xAPIC's page of registers is after power-on.
const MMIO_BASE: u64 = 0xfee0_0000;

/// First MSR of the x2APIC.
pub const FIRST_MSR: u32 = 0x800;

/// A local APIC. Create one per vCPU with [`LocalApic::new`].
///
/// The first cache line holds all that delivering and ending an edge-triggered interrupt touches.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct LocalApic {
    /// Classes that may be delivered now: above the processor priority; none while the APIC is off.
    open: u16,
    /// Classes with a requested vector.
    requested: u16,
    /// Classes with a vector in service.
    in_service: u16,
    /// Classes with a vector in `trigger_level`.
    has_level: u16,
    /// All classes while software and mode leave the APIC on, else none.
    enabled: u16,
    task_priority: u8,
    mode: Mode,
    /// The vector in service of each class in `in_service`.
    service_vector: [u8; 16],
    /// IRR, one element per class.
    request: [u16; 16],
    /// Classes with a vector in `auto_eoi`.
    has_auto_eoi: u16,

    /// Vectors that end as they are delivered, one element per class.
    auto_eoi: [u16; 16],
    /// TMR, one element per class: the vector was last accepted as level-triggered.
    trigger_level: [u16; 16],
    timer: Timer,
    local_vector_table: [u32; LVT_ENTRIES],
    /// The error register as the guest reads it, and the errors since its last write.
    errors_shown: Errors,
    errors: Errors,
    spurious: u32,
    command: u64,
    logical_destination: u32,
    destination_format: u32,
    /// Where the page of registers is.
    base: u64,
    config: Config,
}

const _: () = assert!(offset_of!(LocalApic, auto_eoi) <= 64, "what is hot fits one cache line");

/// Constants of a local APIC.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// APIC id. An xAPIC shows its low eight bits.
    pub id: u32,
    /// Whether the guest may switch to x2APIC mode; CPUID must say the same.
    pub x2apic_offered: bool,
    /// Whether this is the vCPU that boots.
    pub bootstrap: bool,
    /// Ticks. A periodic timer with a shorter period is slowed to this one, lest its interrupts take all of a pCPU.
    /// The equivalent of 20 µs is below anything that a kernel uses.
    pub shortest_period: u64,
}

/// How the guest reaches the registers (APM vol. 2, chapter 16, x2APIC support).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Not at all: the APIC is off, accepts nothing and delivers nothing.
    Disabled,
    /// By MMIO.
    XApic,
    /// By MSRs.
    X2Apic,
}

/// What the owner must do after an access to the APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing beyond looking at [`LocalApic::pending`] before the next entry, as always.
    None,
    /// Route this IPI.
    Send(Message),
    /// The guest ended a level-triggered interrupt: report this to the I/O APIC.
    EndOfInterrupt {
        /// The vector that was in service.
        vector: u8,
    },
    /// [`LocalApic::deadline`] may have changed.
    TimerChanged,
    /// [`LocalApic::logical_id`] may have changed.
    LogicalIdChanged,
    /// [`LocalApic::mode`] has changed, and with it the deadline and the logical id.
    ModeChanged,
}

/// What the owner must do after a pin was asserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pinned {
    /// Nothing more.
    Done,
    /// It is an NMI.
    Nmi,
    /// It is an interrupt of a controller beside the APIC.
    External,
}

/// The access was illegal: the guest gets #GP(0) and nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneralProtection;

/// The life of an interrupt.
impl LocalApic {
    /// An APIC after power-on: in xAPIC mode, switched off by software, everything masked.
    #[must_use]
    pub const fn new(config: Config) -> Self {
        Self {
            open: 0,
            requested: 0,
            in_service: 0,
            has_level: 0,
            enabled: 0,
            task_priority: 0,
            mode: Mode::XApic,
            service_vector: [0; 16],
            request: [0; 16],
            has_auto_eoi: 0,
            auto_eoi: [0; 16],
            trigger_level: [0; 16],
            timer: Timer::new(config.shortest_period),
            local_vector_table: [LVT_MASKED; LVT_ENTRIES],
            errors_shown: Errors::empty(),
            errors: Errors::empty(),
            spurious: 0xff,
            command: 0,
            logical_destination: 0,
            destination_format: u32::MAX,
            base: MMIO_BASE,
            config,
        }
    }

    /// Requests `vector`. Vectors below 16 are recorded as an error; an APIC that is off ignores all.
    pub fn accept(&mut self, vector: u8, level: bool) {
        if self.enabled == 0 {
            return;
        }
        let (class, bit) = split(vector);
        if class == 0 {
            return self.note_error(Errors::RECEIVED_ILLEGAL_VECTOR);
        }
        self.request[class] |= bit;
        self.requested |= 1 << class;
        if level {
            self.trigger_level[class] |= bit;
            self.has_level |= 1 << class;
        } else {
            self.forget_level(class, bit);
        }
    }

    /// Requests many edge-triggered vectors: bit n of word w is vector `w * 64 + n`.
    pub fn accept_words(&mut self, posted: &[u64; 4]) {
        if self.enabled == 0 {
            return;
        }
        for (word, &vectors) in posted.iter().enumerate() {
            let mut left = vectors;
            // Four classes to a word; the loop ends with the last class that has something.
            for class in word * 4..word * 4 + 4 {
                if left == 0 {
                    break;
                }
                self.accept_class(class, low_half_word(left));
                left >>= 16;
            }
        }
    }

    fn accept_class(&mut self, class: usize, vectors: u16) {
        if vectors == 0 {
            return;
        }
        if class == 0 {
            return self.note_error(Errors::RECEIVED_ILLEGAL_VECTOR);
        }
        self.request[class] |= vectors;
        self.requested |= 1 << class;
        self.forget_level(class, vectors);
    }

    fn forget_level(&mut self, class: usize, vectors: u16) {
        if self.has_level >> class & 1 != 0 {
            self.trigger_level[class] &= !vectors;
            if self.trigger_level[class] == 0 {
                self.has_level &= !(1 << class);
            }
        }
    }

    /// The vector to deliver next, if one may be delivered now.
    #[inline]
    #[must_use]
    pub fn pending(&self) -> Option<u8> {
        let deliverable = self.requested & self.open;
        if deliverable == 0 {
            return None;
        }
        let class = highest(deliverable);
        Some(join(class, highest(self.request[class])))
    }

    /// Whether a vector waits only because the task priority holds it back, so that a lower one must be noticed.
    #[must_use]
    pub fn is_held_by_task_priority(&self) -> bool {
        let above_service = classes_above(highest(self.in_service));
        self.requested & self.enabled & above_service & !self.open != 0
    }

    /// Whether anything is requested, deliverable or not.
    #[inline]
    #[must_use]
    pub fn has_any_request(&self) -> bool {
        self.requested != 0
    }

    /// Whether all there is to do is one edge-triggered vector, which may be delivered now: its end lets nothing else
    /// in, and nobody has to learn of it.
    #[must_use]
    pub fn has_only_an_edge(&self) -> bool {
        let Some((class, bit)) = self.pending().map(split) else { return false };
        let is_alone = self.requested == 1 << class && self.request[class] == bit && self.in_service == 0;
        is_alone && self.trigger_level[class] & bit == 0 && self.auto_eoi[class] & bit == 0
    }

    /// The vCPU takes `vector`, which [`LocalApic::pending`] named: from requested to in service. Any vector that may
    /// not be delivered now is left alone.
    #[inline]
    pub fn deliver(&mut self, vector: u8) {
        let (class, bit) = split(vector);
        if self.request[class] & bit == 0 || self.open >> class & 1 == 0 {
            return;
        }
        self.request[class] &= !bit;
        if self.request[class] == 0 {
            self.requested &= !(1 << class);
        }
        if self.has_auto_eoi >> class & 1 != 0 && self.auto_eoi[class] & bit != 0 {
            return;
        }
        self.service_vector[class] = vector;
        self.in_service |= 1 << class;
        // The class was open, so it is above all else in service and above the task priority.
        self.open = classes_above(class) & self.enabled;
    }

    /// `vector`, which [`LocalApic::deliver`] took into service last, did not reach the guest: it is requested again.
    pub fn retract(&mut self, vector: u8) {
        let (class, bit) = split(vector);
        if self.auto_eoi[class] & bit == 0 {
            if self.in_service >> class & 1 == 0 || self.service_vector[class] != vector {
                return;
            }
            self.in_service &= !(1 << class);
        }
        self.request[class] |= bit;
        self.requested |= 1 << class;
        self.reopen();
    }

    /// From now on, exactly these vectors end when they are delivered. The guest sends no EOI for them, and they hold
    /// back no other vector (TLFS, AutoEOI of a synthetic interrupt source). A vector that is in service stays so until
    /// its EOI.
    pub fn set_auto_eoi(&mut self, vectors: impl Iterator<Item = u8>) {
        (self.has_auto_eoi, self.auto_eoi) = (0, [0; 16]);
        for (class, bit) in vectors.map(split) {
            self.auto_eoi[class] |= bit;
            self.has_auto_eoi |= 1 << class;
        }
    }

    /// The guest ends the interrupt of the highest class in service. If there is none, nothing happens.
    ///
    /// A write of the EOI register does this. The caller may call it directly if it knows that the guest is in the
    /// right mode and that an x2APIC writes zero.
    #[inline]
    pub fn end_of_interrupt(&mut self) -> Effect {
        let class = highest(self.in_service);
        // Class 0 is never in service; `highest` returns it if there is none.
        if class == 0 {
            return Effect::None;
        }
        self.in_service &= !(1 << class);
        self.reopen();
        if self.has_level >> class & 1 == 0 { Effect::None } else { self.end_in_level_class(class) }
    }

    #[cold]
    fn end_in_level_class(&self, class: usize) -> Effect {
        let vector = self.service_vector[class];
        let (_, bit) = split(vector);
        if self.trigger_level[class] & bit == 0 { Effect::None } else { Effect::EndOfInterrupt { vector } }
    }

    /// Recomputes which classes may be delivered, after the task priority or the set in service changed.
    #[inline]
    fn reopen(&mut self) {
        let task_class = usize::from(self.task_priority >> 4);
        self.open = classes_above(task_class.max(highest(self.in_service))) & self.enabled;
    }

    /// PPR (APM vol. 2, 16.6.4).
    fn processor_priority(&self) -> u8 {
        let service_class = highest(self.in_service);
        if usize::from(self.task_priority >> 4) >= service_class { self.task_priority } else { join(service_class, 0) }
    }

    /// The task priority as CR8 shows it: the class.
    #[inline]
    #[must_use]
    pub fn cr8(&self) -> u8 {
        self.task_priority >> 4
    }

    /// The guest wrote its task priority through CR8, whose upper bits are ignored here.
    #[inline]
    pub fn set_cr8(&mut self, class: u8) {
        // The owner calls this on each exit to copy the processor's value. If nothing changed, the four lower bits,
        // which CR8 does not have, must stay.
        let class = class & 0xf;
        if class != self.cr8() {
            self.set_task_priority(class << 4);
        }
    }

    fn set_task_priority(&mut self, priority: u8) {
        self.task_priority = priority;
        self.reopen();
    }
}

/// Identity and mode.
impl LocalApic {
    /// INIT: everything as after power-on but MSR 0x1b, which survives together with the id.
    pub fn init(&mut self) {
        self.reset_to(self.mode);
    }

    /// Everything as after power-on, but where the registers are, and the mode.
    fn reset_to(&mut self, mode: Mode) {
        *self = Self { mode, base: self.base, ..Self::new(self.config) };
    }

    /// Address of the register page in xAPIC mode. Guest memory at that address hides it: all vCPUs share one memory
    /// map, which has only the address after power-on.
    #[inline]
    #[must_use]
    pub const fn mmio_base(&self) -> u64 {
        self.base
    }

    /// APIC id.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.config.id
    }

    /// How the guest reaches the registers.
    #[inline]
    #[must_use]
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether mode and spurious-interrupt register leave the APIC on. If not, it accepts and delivers nothing.
    #[cfg(test)]
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        self.enabled != 0
    }

    /// How this APIC answers to [`Target::Logical`](super::interrupt::Target::Logical).
    #[must_use]
    pub const fn logical_id(&self) -> LogicalId {
        match self.mode {
            Mode::Disabled => LogicalId::NONE,
            Mode::XApic => LogicalId::from_xapic(self.logical_destination, self.destination_format),
            Mode::X2Apic => LogicalId::from_x2apic(self.config.id),
        }
    }

    /// Value of MSR 0x1b, the APIC base.
    #[must_use]
    pub const fn base_msr(&self) -> u64 {
        let mode = match self.mode {
            Mode::Disabled => 0,
            Mode::XApic => BASE_ENABLE,
            Mode::X2Apic => BASE_ENABLE | BASE_X2APIC,
        };
        let bootstrap = if self.config.bootstrap { BASE_BOOTSTRAP } else { 0 };
        self.base | mode | bootstrap
    }

    /// A write of MSR 0x1b. Modes change as in the manual (SDM vol. 3, "x2APIC State Transitions"): an x2APIC can only
    /// be switched off, and an APIC that is off becomes an xAPIC after reset. In any mode the registers may be moved
    /// (APM vol. 2, 16.3.1).
    ///
    /// # Errors
    ///
    /// Other changes of mode, and reserved bits; the caller checks the reserved bits of the address. The boot-CPU flag
    /// cannot be changed; a write to it is ignored.
    pub fn set_base_msr(&mut self, value: u64) -> Result<Effect, GeneralProtection> {
        const FIELDS: u64 = BASE_ENABLE | BASE_X2APIC | BASE_BOOTSTRAP;
        if value & !(FIELDS | BASE_ADDRESS) != 0 {
            return Err(GeneralProtection);
        }
        let mode = match (value & BASE_ENABLE != 0, value & BASE_X2APIC != 0) {
            (false, false) => Mode::Disabled,
            (true, false) => Mode::XApic,
            (true, true) if self.config.x2apic_offered => Mode::X2Apic,
            _ => return Err(GeneralProtection),
        };

        let effect = match (self.mode, mode) {
            (old, new) if old == new => Effect::None,
            (Mode::XApic, Mode::X2Apic) => {
                // The upper half of the command register is not kept; the logical id is now a function of the id.
                self.command = 0;
                self.mode = mode;
                Effect::ModeChanged
            }
            (_, Mode::Disabled) | (Mode::Disabled, Mode::XApic) => {
                self.reset_to(mode);
                Effect::ModeChanged
            }
            _ => return Err(GeneralProtection),
        };
        self.base = value & BASE_ADDRESS;
        Ok(effect)
    }
}

/// Errors, and the interrupts that the APIC raises itself.
impl LocalApic {
    fn note_error(&mut self, error: Errors) {
        // The error interrupt is sent once, until the guest writes the error register.
        let is_first = self.errors.is_empty();
        self.errors |= error;
        if is_first {
            self.raise_local(LVT_ERROR);
        }
    }

    /// A pin is asserted. An APIC that is switched off leads them through (SDM vol. 3, "Local Vector Table").
    pub fn assert_pin(&mut self, pin: Pin) -> Pinned {
        if self.mode == Mode::Disabled {
            return match pin {
                Pin::Lint0 => Pinned::External,
                Pin::Lint1 => Pinned::Nmi,
            };
        }
        let source = match pin {
            Pin::Lint0 => LVT_LINT0,
            Pin::Lint1 => LVT_LINT1,
        };
        let entry = self.local_vector_table[source];
        match entry >> 8 & 7 {
            _ if entry & LVT_MASKED != 0 => {}
            0 => {
                let _raised = self.raise_local(source);
            }
            4 => return Pinned::Nmi,
            7 => return Pinned::External,
            // SMI and INIT; the others are reserved.
            _ => {}
        }
        Pinned::Done
    }

    /// Requests the vector of `source`, an entry of the local vector table, unless it is masked.
    fn raise_local(&mut self, source: usize) -> bool {
        let entry = self.local_vector_table[source];
        if entry & LVT_MASKED != 0 {
            return false;
        }
        self.accept(entry.to_le_bytes()[0], false);
        true
    }
}

/// The timer.
impl LocalApic {
    /// When [`LocalApic::expire`] must be called, in absolute ticks. `None` while the timer cannot interrupt.
    #[inline]
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        if self.is_timer_masked() { None } else { self.timer.expiry() }
    }

    /// Requests the timer's interrupt if it is due at `now`, and returns whether it did. Several elapsed periods give
    /// one interrupt, and the next one comes at its regular time.
    ///
    /// Read [`LocalApic::deadline`] again after each call, also without an interrupt: an earlier register access may
    /// have requested it already.
    #[inline]
    pub fn expire(&mut self, now: u64) -> bool {
        self.timer.take_due(now) && self.raise_local(LVT_TIMER)
    }

    /// Value of MSR 0x6e0: the tick of the next interrupt, zero if there is none.
    #[must_use]
    pub fn tsc_deadline(&self, now: u64) -> u64 {
        self.timer.deadline(now)
    }

    /// A write of MSR 0x6e0. Zero disarms, a tick that has passed interrupts at once; ignored unless the timer is in
    /// deadline mode.
    #[inline]
    pub fn set_tsc_deadline(&mut self, deadline: u64, now: u64) -> Effect {
        self.catch_up(now);
        self.timer.set_deadline(deadline);
        self.catch_up(now);
        Effect::TimerChanged
    }

    #[inline]
    fn catch_up(&mut self, now: u64) {
        let _raised = self.expire(now);
    }

    #[inline]
    const fn is_timer_masked(&self) -> bool {
        self.local_vector_table[LVT_TIMER] & LVT_MASKED != 0
    }
}

/// Entries of the local vector table: timer, thermal sensor, performance counters, two pins, errors. The sensor and the
/// counters are registers without a source.
const LVT_ENTRIES: usize = 6;
const LVT_TIMER: usize = 0;
const LVT_LINT0: usize = 3;
const LVT_LINT1: usize = 4;
const LVT_ERROR: usize = LVT_ENTRIES - 1;
const LVT_MASKED: u32 = 1 << 16;

const BASE_BOOTSTRAP: u64 = 1 << 8;
const BASE_X2APIC: u64 = 1 << 10;
const BASE_ENABLE: u64 = 1 << 11;
const BASE_ADDRESS: u64 = !0xfff;

bitflags! {
    /// Error status register (APM vol. 2, 16.4.6).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Errors: u32 {
        const SENT_ILLEGAL_VECTOR = 1 << 5;
        const RECEIVED_ILLEGAL_VECTOR = 1 << 6;
        const ILLEGAL_REGISTER = 1 << 7;
    }
}

/// Priority class of a vector, and the vector's bit within the class.
#[inline]
const fn split(vector: u8) -> (usize, u16) {
    (vector as usize >> 4, 1 << (vector & 0xf))
}

/// The vector of `class` with the lower four bits `index`. Both are below 16.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "both come from `highest`, which is below 16")]
const fn join(class: usize, index: usize) -> u8 {
    (class << 4 | index) as u8
}

/// The highest bit set among sixteen; 0 also if there is none.
#[inline]
const fn highest(set: u16) -> usize {
    // With bit 0 set, the scan has a result without a test for zero.
    ((set as u32 | 1).ilog2() & 0xf) as usize
}

/// The set of classes above `class`, which is below 16.
#[inline]
const fn classes_above(class: usize) -> u16 {
    0xfffe << (class & 0xf)
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn low_half_word(word: u64) -> u16 {
    word as u16
}

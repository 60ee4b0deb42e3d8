//! The pending events of one vCPU, and the choice among them.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};
use x86_defs::registers::vector;

use crate::combine::{Combined, combine};

/// An event that an entry injects, or whose delivery an exit interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// An external interrupt.
    Interrupt(u8),
    /// A non-maskable interrupt.
    Nmi,
    /// An exception. Its return address is the current RIP.
    Exception(Exception),
    /// INT n, INT3 or INTO. Its return address is the current RIP, which must already be behind the instruction.
    SoftwareInterrupt(u8),
}

/// An exception with its error code, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exception {
    /// The vector, 0 to 31.
    pub vector: u8,
    /// The error code.
    pub code: Option<u32>,
}

impl Exception {
    /// An exception without an error code.
    #[must_use]
    pub const fn new(vector: u8) -> Self {
        Self { vector, code: None }
    }

    /// An exception with an error code.
    #[must_use]
    pub const fn with_code(vector: u8, code: u32) -> Self {
        Self { vector, code: Some(code) }
    }
}

/// The guest's state at the current instruction boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// RFLAGS.IF.
    pub interrupts_enabled: bool,
    /// The last instruction was STI or MOV SS: events wait for one more instruction.
    pub shadow: bool,
}

/// How the hypervisor gets control again for the next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Nothing is pending: any exit will do.
    Exit,
    /// An interrupt is pending: exit as soon as the guest can take interrupts.
    Window,
    /// One instruction must complete first. Nothing is injected, and no interrupt window is requested.
    Step,
    /// Exit as soon as the injected event is delivered, before the first instruction of its handler.
    Delivered,
}

/// What the next entry does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The event to inject. It ends an interrupt shadow.
    pub inject: Option<Event>,
    /// When the guest must exit.
    pub until: Until,
    /// An interrupt whose delivery failed. It returns to the interrupt controller and is pending there again.
    pub retract: Option<u8>,
}

bitflags! {
    /// Conditions that need more than "inject an interrupt, if there is one".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Urgent: u8 {
        /// The last exit requires an exception or a software interrupt.
        const OWED = 1 << 0;
        /// An unmasked NMI is pending.
        const NMI = 1 << 1;
        /// An IRET that ends an NMI's mask is about to be executed.
        const RETURNING = 1 << 2;
        /// The guest is in an interrupt shadow that the next entry would lose.
        const SHADOW = 1 << 3;
        /// The last entry injected a software interrupt, and ended during its delivery. So the interrupted event is
        /// that one, and not an INT that the guest has executed since.
        const SOFTWARE = 1 << 4;
        /// An external interrupt waits, or the last entry injected one.
        const EXTERNAL = 1 << 5;
    }
}

/// An interrupt of a controller beside the local APIC, as a PC's 8259. It has a vector, and no EOI in the local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum External {
    None,
    Waiting(u8),
    /// The last entry injected it.
    Taken(u8),
}

/// What a file keeps of a vCPU's events between two entries. External interrupts are not among them: a VM whose state
/// goes into a file has no interrupt controller beside the local APICs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The exception or software interrupt that the last exit requires.
    pub owed: Option<Event>,
    /// The event whose delivery the last exit interrupted, if the next entry injects it again.
    pub interrupted: Option<Event>,
    /// NMIs that wait.
    pub waiting_nmis: u8,
    /// The guest handles an NMI.
    pub masks_nmis: bool,
}

/// The events of one vCPU, except the interrupts in its local APIC.
#[derive(Clone, Debug)]
pub struct Events {
    urgent: Urgent,
    /// Valid if [`Urgent::OWED`] is set.
    owed: Event,
    /// Valid if [`Urgent::EXTERNAL`] is set.
    external: External,
    /// Number of pending NMIs: at most one while NMIs are masked, otherwise at most two, because the processor would
    /// have taken the first.
    waiting_nmis: u8,
    /// The guest handles an NMI: it takes no other until an IRET has completed (APM vol. 2, 8.2.3).
    masks_nmis: bool,
}

impl Events {
    /// No events.
    #[must_use]
    pub const fn new() -> Self {
        Self { urgent: Urgent::empty(), owed: Event::Nmi, external: External::None, waiting_nmis: 0, masks_nmis: false }
    }

    /// INIT: drops pending events (APM vol. 2, 14.1.3).
    pub const fn reset(&mut self) {
        *self = Self::new();
    }

    /// The state for a file. `interrupted` is the event whose delivery the last exit interrupted.
    ///
    /// What belongs to the last entry alone is not in it: an IRET that was about to be stepped over exits again. A
    /// software interrupt that was injected is owed again; one that the guest has executed itself, it executes again.
    #[must_use]
    pub fn state(&self, interrupted: Option<Event>) -> State {
        let again = interrupted.and_then(|event| repeated(event, self.urgent.contains(Urgent::SOFTWARE)));
        let (owed, interrupted) = match (self.owed(), again) {
            (None, Some(event @ Event::SoftwareInterrupt(_))) => (Some(event), None),
            // As in `owed_goes_first`.
            (owed @ Some(_), Some(Event::SoftwareInterrupt(_))) => (owed, None),
            both => both,
        };
        State { owed, interrupted, waiting_nmis: self.waiting_nmis, masks_nmis: self.masks_nmis }
    }

    /// Events in this state. The caller gives [`State::interrupted`] to [`Self::next`].
    #[must_use]
    pub fn with_state(state: &State) -> Self {
        let mut events = Self::new();
        match state.owed {
            Some(Event::Exception(exception)) => events.raise(exception),
            Some(Event::SoftwareInterrupt(vector)) => events.raise_software_interrupt(vector),
            Some(Event::Interrupt(_) | Event::Nmi) | None => {}
        }
        events.masks_nmis = state.masks_nmis;
        events.request_nmis(state.waiting_nmis);
        events
    }

    /// Whether only an interrupt of the local APIC can be due. Then the caller need not call [`Self::next`], if the
    /// last exit interrupted no delivery.
    #[inline]
    #[must_use]
    pub const fn is_quiet(&self) -> bool {
        self.urgent.is_empty()
    }

    /// The last exit requires this exception for the guest.
    #[inline]
    pub fn raise(&mut self, exception: Exception) {
        self.owed = Event::Exception(exception);
        self.urgent.insert(Urgent::OWED);
    }

    /// The guest exited at an INT n, INT3 or INTO, which the hypervisor emulates. RIP is already behind the
    /// instruction.
    pub fn raise_software_interrupt(&mut self, vector: u8) {
        self.owed = Event::SoftwareInterrupt(vector);
        self.urgent.insert(Urgent::OWED);
    }

    /// The exception or software interrupt that the last exit requires.
    #[must_use]
    pub const fn owed(&self) -> Option<Event> {
        if self.urgent.contains(Urgent::OWED) { Some(self.owed) } else { None }
    }

    /// Somebody outside of the guest takes that event back.
    pub fn forget_owed(&mut self) {
        self.urgent.remove(Urgent::OWED);
    }

    /// Somebody outside of the guest masks NMIs as their handler would, or ends the mask.
    pub fn set_nmi_mask(&mut self, masks_nmis: bool) {
        self.masks_nmis = masks_nmis;
        self.request_nmis(0);
    }

    /// `count` NMIs were sent. A processor latches one while it handles another.
    pub fn request_nmis(&mut self, count: u8) {
        let most = if self.masks_nmis { 1 } else { 2 };
        self.waiting_nmis = self.waiting_nmis.saturating_add(count).min(most);
        self.urgent.set(Urgent::NMI, self.waiting_nmis > 0 && !self.masks_nmis);
    }

    /// An external interrupt with this vector waits. It goes before those of the local APIC, whatever the task priority
    /// is. One that waited already is forgotten.
    pub fn request_external(&mut self, vector: u8) {
        self.set_external(External::Waiting(vector));
    }

    /// None waits any more.
    pub fn withdraw_external(&mut self) {
        if self.has_external() {
            self.set_external(External::None);
        }
    }

    /// Whether one waits.
    #[must_use]
    pub const fn has_external(&self) -> bool {
        matches!(self.external, External::Waiting(_))
    }

    /// Whether the interrupt that the last plan injects is external: then the local APIC does not know it.
    #[must_use]
    pub const fn injects_external(&self) -> bool {
        matches!(self.external, External::Taken(_))
    }

    fn set_external(&mut self, external: External) {
        self.external = external;
        self.urgent.set(Urgent::EXTERNAL, external != External::None);
    }

    /// Whether NMIs are masked. Then IRET must exit: [`Self::at_iret`].
    #[must_use]
    pub const fn masks_nmis(&self) -> bool {
        self.masks_nmis
    }

    /// Whether an event other than an interrupt ends a halt.
    #[must_use]
    pub const fn wakes(&self) -> bool {
        self.urgent.intersects(Urgent::OWED.union(Urgent::NMI))
    }

    /// The guest exited at an IRET. The mask of NMIs ends when that IRET has completed, and not if it faults.
    pub fn at_iret(&mut self) {
        self.urgent.set(Urgent::RETURNING, self.masks_nmis);
    }

    /// The guest exited in an interrupt shadow that an entry on this machine does not restore: a single step keeps the
    /// shadow.
    pub fn keep_shadow(&mut self) {
        self.urgent.insert(Urgent::SHADOW);
    }

    /// Whether the next single step is over an IRET.
    #[must_use]
    pub const fn is_returning(&self) -> bool {
        self.urgent.contains(Urgent::RETURNING)
    }

    /// The single-stepped instruction has completed.
    pub fn stepped(&mut self) {
        if self.urgent.contains(Urgent::RETURNING) {
            self.masks_nmis = false;
        }
        self.abandon_step();
        self.urgent.set(Urgent::NMI, self.waiting_nmis > 0 && !self.masks_nmis);
    }

    /// The instruction to step over will not be executed next, or has faulted.
    pub fn abandon_step(&mut self) {
        self.urgent.remove(Urgent::RETURNING | Urgent::SHADOW);
    }

    /// Chooses the event of the next entry, and when the guest must exit for the event after it.
    ///
    /// `interrupt` is the local APIC's vector of highest priority, if it may be delivered; the caller takes it into
    /// service when the plan injects it. `interrupted` is the event whose delivery the last exit interrupted.
    #[must_use]
    pub fn next(&mut self, at: Boundary, interrupt: Option<u8>, interrupted: Option<Event>) -> Plan {
        let was_injected = self.urgent.contains(Urgent::SOFTWARE);
        self.urgent.remove(Urgent::SOFTWARE);

        let again = interrupted.and_then(|event| repeated(event, was_injected));
        match self.external {
            // It has not reached the guest yet.
            External::Taken(vector) if again == Some(Event::Interrupt(vector)) => {}
            External::Taken(_) => self.set_external(External::None),
            External::None | External::Waiting(_) => {}
        }
        let external = match self.external {
            External::Waiting(vector) => Some(vector),
            External::None | External::Taken(_) => None,
        };
        let rest = interrupt;
        let interrupt = external.or(interrupt);
        if self.urgent.contains(Urgent::OWED) {
            return self.owed_goes_first(again, interrupt);
        }
        if let Some(event) = again {
            return self.inject(event, interrupt, None);
        }
        if self.urgent.contains(Urgent::NMI) && !at.shadow {
            // Of two pending NMIs, one is latched behind this one.
            self.waiting_nmis -= 1;
            return self.inject(Event::Nmi, interrupt, None);
        }
        if let Some(vector) = interrupt
            && at.interrupts_enabled
            && !at.shadow
        {
            if external.is_some() {
                self.set_external(External::Taken(vector));
                return self.inject(Event::Interrupt(vector), rest, None);
            }
            return self.inject(Event::Interrupt(vector), None, None);
        }
        let steps = self.urgent.intersects(Urgent::RETURNING.union(Urgent::SHADOW).union(Urgent::NMI));
        let until = match interrupt {
            _ if steps => Until::Step,
            Some(_) => Until::Window,
            None => Until::Exit,
        };
        Plan { inject: None, until, retract: None }
    }

    /// The event that the last exit requires goes first. If it was raised during the delivery of another event, that
    /// one comes again later.
    fn owed_goes_first(&mut self, interrupted: Option<Event>, interrupt: Option<u8>) -> Plan {
        self.urgent.remove(Urgent::OWED);
        let mut owed = self.owed;
        let mut retract = None;
        match (interrupted, owed) {
            (Some(Event::Exception(first)), Event::Exception(second)) if combine(first, second) != Combined::Second => {
                // Only double faults lead to a shutdown. The hardware delivers these itself, and reports the shutdown.
                owed = Event::Exception(Exception::with_code(vector::DOUBLE_FAULT, 0));
            }
            (Some(Event::Interrupt(vector)), _) if self.injects_external() => {
                self.request_external(vector);
                return self.inject(owed, Some(vector), None);
            }
            (Some(Event::Interrupt(vector)), _) => retract = Some(vector),
            (Some(Event::Nmi), _) => {
                self.masks_nmis = false;
                self.request_nmis(1);
            }
            _ => {}
        }
        self.inject(owed, interrupt.or(retract), retract)
    }

    /// A plan that injects `event`; `interrupt` stays pending.
    fn inject(&mut self, event: Event, interrupt: Option<u8>, retract: Option<u8>) -> Plan {
        match event {
            Event::Nmi => {
                self.masks_nmis = true;
                self.urgent.remove(Urgent::NMI);
            }
            Event::SoftwareInterrupt(_) => self.urgent.insert(Urgent::SOFTWARE),
            Event::Interrupt(_) | Event::Exception(_) => {}
        }
        // The handler's first instruction is next, not the one to step over.
        self.abandon_step();
        let until = match interrupt {
            _ if self.urgent.intersects(Urgent::NMI.union(Urgent::SOFTWARE)) => Until::Delivered,
            Some(_) => Until::Window,
            None => Until::Exit,
        };
        Plan { inject: Some(event), until, retract }
    }
}

impl Default for Events {
    fn default() -> Self {
        Self::new()
    }
}

/// The form in which an interrupted event is injected again (APM vol. 2, 15.20): interrupts, NMIs and exceptions
/// unchanged. The guest executes INT n, INT3 and INTO again, because RIP still points at them. But if the hypervisor
/// had injected the event, RIP is behind the instruction.
fn repeated(event: Event, was_injected: bool) -> Option<Event> {
    match event {
        Event::SoftwareInterrupt(_) => was_injected.then_some(event),
        Event::Exception(Exception { vector: vector @ (vector::BREAKPOINT | vector::OVERFLOW), .. }) => {
            was_injected.then_some(Event::SoftwareInterrupt(vector))
        }
        Event::Interrupt(_) | Event::Nmi | Event::Exception(_) => Some(event),
    }
}

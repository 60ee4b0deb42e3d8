//! The events of a vCPU: the event that each entry injects, and the exit that a waiting event needs.
//!
//! The crate `x86_events` makes the choice. This file converts its plans to calls of [`Injection`] (an event, the
//! interrupt window, single steps), and converts exits to the crate's input.
//!
//! #DB and #AC always exit. A guest can make the delivery of one of them raise the same one again, without end and
//! without an instruction boundary at which the processor would take host interrupts (CVE-2015-8104, CVE-2015-5307).
//! With injection, each round is an exit, and host interrupts, kicks and time slices work as usual.

use x86_defs::registers::{rflags, vector};
use x86_events::{Boundary, Debug, Event, Exception, Flags, Step, Until};

use super::state::State as _;
use super::vcpu::ArchVcpu;
use crate::arch::x86_64::backend::{Injection, WorldSwitch as _};
use crate::arch::x86_64::host::apic as host_apic;
use crate::cpu;
use crate::vcpu::Tally;

/// The entry's request to the hardware for control. The exit clears it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Armed {
    Nothing,
    /// An exit as soon as the guest takes interrupts.
    Window,
    /// The guest takes the interrupt of this vector as soon as it can.
    Offer(u8),
    /// The guest may end an interrupt without an exit: the next exit looks whether it has.
    Assist,
    /// One instruction, with whether it is in an interrupt shadow.
    Step(Step, bool),
}

/// Whether these are events that an entry can inject.
pub(super) fn are_possible(state: &x86_events::State) -> bool {
    let is_possible = |event: &Event| match event {
        Event::Exception(exception) => exception.vector < 31 && exception.vector != vector::NMI,
        Event::Interrupt(_) | Event::Nmi | Event::SoftwareInterrupt(_) => true,
    };
    [state.owed, state.interrupted].iter().flatten().all(is_possible)
}

/// The first vector above those of exceptions (APM vol. 2, 8.2).
const FIRST_INTERRUPT: u8 = 32;

/// Before an entry.
impl ArchVcpu {
    /// Chooses the event that the next entry delivers.
    #[inline(always)]
    pub(in crate::arch::x86_64) fn prepare_event(&mut self, tally: Tally<'_>) {
        if self.hardware.has_interrupted_delivery() | !self.events.is_quiet() {
            return self.prepare_rare_event(tally);
        }

        let Some(vector) = self.apic.pending() else {
            if self.apic.has_any_request() {
                self.watch_task_priority();
            }
            return;
        };
        if self.takes_interrupts() {
            self.apic.deliver(vector);
            self.hardware.inject_interrupt(vector);
            if self.assist.is_told() {
                self.armed = Armed::Assist;
            }
            tally.add(|count| &count.irq_injections, 1);
        } else if vector >= FIRST_INTERRUPT {
            self.hardware.offer_interrupt(vector);
            self.armed = Armed::Offer(vector);
        } else {
            self.open_window();
        }
    }

    #[cold]
    fn prepare_rare_event(&mut self, tally: Tally<'_>) {
        let again = self.hardware.take_interrupted();
        let at = Boundary {
            interrupts_enabled: self.hardware.rflags() & rflags::IF != 0,
            shadow: self.hardware.is_in_shadow(),
        };
        let plan = self.events.next(at, self.apic.pending(), again);

        if let Some(vector) = plan.retract {
            self.apic.retract(vector);
        }
        if let Some(event) = plan.inject {
            if Some(event) != again {
                self.count(event, tally);
            }
            self.hardware.inject(event);
        }
        self.intercept_iret();
        match plan.until {
            Until::Exit => {}
            Until::Window => self.open_window(),
            Until::Step => self.begin_step(),
            // A kick of this pCPU stays pending until the entry has delivered the event. Then it ends the entry before
            // the first instruction of the handler, because the processor takes physical interrupts at that boundary.
            Until::Delivered => host_apic::kick(cpu::this().id),
        }
        if self.assist.is_told() && matches!(self.armed, Armed::Nothing) {
            self.armed = Armed::Assist;
        }
    }

    /// A new event goes in.
    fn count(&mut self, event: Event, tally: Tally<'_>) {
        match event {
            Event::Interrupt(vector) => {
                if !self.events.injects_external() {
                    self.apic.deliver(vector);
                }
                tally.add(|count| &count.irq_injections, 1);
            }
            Event::Nmi => tally.add(|count| &count.nmi_injections, 1),
            Event::Exception(_) | Event::SoftwareInterrupt(_) => tally.add(|count| &count.exception_injections, 1),
        }
    }

    /// Asks for an exit as soon as the guest can take an interrupt.
    fn open_window(&mut self) {
        self.hardware.open_window();
        self.armed = Armed::Window;
    }

    /// Asks for an exit behind the next instruction.
    fn begin_step(&mut self) {
        self.hardware.show_debug();
        let flags = if self.events.is_returning() { Flags::Loaded } else { self.at_flags };
        let mut guest = self.debug_registers();
        let step = Step::begin(self.hardware.rip(), &mut guest, flags);
        self.set_debug_registers(guest);
        // An instruction that has already exited for this is not intercepted again.
        self.hardware.begin_step(flags == Flags::Kept);
        self.armed = Armed::Step(step, self.hardware.is_in_shadow());
    }

    /// IRET leaves the guest while it would end the mask of NMIs.
    fn intercept_iret(&mut self) {
        self.hardware.intercept_iret(self.events.masks_nmis());
    }

    /// The guest's parent masks NMIs, or ends the mask.
    pub(in crate::arch::x86_64) fn set_nmi_mask(&mut self, masks_nmis: bool) {
        self.events.set_nmi_mask(masks_nmis);
        self.intercept_iret();
    }

    fn debug_registers(&self) -> Debug {
        Debug { rflags: self.hardware.rflags(), dr6: self.hardware.dr6(), dr7: self.hardware.dr7() }
    }

    fn set_debug_registers(&mut self, guest: Debug) {
        self.hardware.set_rflags(guest.rflags);
        self.hardware.set_dr6(guest.dr6);
    }
}

/// After an exit.
impl ArchVcpu {
    /// Whether the last entry has requested something.
    #[inline]
    pub(in crate::arch::x86_64) fn is_armed(&self) -> bool {
        !matches!(self.armed, Armed::Nothing)
    }

    /// Cancels the requests of the last entry. Returns whether the exit served only them, because a single step is
    /// over. Only #DB ends a step.
    #[inline(always)]
    pub(in crate::arch::x86_64) fn disarm(&mut self, by_debug: bool, tally: Tally<'_>) -> bool {
        match core::mem::replace(&mut self.armed, Armed::Nothing) {
            Armed::Nothing | Armed::Assist => false,
            Armed::Window => {
                self.hardware.close_window();
                false
            }
            Armed::Offer(vector) => {
                if self.hardware.end_offer(vector) {
                    self.apic.deliver(vector);
                    tally.add(|count| &count.irq_injections, 1);
                }
                false
            }
            Armed::Step(step, in_shadow) => self.end_step(step, in_shadow, by_debug),
        }
    }

    #[cold]
    fn end_step(&mut self, step: Step, in_shadow: bool, by_debug: bool) -> bool {
        let mut guest = self.debug_registers();
        let (mut has_completed, mut is_guests) = (false, false);
        if by_debug {
            (has_completed, is_guests) = step.end_by_debug(&mut guest);
        } else {
            step.end(&mut guest);
        }
        self.set_debug_registers(guest);

        if has_completed {
            self.events.stepped();
            self.shows_trap_flag = step.has_saved_trap_flag();
            if in_shadow {
                // Of several shadows in a row only the first is sure to hold (APM vol. 3, STI and MOV).
                self.hardware.set_shadow(false);
            }
        } else {
            // The exit decides whether it is stepped over again: by [`Self::before_instruction`], [`Self::at_iret`].
            self.events.abandon_step();
            if in_shadow && !by_debug && self.hardware.rip() == step.rip() {
                self.hardware.set_shadow(true);
            }
        }
        if is_guests {
            self.events.raise(Exception::new(vector::DEBUG));
        }
        self.hardware.end_step();
        self.intercept_iret();
        self.at_flags = Flags::Kept;
        by_debug
    }

    /// The guest exited before the instruction at RIP, and executes it after the next entry. If that instruction is in
    /// an interrupt shadow that the entry would lose, the shadow is kept.
    #[inline]
    pub(in crate::arch::x86_64) fn before_instruction(&mut self) {
        if self.hardware.is_in_shadow() && self.hardware.loses_shadow() {
            self.events.keep_shadow();
        }
    }

    /// The guest was left at an IRET.
    pub(in crate::arch::x86_64) fn at_iret(&mut self) {
        self.events.at_iret();
        self.at_flags(Flags::Loaded);
    }

    /// The guest was left at an instruction that does this with RFLAGS, because of a step.
    pub(in crate::arch::x86_64) fn at_flags(&mut self, flags: Flags) {
        self.before_instruction();
        self.at_flags = flags;
    }

    /// The guest was left at an INT of this vector and length, which is carried out by injection.
    pub(in crate::arch::x86_64) fn interrupt_itself(&mut self, vector: u8, length: u64) {
        let behind = self.hardware.rip().wrapping_add(length);
        self.hardware.set_rip(behind);
        self.events.raise_software_interrupt(vector);
    }

    /// The guest exited by an exception. Injects it back, with the error code, and for a page fault with the address
    /// from the exit. DR6 and DR7 are as the handler must find them: the CPU has updated them before the exit (APM vol.
    /// 2, 15.12.2).
    pub(in crate::arch::x86_64) fn give_back(&mut self, vector: u8, error: u32, address: u64) {
        match vector {
            // RIP is at the INT3 or INTO, not behind it as for a trap (APM vol. 2, 15.12.4, 15.12.5).
            vector::BREAKPOINT | vector::OVERFLOW => {
                let next = self.hardware.next_rip();
                let length = next.and_then(|next| next.checked_sub(self.hardware.rip()));
                return self.interrupt_itself(vector, length.filter(|length| (1..=15).contains(length)).unwrap_or(1));
            }
            vector::PAGE_FAULT => self.hardware.set_cr2(address),
            _ => {}
        }
        self.raise(vector, error);
    }

    /// The guest gets this exception, with the error code if the vector has one (APM vol. 2, table 8-1).
    pub(in crate::arch::x86_64) fn raise(&mut self, vector: u8, error: u32) {
        let has_code = matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30);
        let exception = if has_code { Exception::with_code(vector, error) } else { Exception::new(vector) };
        self.events.raise(exception);
    }
}

//! The events of a vCPU on SVM: the event that each entry injects, and how the guest exits for a waiting one.
//!
//! The crate `x86_events` chooses. This file converts its plans into EVENTINJ, the interrupt window and single steps
//! (APM vol. 2, 15.20 and 15.21), and reports exits to it.
//!
//! #DB and #AC always exit. A guest can make the delivery of one of them raise the same one again, without end and
//! without an instruction boundary at which the processor would take host interrupts (CVE-2015-8104, CVE-2015-5307).
//! With injection, each round is an exit, and host interrupts, kicks and time slices work as usual.

use x86_defs::exit_code as code;
use x86_defs::registers::{cr0, rflags, vector};
use x86_defs::vmcb::{Event as VmcbEvent, EventKind, IntCtl, Intercept1, Vmcb};
use x86_events::{Boundary, Debug, Event, Exception, Flags, Step, Until};

use super::vcpu::{ArchVcpu, CR8};
use crate::arch::x86_64::host::apic as host_apic;
use crate::arch::x86_64::svm;
use crate::cpu;
use crate::vcpu::Tally;

/// Exceptions that leave the guest at any time.
pub(super) const EXCEPTIONS: u32 = 1 << vector::DEBUG | 1 << vector::ALIGNMENT_CHECK | 1 << vector::MACHINE_CHECK;
/// Exceptions that exit during a step: all of them, because their delivery would save the hypervisor's TF. Vector 2 is
/// no exception.
const STEP_EXCEPTIONS: u32 = !(1 << vector::NMI);
/// Instructions that leave the guest during a step because they save or load RFLAGS.
const STEP_INSTRUCTIONS: Intercept1 =
    Intercept1::IRET.union(Intercept1::POPF).union(Intercept1::PUSHF).union(Intercept1::INTN);

/// The entry's request to the hardware for control. The exit clears it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Armed {
    Nothing,
    /// An exit as soon as the guest takes interrupts.
    Window,
    /// One instruction, with whether it is in an interrupt shadow.
    Step(Step, bool),
}

/// Before an entry.
impl ArchVcpu {
    /// Chooses the event that the next entry delivers.
    ///
    /// Only EVENTINJ delivers interrupts. V_IRQ only reports when the guest can take one, and carries no vector: so no
    /// event is delivered twice, whatever the emulator or CPU does with V_IRQ.
    #[inline]
    pub(super) fn prepare_event(&mut self, tally: Tally<'_>) {
        if self.vmcb.control.exit_int_info.is_valid() | !self.events.is_quiet() {
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
            self.vmcb.control.event_inj = VmcbEvent::interrupt(vector);
            tally.add(|count| &count.irq_injections, 1);
        } else {
            self.open_window();
        }
    }

    #[cold]
    fn prepare_rare_event(&mut self, tally: Tally<'_>) {
        let Vmcb { control, save, .. } = &mut *self.vmcb;
        let interrupted = core::mem::replace(&mut control.exit_int_info, VmcbEvent::NONE);
        let again = interrupted.is_valid().then(|| read(interrupted)).flatten();
        let at =
            Boundary { interrupts_enabled: save.rflags & rflags::IF != 0, shadow: control.interrupt_shadow & 1 != 0 };
        let plan = self.events.next(at, self.apic.pending(), again);

        if let Some(vector) = plan.retract {
            self.apic.retract(vector);
        }
        if let Some(event) = plan.inject {
            if Some(event) != again {
                self.count(event, tally);
            }
            let Vmcb { control, save, .. } = &mut *self.vmcb;
            control.event_inj = write(event, save.cr0 & cr0::PE != 0);
            if svm::features().next_rip {
                // The return address of a software interrupt is this field if the CPU has it, else RIP (APM vol. 2,
                // 15.20).
                control.next_rip = save.rip;
            }
            control.interrupt_shadow = 0;
        }
        self.intercept_iret();
        match plan.until {
            Until::Exit => {}
            Until::Window => self.open_window(),
            Until::Step => self.begin_step(),
            // A kick of this pCPU stays pending until VMRUN has delivered the event. It then ends the entry before the
            // handler's first instruction, because physical interrupts are checked again at that boundary.
            Until::Delivered => host_apic::kick(cpu::this().id),
        }
    }

    /// A new event goes in.
    fn count(&mut self, event: Event, tally: Tally<'_>) {
        match event {
            Event::Interrupt(vector) => {
                self.apic.deliver(vector);
                tally.add(|count| &count.irq_injections, 1);
            }
            Event::Nmi => tally.add(|count| &count.nmi_injections, 1),
            Event::Exception(_) | Event::SoftwareInterrupt(_) => tally.add(|count| &count.exception_injections, 1),
        }
    }

    /// Asks for an exit as soon as the guest can take an interrupt.
    fn open_window(&mut self) {
        let control = &mut self.vmcb.control;
        control.int_ctl.0 |= IntCtl::V_IRQ | IntCtl::V_INTR_PRIO_MAX | IntCtl::V_IGN_TPR;
        control.intercept_1.insert(Intercept1::VINTR);
        // A guest that lowers CR8 while V_IRQ is set brings down QEMU 7.2 (an assertion); so it leaves the guest then.
        control.intercept_cr_write |= CR8;
        self.armed = Armed::Window;
    }

    /// Asks for an exit behind the next instruction.
    fn begin_step(&mut self) {
        let flags = if self.events.is_returning() { Flags::Loaded } else { self.at_flags };
        let mut guest = self.debug_registers();
        let step = Step::begin(self.vmcb.save.rip, &mut guest, flags);
        self.set_debug_registers(guest);
        let control = &mut self.vmcb.control;
        control.intercept_exceptions = STEP_EXCEPTIONS;
        // An instruction that has left the guest for this once is let go.
        control.intercept_1.set(STEP_INSTRUCTIONS, flags == Flags::Kept);
        self.armed = Armed::Step(step, control.interrupt_shadow & 1 != 0);
    }

    /// IRET leaves the guest while it would end the mask of NMIs.
    fn intercept_iret(&mut self) {
        self.vmcb.control.intercept_1.set(Intercept1::IRET, self.events.masks_nmis());
    }

    fn debug_registers(&self) -> Debug {
        let save = &self.vmcb.save;
        Debug { rflags: save.rflags, dr6: save.dr6, dr7: save.dr7 }
    }

    fn set_debug_registers(&mut self, guest: Debug) {
        let save = &mut self.vmcb.save;
        (save.rflags, save.dr6) = (guest.rflags, guest.dr6);
    }
}

/// After an exit.
impl ArchVcpu {
    /// Clears the entry's requests. Returns whether the exit came only from them: a step is over.
    #[inline]
    pub(super) fn disarm(&mut self, reason: u32) -> bool {
        !matches!(self.armed, Armed::Nothing) && self.disarm_window_or_step(reason)
    }

    #[inline(never)]
    fn disarm_window_or_step(&mut self, reason: u32) -> bool {
        match core::mem::replace(&mut self.armed, Armed::Nothing) {
            Armed::Nothing => false,
            Armed::Window => {
                let control = &mut self.vmcb.control;
                control.int_ctl.0 &= !(IntCtl::V_IRQ | IntCtl::V_INTR_PRIO_MAX | IntCtl::V_IGN_TPR);
                control.intercept_1.remove(Intercept1::VINTR);
                control.intercept_cr_write &= !CR8;
                false
            }
            Armed::Step(step, in_shadow) => self.end_step(step, in_shadow, reason),
        }
    }

    #[cold]
    fn end_step(&mut self, step: Step, in_shadow: bool, reason: u32) -> bool {
        let mut guest = self.debug_registers();
        let by_debug = reason == code::EXCEPTION_BASE + u32::from(vector::DEBUG);
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
                self.vmcb.control.interrupt_shadow &= !1;
            }
        } else {
            // The exit decides whether it is stepped over again: by [`Self::before_instruction`], [`Self::at_iret`].
            self.events.abandon_step();
            if in_shadow && !by_debug && self.vmcb.save.rip == step.rip() {
                self.vmcb.control.interrupt_shadow |= 1;
            }
        }
        if is_guests {
            self.events.raise(Exception::new(vector::DEBUG));
        }
        let control = &mut self.vmcb.control;
        control.intercept_exceptions = EXCEPTIONS;
        control.intercept_1.remove(STEP_INSTRUCTIONS);
        self.intercept_iret();
        self.at_flags = Flags::Kept;
        by_debug
    }

    /// The guest exited before the instruction at RIP, and executes it after the next entry. If that instruction is in
    /// an interrupt shadow that the entry would lose, the shadow is kept.
    #[inline]
    pub(in crate::arch::x86_64) fn before_instruction(&mut self) {
        if self.vmcb.control.interrupt_shadow & 1 != 0 && self.loses_shadow {
            self.events.keep_shadow();
        }
    }

    /// The guest was left at an IRET.
    pub(super) fn at_iret(&mut self) {
        self.events.at_iret();
        self.at_flags(Flags::Loaded);
    }

    /// The guest was left at an instruction that does this with RFLAGS, because of a step.
    pub(super) fn at_flags(&mut self, flags: Flags) {
        self.before_instruction();
        self.at_flags = flags;
    }

    /// Whether the instruction at RIP is in an interrupt shadow.
    pub(super) fn is_in_shadow(&self) -> bool {
        self.vmcb.control.interrupt_shadow & 1 != 0
    }

    /// The guest was left at an INT of this vector and length, which is carried out by injection.
    pub(super) fn interrupt_itself(&mut self, vector: u8, length: u64) {
        let save = &mut self.vmcb.save;
        save.rip = save.rip.wrapping_add(length);
        self.events.raise_software_interrupt(vector);
    }

    /// The guest exited by an exception, which it gets back. DR6 and DR7 are as its handler must find them: the CPU has
    /// updated them before the exit (APM vol. 2, 15.12.2).
    pub(super) fn give_back(&mut self, vector: u8) {
        let Vmcb { control, save, .. } = &mut *self.vmcb;
        match vector {
            // RIP is at the INT3 or INTO, not behind it as for a trap (APM vol. 2, 15.12.4, 15.12.5).
            vector::BREAKPOINT | vector::OVERFLOW => {
                let length = control.next_rip.checked_sub(save.rip).filter(|length| (1..=15).contains(length));
                return self.interrupt_itself(vector, length.unwrap_or(1));
            }
            vector::PAGE_FAULT => save.cr2 = control.exit_info_2,
            _ => {}
        }
        #[expect(clippy::cast_possible_truncation, reason = "an error code has 32 bits")]
        let error = control.exit_info_1 as u32;
        self.raise(vector, error);
    }

    /// The guest gets this exception, with the error code if the vector has one (APM vol. 2, table 8-1).
    pub(in crate::arch::x86_64) fn raise(&mut self, vector: u8, error: u32) {
        let has_code = matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30);
        let exception = if has_code { Exception::with_code(vector, error) } else { Exception::new(vector) };
        self.events.raise(exception);
    }
}

/// Decodes EXITINTINFO.
fn read(event: VmcbEvent) -> Option<Event> {
    match event.kind() {
        EventKind::Interrupt => Some(Event::Interrupt(event.vector())),
        EventKind::Nmi => Some(Event::Nmi),
        // Vectors from 31 on are no exceptions; VMRUN would reject them.
        EventKind::Exception if event.vector() < 31 => {
            Some(Event::Exception(Exception { vector: event.vector(), code: event.error_code() }))
        }
        EventKind::SoftwareInterrupt => Some(Event::SoftwareInterrupt(event.vector())),
        EventKind::Exception | EventKind::Reserved => None,
    }
}

/// Encodes EVENTINJ. Real mode has no error codes (APM vol. 2, 8.2).
fn write(event: Event, is_protected: bool) -> VmcbEvent {
    match event {
        Event::Interrupt(vector) => VmcbEvent::interrupt(vector),
        Event::Nmi => VmcbEvent::nmi(),
        Event::Exception(Exception { vector, code: Some(code) }) if is_protected => {
            VmcbEvent::exception_with_code(vector, code)
        }
        Event::Exception(Exception { vector, .. }) => VmcbEvent::exception(vector),
        Event::SoftwareInterrupt(vector) => VmcbEvent::software_interrupt(vector),
    }
}

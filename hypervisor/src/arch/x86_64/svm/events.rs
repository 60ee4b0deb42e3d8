//! The events of a vCPU on SVM: EVENTINJ, EXITINTINFO, the interrupt window and the intercepts of a single step (APM
//! vol. 2, 15.20 and 15.21).
//!
//! An interrupt that the guest can take goes in by EVENTINJ. One that it cannot take yet waits in V_IRQ, and the
//! processor delivers it without an exit. V_IRQ of a higher priority than any vector, with its exit, serves to learn
//! when the guest can take some other event.

use x86_defs::registers::{cr0, vector};
use x86_defs::vmcb::{EventKind, IntCtl, Intercept1, Vmcb, VmcbEvent};
use x86_events::{Event, Exception};

use super::repeated;
use super::vcpu::{CR8, Vcpu};
use crate::arch::x86_64::backend::Injection;
use crate::arch::x86_64::host::quirks::{EXITS_AT_CR8_IN_A_WINDOW, REPORTS_INTERRUPTS_AS_EXCEPTIONS};

/// Exceptions that leave the guest at any time.
pub(super) const EXCEPTIONS: u32 = 1 << vector::DEBUG | 1 << vector::ALIGNMENT_CHECK | 1 << vector::MACHINE_CHECK;
/// Exceptions that exit during a step: all of them, because their delivery would save the hypervisor's TF. Vector 2 is
/// no exception.
const STEP_EXCEPTIONS: u32 = !(1 << vector::NMI);
/// Instructions that leave the guest during a step because they save or load RFLAGS.
const STEP_INSTRUCTIONS: Intercept1 =
    Intercept1::IRET.union(Intercept1::POPF).union(Intercept1::PUSHF).union(Intercept1::INTN);

impl Injection for Vcpu {
    fn reset(&mut self) {
        let control = &mut self.vmcb.control;
        control.interrupt_shadow = 0;
        control.exit_int_info = VmcbEvent::NONE;
        control.int_ctl = control.int_ctl.with_v_tpr(0);
        control.intercept_1.remove(Intercept1::IRET);
    }

    #[inline]
    fn has_interrupted_delivery(&self) -> bool {
        self.vmcb.control.exit_int_info.is_valid()
    }

    fn take_interrupted(&mut self) -> Option<Event> {
        let interrupted = core::mem::replace(&mut self.vmcb.control.exit_int_info, VmcbEvent::NONE);
        let interrupted = repeated::unmask(interrupted, self.vmcb.save.rip, self.disguised.take());
        interrupted.is_valid().then(|| read(interrupted)).flatten()
    }

    fn interrupted(&self) -> Option<Event> {
        let interrupted = repeated::unmask(self.vmcb.control.exit_int_info, self.vmcb.save.rip, self.disguised);
        interrupted.is_valid().then(|| read(interrupted)).flatten()
    }

    fn set_interrupted(&mut self, event: Option<Event>) {
        self.disguised = None;
        // Error codes are left out at the injection, where the guest's mode is known.
        self.vmcb.control.exit_int_info = event.map_or(VmcbEvent::NONE, |event| write(event, true));
    }

    #[inline]
    fn inject_interrupt(&mut self, vector: u8) {
        if self.repeats_interrupts {
            self.disguised = repeated::inject(&mut self.vmcb, vector);
        } else {
            self.vmcb.control.event_inj = VmcbEvent::interrupt(vector);
        }
    }

    fn inject(&mut self, event: Event) {
        if let (Event::Interrupt(vector), true) = (event, self.repeats_interrupts) {
            self.disguised = repeated::inject(&mut self.vmcb, vector);
            self.vmcb.control.interrupt_shadow = 0;
            return;
        }
        let Vmcb { control, save, .. } = &mut *self.vmcb;
        control.event_inj = write(event, save.cr0 & cr0::PE != 0);
        if super::features().next_rip {
            // The return address of a software interrupt is this field if the CPU has it, else RIP (APM vol. 2,
            // 15.20).
            control.next_rip = save.rip;
        }
        control.interrupt_shadow = 0;
    }

    fn show_debug(&mut self) {
        if let (image, Some(vmx)) = self.parts() {
            vmx.show_debug(image);
        }
    }

    #[inline]
    fn loses_shadow(&self) -> bool {
        self.loses_shadow
    }

    fn open_window(&mut self) {
        let control = &mut self.vmcb.control;
        control.int_ctl.0 |= IntCtl::V_IRQ | IntCtl::V_INTR_PRIO_MAX | IntCtl::V_IGN_TPR;
        control.intercept_1.insert(Intercept1::VINTR);
        if EXITS_AT_CR8_IN_A_WINDOW {
            control.intercept_cr_write |= CR8;
        }
    }

    fn close_window(&mut self) {
        let control = &mut self.vmcb.control;
        control.int_ctl.0 &= !(IntCtl::V_IRQ | IntCtl::V_INTR_PRIO_MAX | IntCtl::V_IGN_TPR);
        control.intercept_1.remove(Intercept1::VINTR);
        control.intercept_cr_write &= !CR8;
    }

    fn offer_interrupt(&mut self, vector: u8) {
        let control = &mut self.vmcb.control;
        control.int_ctl = control.int_ctl.with_interrupt(vector);
        if EXITS_AT_CR8_IN_A_WINDOW {
            control.intercept_cr_write |= CR8;
        }
    }

    fn end_offer(&mut self, vector: u8) -> bool {
        let control = &mut self.vmcb.control;
        let waits = control.int_ctl.0 & IntCtl::V_IRQ != 0;
        control.int_ctl = control.int_ctl.without_interrupt();
        control.intercept_cr_write &= !CR8;
        let interrupted = control.exit_int_info;
        if interrupted.is_valid() && is_delivery_of(interrupted, vector) {
            control.exit_int_info = VmcbEvent::interrupt(vector);
            return true;
        }
        !waits
    }

    fn intercept_task_priority(&mut self, leaves_guest: bool) {
        let writes = &mut self.vmcb.control.intercept_cr_write;
        *writes = if leaves_guest { *writes | CR8 } else { *writes & !CR8 };
    }

    fn intercept_iret(&mut self, leaves_guest: bool) {
        self.vmcb.control.intercept_1.set(Intercept1::IRET, leaves_guest);
    }

    fn begin_step(&mut self, flags_leave_guest: bool) {
        let control = &mut self.vmcb.control;
        control.intercept_exceptions = STEP_EXCEPTIONS;
        control.intercept_1.set(STEP_INSTRUCTIONS, flags_leave_guest);
    }

    fn end_step(&mut self) {
        let control = &mut self.vmcb.control;
        control.intercept_exceptions = EXCEPTIONS;
        control.intercept_1.remove(STEP_INSTRUCTIONS);
    }
}

/// Whether `interrupted` is the delivery of a virtual interrupt. An INT of the guest's own with this vector is not.
fn is_delivery_of(interrupted: VmcbEvent, vector: u8) -> bool {
    let is_interrupt = interrupted.kind() == EventKind::Interrupt
        || REPORTS_INTERRUPTS_AS_EXCEPTIONS && interrupted.kind() == EventKind::Exception;
    is_interrupt && interrupted.vector() == vector
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

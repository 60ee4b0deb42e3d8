//! Emulated processors that deliver an injected interrupt a second time.

use x86_defs::registers::cr0;
use x86_defs::vmcb::{Vmcb, VmcbEvent};

use crate::arch::x86_64::host::apic;
use crate::cpu;

/// An interrupt that was injected as a software interrupt, and the RIP at which it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Disguised {
    vector: u8,
    rip: u64,
}

/// Injects an interrupt so that it is delivered once: see
/// [`repeats_interrupts`](crate::arch::x86_64::host::quirks::repeats_interrupts). Returns its disguise, if it has one.
///
/// The emulator's main loop itself delivers a software interrupt, and forgets it. The two differ only in user mode,
/// where a software interrupt needs a gate that user mode may call. There the interrupt goes in as it is. A kick of
/// this pCPU is pending then, and ends the entry before the first instruction of the handler.
pub(super) fn inject(vmcb: &mut Vmcb, vector: u8) -> Option<Disguised> {
    let Vmcb { control, save, .. } = vmcb;
    let is_user = save.cpl & 3 != 0 && save.cr0 & cr0::PE != 0;
    if is_user {
        control.event_inj = VmcbEvent::interrupt(vector);
        apic::kick(cpu::this().id);
        return None;
    }
    control.event_inj = VmcbEvent::software_interrupt(vector);
    if super::features().next_rip {
        control.next_rip = save.rip;
    }
    Some(Disguised { vector, rip: save.rip })
}

/// The event whose delivery an exit interrupted. A disguised interrupt is an interrupt again. An INT of the guest's own
/// has the same RIP and vector only if it is the very instruction before which the interrupt came.
pub(super) fn unmask(interrupted: VmcbEvent, rip: u64, disguised: Option<Disguised>) -> VmcbEvent {
    let vector = interrupted.vector();
    let is_ours = disguised == Some(Disguised { vector, rip }) && interrupted == VmcbEvent::software_interrupt(vector);
    if is_ours { VmcbEvent::interrupt(vector) } else { interrupted }
}

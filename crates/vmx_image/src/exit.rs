//! Back from the VMCS.

use x86_defs::registers::{dr6, rflags};
use x86_defs::vmcb::{EventKind, Vmcb, VmcbEvent};
use x86_defs::vmx::event::Information;
use x86_defs::vmx::reason;

use crate::{BY_NMI, Fields, SHADOWS};

/// DR7: an access to a debug register raises #DB.
const GENERAL_DETECT_ENABLE: u64 = 1 << 13;

/// What an exit leaves in the VMCS.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// What holds events back.
    pub interruptibility: u32,
    /// The length of the instruction that exited, or that raised the event whose delivery the exit interrupted. Else
    /// it means nothing.
    pub length: u64,
    /// That event (IDT-vectoring information).
    pub interrupted: Information,
}

/// Writes to `image` and `held` what an exit has left. `code` reads the error code of an interrupted event.
#[inline(always)]
pub fn exit(image: &mut Vmcb, held: &mut Fields, left: &Left, code: impl FnOnce() -> u32) {
    let Vmcb { control, save, .. } = image;
    (held.rip, held.rflags) = (left.rip, left.rflags);
    held.interruptibility = left.interruptibility;
    (save.rip, save.rflags) = (left.rip, left.rflags);
    control.interrupt_shadow = u64::from(left.interruptibility & SHADOWS != 0);
    control.next_rip = left.rip.wrapping_add(left.length);
    control.exit_int_info = VmcbEvent::NONE;
    if left.interrupted.is_valid() {
        control.exit_int_info = left.interrupted.interrupted(code());
        if left.interrupted.is_by_instruction() {
            // In the control block RIP is its return address.
            save.rip = control.next_rip;
        }
    }
}

/// Whether an exit with this `reason` has ended the mask of NMIs, because the guest has executed an IRET. `details` are
/// the qualification of an EPT violation, or the event of an exception. The mask was on at the entry.
///
/// An IRET that faults has ended the mask already, and will be executed again: bit 12 says so (SDM vol. 3C, 28.2.3),
/// and then the mask goes on. While the delivery of an NMI is interrupted, the mask is off, too (28.2.4).
#[must_use]
pub fn unmasks_nmis(image: &Vmcb, interruptibility: u32, reason: u32, details: u32) -> bool {
    const BY_IRET: u32 = 1 << 12;
    let comes_again =
        matches!(reason, reason::EPT_VIOLATION | reason::PML_FULL | reason::EXCEPTION_OR_NMI) && details & BY_IRET != 0;
    let interrupted = image.control.exit_int_info;
    let is_delivery = interrupted.is_valid() && interrupted.kind() == EventKind::Nmi;
    interruptibility & BY_NMI == 0 && !comes_again && !is_delivery
}

/// An exit by a #DB has not changed DR6 and DR7: its qualification has the `causes` (SDM vol. 3C, 28.1). Does what the
/// processor does before it calls the handler.
pub fn take_debug(image: &mut Vmcb, causes: u64) {
    let save = &mut image.save;
    let known = causes & (dr6::BREAKPOINTS | dr6::GENERAL_DETECT | dr6::SINGLE_STEP);
    save.dr6 = save.dr6 & !dr6::BREAKPOINTS | known;
    save.dr7 &= !GENERAL_DETECT_ENABLE;
}

/// An exit by the monitor trap flag becomes the end of a step: TF as the step has set it, and DR6.BS.
pub fn end_step(image: &mut Vmcb) {
    image.save.rflags |= rflags::TF;
    image.save.dr6 |= dr6::SINGLE_STEP;
}

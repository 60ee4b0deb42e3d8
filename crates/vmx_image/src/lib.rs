//! A vCPU's control block as the image of a VMCS.
//!
//! The hypervisor keeps a vCPU's registers, intercepts and events in a control block of AMD's format ([`Vmcb`]), plain
//! memory, also on Intel's processors. There an entry carries what it says into the VMCS, and an exit brings back what
//! has changed. The two vendors differ in more than names, and this crate has the rules: [`entry()`] and [`exit()`]
//! take and give values, so they are tested on any machine. The code that reads and writes the fields is elsewhere.
//!
//! | control block | VMCS |
//! |---|---|
//! | a virtual interrupt that waits (V_IRQ) | interrupt-window exiting: the interrupt goes in at the next entry |
//! | IRET is intercepted: NMIs are masked | virtual NMIs, blocking by NMI, and NMI-window exiting |
//! | all exceptions are intercepted, and TF is set: a step | the monitor trap flag, and the guest's own TF |
//! | the interrupt shadow | blocking by STI, or by MOV SS while IF is clear |
//! | a software interrupt, RIP is its return address | an instruction of length 1, and RIP before it |
//!
//! ```
//! use vmx_image::{Fields, entry};
//! use x86_defs::vmcb::{Vmcb, VmcbEvent};
//!
//! let mut image = Vmcb::zeroed();
//! (image.save.rip, image.save.rflags) = (0x1000, 0x202);
//! image.control.event_inj = VmcbEvent::software_interrupt(0x80);
//! let entry = entry(&mut image, &Fields::default(), 0, || true);
//! let delivery = entry.delivery.expect("there is an event");
//! assert_eq!((delivery.information.0, delivery.length, entry.fields.rip), (0x8000_0480, 1, 0xfff));
//! ```

#![no_std]
#![forbid(unsafe_code)]

mod entry;
mod exit;
mod invalidate;
#[cfg(test)]
mod tests;

use x86_defs::registers::vector;
#[cfg(doc)]
use x86_defs::vmcb::Vmcb;
use x86_defs::vmcb::{ControlArea, Intercept1};

pub use entry::{Delivery, Entry, Quiet, entry};
pub use exit::{Left, end_step, exit, take_debug, unmasks_nmis};
pub use invalidate::{Instruction, Scope};

/// Fields of a VMCS that each entry compares with what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// Primary processor-based controls.
    pub primary: u32,
    /// The exceptions that exit.
    pub exceptions: u32,
    /// What holds events back (SDM vol. 3C, table 25-3).
    pub interruptibility: u32,
}

/// Interruptibility: one instruction behind STI.
const BY_STI: u32 = 1 << 0;
/// One instruction behind MOV SS or POP SS.
const BY_MOV_SS: u32 = 1 << 1;
/// Either shadow.
const SHADOWS: u32 = BY_STI | BY_MOV_SS;
/// NMIs are masked.
const BY_NMI: u32 = 1 << 3;

/// Exceptions that exit during a step: those that always do, because a step by the monitor trap flag has nothing to
/// hide.
const DURING_STEP: u32 = 1 << vector::DEBUG | 1 << vector::ALIGNMENT_CHECK | 1 << vector::MACHINE_CHECK;

/// Whether NMIs are masked until the guest's next IRET. A step intercepts IRET, too, but on this processor no step is
/// made over one.
#[must_use]
pub const fn masks_nmis(control: &ControlArea) -> bool {
    control.intercept_1.contains(Intercept1::IRET) && !is_step(control)
}

/// Whether the control block asks for all exceptions, as it does for a step.
const fn is_step(control: &ControlArea) -> bool {
    control.intercept_exceptions & !DURING_STEP != 0
}

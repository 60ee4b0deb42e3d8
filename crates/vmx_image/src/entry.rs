//! Into the VMCS.

use x86_defs::registers::rflags;
use x86_defs::vmcb::{EventKind, IntCtl, Intercept1, Vmcb, VmcbEvent};
use x86_defs::vmx::controls::primary;
use x86_defs::vmx::event::Information;

use crate::{BY_MOV_SS, BY_NMI, BY_STI, DURING_STEP, Fields, is_step, masks_nmis};

/// A pending debug exception: a step that waits for the end of a shadow.
const PENDING_STEP: u64 = 1 << 14;

/// What an entry needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The fields' values.
    pub fields: Fields,
    /// The event that the entry delivers.
    pub delivery: Option<Delivery>,
    /// The pending debug exceptions, if they must be written.
    pub pending_debug: Option<u64>,
}

/// An event that an entry delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The event.
    pub information: Information,
    /// Its error code, if it has one.
    pub code: Option<u32>,
    /// Length of the instruction that raised it. Zero if none did.
    pub length: u32,
}

/// What an entry needs that is to do what `image` says. The event in it is taken out. `held` is what the VMCS holds,
/// `controls` are the primary controls that it begins with, and `is_64_bit` tells whether the guest is in 64-bit code.
#[inline(always)]
pub fn entry(image: &mut Vmcb, held: &Fields, controls: u32, is_64_bit: impl FnOnce() -> bool) -> Entry {
    let Vmcb { control, save, .. } = image;
    let event = core::mem::replace(&mut control.event_inj, VmcbEvent::NONE);
    let masks_nmis = masks_nmis(control);
    let is_step = is_step(control);

    let mut fields = Fields {
        rip: save.rip,
        rflags: save.rflags,
        primary: controls,
        exceptions: if is_step { DURING_STEP } else { control.intercept_exceptions },
        interruptibility: 0,
    };
    if control.int_ctl.0 & IntCtl::V_IRQ != 0 {
        fields.primary |= primary::INTERRUPT_WINDOW;
    }
    if masks_nmis {
        fields.primary |= primary::NMI_WINDOW;
    }
    if control.intercept_1.contains(Intercept1::PAUSE) {
        fields.primary |= primary::PAUSE;
    }
    if is_step && save.rflags & rflags::TF != 0 && held.rflags & rflags::TF == 0 {
        // The hypervisor's TF, which the guest never sees. A step of the guest's own stays one.
        fields.rflags &= !rflags::TF;
        fields.primary |= primary::MONITOR_TRAP;
    }

    let mut pending_debug = None;
    if control.interrupt_shadow & 1 != 0 {
        // Blocking by STI needs IF (SDM vol. 3C, 27.3.1.5).
        let by_sti = held.interruptibility & BY_MOV_SS == 0 && fields.rflags & rflags::IF != 0;
        fields.interruptibility = if by_sti { BY_STI } else { BY_MOV_SS };
        // The same section: a single step that waits for the end of the shadow.
        pending_debug = Some(if fields.rflags & rflags::TF != 0 { PENDING_STEP } else { 0 });
    }
    // An NMI that goes in must not be blocked, and blocks by itself.
    if masks_nmis && !(event.is_valid() && event.kind() == EventKind::Nmi) {
        fields.interruptibility |= BY_NMI;
    }

    let delivery = event.is_valid().then(|| {
        let information = Information::to_deliver(event);
        let mut length = 0;
        if information.is_by_instruction() {
            // The return address is RIP plus the length, which cannot be zero (27.2.1.3).
            length = 1;
            fields.rip = before(save.rip, is_64_bit);
        }
        Delivery { information, code: event.error_code(), length }
    });
    Entry { fields, delivery, pending_debug }
}

/// One byte before RIP, which has 32 bits outside of 64-bit code.
fn before(rip: u64, is_64_bit: impl FnOnce() -> bool) -> u64 {
    match rip {
        0 if !is_64_bit() => 0xffff_ffff,
        _ => rip.wrapping_sub(1),
    }
}

/// The intercepts of the last entry, if it was plain: no event, no shadow, nothing that waits. While all of that is so,
/// an entry needs RIP and RFLAGS only.
#[derive(Clone, Copy, Debug)]
pub struct Quiet {
    intercepts: Intercept1,
    exceptions: u32,
}

impl Default for Quiet {
    fn default() -> Self {
        Self::NEVER
    }
}

impl Quiet {
    /// No entry is as before. (Without an exception that exits there is no entry.)
    pub const NEVER: Self = Self { intercepts: Intercept1::empty(), exceptions: 0 };

    /// After an entry that `image` has asked for, with these `fields`.
    #[must_use]
    pub fn after(image: &Vmcb, fields: &Fields, controls: u32) -> Self {
        let Vmcb { control, .. } = image;
        let (changes, plain) = (fields.primary ^ controls, fields.interruptibility == 0);
        if plain && changes & !primary::PAUSE == 0 && !is_step(control) {
            Self { intercepts: control.intercept_1, exceptions: control.intercept_exceptions }
        } else {
            Self::NEVER
        }
    }

    /// Whether the next entry needs RIP and RFLAGS only. `held` is what the VMCS holds.
    #[must_use]
    #[inline(always)]
    pub fn is_as_before(&self, image: &Vmcb, held: &Fields) -> bool {
        let control = &image.control;
        self.exceptions == control.intercept_exceptions
            && self.intercepts == control.intercept_1
            && !control.event_inj.is_valid()
            && held.interruptibility == 0
            && control.interrupt_shadow & 1 == 0
            && control.int_ctl.0 & IntCtl::V_IRQ == 0
    }
}

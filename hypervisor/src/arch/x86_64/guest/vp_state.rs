//! State of a child's vCPU beside the registers of the Hyper-V interface, for its parent: the local APIC, the image of
//! XSAVE, the pages of the synthetic controller, the synthetic timers.
//!
//! A state from the parent is checked completely before it has any effect. This matters most for the image of XSAVE,
//! which the hypervisor loads by XRSTOR.

use hyperv_defs::Status;
use hyperv_defs::page::{LocalApicState, TimersState};
use hyperv_defs::vp::StateKind;
use sched::Pending;

use super::hyperv::HyperV;
use super::registers::tick_of;
use crate::arch::hypercall::Held;

/// Writes a state into `bytes`. Returns its length. `components` are those of XSAVE.
///
/// # Errors
/// [`Status::InvalidParameter`] if there is no room for it.
pub(in crate::arch) fn get(
    held: &mut Held<'_>,
    kind: StateKind,
    components: u64,
    bytes: &mut [u8],
) -> Result<usize, Status> {
    // Where time stands, if the parent has stopped it.
    let now = tick_of(held.vm);
    let arch = &mut held.owner.arch;
    let mut put = |state: &[u8]| {
        bytes.get_mut(..state.len()).ok_or(Status::InvalidParameter)?.copy_from_slice(state);
        Ok(state.len())
    };
    match kind {
        StateKind::LocalApic => put(arch.apic.state(now).bytes()),
        StateKind::SyntheticTimers => put(arch.synic.timers().bytes()),
        StateKind::Xsave => arch.fpu.image(components, bytes).ok_or(Status::InvalidParameter),
        StateKind::Simp | StateKind::Siefp => {
            bytes.fill(0);
            let [messages, flags] = arch.synic.pages();
            let page = if kind == StateKind::Simp { messages } else { flags };
            if let Some(page) = page
                && !held.vm.memory.read(page, bytes)
            {
                // The parent has taken this page of the guest away, so it has the content itself.
                bytes.fill(0);
            }
            Ok(bytes.len())
        }
    }
}

/// Takes over a state.
///
/// # Errors
/// [`Status::InvalidParameter`] if the vCPU cannot have it. Then nothing has changed.
pub(in crate::arch) fn set(held: &mut Held<'_>, kind: StateKind, components: u64, bytes: &[u8]) -> Result<(), Status> {
    let refused = Status::InvalidParameter;
    let now = tick_of(held.vm);
    let arch = &mut held.owner.arch;
    match kind {
        StateKind::LocalApic => {
            let state = LocalApicState::from_bytes(bytes).ok_or(refused)?;
            arch.apic.set_state(&state, now);
            held.vcpu.posted().publish_logical_id(arch.apic.logical_id());
        }
        StateKind::SyntheticTimers => {
            let state = TimersState::from_bytes(bytes).ok_or(refused)?;
            match held.vm.platform().hyperv.as_ref().map(HyperV::clock) {
                Some(clock) => {
                    arch.synic.set_timers(&state, clock, now).ok_or(refused)?;
                    held.vm.post(held.index, Pending::MESSAGE);
                }
                None if state == TimersState::default() => {}
                None => return Err(refused),
            }
        }
        StateKind::Xsave => arch.fpu.set_image(components, bytes).ok_or(refused)?,
        // Pages of the guest's own memory, which its parent restores with the rest of it.
        StateKind::Simp | StateKind::Siefp => {}
    }
    Ok(())
}

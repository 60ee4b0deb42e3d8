//! Calls about the registers and other state of a child's virtual processors, and about what CPUID answers there.

use addr::Gpa;
use hyperv_defs::memory::PageList;
use hyperv_defs::register::{Register, RegisterValue};
use hyperv_defs::vp::{
    CpuidResult, CpuidValues, GetCpuidValues, GetRegisters, InstallIntercept, InterceptKind, SetRegisters, State,
    StatePlace, Translate, Translation,
};
use hyperv_defs::wire::U32;
use hyperv_defs::{Answer, Status};
use sched::Pending;

use super::budget::Budget;
use super::parent::Caller;
use super::{Ended, Held, register_page, time};
use crate::arch::{Arch as _, Machine, machine};
use crate::mutants::{self, Mutant};
use crate::sync::Ordering;
use crate::vm::VcpuRef;
use crate::vm::child::suspend;

/// HvCallGetVpRegisters.
pub(super) fn get(caller: &Caller<'_>, get: &GetRegisters<'_>) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(get.vp)?;
    let first = caller.checked.control().rep_start();
    let write = |done: u16, value: RegisterValue| {
        let at = usize::from(first + done) * size_of::<RegisterValue>();
        caller.output.write_at(at as u64, value.bytes())
    };
    // The guest stands still only while its own registers are read, not for its suspension.
    let budget = Budget::start();
    let mut names = get.names().peekable();
    let mut done = 0;
    while let Some(name) = names.peek() {
        if let Some(reason) = name.ok().and_then(reason_of) {
            let is_set = vcpu.vcpu().suspended().load(Ordering::SeqCst) & reason != 0;
            write(done, u64::from(is_set).into())?;
            names.next();
            done += 1;
            continue;
        }
        let result = Held::with(&vcpu, |held| {
            while let Some(name) = names.next_if(|name| name.ok().and_then(reason_of).is_none()) {
                write(done, machine::registers::read(held, name?)?)?;
                done += 1;
                if budget.is_spent() {
                    break;
                }
            }
            Ok(())
        });
        match result {
            Ok(()) if names.peek().is_some() && budget.is_spent() => return Ok(not_yet(caller, done)),
            Ok(()) => {}
            Err(status) => return Ok(failed(caller, done, status)),
        }
    }
    caller.done()
}

/// HvCallSetVpRegisters. The elements before a refused one are written.
pub(super) fn set(caller: &Caller<'_>, set: &SetRegisters<'_>) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(set.vp)?;
    let budget = Budget::start();
    let mut elements = set.elements().peekable();
    let (mut done, mut runs) = (0, false);
    // These are not written while the vCPU is held.
    let apart = |element: &Result<(Register, RegisterValue), Status>| {
        element.ok().filter(|(name, _)| reason_of(*name).is_some() || *name == Register::Tsc)
    };
    while let Some(element) = elements.peek() {
        let result = if let Some((name, value)) = apart(element) {
            elements.next();
            let result = match reason_of(name) {
                Some(reason) => set_suspend(caller, &vcpu, reason, value.as_u64()).map(|now| runs |= now),
                None => time::set_tsc(caller, &vcpu, value.as_u64()),
            };
            done += u16::from(result.is_ok());
            result
        } else {
            Held::with(&vcpu, |held| {
                while let Some(element) = elements.next_if(|element| apart(element).is_none()) {
                    let (name, value) = element?;
                    machine::registers::write(held, name, value)?;
                    done += 1;
                    if done.is_multiple_of(4) && budget.is_spent() {
                        break;
                    }
                }
                Ok(())
            })
        };
        match result {
            Ok(()) if elements.peek().is_some() && budget.is_spent() => return Ok(not_yet(caller, done)),
            Ok(()) => {}
            Err(status) => return Ok(failed(caller, done, status)),
        }
    }
    if runs { Ok(Ended::Yielding(caller.checked.success())) } else { caller.done() }
}

/// The reason to stay out of the guest that a register tells.
fn reason_of(register: Register) -> Option<u8> {
    match register {
        Register::ExplicitSuspend => Some(suspend::EXPLICIT),
        Register::InterceptSuspend => Some(suspend::INTERCEPT),
        _ => None,
    }
}

/// Suspends the vCPU, or takes away a reason for it. On return from the former it is out of its guest. Returns whether
/// it runs now.
fn set_suspend(caller: &Caller<'_>, vcpu: &VcpuRef, reason: u8, value: u64) -> Result<bool, Status> {
    match value {
        0 => {
            if let Some(gpa) = vcpu.register_page_left_by(reason) {
                register_page::take_over(vcpu, &caller.vm.memory, gpa);
            }
            Ok(vcpu.resume(reason, caller.index))
        }
        1 => {
            vcpu.suspend(reason);
            Ok(false)
        }
        _ => Err(Status::InvalidRegisterValue),
    }
}

/// The parent calls again for the elements after these.
fn not_yet(caller: &Caller<'_>, done: u16) -> Ended {
    let control = caller.checked.control();
    Ended::NotYet(control.with_rep_start(control.rep_start() + done))
}

/// The element after these is refused.
fn failed(caller: &Caller<'_>, done: u16, status: Status) -> Ended {
    let answer: Answer = caller.checked.failure_after(done, status);
    Ended::With(answer)
}

/// HvCallGetVpState.
pub(super) fn state(caller: &Caller<'_>, state: &State<'_>) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(state.vp)?;
    let mut bytes = [0; LARGEST_STATE];
    let length = Held::with(&vcpu, |held| {
        take_posted(held);
        machine::vp_state::get(held, state.kind, state.xsave_states, &mut bytes)
    })?;
    let bytes = bytes.get(..length).unwrap_or(&bytes);
    match &state.place {
        StatePlace::Call(_) => caller.output.write(bytes)?,
        StatePlace::Pages(pages) => {
            if !caller.vm.memory.write(first(pages)?, bytes) {
                return Err(Status::InvalidParameter);
            }
        }
    }
    caller.done()
}

/// Interrupts that were posted to the vCPU are in its local APIC now. Otherwise they would be in no state that its
/// parent reads, because the vCPU takes them when it is its turn on a pCPU. An INIT or a start it takes itself.
fn take_posted(held: &mut Held<'_>) {
    if !mutants::is(Mutant::PostedNotRead) {
        Machine::take_posted(&mut held.owner.arch, held.vcpu.posted(), Pending::INTERRUPT | Pending::NMI);
    }
}

/// HvCallSetVpState.
pub(super) fn set_state(caller: &Caller<'_>, state: &State<'_>) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(state.vp)?;
    let mut copy = [0; LARGEST_STATE];
    let bytes = match &state.place {
        StatePlace::Call(bytes) => *bytes,
        StatePlace::Pages(pages) => {
            if !caller.vm.memory.read(first(pages)?, &mut copy) {
                return Err(Status::InvalidParameter);
            }
            &copy[..]
        }
    };
    Held::with(&vcpu, |held| machine::vp_state::set(held, state.kind, state.xsave_states, bytes))?;
    caller.done()
}

/// A page, or the compacted image of all components that guests have: no state needs a second page.
const LARGEST_STATE: usize = 4096;

fn first(pages: &PageList<'_>) -> Result<Gpa, Status> {
    pages.iter().next().unwrap_or(Err(Status::InvalidParameter))
}

/// HvCallRegisterInterceptResult.
pub(super) fn register_cpuid(caller: &Caller<'_>, result: &CpuidResult) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(result.vp)?;
    Held::with(&vcpu, |held| machine::registers::register_cpuid(held, result))?;
    caller.done()
}

/// HvCallGetVpCpuidValues.
pub(super) fn cpuid_values(caller: &Caller<'_>, get: &GetCpuidValues<'_>) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(get.vp)?;
    let first = caller.checked.control().rep_start();
    let budget = Budget::start();
    let mut leaves = get.leaves();
    let mut done = 0;
    Held::with(&vcpu, |held| {
        for (leaf, subleaf) in leaves.by_ref() {
            let answer = CpuidValues { registers: machine::registers::cpuid(held, leaf, subleaf).map(U32::new) };
            let at = usize::from(first + done) * size_of::<CpuidValues>();
            caller.output.write_at(at as u64, answer.bytes())?;
            done += 1;
            if budget.is_spent() {
                break;
            }
        }
        Ok(())
    })?;
    if leaves.len() == 0 { caller.done() } else { Ok(not_yet(caller, done)) }
}

/// HvCallTranslateVirtualAddress.
pub(super) fn translate(caller: &Caller<'_>, translate: &Translate) -> Result<Ended, Status> {
    let vcpu = caller.vcpu(translate.vp)?;
    let found = Held::with(&vcpu, |held| machine::translate::translate(held, translate.flags, translate.gva));
    caller.output.write(Translation::new(found).bytes())?;
    caller.done()
}

/// HvCallInstallIntercept. CPUID is answered by what is registered, so a parent that asks for messages about it gets
/// none, and the call succeeds: Cloud Hypervisor's library requires that. Nothing else can be asked for.
pub(super) fn install_intercept(caller: &Caller<'_>, install: &InstallIntercept) -> Result<Ended, Status> {
    caller.check_child(install.partition)?;
    let is_nothing = !(install.read || install.write || install.execute);
    match install.kind {
        InterceptKind::Cpuid(_) => caller.done(),
        _ if is_nothing => caller.done(),
        _ => Err(Status::FeatureUnavailable),
    }
}

#[cfg(test)]
mod tests;

//! SPEC_CTRL and PRED_CMD, by which a guest's kernel controls speculation: its own, and that of its processes.
//!
//! A guest has them where CPUID tells it so ([`Reports`](mitigations::Reports)). Both leave the guest at first. From
//! the first write of each on, it uses the register without an exit ([`Passed`]). Of SPEC_CTRL that is the first write
//! that sets a bit: who sets none does not pay for reading it at each exit.
//!
//! SPEC_CTRL is in the control block. Where SVM does not switch it, it is in the pCPU's block while the vCPU is on a
//! pCPU: the world switch finds it there (`speculation.rs`).

use vcpu_layout::Proof;

use super::state::State as _;
use super::vcpu::ArchVcpu;
use crate::arch::x86_64::backend::{Passed, WorldSwitch as _};
use crate::arch::x86_64::host::percpu::this;
use crate::arch::x86_64::speculation;
use crate::device::local_apic::GeneralProtection;
use crate::vcpu::run::Running;

/// RDMSR of SPEC_CTRL.
///
/// # Errors
/// The guest has no such register.
pub(super) fn read(run: &mut Running<'_>) -> Result<u64, GeneralProtection> {
    if run.vm.platform().cpuid.reports().spec_ctrl() == 0 {
        return Err(GeneralProtection);
    }
    Ok(if speculation::switches_spec_ctrl() {
        this().arch.spec_ctrl.get()
    } else {
        run.owner.arch.hardware.spec_ctrl()
    })
}

/// WRMSR to SPEC_CTRL.
///
/// # Errors
/// The guest has no such register, or not with these bits.
pub(super) fn write(run: &mut Running<'_>, value: u64) -> Result<(), GeneralProtection> {
    let existing = run.vm.platform().cpuid.reports().spec_ctrl();
    if existing == 0 || value & !existing != 0 {
        return Err(GeneralProtection);
    }
    let arch = &mut run.owner.arch;
    if value != 0 {
        arch.hardware.pass(Passed::Everything);
    }
    arch.hardware.set_spec_ctrl(value);
    load(arch);
    Ok(())
}

/// WRMSR to PRED_CMD. It cannot be read.
///
/// # Errors
/// The guest has no such register, or not with these bits.
pub(super) fn command(run: &mut Running<'_>, value: u64) -> Result<(), GeneralProtection> {
    let existing = run.vm.platform().cpuid.reports().pred_cmd();
    if existing == 0 || value & !existing != 0 {
        return Err(GeneralProtection);
    }
    let hardware = &mut run.owner.arch.hardware;
    hardware.pass(hardware.passed().max(Passed::Commands));
    // A guest is told only of bits that this processor has.
    speculation::forget(value);
    Ok(())
}

/// Writes SPEC_CTRL of a vCPU that is on no pCPU.
pub(super) fn place(arch: &mut ArchVcpu, value: u64) {
    arch.hardware.pass(if value == 0 { Passed::Nothing } else { Passed::Everything });
    arch.hardware.set_spec_ctrl(value);
}

/// The vCPU comes to this pCPU, or has got another value here.
#[inline]
pub(super) fn load(arch: &ArchVcpu) {
    if speculation::switches_spec_ctrl() {
        let mine = &this().arch;
        let proof = Proof::by_place();
        mine.spec_ctrl.set(proof, arch.hardware.spec_ctrl());
        mine.owns_spec_ctrl.set(proof, u64::from(arch.hardware.passed() == Passed::Everything));
    }
}

/// The vCPU leaves this pCPU.
#[inline]
pub(super) fn unload(arch: &mut ArchVcpu) {
    if speculation::switches_spec_ctrl() {
        arch.hardware.set_spec_ctrl(this().arch.spec_ctrl.get());
    }
}

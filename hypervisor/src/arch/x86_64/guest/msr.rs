//! Model-specific registers, by allow-list.
//!
//! A register that is not named here does not exist: the guest gets #GP, as on a CPU that lacks it. Registers that the
//! processor switches at entries and exits do not exit (the back end has the list). Registers without an effect are
//! [`crate::device::msr`].

use core::sync::atomic::Ordering;

use abi::counters::ExitReason;
use addr::Gpa;
use log::debug;
use x86_defs::control::Refused;
use x86_defs::msr;

use super::apic::{Origin, apply};
use super::state::{State as _, gpr};
use super::vcpu::ArchVcpu;
use super::{control, cpuid, hyperv, spec_ctrl};
use crate::arch::x86_64::backend;
use crate::arch::x86_64::host::tsc;
use crate::device::local_apic::{Effect, GeneralProtection, Mode};
use crate::device::memory_types;
use crate::vcpu::run::{Next, Running};

/// RDMSR and WRMSR.
#[inline(always)]
pub(in crate::arch::x86_64) fn access(run: &mut Running<'_>, is_write: bool) -> Next {
    let arch = &mut run.owner.arch;
    #[expect(clippy::cast_possible_truncation, reason = "RDMSR and WRMSR read ECX")]
    let register = arch.gprs[gpr::RCX] as u32;

    let result = if is_write {
        run.tally.exit(ExitReason::SysregWrite);
        let value = arch.edx_eax();
        if register == msr::X2APIC_EOI && value == 0 && arch.apic.mode() == Mode::X2Apic {
            // The most frequent write by far; see `LocalApic::end_of_interrupt`.
            let effect = arch.apic.end_of_interrupt();
            arch.skip(2);
            apply(Origin::of(run), &mut run.owner.arch.apic, effect);
            return Next::Resume;
        }
        write(run, register, value)
    } else {
        run.tally.exit(ExitReason::SysregRead);
        read(run, register).map(|value| run.owner.arch.set_edx_eax(value))
    };

    match result {
        Ok(()) => run.owner.arch.skip(2),
        Err(GeneralProtection) => refuse_msr(run, register, is_write),
    }
    Next::Resume
}

#[cold]
fn refuse_msr(run: &mut Running<'_>, register: u32, is_write: bool) {
    if let Some(child) = run.vm.as_child()
        && child.ignores_unknown_msrs.load(Ordering::Relaxed)
    {
        if !is_write {
            run.owner.arch.set_edx_eax(0);
        }
        run.owner.arch.skip(2);
        return;
    }
    let verb = if is_write { "WRMSR" } else { "RDMSR" };
    debug!("{} vCPU {}: {verb} {register:#x} gets #GP", run.vm.name(), run.index);
    run.owner.arch.general_protection();
}

/// Reads a register for the guest.
///
/// # Errors
/// When it does not exist or cannot be read: the guest gets #GP.
#[inline(always)]
fn read(run: &mut Running<'_>, number: u32) -> Result<u64, GeneralProtection> {
    let arch = &mut run.owner.arch;
    match number {
        msr::X2APIC_FIRST..=msr::X2APIC_LAST => arch.apic.read_msr(number, tsc::now),
        msr::TSC_DEADLINE => Ok(arch.tsc_deadline()),
        msr::APIC_BASE => Ok(arch.apic.base_msr()),
        msr::TSC => Ok(arch.guest_tsc()),
        msr::EFER => Ok(arch.hardware.control().efer),
        msr::PAT => Ok(arch.hardware.pat()),
        msr::SPEC_CTRL => spec_ctrl::read(run),
        msr::ARCH_CAPABILITIES => run.vm.platform().cpuid.reports().arch_capabilities().ok_or(GeneralProtection),
        hyperv::FIRST_MSR..=hyperv::LAST_MSR => hyperv::read_msr(run, number),
        number => arch.kept.read(number, backend::vendor()).ok_or(GeneralProtection),
    }
}

/// Writes a register for the guest.
///
/// # Errors
/// When it does not exist, cannot be written, or not with this value: the guest gets #GP and nothing has changed.
#[inline(always)]
fn write(run: &mut Running<'_>, number: u32, value: u64) -> Result<(), GeneralProtection> {
    let arch = &mut run.owner.arch;
    let effect = match number {
        msr::X2APIC_FIRST..=msr::X2APIC_LAST => arch.apic.write_msr(number, value, tsc::now())?,
        msr::TSC_DEADLINE => arch.apic.set_tsc_deadline(arch.host_tick(value), tsc::now()),
        msr::APIC_BASE => set_apic_base(arch, value)?,
        msr::EFER => return control::write_efer(run, value).map_err(|Refused| GeneralProtection),
        msr::PAT if memory_types::is_valid_pat(value) => {
            arch.hardware.set_pat(value);
            return Ok(());
        }
        // The TSC is the host's, the same on all vCPUs. A kernel writes it only to remove differences, and there are
        // none.
        msr::TSC | msr::TSC_ADJUST => return Ok(()),
        msr::SPEC_CTRL => return spec_ctrl::write(run, value),
        msr::PRED_CMD => return spec_ctrl::command(run, value),
        hyperv::FIRST_MSR..=hyperv::LAST_MSR => return hyperv::write_msr(run, number, value),
        number => return write_kept(arch, number, value),
    };
    apply(Origin::of(run), &mut run.owner.arch.apic, effect);
    Ok(())
}

/// IA32_APIC_BASE, whose address has as many bits as the guest's others.
#[cold]
fn set_apic_base(arch: &mut ArchVcpu, value: u64) -> Result<Effect, GeneralProtection> {
    if Gpa(value) >= cpuid::physical_addresses_end() {
        return Err(GeneralProtection);
    }
    arch.apic.set_base_msr(value)
}

/// Registers without an effect.
#[cold]
fn write_kept(arch: &mut ArchVcpu, number: u32, value: u64) -> Result<(), GeneralProtection> {
    let written = arch.kept.write(number, value, backend::vendor(), cpuid::physical_address_bits());
    written.ok_or(GeneralProtection)
}

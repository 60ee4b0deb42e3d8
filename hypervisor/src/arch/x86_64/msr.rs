//! Model-specific registers, by allow list.
//!
//! A register that is not named here does not exist: the guest gets #GP, as on a CPU that lacks it. What VMLOAD and
//! VMSAVE switch is passed through and does not come here (see [`super::svm`]).

use x86_defs::control::Refused;
use x86_defs::msr;
use x86_defs::registers::efer;

use super::control;
use super::exit::{Origin, apply};
use super::hyperv;
use super::tsc;
use crate::device::local_apic::GeneralProtection;
use crate::vcpu::run::Running;

/// HWCR: the TSC counts at the P0 frequency whatever the CPU does.
const HWCR_TSC_FREQ_SEL: u64 = 1 << 24;
/// DE_CFG: LFENCE waits for all earlier instructions.
const DE_CFG_LFENCE_SERIALIZES: u64 = 1 << 1;

/// Reads a register for the guest.
///
/// # Errors
/// When it does not exist or cannot be read: the guest gets #GP.
pub(super) fn read(run: &mut Running<'_>, number: u32) -> Result<u64, GeneralProtection> {
    let arch = &mut run.owner.arch;
    match number {
        msr::X2APIC_FIRST..=msr::X2APIC_LAST => arch.apic.read_msr(number, tsc::now()),
        msr::TSC_DEADLINE => Ok(arch.apic.tsc_deadline(tsc::now())),
        msr::APIC_BASE => Ok(arch.apic.base_msr()),
        msr::TSC => Ok(tsc::now()),
        msr::EFER => Ok(arch.vmcb.save.efer & !efer::SVME),
        msr::PAT => Ok(arch.vmcb.save.g_pat),
        msr::HWCR => Ok(HWCR_TSC_FREQ_SEL),
        msr::DE_CFG => Ok(DE_CFG_LFENCE_SERIALIZES),
        hyperv::FIRST_MSR..=hyperv::LAST_MSR => hyperv::read_msr(run, number),
        number if reads_as_zero(number) => Ok(0),
        number => arch.memory_types.read(number).ok_or(GeneralProtection),
    }
}

/// Writes a register for the guest.
///
/// # Errors
/// When it does not exist, cannot be written, or not with this value: the guest gets #GP and nothing has changed.
pub(super) fn write(run: &mut Running<'_>, number: u32, value: u64) -> Result<(), GeneralProtection> {
    let arch = &mut run.owner.arch;
    let effect = match number {
        msr::X2APIC_FIRST..=msr::X2APIC_LAST => arch.apic.write_msr(number, value, tsc::now())?,
        msr::TSC_DEADLINE => arch.apic.set_tsc_deadline(value, tsc::now()),
        msr::APIC_BASE => arch.apic.set_base_msr(value)?,
        msr::EFER => return control::write_efer(run, value).map_err(|Refused| GeneralProtection),
        msr::PAT if is_valid_pat(value) => {
            arch.vmcb.save.g_pat = value;
            return Ok(());
        }
        // The TSC is the host's and the same for all; a kernel writes it only to undo differences that there are not.
        msr::TSC | msr::TSC_ADJUST | msr::HWCR | msr::DE_CFG => return Ok(()),
        hyperv::FIRST_MSR..=hyperv::LAST_MSR => return hyperv::write_msr(run, number, value),
        number if reads_as_zero(number) => return Ok(()),
        number => return arch.memory_types.write(number, value).ok_or(GeneralProtection),
    };
    apply(Origin::of(run), &mut run.owner.arch.apic, effect);
    Ok(())
}

/// Registers that Linux reads or writes without asking CPUID, and that do nothing here: they read zero and ignore
/// writes.
fn reads_as_zero(number: u32) -> bool {
    matches!(
        number,
        msr::TSC_ADJUST | msr::PATCH_LEVEL | msr::DEBUG_CTL | msr::K7_EVNTSEL0
            ..=msr::K7_PERFCTR3
                | msr::SYSCFG
                | msr::TOP_MEM
                | msr::TOP_MEM2
                | msr::NB_CFG
                | msr::INT_PENDING
                | msr::DC_CFG
    )
}

/// Eight memory types, one a byte: uncacheable, write-combining, write-through, write-protected, write-back, UC-.
fn is_valid_pat(value: u64) -> bool {
    value.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

/// The memory-type range registers (APM vol. 2, 7.7), kept so that a kernel finds what it wrote.
///
/// They have no effect: a guest has nothing but RAM and emulated devices. As after a PC's firmware, they are on and
/// everything is write-back.
pub(crate) struct MemoryTypes {
    variable: [u64; VARIABLE_REGISTERS],
    fixed: [u64; 11],
    default: u64,
}

const VARIABLE_REGISTERS: usize = (msr::MTRR_PHYS_MASK_7 - msr::MTRR_PHYS_BASE_0 + 1) as usize;
/// Eight variable ranges, fixed ranges, write-combining.
const CAPABILITIES: u64 = 8 | 1 << 8 | 1 << 10;
/// Ranges are on, and what is in none of them is write-back.
const ON_AND_WRITE_BACK: u64 = 1 << 11 | 6;
const DEFAULT_WRITABLE: u64 = 0b1100_0000_0111;

impl MemoryTypes {
    pub(super) fn new() -> Self {
        Self { variable: [0; VARIABLE_REGISTERS], fixed: [0x0606_0606_0606_0606; 11], default: ON_AND_WRITE_BACK }
    }

    fn read(&self, number: u32) -> Option<u64> {
        match number {
            msr::MTRR_CAP => Some(CAPABILITIES),
            msr::MTRR_DEF_TYPE => Some(self.default),
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 => {
                Some(self.variable[(number - msr::MTRR_PHYS_BASE_0) as usize])
            }
            _ => Some(self.fixed[fixed_index(number)?]),
        }
    }

    fn write(&mut self, number: u32, value: u64) -> Option<()> {
        match number {
            msr::MTRR_DEF_TYPE if value & !DEFAULT_WRITABLE == 0 => self.default = value,
            msr::MTRR_PHYS_BASE_0..=msr::MTRR_PHYS_MASK_7 => {
                self.variable[(number - msr::MTRR_PHYS_BASE_0) as usize] = value;
            }
            _ => self.fixed[fixed_index(number)?] = value,
        }
        Some(())
    }
}

fn fixed_index(number: u32) -> Option<usize> {
    match number {
        msr::MTRR_FIX_64K => Some(0),
        msr::MTRR_FIX_16K_0 => Some(1),
        msr::MTRR_FIX_16K_1 => Some(2),
        msr::MTRR_FIX_4K_0..=msr::MTRR_FIX_4K_7 => Some(3 + (number - msr::MTRR_FIX_4K_0) as usize),
        _ => None,
    }
}

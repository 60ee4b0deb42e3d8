//! What the CPU and the firmware tables report about the machine.

use core::fmt;

use super::boot;
use super::registers::read_register;

/// Affinity fields 0 to 2 of MPIDR_EL1.
pub(crate) fn hardware_id() -> u32 {
    (read_register!("mpidr_el1") & 0x00ff_ffff) as u32
}

/// Width of a physical address in bits (ID_AA64MMFR0_EL1.PARange), up to what tables of 4 KiB pages support.
pub(crate) fn physical_bits() -> u32 {
    match read_register!("id_aa64mmfr0_el1") & 0xf {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        _ => 48,
    }
}

/// Whether programs of 32 bits run at EL0 (ID_AA64PFR0_EL1.EL0).
pub(crate) fn has_aarch32() -> bool {
    read_register!("id_aa64pfr0_el1") & 0xf == 2
}

/// Whether there are instructions that read, change and write memory in one step (ID_AA64ISAR0_EL1.Atomic).
pub(crate) fn has_atomics() -> bool {
    read_register!("id_aa64isar0_el1") >> 20 & 0xf != 0
}

/// Whether there are WFIT and WFET (ID_AA64ISAR2_EL1.WFxT).
pub(crate) fn has_timed_waits() -> bool {
    read_register!("s3_0_c0_c6_2") & 0xf == 2
}

/// Causes an exit that changes nothing, if a hypervisor traps the access.
pub(crate) fn leave() {
    let _ = read_register!("id_aa64pfr0_el1");
}

/// How a processor or a machine names itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signature {
    /// MIDR_EL1.
    Processor(u64),
    /// The device tree's `model`.
    Machine(&'static str),
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Processor(midr) => write!(f, "{midr:#x}"),
            Self::Machine(model) => {
                model.chars().try_for_each(|c| write!(f, "{}", if c.is_ascii_graphic() { c } else { '.' }))
            }
        }
    }
}

/// The processor.
pub(crate) fn maker() -> Signature {
    Signature::Processor(read_register!("midr_el1"))
}

/// The hypervisor below, if it identifies itself. QEMU's own machine calls itself a dummy.
pub(crate) fn hypervisor() -> Option<Signature> {
    boot::machine()?.model.filter(|model| !model.contains("dummy")).map(Signature::Machine)
}

/// Whether a hypervisor is below, which then is responsible for deviations from the architecture.
pub(crate) fn is_judged() -> bool {
    hypervisor().is_some()
}

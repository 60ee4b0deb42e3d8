//! Loads a kernel into a VM's memory, by the boot protocols of x86-64.

use abi::payload::Devices;
use addr::{Gpa, GpaRange};
pub(crate) use x86_boot::KernelEntry;
use x86_boot::{Boot, GuestMemory, OutsideMemory};

use super::own_machine::{self, Prepared};
use crate::cpu::preemption::preemption_point;
use crate::vm::memory::Memory;
use crate::vm::spec::Spec;

/// The ranges of a VM's memory in its physical address space.
pub(crate) fn ram_layout(bytes: u64) -> impl Iterator<Item = GpaRange> {
    x86_boot::layout::ram_layout(bytes)
}

/// Loads kernel, initrd and tables of a VM into its memory, which is all zero.
///
/// # Errors
/// When the files cannot be booted or do not fit.
pub(crate) fn load(spec: &Spec<'_>, memory: &mut Memory) -> Result<KernelEntry, x86_boot::Error> {
    let Spec { config, kernel, initrd } = *spec;
    let own = match config.devices {
        Devices::None | Devices::These(_) => None,
        Devices::All => Some(Prepared::new(config, memory)?),
    };
    let boot = Boot {
        kernel,
        initrd,
        cmdline: &config.cmdline,
        memory_bytes: config.memory_bytes,
        vcpus: config.vcpus,
        role: config.role,
        apic: config.apic,
        machine: own.as_ref().map(Prepared::machine),
    };
    let entry = x86_boot::load(&boot, memory)?;
    if let Some(own) = &own
        && !own.write_tables(memory)
    {
        return Err(x86_boot::Error::NoRoom { needs: 0, has: 0 });
    }
    if own.is_some() {
        own_machine::map_reserved(config, memory);
    }
    Ok(entry)
}

impl GuestMemory for Memory {
    fn worked(&mut self) {
        preemption_point();
    }

    fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let written = self.write_file(gpa, bytes);
        if written { Ok(()) } else { Err(OutsideMemory { gpa, bytes: bytes.len() }) }
    }
}

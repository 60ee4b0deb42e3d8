//! Creation of a VM: takes and zeroes its memory, loads its kernel and makes its vCPUs, in small steps.
//!
//! Zeroing a VM's memory may take longer than other vCPUs on the same pCPU can wait. So the pCPU creates a VM in steps
//! and does other work in between. Dropping an incomplete creation frees everything that it took.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::About;
use abi::payload::{DecodeCache, Devices, Populate, Role, VmConfig};
use addr::GpaRange;
use decode_cache::Vouching;

use super::memory::{Assembly, Memory, MemoryError};
use super::serial::SerialLine;
use super::shares;
use super::spec::Spec;
use super::tags::VmTags;
use super::{DETAIL_BYTES, Parts, Vm};
use crate::arch::block::Block;
use crate::arch::{Arch, GivenFunctions, Machine, VcpuState};
use crate::cpu::preemption::preemption_point;
use crate::cpu::room::Room;
use crate::cpu::scheduler;
use crate::frames::{self, Exhausted};
use crate::io::iommu::{self, Functions};
use crate::vcpu::Vcpu;

/// Why there is no VM.
#[derive(Clone, Debug)]
pub(crate) struct NotCreated {
    /// The part of the description that the host cannot provide.
    pub(crate) about: About,
    /// One line for people.
    pub(crate) why: String,
}

impl NotCreated {
    pub(crate) fn new(about: About, why: impl Into<String>) -> Self {
        Self { about, why: why.into() }
    }
}

/// A VM in the making.
pub(crate) struct Creation {
    number: u32,
    config: VmConfig,
    /// The PCI functions that it will have.
    given: Option<<Machine as Arch>::Given>,
    /// Whether a kernel is loaded. A VM that is restored has one in its memory.
    loads: bool,
    stage: Stage,
}

enum Stage {
    /// Memory is taken, zeroed and mapped.
    Memory(Box<Assembly>),
    /// The kernel is loaded. vCPUs are made.
    Vcpus { parts: Box<Parts>, vcpus: Vec<Block<Vcpu>> },
    /// Nothing is left to make or to free.
    Over,
}

/// vCPUs that are made in one step.
const VCPUS_AT_ONCE: usize = 2;

impl Creation {
    /// The same for a VM that is restored: no kernel is loaded, and its vCPUs have no state yet.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub(crate) fn without_kernel(number: u32, config: VmConfig) -> Result<Self, NotCreated> {
        let mut creation = Self::begin(number, config)?;
        creation.loads = false;
        Ok(creation)
    }

    /// Begins the creation of VM `number` with this description.
    ///
    /// # Errors
    /// The host cannot provide what the description demands. Nothing was taken then.
    pub(crate) fn begin(number: u32, config: VmConfig) -> Result<Self, NotCreated> {
        Spec::check(&config)?;
        shares::check(&config).map_err(|why| NotCreated::new(About::Share, why))?;
        let tags = VmTags::new(&config).map_err(|why| NotCreated::new(About::Tags, why))?;
        let level_on_touch = match config.populate {
            Populate::AtStart => None,
            Populate::Touch4K => Some(0),
            Populate::Touch2M => Some(1),
        };
        let mut given = None;
        let memory = match &config.devices {
            Devices::None | Devices::These(_) => {
                let mut functions = 0;
                if let Devices::These(named) = &config.devices {
                    let taken = <Machine as Arch>::Given::take(named);
                    given = Some(taken.map_err(|why| NotCreated::new(About::Devices, why))?);
                    functions = named.len();
                }
                let ranges: Vec<GpaRange> = Machine::ram_layout(config.memory_bytes).collect();
                Assembly::begin(ranges, config.vcpus, tags, level_on_touch, functions)
            }
            Devices::All => {
                let low = Machine::take_devices(config.vcpus).map_err(|why| NotCreated::new(About::Devices, why))?;
                Assembly::in_place(low, config.memory_bytes, config.vcpus, tags)
            }
        };
        let memory = memory.map_err(|error| lacks_memory(&config, &error))?;
        Ok(Self { number, config, given, loads: true, stage: Stage::Memory(Box::new(memory)) })
    }

    /// Does the next step of the creation. `spec` is the same in each step. Returns the VM when it is complete.
    ///
    /// # Errors
    /// The host cannot provide what the description demands. Everything that was taken has been freed.
    pub(crate) fn step(&mut self, spec: Spec<'_>) -> Result<Option<Arc<Vm>>, NotCreated> {
        match &mut self.stage {
            Stage::Memory(assembly) => {
                let has_memory = assembly.step().map_err(|error| lacks_memory(&self.config, &error))?;
                let are_ready = self.given.as_mut().map_or(Ok(true), GivenFunctions::is_ready);
                if are_ready.map_err(|why| NotCreated::new(About::Devices, why))? && has_memory {
                    self.load(spec)?;
                }
                Ok(None)
            }
            Stage::Vcpus { parts, vcpus } => {
                let memory = &parts.memory;
                let count = self.config.vcpus as usize;
                let until = count.min(vcpus.len() + VCPUS_AT_ONCE);
                while vcpus.len() < until {
                    let index = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
                    let home = scheduler::first_home(self.number, index, shares::cpus(&self.config));
                    let arch =
                        <Machine as Arch>::Vcpu::new(index, &self.config, memory.stage2_root(), memory.tags().vcpu());
                    vcpus.push(Block::new(index as usize, Vcpu::new(arch, home)));
                    if frames::is_low() {
                        let why = format!("{count} vCPUs: the host has no memory left from vCPU {index} on");
                        return Err(NotCreated::new(About::Vcpus, why));
                    }
                }
                preemption_point();
                Ok(if vcpus.len() == count { self.complete() } else { None })
            }
            Stage::Over => Ok(None),
        }
    }

    /// Loads the kernel into memory that is complete.
    fn load(&mut self, spec: Spec<'_>) -> Result<(), NotCreated> {
        let Stage::Memory(assembly) = core::mem::replace(&mut self.stage, Stage::Over) else { return Ok(()) };
        preemption_point();
        let mut memory = assembly.finish().map_err(|error| lacks_memory(&self.config, &error))?;
        match self.config.decode_cache {
            DecodeCache::WriteProtect => memory.remember_decoded(Vouching::Walk),
            DecodeCache::WriteProtectTables => memory.remember_decoded(Vouching::Tables),
            DecodeCache::Off | DecodeCache::Bytes => {}
        }
        preemption_point();
        let entry = if self.loads {
            let loaded = Machine::load(&spec, &mut memory);
            Some(loaded.map_err(|error| NotCreated::new(About::Kernel, error.to_string()))?)
        } else {
            None
        };
        if self.config.role == Role::Parent {
            memory.may_go_away();
        }
        if self.config.devices == Devices::All {
            iommu::warn_of_owner(&self.config.name);
            let owned = memory.own(Functions::All, None);
            owned.map_err(|why| NotCreated::new(About::Devices, why.to_string()))?;
        }
        if let (Devices::These(functions), Some(given)) = (&self.config.devices, self.given.take()) {
            let mapped = memory.map_registers(given.registers());
            mapped.map_err(|error| lacks_memory(&self.config, &MemoryError::Map(error)))?;
            let functions = functions.iter().map(|function| (*function).into()).collect();
            let owned = memory.own(Functions::These(functions), Some(given));
            owned.map_err(|why| NotCreated::new(About::Devices, why.to_string()))?;
        }
        preemption_point();
        let (parts, vcpus) = self.prepare(memory, entry).map_err(|Exhausted| {
            let count = self.config.vcpus;
            NotCreated::new(About::Vcpus, format!("{count} vCPUs: the host has no memory left from vCPU 0 on"))
        })?;
        self.stage = Stage::Vcpus { parts: Box::new(parts), vcpus };
        Ok(())
    }

    /// Takes what the VM needs besides memory, and makes room for its vCPUs.
    fn prepare(
        &self,
        memory: Memory,
        entry: Option<<Machine as Arch>::KernelEntry>,
    ) -> Result<(Parts, Vec<Block<Vcpu>>), Exhausted> {
        let mut vcpus = Vec::new();
        frames::reserve(&mut vcpus, self.config.vcpus as usize)?;
        let serial = [SerialLine::new()?, SerialLine::new()?];
        let mut detail = String::new();
        detail.try_reserve_exact(DETAIL_BYTES).map_err(|_| Exhausted)?;
        let room = Room::take(self.config.vcpus)?;
        Ok((Parts { memory, serial, room, detail, entry, child: None }, vcpus))
    }

    fn complete(&mut self) -> Option<Arc<Vm>> {
        match core::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Vcpus { parts, vcpus } => Some(Vm::assemble(self.number, self.config.clone(), *parts, vcpus.into())),
            _ => None,
        }
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        if let Stage::Vcpus { parts, vcpus } = core::mem::replace(&mut self.stage, Stage::Over) {
            for vcpu in vcpus {
                parts.memory.tags().release(vcpu.into_inner().into_tags());
            }
        }
    }
}

fn lacks_memory(config: &VmConfig, error: &MemoryError) -> NotCreated {
    let wanted_mib = config.memory_bytes >> 20;
    let why = match error {
        MemoryError::Exhausted => {
            let free_mib = frames::free_bytes() >> 20;
            format!("memory {wanted_mib} MiB: the host has {free_mib} MiB left, in pieces of at least 2 MiB")
        }
        MemoryError::Map(error) => format!("memory {wanted_mib} MiB: {error}"),
    };
    NotCreated::new(About::Memory, why)
}

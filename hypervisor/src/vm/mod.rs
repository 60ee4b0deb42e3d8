//! A virtual machine: its memory, its vCPUs, its devices, and its end.

pub(crate) mod address_space;
pub(crate) mod dirty;
pub(crate) mod fault;
pub(crate) mod memory;
pub(crate) mod serial;
pub(crate) mod tags;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use abi::control::{Line, StopReason};
use abi::payload::{DecodeCache, Payload, Populate, VmConfig};
use addr::GpaRange;
use decode_cache::Vouching;
use log::info;
use sched::{CpuId, Notify, Pending};
use spin::Once;
use vcpu_layout::lay_out;

use crate::arch::block::Block;
use crate::arch::platform::{self, Platform};
use crate::arch::vcpu::ArchVcpu;
use crate::arch::{interrupts, loader};
use crate::cpu::{self, scheduler};
use crate::frames;
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};
use crate::vcpu::Vcpu;
use memory::{Memory, MemoryError};
use serial::SerialLine;
use tags::VmTags;

/// A VM. Its vCPUs share it; its memory is freed with the last of them.
///
/// The fields that each exit reads are on cache lines that are not written while guests run.
#[lay_out]
pub(crate) struct Vm {
    /// Number on the control port.
    #[layout(frozen)]
    pub(crate) number: u32,
    #[layout(frozen)]
    pub(crate) config: VmConfig,
    #[layout(nested)]
    pub(crate) memory: Memory,
    #[layout(frozen)]
    vcpus: Vec<Block<Vcpu>>,
    /// Devices of the VM, with locks of their own.
    #[layout(cold)]
    platform: Platform,
    #[layout(cold)]
    serial: [SerialLine; 2],
    /// vCPUs that have not left for good.
    #[layout(cold)]
    alive: AtomicU32,
    /// vCPUs that only another vCPU can make run again.
    #[layout(cold)]
    parked: AtomicU32,
    #[layout(cold)]
    ending: Once<Ending>,
    /// No vCPU enters its guest.
    #[layout(cold)]
    paused: AtomicBool,
}

/// Why a VM ended.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) reason: StopReason,
    /// One line for people.
    pub(crate) detail: String,
}

/// One vCPU of a VM, as run queues and timers hold it.
///
/// References are counted per vCPU: a count per VM would be written whenever one of its vCPUs blocks or wakes.
#[derive(Clone)]
pub(crate) struct VcpuRef(Arc<Seat>);

/// The reference of one vCPU to its VM, until the vCPU has left its guest for ever. The line before it holds its count.
#[lay_out]
struct Seat {
    #[layout(frozen)]
    vm: Arc<Vm>,
    #[layout(frozen)]
    index: u32,
}

impl VcpuRef {
    /// The VM.
    pub(crate) fn vm(&self) -> &Arc<Vm> {
        &self.0.vm
    }

    /// The vCPU's number within its VM.
    pub(crate) fn index(&self) -> u32 {
        self.0.index
    }

    /// The vCPU itself.
    pub(crate) fn vcpu(&self) -> &Vcpu {
        &self.0.vm.vcpus[self.0.index as usize]
    }
}

/// The number of a serial line within its VM.
pub(crate) fn line_index(line: Line) -> usize {
    match line {
        Line::Console => 0,
        Line::Agent => 1,
    }
}

/// The serial lines, in the order of [`line_index`].
pub(crate) const LINES: [Line; 2] = [Line::Console, Line::Agent];

impl Vm {
    /// Allocates memory, loads the kernel, and makes the vCPUs, none of which runs yet.
    ///
    /// # Errors
    /// One line with the error in the VM's description, or what the host lacks.
    pub(crate) fn create(number: u32, config: VmConfig, payload: &Payload<'_>) -> Result<Arc<Self>, String> {
        let wanted_mib = config.memory_bytes >> 20;
        let tags = VmTags::new(&config);
        let level_on_touch = match config.populate {
            Populate::AtStart => None,
            Populate::Touch4K => Some(0),
            Populate::Touch2M => Some(1),
        };
        let ranges: Vec<GpaRange> = loader::ram_layout(config.memory_bytes).collect();
        let mut memory = Memory::new(&ranges, config.vcpus, tags, level_on_touch).map_err(|error| match error {
            MemoryError::Exhausted => {
                let free_mib = frames::free_bytes() >> 20;
                format!("memory {wanted_mib} MiB: the host has {free_mib} MiB left, in pieces of at least 2 MiB")
            }
            MemoryError::Map(error) => format!("memory {wanted_mib} MiB: {error}"),
        })?;
        match config.decode_cache {
            DecodeCache::WriteProtect => memory.remember_decoded(Vouching::Walk),
            DecodeCache::WriteProtectTables => memory.remember_decoded(Vouching::Tables),
            DecodeCache::Off | DecodeCache::Bytes => {}
        }
        let entry = loader::load(&config, payload, &mut memory).map_err(|error| error.to_string())?;

        let root = memory.stage2_root();
        let vcpu_count = config.vcpus;
        // Neighbours start on different pCPUs; where they go from there is the scheduler's business.
        let mut homes = scheduler::runners().map(|cpu| cpu.id).cycle().skip(number as usize);
        let mut vcpus = Vec::with_capacity(vcpu_count as usize);
        for index in 0..vcpu_count {
            let home = homes.next().unwrap_or(CpuId(0));
            let vcpu = Vcpu::new(ArchVcpu::new(index, &config, root, memory.tags().vcpu()), home);
            vcpus.push(Block::new(index as usize, vcpu));
            if frames::is_low() {
                return Err(format!("{vcpu_count} vCPUs: the host has no memory left from vCPU {index} on"));
            }
        }
        let vm = Arc::new(Self::lay_out(VmFields {
            number,
            platform: Platform::new(&config),
            serial: [SerialLine::new(), SerialLine::new()],
            vcpus,
            memory,
            config,
            alive: AtomicU32::new(vcpu_count),
            parked: AtomicU32::new(vcpu_count),
            ending: Once::new(),
            paused: AtomicBool::new(false),
        }));

        for (index, vcpu) in (0..).zip(&vm.vcpus) {
            vcpu.sit(VcpuRef(Arc::new(Seat::lay_out(SeatFields { vm: vm.clone(), index }))));
        }
        vm.vcpus[0].own().arch.start_at(&entry);
        info!(
            "{}: {} vCPUs, {wanted_mib} MiB, {} KiB of stage-2 tables",
            vm.name(),
            vcpu_count,
            vm.memory.table_bytes() >> 10
        );
        Ok(vm)
    }

    /// Lets the first vCPU run.
    pub(crate) fn start(&self) {
        // A start without a start-up message: it only puts the vCPU into a run queue.
        self.post(0, Pending::STARTUP);
    }

    /// The VM's name.
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    /// The architecture's data per VM.
    #[inline]
    pub(crate) fn platform(&self) -> &Platform {
        &self.platform
    }

    /// The vCPUs.
    #[inline]
    pub(crate) fn vcpus(&self) -> &[Block<Vcpu>] {
        &self.vcpus
    }

    /// A serial line.
    pub(crate) fn serial(&self, line: Line) -> &SerialLine {
        &self.serial[line_index(line)]
    }

    /// Input on a serial port. Returns how many bytes the guest's UART had room for.
    pub(crate) fn type_on(&self, line: Line, bytes: &[u8]) -> usize {
        self.serial(line).receive(bytes, |asserted| platform::serial_interrupt(self, line, asserted))
    }

    /// Posts work to a vCPU, and makes the vCPU notice it.
    pub(crate) fn post(&self, index: u32, work: Pending) {
        let Some(vcpu) = self.vcpus.get(index as usize) else { return };
        let was_outside = mutants::is(Mutant::LookBeforePost) && !vcpu.presence().is_inside();
        match vcpu.mailbox().post(work) {
            Notify::Nothing => {}
            // This pCPU takes its own vCPU's work before it enters again.
            Notify::Kick(cpu) if cpu == cpu::this().id => {}
            Notify::Kick(cpu) => {
                // Post first, then read: a vCPU that enters between the two finds the work itself.
                fence(Ordering::SeqCst);
                if !was_outside && vcpu.presence().is_inside() {
                    interrupts::kick(cpu);
                }
            }
            Notify::Enqueue => {
                if let Some(seat) = vcpu.seat() {
                    scheduler::wake(seat);
                }
            }
        }
    }

    /// Keeps all vCPUs out of their guests, or lets them in again.
    pub(crate) fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::SeqCst);
        if mutants::is(Mutant::PauseNotPosted) {
            return;
        }
        for index in 0..self.config.vcpus {
            self.post(index, Pending::PAUSE);
        }
    }

    /// Whether the vCPUs must stay out of their guests.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Whether the VM is paused and all of its vCPUs have noticed.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.is_paused() && self.vcpus.iter().all(|vcpu| vcpu.mailbox().is_blocked())
    }

    /// Ends the VM: all its vCPUs leave the guest for good. The first reason counts.
    pub(crate) fn stop(&self, reason: StopReason, detail: fmt::Arguments<'_>) {
        self.ending.call_once(|| Ending { reason, detail: detail.to_string() });
        for index in 0..self.config.vcpus {
            self.post(index, Pending::STOP);
        }
    }

    /// A vCPU has left the guest for ever. Returns why the VM ended if it was the last one.
    pub(crate) fn vcpu_left(&self) -> Option<&Ending> {
        if self.alive.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        self.ending.get()
    }

    /// A vCPU is about to block, and only another vCPU can make it run again.
    pub(crate) fn vcpu_parked(&self) {
        self.parked.fetch_add(1, Ordering::SeqCst);
    }

    /// A parked vCPU runs again.
    pub(crate) fn vcpu_unparked(&self) {
        if !mutants::is(Mutant::UnparkNotCounted) {
            self.parked.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Ends the VM if every vCPU waits for another. Called by a parked vCPU after it has blocked, so the last one of
    /// them sees all the others blocked.
    pub(crate) fn stop_if_all_parked(&self) {
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) == self.config.vcpus
            && self.vcpus.iter().all(|vcpu| vcpu.mailbox().is_blocked())
        {
            self.stop(StopReason::Halted, format_args!("every vCPU is halted with interrupts off"));
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        for vcpu in core::mem::take(&mut self.vcpus) {
            self.memory.tags().release(vcpu.into_inner().into_tags());
        }
        info!("{}: memory freed", self.config.name);
    }
}

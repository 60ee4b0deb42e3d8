//! A virtual machine: its memory, its vCPUs, its devices, and its end.

pub(crate) mod address_space;
pub(crate) mod backing;
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) mod child;
pub(crate) mod creation;
pub(crate) mod dirty;
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) mod doorbells;
pub(crate) mod fault;
pub(crate) mod memory;
pub(crate) mod rest;
pub(crate) mod rivals;
pub(crate) mod saved;
pub(crate) mod serial;
pub(crate) mod shares;
pub(crate) mod spec;
pub(crate) mod table;
pub(crate) mod tags;
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) mod tool_port;
pub(crate) mod visits;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use abi::control::{Line, StopReason};
use abi::counters::VcpuCounters;
use abi::payload::VmConfig;
use log::info;
use sched::{Dormant, Notify, Pending, Share};
use spin::Once;
use vcpu_layout::lay_out;

use crate::arch::block::Block;
use crate::arch::growing::Growing;
use crate::arch::{Arch, Machine, VcpuState};
use crate::cpu::preemption::preemption_point;
use crate::cpu::room::Room;
use crate::cpu::{self, scheduler};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};
use crate::vcpu::Vcpu;
use child::Child;
use memory::Memory;
use serial::SerialLine;

type Platform = <Machine as Arch>::Platform;

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
    /// Those of a child come one by one.
    #[layout(frozen)]
    vcpus: Growing<Block<Vcpu>>,
    /// What it has because another VM created it.
    #[layout(frozen)]
    child: Option<Box<Child>>,
    /// Devices of the VM, with locks of their own.
    #[layout(cold)]
    platform: Platform,
    /// What its vCPUs may use of the pCPUs, and have used. On cache lines of its own.
    #[layout(frozen)]
    share: Box<Share>,
    #[layout(cold)]
    serial: [SerialLine; 2],
    /// Where its vCPUs wait for pCPUs and for timers.
    #[layout(cold)]
    _room: Room,
    /// vCPUs that have not left for good.
    #[layout(cold)]
    alive: AtomicU32,
    /// Number of dormant vCPUs: only another vCPU can make them run again.
    #[layout(cold)]
    dormant: Dormant,
    #[layout(cold)]
    ending: Once<Ending>,
    /// Room for the text about its end: a guest that ends allocates nothing.
    #[layout(cold)]
    detail: spin::Mutex<String>,
    /// No vCPU enters its guest.
    #[layout(cold)]
    paused: AtomicBool,
}

/// Parts of a VM besides its vCPUs.
struct Parts {
    /// With a kernel in it.
    memory: Memory,
    serial: [SerialLine; 2],
    room: Room,
    detail: String,
    /// Where the first vCPU begins.
    entry: Option<<Machine as Arch>::KernelEntry>,
    child: Option<Child>,
}

/// Why a VM ended.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) reason: StopReason,
    /// One line for people.
    pub(crate) detail: String,
}

/// Text that takes no more memory than it has.
struct UpTo(String);

impl fmt::Write for UpTo {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fits = text.floor_char_boundary(self.0.capacity() - self.0.len());
        self.0.push_str(&text[..fits]);
        if fits == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// How many vCPUs one tells that the VM pauses, goes on or ends: with 2, the last of 512 is told by the ninth one. VMs
/// of the fake machine are small.
const TOLD_BY_ONE: u32 = if cfg!(test) { 1 } else { 2 };

/// Maximum length in bytes of the text that explains how a VM ended.
const DETAIL_BYTES: usize = 240;

/// One vCPU of a VM, as run queues and timers hold it.
///
/// References are counted per vCPU: a count per VM would be written whenever one of its vCPUs blocks or wakes.
#[derive(Clone)]
pub(crate) struct VcpuRef(Arc<VcpuRefInner>);

/// The reference of one vCPU to its VM, until the vCPU has left its guest for good. The cache line before it holds its
/// count.
#[lay_out]
struct VcpuRefInner {
    #[layout(frozen)]
    vm: Arc<Vm>,
    #[layout(frozen)]
    index: u32,
}

impl VcpuRef {
    fn new(vm: Arc<Vm>, index: u32) -> Self {
        Self(Arc::new(VcpuRefInner::lay_out(VcpuRefInnerFields { vm, index })))
    }

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
    /// Builds the VM from its vCPUs and its other parts. No vCPU runs yet.
    fn assemble(number: u32, config: VmConfig, parts: Parts, vcpus: Growing<Block<Vcpu>>) -> Arc<Self> {
        let Parts { memory, serial, room, detail, entry, child } = parts;
        // A child counts itself, because it has no vCPU yet.
        let vcpu_count = if child.is_some() { 1 } else { config.vcpus };
        let vm = Arc::new(Self::lay_out(VmFields {
            number,
            platform: Platform::new(&config, child.as_ref().map(|child| &child.features), &memory),
            share: Box::new(shares::of(&config, child.as_ref().map(|child| child.parent.share()))),
            serial,
            _room: room,
            vcpus,
            child: child.map(Box::new),
            memory,
            config,
            alive: AtomicU32::new(vcpu_count),
            dormant: Dormant::all(vcpu_count),
            ending: Once::new(),
            detail: spin::Mutex::new(detail),
            paused: AtomicBool::new(false),
        }));

        for (index, vcpu) in (0..).zip(vm.vcpus()) {
            preemption_point();
            vcpu.set_handle(VcpuRef::new(vm.clone(), index));
        }
        if let Some(entry) = entry {
            vm.vcpus[0].own().arch.start_at(&entry);
        }
        info!(
            "{}: {} vCPUs, {} MiB, {} KiB of stage-2 tables",
            vm.name(),
            vcpu_count,
            vm.config.memory_bytes >> 20,
            vm.memory.table_bytes() >> 10
        );
        vm
    }

    /// Lets the first vCPU run.
    pub(crate) fn start(&self) {
        // A start without a start-up message: this post only puts the vCPU into a run queue.
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

    /// What its vCPUs may use of the pCPUs, and have used.
    #[inline]
    pub(crate) fn share(&self) -> &Share {
        &self.share
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

    /// Input on a serial port. Returns the number of bytes that the guest's UART accepted.
    pub(crate) fn type_on(&self, line: Line, bytes: &[u8]) -> usize {
        self.serial(line).receive(bytes, |asserted| Machine::serial_interrupt(self, line, asserted))
    }

    /// Posts work to a vCPU, and makes the vCPU notice it.
    pub(crate) fn post(&self, index: u32, work: Pending) {
        self.post_and(index, work, scheduler::wake);
    }

    /// The same from a vCPU that is about to leave this pCPU, to one that had better run next here.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn post_from_leaving(&self, index: u32, work: Pending) {
        self.post_and(index, work, scheduler::wake_next);
    }

    fn post_and(&self, index: u32, work: Pending, wake: fn(VcpuRef)) {
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
                    Machine::kick(cpu);
                }
            }
            Notify::Enqueue => {
                if let Some(handle) = vcpu.handle() {
                    wake(handle);
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
        self.post(0, Pending::PAUSE | Pending::TELL);
    }

    /// The vCPU `index` has taken `work`, which may concern all vCPUs: tells those behind it. So a pause or an end goes
    /// through the VM as through a tree, and no pCPU posts to 512 vCPUs with interrupts off. Whoever is told the end
    /// passes it on, and then takes no more work.
    pub(crate) fn pass_on(&self, index: u32, work: Pending) {
        let told = match work {
            work if work.contains(Pending::STOP) => Pending::STOP,
            work if work.contains(Pending::TELL) => Pending::PAUSE | Pending::TELL,
            _ => return,
        };
        let first = index.saturating_mul(TOLD_BY_ONE).saturating_add(1);
        let end = first.saturating_add(TOLD_BY_ONE).min(self.config.vcpus);
        for behind in (first..end).filter(|_| !mutants::is(Mutant::RestNotTold)) {
            self.post(behind, told);
        }
    }

    /// Whether the vCPUs must not enter their guests.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Whether the VM is paused and all of its vCPUs have noticed.
    pub(crate) fn is_at_rest(&self) -> bool {
        // A vCPU blocks after it has [told](Self::pass_on) those behind it, which have higher numbers: one that is
        // found blocked here, after those before it, has been told.
        self.is_paused() && self.vcpus.iter().all(|vcpu| vcpu.mailbox().is_blocked())
    }

    /// Ends the VM: all its vCPUs leave the guest for good. The first reason counts.
    pub(crate) fn stop(&self, reason: StopReason, detail: fmt::Arguments<'_>) {
        self.ending.call_once(|| {
            // This is the only place that takes the lock, and it runs once, so no pCPU waits for it.
            let mut text = UpTo(core::mem::take(&mut *self.detail.lock()));
            // Text that does not fit is cut.
            let _ = fmt::Write::write_fmt(&mut text, detail);
            Ending { reason, detail: text.0 }
        });
        // Before anybody looks which vCPUs there are: a child may get another one now.
        fence(Ordering::SeqCst);
        self.post(0, Pending::STOP);
    }

    /// The same for a vCPU of this VM, which does not enter its guest again.
    pub(crate) fn stop_by(&self, index: u32, reason: StopReason, detail: fmt::Arguments<'_>) {
        self.stop(reason, detail);
        self.post(index, Pending::STOP);
    }

    /// A vCPU has left the guest for good. Returns whether it was the last one.
    pub(crate) fn vcpu_left(&self) -> bool {
        self.alive.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether all vCPUs have left the guest for good.
    pub(crate) fn is_over(&self) -> bool {
        self.alive.load(Ordering::Acquire) == 0
    }

    /// Why it ends, if it does.
    pub(crate) fn ending(&self) -> Option<&Ending> {
        self.ending.get()
    }

    /// Counters of all vCPUs, to be kept when it has ended. Where there is no room for them, there are none.
    pub(crate) fn last_counters(&self) -> Vec<VcpuCounters> {
        let mut counters = Vec::new();
        if counters.try_reserve_exact(self.vcpus.len()).is_ok() {
            counters.extend(self.vcpus.iter().inspect(|_| preemption_point()).map(|vcpu| vcpu.counters().snapshot()));
        }
        counters
    }

    /// A vCPU is about to block, and only another vCPU can make it run again.
    pub(crate) fn add_dormant(&self) {
        self.dormant.add();
    }

    /// A dormant vCPU runs again.
    pub(crate) fn remove_dormant(&self) {
        if !mutants::is(Mutant::DormantNotUncounted) {
            self.dormant.remove();
        }
    }

    /// Ends the VM if every vCPU is dormant. A dormant vCPU calls this after it has blocked, so the last one of them
    /// sees all the others blocked.
    pub(crate) fn stop_if_all_dormant(&self) {
        let are_blocked = || self.vcpus.iter().all(|vcpu| vcpu.mailbox().is_blocked());
        // The parent of a child can always make one run again.
        if self.child.is_none() && self.dormant.are_all(self.config.vcpus, are_blocked) {
            self.stop(StopReason::Halted, format_args!("every vCPU is halted with interrupts off"));
        }
    }
}

/// Frees a VM that has ended, in steps.
pub(crate) fn take_apart(mut vm: Arc<Vm>) {
    if let Some(vm) = Arc::get_mut(&mut vm) {
        vm.free_vcpus(preemption_point);
    }
}

impl Vm {
    fn free_vcpus(&mut self, in_between: fn()) {
        while self.free_vcpu() {
            in_between();
        }
    }

    /// Frees the last vCPU. Returns whether there was one.
    pub(crate) fn free_vcpu(&mut self) -> bool {
        // No memory moves, nor is any allocated.
        let mut vcpus = core::mem::take(&mut self.vcpus).into_vec();
        let last = vcpus.pop();
        self.vcpus = vcpus.into();
        let Some(last) = last else { return false };
        if let Some(child) = &self.child {
            child.give_up_room();
        }
        self.memory.tags().release(last.into_inner().into_tags());
        true
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.free_vcpus(|| {});
        info!("{}: memory freed", self.config.name);
    }
}

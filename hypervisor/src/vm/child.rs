//! A child: a VM that another VM, its parent, has created by hypercall.
//!
//! Its memory is the parent's, and its vCPUs come one by one. The parent decides when each of them runs: a vCPU with a
//! bit of [`suspend`] does not enter its guest. An exit for the parent's virtual machine monitor suspends the vCPU and
//! leaves a message ([`intercept`]): first in a page of the parent, then, as a short notice, with the parent's vCPU
//! that has resumed this one last.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::StopReason;
use abi::payload::VmConfig;
use addr::Gpa;
use hyperv_defs::PartitionId;
use hyperv_defs::message::{HEADER_BYTES, MessageType, page_of};
use hyperv_defs::vp::StatePage;
use partition::Features;
use sched::Pending;
use spin::{Mutex, Once};

use super::doorbells::Doorbells;
use super::memory::Memory;
use super::serial::SerialLine;
use super::{DETAIL_BYTES, Parts, VcpuRef, Vm};
use crate::arch::block::Block;
use crate::arch::growing::Growing;
use crate::arch::{Arch, Machine, VcpuState};
use crate::cpu::room::Room;
use crate::cpu::scheduler;
use crate::device::guest_tsc::GuestTsc;
use crate::frames::{self, Exhausted};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence, point, relax};
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};
use crate::vcpu::{Owner, Vcpu};

/// Reasons that keep a vCPU out of its guest.
pub(crate) mod suspend {
    /// The parent has suspended it. So is each new vCPU.
    pub(crate) const EXPLICIT: u8 = 1 << 0;
    /// A message about it is on its way to the parent.
    pub(crate) const INTERCEPT: u8 = 1 << 1;
    /// Another pCPU is about to take its registers.
    pub(super) const HELD: u8 = 1 << 2;
    /// The parent has not created it, or has deleted it.
    pub(super) const ABSENT: u8 = 1 << 3;
}

/// vCPUs of a child, at most.
pub(crate) const MAX_VPS: u32 = 256;

/// What a VM has because it is a child.
pub(crate) struct Child {
    /// Its id as a partition.
    pub(crate) id: PartitionId,
    /// Who created it.
    pub(crate) parent: Arc<Vm>,
    /// What its vCPUs have.
    pub(super) features: Features,
    /// As many as vCPUs, in the same order.
    vps: Growing<Vp>,
    /// Room in run queues for each of them. Whoever adds a vCPU holds the lock.
    rooms: Mutex<Vec<Room>>,
    /// The time-stamp counter of its vCPUs.
    pub(crate) tsc: Mutex<GuestTsc>,
    /// What its parent hears of without an exit.
    pub(crate) doorbells: Doorbells,
    /// Unknown MSRs read as zero, and writes to them do nothing.
    pub(crate) ignores_unknown_msrs: AtomicBool,
    /// It counts itself among its vCPUs that have not left for good.
    is_open: AtomicBool,
}

/// What [`Vm::child`] needs besides memory.
pub(crate) struct RoomForChild {
    child: Child,
    serial: [SerialLine; 2],
    room: Room,
    detail: String,
    vcpus: Growing<Block<Vcpu>>,
}

/// What the parent has to do with one of its vCPUs.
struct Vp {
    /// Pages of the parent that show its state, by [`StatePage`]: a GPA, and bit 0 if there is one.
    pages: [AtomicU64; 2],
    /// The parent's vCPU that has resumed it last.
    resumer: AtomicU32,
    /// Its number among the senders of messages to the parent.
    sender: Once<u32>,
}

const IS_MAPPED: u64 = 1 << 0;

impl Vp {
    fn new() -> Self {
        Self { pages: Default::default(), resumer: AtomicU32::new(0), sender: Once::new() }
    }
}

impl Child {
    /// A vCPU is freed, and needs no room in the queues any more.
    pub(super) fn give_up_room(&self) {
        self.rooms.lock().pop();
    }

    /// The parent's vCPU that has resumed a vCPU last.
    pub(crate) fn resumer(&self, index: u32) -> u32 {
        self.vps.get(index as usize).map_or(0, |vp| vp.resumer.load(Ordering::Relaxed))
    }

    /// A vCPU's page.
    fn page(&self, index: u32, which: StatePage) -> Option<Gpa> {
        let word = self.vps.get(index as usize)?.pages[which as usize].load(Ordering::Acquire);
        (word & IS_MAPPED != 0).then_some(Gpa(word & !IS_MAPPED))
    }
}

impl Vm {
    /// Takes all that a child without vCPUs needs of the host besides its memory, so that its creation cannot fail.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn room_for_child(
        id: PartitionId,
        features: Features,
        parent: Arc<Self>,
    ) -> Result<RoomForChild, Exhausted> {
        let mut rooms = Vec::new();
        frames::reserve(&mut rooms, MAX_VPS as usize)?;
        let child = Child {
            id,
            parent,
            features,
            vps: Growing::with_room(MAX_VPS as usize)?,
            rooms: Mutex::new(rooms),
            tsc: Mutex::new(GuestTsc::new()),
            doorbells: Doorbells::new(),
            ignores_unknown_msrs: AtomicBool::new(false),
            is_open: AtomicBool::new(true),
        };
        let mut detail = String::new();
        detail.try_reserve_exact(DETAIL_BYTES).map_err(|_| Exhausted)?;
        let serial = [SerialLine::new()?, SerialLine::new()?];
        let vcpus = Growing::with_room(MAX_VPS as usize)?;
        Ok(RoomForChild { child, serial, room: Room::take(0)?, detail, vcpus })
    }

    /// Builds a child without vCPUs. It is in no table yet.
    pub(crate) fn child(number: u32, config: VmConfig, memory: Memory, taken: RoomForChild) -> Arc<Self> {
        let RoomForChild { child, serial, room, detail, vcpus } = taken;
        let parts = Parts { memory, serial, room, detail, entry: None, child: Some(child) };
        Self::assemble(number, config, parts, vcpus)
    }

    /// What it has because it is a child.
    #[inline]
    pub(crate) fn as_child(&self) -> Option<&Child> {
        self.child.as_deref()
    }

    /// Gives a child those vCPUs before `index` that it lacks, absent, as long as there is time for `more` after each.
    /// Returns whether it lacks none any more.
    ///
    /// # Errors
    /// The host has too little memory, or the VM is no child.
    pub(crate) fn add_absent_vcpus(
        self: &Arc<Self>,
        index: u32,
        mut more: impl FnMut() -> bool,
    ) -> Result<bool, Exhausted> {
        while let Some(last) = index.checked_sub(1)
            && self.vcpus.len() <= last as usize
        {
            self.grow_to(u32::try_from(self.vcpus.len()).unwrap_or(last).min(last))?;
            if !more() {
                return Ok(self.vcpus.len() > last as usize);
            }
        }
        Ok(true)
    }

    /// Gives a child its vCPU `index`, suspended, and those before it that it lacks, absent.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn add_vcpu(self: &Arc<Self>, index: u32) -> Result<(), Exhausted> {
        self.grow_to(index)?;
        self.vcpus[index as usize].suspended().fetch_and(!suspend::ABSENT, Ordering::SeqCst);
        Ok(())
    }

    /// Adds absent vCPUs up to this one.
    fn grow_to(self: &Arc<Self>, index: u32) -> Result<(), Exhausted> {
        let Some(child) = self.as_child() else { return Err(Exhausted) };
        let mut rooms = child.rooms.lock();
        while self.vcpus.len() <= index as usize {
            let next = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
            let room = Room::take(1)?;
            if frames::is_low() {
                return Err(Exhausted);
            }
            let (root, tags) = (self.memory.stage2_root(), self.memory.tags().vcpu());
            let mut arch = <Machine as Arch>::Vcpu::new(next, &self.config, root, tags);
            if next == 0 {
                // The processor that boots waits for no start-up message.
                *arch.activity() = Activity::Active;
            }
            let home = scheduler::first_home(self.number, next, self.share.cpus());
            let vcpu = Block::new(next as usize, Vcpu::new(arch, home));
            vcpu.suspended().store(suspend::EXPLICIT | suspend::ABSENT, Ordering::Relaxed);
            vcpu.set_handle(VcpuRef::new(self.clone(), next));
            if child.vps.push(Vp::new()).is_err() {
                return Err(Exhausted);
            }
            rooms.push(room);
            self.alive.fetch_add(1, Ordering::AcqRel);
            if let Err(vcpu) = self.vcpus.push(vcpu) {
                self.memory.tags().release(vcpu.into_inner().into_tags());
                self.alive.fetch_sub(1, Ordering::AcqRel);
                return Err(Exhausted);
            }
            // Either whoever ends the VM has found the new vCPU, or this finds that the VM ends.
            fence(Ordering::SeqCst);
            if self.ending().is_some() {
                self.post(next, Pending::STOP);
            }
        }
        Ok(())
    }

    /// The vCPU of a child with this index, if the parent has created it.
    pub(crate) fn vp(self: &Arc<Self>, index: u32) -> Option<VcpuRef> {
        let vcpu = self.vcpus.get(index as usize)?;
        let exists = vcpu.suspended().load(Ordering::SeqCst) & suspend::ABSENT == 0;
        exists.then(|| vcpu.handle()).flatten()
    }

    /// The vCPU of a child that had this index, if the parent has deleted it, or created only a later one.
    pub(crate) fn absent_vp(self: &Arc<Self>, index: u32) -> Option<VcpuRef> {
        let vcpu = self.vcpus.get(index as usize)?;
        let exists = vcpu.suspended().load(Ordering::SeqCst) & suspend::ABSENT == 0;
        if exists { None } else { vcpu.handle() }
    }

    /// Ends a child for good. Returns whether the last of its vCPUs has left.
    pub(crate) fn end_child(&self) -> bool {
        if let Some(child) = self.as_child()
            && child.is_open.swap(false, Ordering::SeqCst)
        {
            self.stop(StopReason::PowerOff, format_args!("its parent has finalized it"));
            self.vcpu_left();
        }
        self.is_over()
    }
}

impl VcpuRef {
    /// Takes a child's vCPU out of its guest for as long as `work` uses its registers.
    pub(crate) fn hold<R>(&self, work: impl FnOnce(&mut Owner) -> R) -> R {
        let vcpu = self.vcpu();
        let mut kicks = Kicks::new();
        loop {
            if let Some(mut guard) = vcpu.try_own() {
                let (owner, _) = guard.split();
                let result = work(owner);
                drop(guard);
                if kicks.are_sent() && !mutants::is(Mutant::HeldForEver) {
                    self.unsuspend(suspend::HELD, Vm::post);
                }
                return result;
            }
            // Each time, because another pCPU that held it may have taken the bit away.
            if kicks.is_due() {
                vcpu.suspended().fetch_or(suspend::HELD, Ordering::SeqCst);
                self.vm().post(self.index(), Pending::PAUSE);
                if vcpu.presence().is_inside() {
                    Machine::kick(vcpu.home());
                }
            }
            relax();
        }
    }

    /// Suspends a child's vCPU for `reason`. On return it is out of its guest, and makes no exit any more.
    pub(crate) fn suspend(&self, reason: u8) {
        self.vcpu().suspended().fetch_or(reason, Ordering::SeqCst);
        self.vm().post(self.index(), Pending::PAUSE);
        self.hold(|_| ());
    }

    /// Takes a reason away. Without any, the vCPU runs again. Returns whether it does.
    fn unsuspend(&self, reason: u8, post: fn(&Vm, u32, Pending)) -> bool {
        let before = self.vcpu().suspended().fetch_and(!reason, Ordering::SeqCst);
        let runs = before & !reason == 0 && before != 0 && !mutants::is(Mutant::ResumeNotPosted);
        if runs {
            post(self.vm(), self.index(), Pending::PAUSE);
        }
        runs
    }

    /// The vCPU is not the parent's any more. It never runs again, unless it is created again.
    pub(crate) fn remove(&self) {
        self.suspend(suspend::EXPLICIT | suspend::ABSENT);
        self.hide(StatePage::Registers);
        self.hide(StatePage::InterceptMessage);
    }

    /// The vCPU begins anew, suspended as a new one: the first one may run, others wait for a start-up message.
    pub(crate) fn power_on(&self) {
        self.vcpu().suspended().fetch_and(!suspend::INTERCEPT, Ordering::SeqCst);
        if self.index() == 0 {
            self.hold(|owner| *owner.arch.activity() = Activity::Active);
        }
    }

    /// From now on a page of the parent shows this of a child's vCPU.
    pub(crate) fn show(&self, which: StatePage, gpa: Gpa) {
        self.hold(|_| self.set_page(which, gpa.0 | IS_MAPPED));
    }

    /// Where its register page is, if there is one and this `reason` is the only one that keeps the vCPU from running.
    pub(crate) fn register_page_left_by(&self, reason: u8) -> Option<Gpa> {
        if self.vcpu().suspended().load(Ordering::SeqCst) == reason {
            self.vm().as_child()?.page(self.index(), StatePage::Registers)
        } else {
            None
        }
    }

    fn vp(&self) -> Option<&Vp> {
        self.vm().as_child()?.vps.get(self.index() as usize)
    }

    /// On return, nothing more is written to the page that shows this.
    pub(crate) fn hide(&self, which: StatePage) {
        self.hold(|_| self.set_page(which, 0));
    }

    fn set_page(&self, which: StatePage, word: u64) {
        if let Some(vp) = self.vp() {
            vp.pages[which as usize].store(word, Ordering::Release);
        }
    }

    /// The parent's vCPU `resumer` takes a reason away. It will hear of the next exit. Returns whether the vCPU runs
    /// now: then the resumer, which is about to wait for that exit, had better leave its pCPU.
    pub(crate) fn resume(&self, reason: u8, resumer: u32) -> bool {
        if let Some(vp) = self.vp() {
            vp.resumer.store(resumer, Ordering::Relaxed);
        }
        self.unsuspend(reason, Vm::post_from_leaving)
    }

    /// Its number among the senders of messages to the parent, which is set once.
    pub(crate) fn set_sender(&self, sender: u32) {
        if let Some(vp) = self.vp() {
            vp.sender.call_once(|| sender);
        }
    }

    /// That number, if it has one.
    pub(crate) fn sender(&self) -> Option<u32> {
        let child = self.vm().as_child()?;
        child.vps.get(self.index() as usize)?.sender.get().copied()
    }
}

/// When a vCPU that shall leave its guest is kicked again: an emulator may lose a kick.
struct Kicks {
    due: u64,
    patience: u64,
    count: u32,
}

impl Kicks {
    const PATIENCE_NANOS: u64 = 100_000;

    fn new() -> Self {
        Self { due: 0, patience: Machine::nanos_to_ticks(Self::PATIENCE_NANOS), count: 0 }
    }

    fn is_due(&mut self) -> bool {
        let now = Machine::now();
        let is_due = now >= self.due;
        if is_due {
            self.due = now + self.patience;
            self.patience *= 2;
            self.count += 1;
        }
        is_due
    }

    fn are_sent(&self) -> bool {
        self.count != 0
    }
}

/// Between two instructions, a child's vCPU has to wait for its parent: calls `tell`, which leaves a message. If it
/// waits for something already, no second message is left. When it goes on, it looks again whether it has to wait.
#[cold]
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) fn wait_between_instructions(run: &mut Running<'_>, tell: impl FnOnce(&mut Running<'_>) -> Next) {
    if run.is_held() {
        return;
    }
    let _ = tell(run);
    if mutants::is(Mutant::WaitNotSeen) {
        // Time for the page to come back.
        (0..20).for_each(|_| point());
        return;
    }
    // The loop looks whether it is suspended.
    run.vm.post(run.index, Pending::PAUSE);
}

/// The exit of a child's vCPU is for the parent: suspends the vCPU, and leaves this message.
#[inline(never)]
pub(crate) fn intercept(run: &mut Running<'_>, kind: MessageType, payload: &[u8]) -> Next {
    let Some(child) = run.vm.as_child() else { return Next::Resume };
    if let Some(gpa) = child.page(run.index, StatePage::InterceptMessage) {
        // A parent that has no memory there sees no message. What is behind the payload is of an earlier message.
        let page = page_of(kind, child.id.0, payload);
        let bytes = (HEADER_BYTES + payload.len()).min(page.len());
        let _ = child.parent.memory.write(gpa, &page[..bytes]);
    }
    match kind {
        MessageType::GpaIntercept => run.tally.add(|count| &count.vmm_faults, 1),
        _ => run.tally.add(|count| &count.vmm_exits, 1),
    }
    // From here on the parent may resume it.
    run.vcpu.suspended().fetch_or(suspend::INTERCEPT, Ordering::SeqCst);
    if let Some(vp) = child.vps.get(run.index as usize)
        && let Some(sender) = vp.sender.get()
    {
        Machine::post_message(&child.parent, vp.resumer.load(Ordering::Relaxed), *sender);
    }
    Next::Suspended
}

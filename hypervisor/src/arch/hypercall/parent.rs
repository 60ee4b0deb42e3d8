//! The calls of a parent: it creates VMs of its own, its children.
//!
//! The crate `partition` has the rules, and the parent's description of its children. The files next to this one make a
//! description true, each for one family of calls.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES};
use hyperv_defs::memory::{number_of_page, page_of_number};
use hyperv_defs::vp::Vp;
use hyperv_defs::{Checked, PartitionId, Request, Status};
use partition::{Host, Ledger, OwnStats, Parent, Progress, Store, limits};

use super::budget::Budget;
use super::mail::Mail;
use super::stats::{self, Statistics};
use super::vmbus::{self, VmBus};
use super::{Ended, interrupt, memory, partition as life, registers, tracking, vp};
use crate::arch::machine::cpuid;
use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::cpu::preemption::{preemption_point, preemption_point_in_exit};
use crate::sync::{Mutex, MutexGuard, relax};
use crate::vcpu::{Vcpu, unsent};
use crate::vm::backing::Place;
use crate::vm::memory::Memory;
use crate::vm::{VcpuRef, Vm};

/// The children of a VM that is a parent.
pub(in crate::arch) struct Children {
    /// Their descriptions.
    parent: Mutex<Parent>,
    /// The VMs of those that are initialized.
    vms: Mutex<Vec<(PartitionId, OfChild)>>,
    /// Nobody will end them: the parent has reset its interface.
    are_abandoned: AtomicBool,
    /// What they have left for the parent's vCPUs.
    pub(in crate::arch) mail: Mail,
    /// The bus that the parent's kernel looks for.
    pub(in crate::arch) bus: VmBus,
    /// Its pages that show counters.
    pub(super) statistics: Statistics,
}

/// The VM of a child.
enum OfChild {
    /// It lives.
    Lives(Arc<Vm>),
    /// It has ended, and is taken apart: what is left of it. `None`: by a call at this moment.
    Ends(Option<Arc<Vm>>),
}

impl Children {
    /// None yet. They can have what `host` says, and pages of the parent's memory, which are `ranges`. The
    /// parent has `vcpus` of its own.
    pub(in crate::arch) fn new(host: Host, vcpus: u32, ranges: impl Iterator<Item = GpaRange>) -> Option<Self> {
        let mut memory = Vec::new();
        for range in ranges {
            memory.try_reserve(1).ok()?;
            memory.push((number_of_page(range.start), range.bytes() / PAGE_BYTES));
        }
        let ledger = Ledger::new(&memory)?;
        let mut parent = Parent::new(ledger, host);
        parent.stats = OwnStats::new(vcpus, u32::try_from(cpu::count()).ok()?);
        let mut vms = Vec::new();
        vms.try_reserve_exact(limits::CHILDREN).ok()?;
        Some(Self {
            parent: Mutex::new(parent),
            vms: Mutex::new(vms),
            are_abandoned: AtomicBool::new(false),
            mail: Mail::new(vcpus)?,
            bus: VmBus::new(),
            statistics: Statistics::new(),
        })
    }

    /// See [`Family::lock`].
    fn lock_for(&self, caller: Option<&Vcpu>) -> MutexGuard<'_, Parent> {
        loop {
            if let Some(parent) = self.try_lock() {
                return parent;
            }
            preemption_point_of(caller);
            relax();
        }
    }

    /// Their descriptions, unless somebody has the lock.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Parent>> {
        self.parent.try_lock()
    }

    /// Writes the counters of the host, of `parent` and of its children into those pages whose turn it is.
    pub(in crate::arch) fn renew_statistics(&self, parent: &Vm) {
        self.statistics.renew(&Family { vm: parent, children: self, caller: None }, Machine::now());
    }

    /// A child's VM.
    ///
    /// # Errors
    /// [`Status::InvalidPartitionState`] if it has none, because it is not initialized or is finalized.
    pub(in crate::arch) fn vm(&self, id: PartitionId) -> Result<Arc<Vm>, Status> {
        match self.vms.lock().iter().find(|(other, _)| *other == id) {
            Some((_, OfChild::Lives(vm))) => Ok(vm.clone()),
            Some((_, OfChild::Ends(_))) | None => Err(Status::InvalidPartitionState),
        }
    }

    /// A child has its VM now.
    pub(super) fn add_vm(&self, id: PartitionId, vm: Arc<Vm>) {
        self.vms.lock().push((id, OfChild::Lives(vm)));
    }

    /// The parent will not end them: it begins anew, as another kernel.
    pub(in crate::arch) fn abandon(&self) {
        self.statistics.remove_all();
        self.are_abandoned.store(true, Ordering::Release);
    }

    /// Whether there are some that their parent will not end: because it has ended itself, if it `is_over`, or because
    /// it has [abandoned](Self::abandon) them.
    pub(in crate::arch) fn are_orphans(&self, is_over: bool) -> bool {
        (is_over || self.are_abandoned.load(Ordering::Acquire)) && {
            let parent = self.lock_for(None);
            parent.children().len() + parent.stats.count() != 0
        }
    }

    /// Does a part of the end of all children of `parent`.
    pub(in crate::arch) fn end_all(&self, parent: &Vm) {
        // All at once, so that none waits for another to leave.
        for at in 0.. {
            let vm = match self.vms.lock().get(at) {
                Some((_, OfChild::Lives(vm))) => vm.clone(),
                Some((_, OfChild::Ends(_))) => continue,
                None => break,
            };
            vm.end_child();
            preemption_point();
        }
        let family = Family { vm: parent, children: self, caller: None };
        family.lock().forget_stats();
        let budget = Budget::start();
        while !budget.is_spent() {
            let Some(id) = family.lock().children().next().map(|child| child.id) else {
                self.are_abandoned.store(false, Ordering::Release);
                return;
            };
            // One that is finalized already cannot be finalized again.
            let is_final = !matches!(life::finalize_part(&family, id, budget), Ok(Progress::More));
            if !is_final || !matches!(life::delete_part(&family, id, budget), Ok(Progress::Done)) {
                return;
            }
        }
    }

    /// What is left of a child's VM, to be taken apart: `None`, if it has no VM any more. Nobody refers to it.
    ///
    /// # Errors
    /// Somebody does, or takes it apart at this moment.
    pub(super) fn take_vm(&self, id: PartitionId) -> Result<Option<Arc<Vm>>, Busy> {
        let mut vms = self.vms.lock();
        let Some((_, vm)) = vms.iter_mut().find(|(other, _)| *other == id) else { return Ok(None) };
        match vm {
            OfChild::Lives(vm) if Arc::strong_count(vm) != 1 => Err(Busy),
            OfChild::Lives(_) => match core::mem::replace(vm, OfChild::Ends(None)) {
                OfChild::Lives(vm) => Ok(Some(vm)),
                OfChild::Ends(rest) => Ok(rest),
            },
            OfChild::Ends(rest) => rest.take().map(Some).ok_or(Busy),
        }
    }

    /// Gives back what is left of a VM. `None`: nothing.
    pub(super) fn leave_vm(&self, id: PartitionId, left: Option<Arc<Vm>>) {
        let mut vms = self.vms.lock();
        let Some(at) = vms.iter().position(|(other, _)| *other == id) else { return };
        if left.is_some() {
            vms[at].1 = OfChild::Ends(left);
        } else {
            vms.swap_remove(at);
        }
    }

    /// What the parent with this memory has said about a page of a child.
    #[cfg(test)]
    pub(in crate::arch) fn described(&self, memory: &Memory, id: PartitionId, page: u64) -> Option<partition::Entry> {
        self.lock_for(None).child(id).ok().map(|child| child.page(page, &Deposited::of(memory)))
    }

    /// Pages of the parent that are deposited, or used by children or for its own statistics.
    #[cfg(test)]
    pub(in crate::arch) fn pages_in_use(&self) -> Vec<(u64, partition::PageUse)> {
        self.lock_for(None).ledger.used().collect()
    }

    /// The first of them.
    #[cfg(test)]
    pub(in crate::arch) fn first(&self) -> Option<PartitionId> {
        self.lock_for(None).children().next().map(|child| child.id)
    }

    /// How many there are.
    #[cfg(test)]
    pub(in crate::arch) fn count(&self) -> usize {
        self.lock_for(None).children().len()
    }
}

fn preemption_point_of(caller: Option<&Vcpu>) {
    let has_taken_some = preemption_point_in_exit();
    if has_taken_some && let Some(caller) = caller {
        unsent::keep_out(caller);
    }
}

/// Somebody still uses a VM.
pub(super) struct Busy;

/// A parent and its children.
#[derive(Clone, Copy)]
pub(super) struct Family<'a> {
    /// The parent.
    pub(super) vm: &'a Vm,
    /// Its children.
    pub(super) children: &'a Children,
    /// The vCPU for which this pCPU works: the parent's that calls, or a child's that faults. `None` in housekeeping.
    pub(super) caller: Option<&'a Vcpu>,
}

/// A parent's call.
pub(super) struct Caller<'a> {
    family: Family<'a>,
    /// The parent's vCPU that calls.
    pub(super) index: u32,
    /// The call.
    pub(super) checked: &'a Checked,
    /// The place of its output.
    pub(super) output: Output<'a>,
}

/// Executes a parent's call. Its output goes to `output`.
#[inline(never)]
pub(in crate::arch) fn perform(
    vm: &Vm,
    index: u32,
    checked: &Checked,
    request: &Request<'_>,
    children: Option<&Children>,
    output: Gpa,
) -> Result<Ended, Status> {
    let children = children.ok_or(Status::AccessDenied)?;
    let family = Family { vm, children, caller: vm.vcpus().get(index as usize).map(|vcpu| &**vcpu) };
    let caller = Caller { family, index, checked, output: Output::new(vm, checked, output)? };
    match request {
        Request::CreatePartition(create) => life::create(&caller, create),
        Request::InitializePartition(id) => life::initialize(&caller, *id),
        Request::FinalizePartition(id) => life::finalize(&caller, *id),
        Request::DeletePartition(id) => life::delete(&caller, *id),
        Request::GetProperty(get) => life::property(&caller, get),
        Request::SetProperty(set) => life::set_property(&caller, set),

        Request::Deposit(deposit) => memory::deposit(&caller, deposit),
        Request::Withdraw(withdraw) => memory::withdraw(&caller, withdraw),
        Request::MapPages(map) => memory::map(&caller, map),
        Request::UnmapPages(unmap) => memory::unmap(&caller, unmap),
        Request::GetAccessStates(get) => tracking::access_states(&caller, get),

        Request::CreateVp(vp) => vp::create(&caller, *vp),
        Request::DeleteVp(vp) => vp::delete(&caller, *vp),
        Request::MapStatePage(map) => vp::map_state_page(&caller, map),
        Request::UnmapStatePage(unmap) => vp::unmap_state_page(&caller, unmap),
        Request::MapStatsPage(page, location) => stats::map(&caller, page, *location),
        Request::UnmapStatsPage(page) => stats::unmap(&caller, page),

        Request::GetRegisters(get) => registers::get(&caller, get),
        Request::SetRegisters(set) => registers::set(&caller, set),
        Request::GetState(state) => registers::state(&caller, state),
        Request::SetState(state) => registers::set_state(&caller, state),
        Request::CpuidResult(result) => registers::register_cpuid(&caller, result),
        Request::GetCpuidValues(get) => registers::cpuid_values(&caller, get),
        Request::Translate(translate) => registers::translate(&caller, translate),
        Request::InstallIntercept(install) => registers::install_intercept(&caller, install),

        Request::AssertInterrupt(assert) => interrupt::assert(&caller, assert),
        Request::ClearInterrupt(id) => interrupt::clear(&caller, *id),
        Request::CreatePort(create) => interrupt::create_port(&caller, create),
        Request::DeletePort(port) => interrupt::delete_port(&caller, port),
        Request::ConnectPort(connect) => interrupt::connect_port(&caller, connect),
        Request::DisconnectPort(port) => interrupt::disconnect_port(&caller, port),
        Request::RingEmpty(sint) => interrupt::ring_empty(&caller, *sint),
        Request::PostMessage(posted) => vmbus::post(&caller, *posted),
    }
}

impl<'a> Deref for Caller<'a> {
    type Target = Family<'a>;

    fn deref(&self) -> &Family<'a> {
        &self.family
    }
}

impl Caller<'_> {
    /// The call has done all that was asked.
    pub(super) fn done(&self) -> Result<Ended, Status> {
        Ok(Ended::With(self.checked.success()))
    }

    /// The call has done `done` elements of what was left, and perhaps it ends there.
    pub(super) fn ended_after(&self, done: u16, result: Result<(), Status>) -> Result<Ended, Status> {
        match result {
            Ok(()) if done < self.checked.elements_left() => {
                let control = self.checked.control();
                Ok(Ended::NotYet(control.with_rep_start(control.rep_start() + done)))
            }
            Ok(()) => self.done(),
            Err(status) => Ok(Ended::With(self.checked.failure_after(done, status))),
        }
    }

    /// The parent, for its children to keep.
    ///
    /// # Errors
    /// [`Status::OperationDenied`] for a parent that is about to end.
    pub(super) fn parent(&self) -> Result<Arc<Vm>, Status> {
        let handle = self.vm.vcpus().get(self.index as usize).and_then(|vcpu| vcpu.handle());
        handle.map(|handle| handle.vm().clone()).ok_or(Status::OperationDenied)
    }
}

impl<'a> Family<'a> {
    /// The descriptions of the children. Another pCPU may have the lock for long: until then this one takes its
    /// interrupts.
    ///
    /// A change of memory holds the lock during its flush, until the vCPUs concerned have left their guests, and until
    /// visitors have left memory. So never take the lock during the emulation of an instruction, nor as a walker of
    /// stage 2. Nor wait with it for a vCPU's owner, who may want to take it.
    pub(super) fn lock(&self) -> MutexGuard<'a, Parent> {
        self.children.lock_for(self.caller)
    }

    /// A place in long work where the pCPU takes its interrupts, also with the locks of children. Before the caller
    /// enters its guest again it looks what they were about.
    pub(super) fn preemption_point(&self) {
        preemption_point_of(self.caller);
    }

    /// A vCPU of a child.
    ///
    /// # Errors
    /// [`Status::InvalidPartitionId`], [`Status::InvalidPartitionState`], [`Status::InvalidVpIndex`].
    pub(super) fn vcpu(&self, vp: Vp) -> Result<VcpuRef, Status> {
        match self.children.vm(vp.partition) {
            Ok(vm) => vm.vp(vp.index).ok_or(Status::InvalidVpIndex),
            // Only a child has a VM, so its description is not needed where there is one: each exit of a child to its
            // parent costs two such calls.
            Err(status) => self.check_child(vp.partition).and(Err(status)),
        }
    }

    /// The pages that it has deposited.
    pub(super) fn store(&self) -> Deposited<'a> {
        Deposited { family: Some(*self), ..Deposited::of(&self.vm.memory) }
    }

    /// Whether this names a child, for calls that change nothing.
    pub(super) fn check_child(&self, id: PartitionId) -> Result<(), Status> {
        self.lock().child(id).map(|_| ())
    }
}

/// The place of a call's output.
pub(super) struct Output<'a> {
    vm: &'a Vm,
    at: Gpa,
}

impl<'a> Output<'a> {
    /// A place that can be written to, or none for a call without output. It is cleared, before the call has done
    /// anything that could not be told.
    fn new(vm: &'a Vm, checked: &Checked, at: Gpa) -> Result<Self, Status> {
        checked.check_output_placement(at, cpuid::physical_addresses_end())?;
        let output = Self { vm, at };
        let bytes = checked.output_bytes();
        // A call that goes on has begun to fill it.
        if bytes != 0 && checked.control().rep_start() == 0 {
            output.write([0; LARGEST_OUTPUT].get(..bytes).ok_or(Status::InvalidHypercallInput)?)?;
        }
        Ok(output)
    }

    /// Writes from its start on.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<(), Status> {
        self.write_at(0, bytes)
    }

    /// Writes this many bytes behind its start.
    pub(super) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let at = self.at.checked_add(offset).ok_or(Status::InvalidHypercallInput)?;
        if self.vm.memory.write(at, bytes) { Ok(()) } else { Err(Status::InvalidHypercallInput) }
    }
}

/// An output is within one page.
const LARGEST_OUTPUT: usize = 4096;

/// The pages that a parent has deposited: they are in its frames, where it cannot reach them.
pub(in crate::arch) struct Deposited<'a> {
    pub(super) memory: &'a Memory,
    /// Who works with them, if that may take long.
    family: Option<Family<'a>>,
    /// Words that were accessed since the pCPU has taken its interrupts; a clear page counts as [`CLEARED`].
    work: Cell<usize>,
}

/// How many words are accessed before the pCPU takes its interrupts: with what is done for each, ten thousand
/// instructions and more.
const WORDS_AT_ONCE: usize = 128;
/// What a page that is cleared counts as.
const CLEARED: usize = 16;

impl<'a> Deposited<'a> {
    /// For work that is done soon.
    pub(super) fn of(memory: &'a Memory) -> Self {
        Self { memory, family: None, work: Cell::new(0) }
    }

    fn worked(&self, words: usize) {
        let Some(family) = self.family else { return };
        let work = self.work.get() + words;
        self.work.set(work % WORDS_AT_ONCE);
        if work >= WORDS_AT_ONCE {
            family.preemption_point();
        }
    }

    pub(super) fn host_page(&self, page: u64) -> Option<Hpa> {
        self.memory.backing.pages(page, 1)
    }

    fn word(&self, page: u64, index: usize) -> Option<&AtomicU64> {
        self.words(page, index).first()
    }

    /// Those of a page from `index` on, and the memory behind them. None, if there is no such page.
    fn words(&self, page: u64, index: usize) -> &[AtomicU64] {
        let words = || {
            let backing = &self.memory.backing;
            let Place { region, offset } = backing.find(page_of_number(page).ok()?)?;
            let first = usize::try_from(offset / 8).ok()?;
            backing.ram.run(region)?.words().get(first + index..)
        };
        words().unwrap_or_default()
    }
}

impl Store for Deposited<'_> {
    fn read(&self, page: u64, index: usize) -> u64 {
        self.worked(1);
        self.word(page, index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn read_words(&self, page: u64, index: usize, words: &mut [u64]) {
        self.worked(words.len() / CLEARED);
        words.fill(0);
        words.iter_mut().zip(self.words(page, index)).for_each(|(copy, word)| *copy = word.load(Ordering::Relaxed));
    }

    fn write(&mut self, page: u64, index: usize, value: u64) {
        self.worked(1);
        if let Some(word) = self.word(page, index) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn clear(&mut self, page: u64) {
        self.worked(CLEARED);
        let backing = &self.memory.backing;
        if let Some(Place { region, offset }) = page_of_number(page).ok().and_then(|gpa| backing.find(gpa))
            && let Some(run) = backing.ram.run(region)
        {
            run.zero_part(offset, PAGE_BYTES);
        }
    }
}

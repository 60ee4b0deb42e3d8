//! A VM's address space, a part of its [`Memory`]: the stage-2 tree and its tables, the tags of its TLB entries, and
//! the flush of these entries.
//!
//! One vCPU requests a flush for some or all vCPUs of the VM ([`Memory::flush`]). First it publishes the request, where
//! each target finds it before its next entry. Single pages go into words next to the target's mailbox. A flush of
//! everything on all vCPUs is a new *epoch* of the VM, which each entry compares with the epoch that the vCPU has seen.
//! Then the sender reads which targets are in their guests, kicks those, all at once, and waits for them. It never
//! waits for a vCPU that does not run.

use core::cell::Cell;

use addr::Hpa;
use hyperv_defs::Targets;
use sched::{CpuId, Pending};
use shootdown::{Flush, Plan};
use stage2::{Shape, Stale, Tlb, Tree, WalkMut};
use tlb_tag::Scheme;

use super::Vm;
use super::memory::Memory;
use super::tags::{TagPool, VmTags};
use crate::arch::block::Block;
use crate::arch::tables::TablePool;
use crate::arch::{Arch, Machine, VcpuState};
use crate::cpu::preemption::preemption_point;
use crate::mutants::{self, Mutant};
use crate::sync::{MutexGuard, Ordering, relax};
use crate::trace;
use crate::vcpu::run::Running;
use crate::vcpu::{Owner, Tally, Vcpu};

/// The format of stage-2 tables.
pub(super) type Stage2Format = <Machine as Arch>::Format;
type ArchVcpu = <Machine as Arch>::Vcpu;

/// A wait for kicked vCPUs, in ticks of the host's clock.
struct Wait {
    since: u64,
    /// When to kick the vCPU again that is waited for, and the delay until the kick after that.
    kick_at: u64,
    patience: u64,
}

/// Time limit for kicked vCPUs to leave their guests, before one is kicked again: 100 µs, then twice as long each time.
/// An exit takes one or two. An emulator may lose the kick (`host/quirks.rs` of x86-64).
const PATIENCE_NANOS: u64 = 100_000;

/// The most requests that one flush leaves with its targets, if it has several for each: two with 384 vCPUs, six with
/// 128. A flush with more becomes one of everything.
const MOST_REQUESTS: usize = 768;

impl Memory {
    /// The VM's epoch. An entry that has seen another epoch must not use older TLB entries.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Read after `Presence::enter`, whose barrier orders it against `Memory::flush`.
        self.epoch.load(Ordering::Relaxed)
    }

    /// The pool of its vCPUs' tags.
    #[inline]
    pub(crate) fn tag_pool(&self) -> &TagPool {
        self.tags.pool()
    }

    /// Its part of that pool.
    pub(crate) fn tags(&self) -> &VmTags {
        &self.tags
    }

    /// Flushes the translations of `plan` from the TLBs of the `targets` among `vcpus`. On return none of them runs its
    /// guest with a flushed translation. `requester` is the requesting vCPU, on this pCPU. Without one, a target on
    /// this pCPU flushes before its next entry, like all others.
    pub(crate) fn flush(
        &self,
        plan: &Plan,
        vcpus: &[Block<Vcpu>],
        targets: Targets<'_>,
        mut requester: Option<&mut Running<'_>>,
    ) {
        let count = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
        let me = requester.as_ref().map(|run| run.index);
        let tally = requester.as_ref().map(|run| run.tally);
        let others = targets.indices(count).filter(|&target| Some(target) != me).map(|target| &*vcpus[target as usize]);

        // Not more requests than a pCPU can leave while its own interrupts wait.
        let targets_of_bank = |(_, bank): (u32, u64)| bank.count_ones() as usize;
        let is_too_long = plan.requests() > 1
            && plan.requests() * targets.banks(count).map(targets_of_bank).sum::<usize>() > MOST_REQUESTS;
        let everything = Plan::whole();
        let plan = if is_too_long { &everything } else { plan };

        // A flush of everything on all vCPUs is one store. (With a scheme that counts per pCPU, other VMs would pay for
        // it.)
        let by_epoch = plan.is_whole() && self.tag_pool().scheme() == Scheme::Epoch && is_everybody(targets, count);
        if by_epoch && !mutants::is(Mutant::EpochNotBumped) && !mutants::is(Mutant::EpochAfterLook) {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }
        if by_epoch && mutants::is(Mutant::FlushNotWaitedFor) {
            return;
        }
        let publish = |target: &Vcpu| {
            if !by_epoch {
                plan.leave_with(target.requests());
                if !mutants::is(Mutant::FlushNotAnnounced) {
                    target.mailbox().leave(Pending::FLUSH);
                }
            }
        };
        let meanwhile = || {
            if let Some(run) = &mut requester
                && !by_epoch
                && targets.contains(run.index)
            {
                plan.flushes().for_each(|flush| flush_own(&mut run.owner.arch, run.tally, flush));
            }
        };
        let began = Machine::now();
        let mut wait = None;
        let relax = |cpu| kick_again(&mut wait, cpu);
        let outcome = shootdown::run(others, Vcpu::presence, publish, Machine::kick_all, meanwhile, relax);
        if by_epoch && mutants::is(Mutant::EpochAfterLook) {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }

        let Some(tally) = tally else { return };
        tally.add(|count| &count.flush_targets, outcome.targets.into());
        tally.add(|count| &count.flush_kicks, outcome.kicked.into());
        trace::flushed(began, outcome.targets, outcome.kicked);
        if let Some(wait) = wait {
            tally.add(|count| &count.flush_wait_ticks, Machine::now().saturating_sub(wait.since));
        }
    }

    /// Flushes everything on all `vcpus`. On return none of them runs its guest with a flushed translation. The
    /// caller's own vCPU flushes before its next entry.
    pub(crate) fn flush_everybody(&self, vcpus: &[Block<Vcpu>]) {
        self.flush(&Plan::whole(), vcpus, Targets::All, None);
    }

    /// On return every write is reported that the guests of `vcpus` have made before the call, where pCPUs list writes.
    pub(crate) fn collect_reports(&self, vcpus: &[Block<Vcpu>]) {
        if !Machine::lists_writes() || mutants::is(Mutant::ReportsNotCollected) {
            return;
        }
        // Each vCPU reports on its way out of the guest. Nothing is left for it: it goes on at once.
        let mut wait = None;
        let all = vcpus.iter().map(|vcpu| &**vcpu);
        let _ = shootdown::run(all, Vcpu::presence, |_| (), Machine::kick_all, || (), |cpu| kick_again(&mut wait, cpu));
    }

    /// The vCPU, which is about to enter, does the flushes that others have requested.
    pub(crate) fn flush_owed(&self, vcpu: &Vcpu, owner: &mut Owner, tally: Tally<'_>) {
        let taken = vcpu.requests().take();
        if mutants::is(Mutant::FlushNotCarriedOut) {
            return;
        }
        if taken.whole() {
            flush_own(&mut owner.arch, tally, Flush::Whole);
        } else {
            taken.for_each(|pages| flush_own(&mut owner.arch, tally, Flush::Pages(pages)));
        }
    }

    /// The stage-2 tree.
    #[inline]
    pub(crate) fn tree(&self) -> &Tree<Stage2Format> {
        &self.tree
    }

    /// Walks stage 2, with the right to change its shape.
    pub(crate) fn walk_mut<'a>(
        &'a self,
        tlbs: &'a AllTlbs<'_>,
        shape: &'a mut Shape,
    ) -> WalkMut<'a, Stage2Format, TablePool, AllTlbs<'a>> {
        self.tree.walk_mut(&self.tables, tlbs, shape)
    }

    /// Pool of its tables.
    #[inline]
    pub(crate) fn tables(&self) -> &TablePool {
        &self.tables
    }

    /// The right to change its shape.
    pub(crate) fn shape(&self) -> MutexGuard<'_, Shape> {
        self.shape.lock()
    }

    /// HPA of the stage-2 tree's root table.
    pub(crate) fn stage2_root(&self) -> Hpa {
        self.tree.root()
    }

    /// Bytes of host memory that the stage-2 tables use now.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.tables.bytes()
    }

    /// Bytes of host memory that are set aside for the stage-2 tables.
    pub(crate) fn reserved_table_bytes(&self) -> u64 {
        self.tables.reserved()
    }
}

/// The TLBs of all pCPUs that may have run a VM, and those of IOMMUs for the devices that it owns.
pub(crate) struct AllTlbs<'a> {
    memory: &'a Memory,
    vcpus: &'a [Block<Vcpu>],
    flushes: Cell<u64>,
    /// Entries that were read since interrupts were let in. `None`: the caller never lets them in.
    worked: Cell<Option<usize>>,
}

impl<'a> AllTlbs<'a> {
    /// Those of `vm`.
    pub(crate) fn of(vm: &'a Vm) -> Self {
        Self::new(&vm.memory, vm.vcpus())
    }

    /// Those of the VM with this memory and these vCPUs.
    pub(crate) fn new(memory: &'a Memory, vcpus: &'a [Block<Vcpu>]) -> Self {
        Self { memory, vcpus, flushes: Cell::new(0), worked: Cell::new(None) }
    }

    /// The same for housekeeping, which lets interrupts in now and then.
    pub(crate) fn of_kept(vm: &'a Vm) -> Self {
        Self { worked: Cell::new(Some(0)), ..Self::of(vm) }
    }

    /// How often all of them were flushed.
    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.get()
    }
}

impl Tlb for AllTlbs<'_> {
    fn publish(&self) {
        Machine::publish();
    }

    fn flush(&self, stale: Stale) {
        if mutants::is(Mutant::Stage2NotFlushed) {
            return;
        }
        self.flushes.set(self.flushes.get() + 1);
        self.worked(ENTRIES_AT_ONCE);
        Machine::flush(self.memory, self.memory.tags.own(), self.vcpus, stale);
        self.worked(ENTRIES_AT_ONCE);
        if let Some(devices) = self.memory.devices()
            && !mutants::is(Mutant::DevicesNotFlushed)
        {
            devices.flush(stale);
        }
    }

    fn relax(&self) {
        relax();
    }

    fn worked(&self, entries: usize) {
        let Some(worked) = self.worked.get() else { return };
        let worked = worked + entries;
        self.worked.set(Some(worked % ENTRIES_AT_ONCE));
        if worked >= ENTRIES_AT_ONCE {
            preemption_point();
        }
    }
}

/// Entries of tables that housekeeping reads before it lets interrupts in.
const ENTRIES_AT_ONCE: usize = 256;

/// The TLBs of a VM that has no vCPUs yet.
pub(crate) struct NoTlb;

impl Tlb for NoTlb {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {}
    fn relax(&self) {}
}

/// The sender waits for a kicked vCPU on `cpu`: kicks it again, less and less often.
fn kick_again(wait: &mut Option<Wait>, cpu: u32) {
    let now = Machine::now();
    let patience = Machine::nanos_to_ticks(PATIENCE_NANOS);
    let wait = wait.get_or_insert(Wait { since: now, kick_at: now + patience, patience });
    if now > wait.kick_at {
        wait.patience *= 2;
        wait.kick_at = now + wait.patience;
        Machine::kick(CpuId(cpu));
    }
    relax();
}

/// Whether `set` contains all of `count` vCPUs.
fn is_everybody(targets: Targets<'_>, count: u32) -> bool {
    targets.banks(count).map(|(_, members)| members.count_ones()).sum::<u32>() == count
}

/// The running vCPU flushes its own entries: pages at once, everything at the next entry.
fn flush_own(arch: &mut ArchVcpu, tally: Tally<'_>, flush: Flush) {
    match flush {
        Flush::Whole => {
            arch.flush_whole();
            tally.add(|count| &count.flush_whole, 1);
        }
        Flush::Pages(pages) => tally.add(|count| &count.flush_pages, arch.flush_pages(pages)),
    }
}

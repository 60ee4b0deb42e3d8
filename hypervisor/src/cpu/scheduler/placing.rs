//! Where a vCPU waits, and which of those that wait a pCPU takes.
//!
//! A woken vCPU goes to its last pCPU, or to an idle one. A pCPU without work steals some from the busiest queue before
//! it idles. One whose vCPU belongs to a VM that has used much more than one that waits elsewhere pulls from there.
//!
//! With `smt=core` an idle pCPU is *open* to a VM only if its core runs nothing, or that VM. What changes a core, a VM
//! that comes or goes, is followed by kicks of those whom it opens the core for.

use crossbeam_utils::CachePadded;
use sched::{Claim, CpuId, CpuSet, IdleSet, Member, RunQueue, Share, Taker, Turn, VirtualTime, VmKey};
use vcpu_layout::Proof;

use super::caps::{has_used_up_cap, park};
use super::threads::{by_core, leader, leaders, mates, runners};
use super::{
    HANDOVER_NANOS, PULL_MARGIN, next_tick, others_wait, publish, publish_less, publish_more, publish_occupant,
    queue_of,
};
use crate::arch::{Arch, Machine};
use crate::cpu::{PerCpu, by_id, this};
use crate::mutants::{self, Mutant};
use crate::sync::{MutexGuard, Ordering, per_host};
use crate::trace::longest;
use crate::vm::VcpuRef;

per_host! {
    /// The idle pCPUs. On a cache line of its own, because neighbouring data may be read all the time.
    static IDLE: CachePadded<IdleSet> = CachePadded::new(IdleSet::new());
}

/// The pCPU on which a new vCPU wakes first. Neighbours start on different ones; where they go from there is the
/// scheduler's business.
pub(crate) fn first_home(vm: u32, index: u32, cpus: CpuSet) -> CpuId {
    let homes = || runners().map(|cpu| cpu.id).filter(|cpu| cpus.contains(*cpu));
    let skipped = vm.wrapping_add(index) as usize % homes().count().max(1);
    homes().nth(skipped).unwrap_or(CpuId(0))
}

/// The pCPUs that are open to a VM: on which a vCPU of it may run at once.
#[derive(Clone, Copy)]
pub(super) struct Open {
    cpus: CpuSet,
    vm: VmKey,
}

impl Open {
    /// Those for the VM with this share, whenever they are asked for.
    pub(super) fn to(share: &Share) -> Self {
        Self { cpus: share.cpus(), vm: VmKey::of(share) }
    }

    /// Of cores that run nothing.
    fn free(self) -> CpuSet {
        if by_core() { cores_with(0).and(self.cpus) } else { self.cpus }
    }

    /// Of cores that run this VM.
    fn own(self) -> CpuSet {
        if by_core() { cores_with(self.vm.word()).and(self.cpus) } else { CpuSet::NONE }
    }

    /// An idle one, `preferred` if it is one, and rather of a core that runs nothing.
    fn idle(self, preferred: CpuId) -> Option<CpuId> {
        IDLE.find(preferred, self.free()).or_else(|| IDLE.find(preferred, self.own()))
    }
}

/// The pCPUs of cores with this occupant.
fn cores_with(occupant: u64) -> CpuSet {
    let of = |cpu: &&PerCpu| cpu.scheduler.occupant.load(Ordering::SeqCst) == occupant;
    leaders().filter(of).fold(CpuSet::NONE, |set, cpu| CpuSet(set.0 | mates(cpu.id).0))
}

/// Puts a vCPU that was blocked into a run queue.
pub(crate) fn wake(vcpu: VcpuRef) {
    let home = by_id(vcpu.vcpu().home());
    let (cpus, open) = (vcpu.share().cpus(), Open::to(vcpu.share()));
    // A home that is this very pCPU and runs nothing takes it next; to wake another would only move it.
    let is_idle_home = home.id == this().id && home.scheduler.is_running.get() == 0 && !others_wait(home);
    let picks_next = is_idle_home && !by_core();
    let target = if picks_next { home } else { open.idle(home.id).map_or(home, by_id) };
    let time = vcpu.vcpu().virtual_time();
    let now = Machine::now();
    vcpu.vcpu().set_queued_at(now);

    let mut queue = queue_of(target);
    let claim = queue.push_woken(time, Turn::Fair, vcpu);
    let inside = queue.inside();
    let running = inside.first().and_then(|cpu| queue.running(by_id(cpu).scheduler.times(now)));
    publish_more(target, &queue, claim.times().whole, cpus);
    drop(queue);

    if picks_next {
        return;
    }
    // What its VM used since it was last charged is not counted here. The pCPU that is kicked decides.
    let may_go_first = || running.is_some_and(|running| claim.is_before(&running, 0));
    if !kick_idle(target, open) && may_go_first() {
        // This pCPU, too, may be in the middle of a vCPU: the kick ends that vCPU's next entry at once.
        inside.iter().for_each(Machine::kick);
    }
}

/// The same, called for the vCPU that runs on this pCPU and is about to leave it. The woken one runs here next if no
/// other waits: it needs no interrupt to another pCPU then, and finds the caches that the caller has filled.
///
/// A parent's vCPU and that of its child take turns in this way. The parent's is not asleep when it hands the pCPU
/// over, but about to wait for the child's next exit. If that comes soon, all of this costs two switches. If not, the
/// parent's vCPU goes on, on another pCPU or here ([`is_due`]).
pub(crate) fn wake_next(vcpu: VcpuRef) {
    let cpu = this();
    if cpu.scheduler.is_running.get() == 0 || others_wait(cpu) || !vcpu.share().cpus().contains(cpu.id) {
        return wake(vcpu);
    }
    let (time, now) = (vcpu.vcpu().virtual_time(), Machine::now());
    let mut queue = queue_of(cpu);
    if queue.inside().without(cpu.id) != CpuSet::NONE {
        // It could not run here before the others have left.
        drop(queue);
        return wake(vcpu);
    }
    vcpu.vcpu().set_queued_at(now);
    let cpus = vcpu.share().cpus();
    let claim = queue.push_woken(time, Turn::Next, vcpu);
    publish_more(cpu, &queue, claim.times().whole, cpus);
    drop(queue);
    // Whoever runs here is the caller.
    cpu.scheduler.handed_over_until.set(Proof::by_place(), now + Machine::nanos_to_ticks(HANDOVER_NANOS));
}

/// A vCPU was pushed into the queue of `target`: kicks an idle pCPU of those that are open to it, if there is one,
/// which finds it there.
///
/// Which are open is found out after the push, as a core whose VM leaves is looked after by its threads after that.
pub(super) fn kick_idle(target: &PerCpu, open: Open) -> bool {
    kick_one(target.id, open.free()) || (by_core() && kick_one(target.id, open.own()))
}

/// Kicks an idle pCPU of those that may take some vCPU from the queue of `target`, if their core runs nothing.
pub(super) fn kick_any_idle(target: &PerCpu, takers: CpuSet) -> bool {
    kick_one(target.id, if by_core() { cores_with(0).and(takers) } else { takers })
}

fn kick_one(preferred: CpuId, among: CpuSet) -> bool {
    if mutants::is(Mutant::WakeWithoutKick) {
        return true;
    }
    let idle = IDLE.claim(preferred, among);
    if let Some(idle) = idle {
        Machine::kick(idle);
    }
    idle.is_some()
}

/// Puts a vCPU that ran on `cpu` back, there or where fewer wait.
pub(super) fn put_back(cpu: &'static PerCpu, time: VirtualTime, vcpu: VcpuRef) {
    let (now, cpus, whole) = (Machine::now(), vcpu.share().cpus(), vcpu.share().whole().time());
    let open = Open::to(vcpu.share());
    vcpu.vcpu().set_queued_at(now);
    if cpu.scheduler.handed_over_until.get() > now {
        let mut queue = queue_of(cpu);
        if !queue.is_empty() {
            queue.push(time, Turn::AfterOthers, vcpu);
            return publish_more(cpu, &queue, whole, cpus);
        }
    }
    let waiting = |cpu: &PerCpu| cpu.scheduler.waiting.load(Ordering::Relaxed);
    let shortest = runners().filter(|other| cpus.contains(other.id)).min_by_key(|other| waiting(other)).unwrap_or(cpu);
    let target =
        open.idle(cpu.id).map_or_else(|| if waiting(shortest) + 1 < waiting(cpu) { shortest } else { cpu }, by_id);

    let mut queue = queue_of(target);
    if leader(target).id == leader(cpu).id {
        let turn = if cpu.scheduler.yields.get() == 0 { Turn::Fair } else { Turn::AfterOthers };
        queue.push(time, turn, vcpu);
    } else {
        queue.push_moved(time, vcpu);
    }
    publish_more(target, &queue, whole, cpus);
    // This pCPU takes one from its queue next, unless its core is somebody else's.
    let waits = target.id != cpu.id || queue.len() > 1 || by_core();
    drop(queue);
    if waits {
        kick_idle(target, open);
    }
}

/// The vCPU to run next: the first of this pCPU's queue that it may run, else one from the longest queue.
pub(super) fn pick(cpu: &PerCpu) -> Option<(VirtualTime, VcpuRef)> {
    loop {
        let Picked { next, changes_core } = match pop(cpu, queue_of(cpu)) {
            Picked { next: None, .. } => steal(cpu),
            picked => picked,
        };
        let takers = CpuSet(cpu.scheduler.takers.load(Ordering::Relaxed));
        let (time, vcpu) = next?;
        if changes_core {
            kick_mates(cpu);
        }
        // The pCPU that was kicked for one of these may have found another vCPU, which not every pCPU may take.
        if takers.0 != 0 && takers != CpuSet::ALL && cpu.scheduler.handed_over_until.get() == 0 {
            kick_any_idle(cpu, takers);
        }
        if !has_used_up_cap(&vcpu) {
            return Some((time, vcpu));
        }
        park(cpu, time, vcpu);
    }
}

/// What a pCPU has found to run.
struct Picked {
    next: Option<(VirtualTime, VcpuRef)>,
    /// With `smt=core`: the core ran nothing, and now it runs a VM.
    changes_core: bool,
}

/// Takes the first vCPU that this pCPU may run from its queue.
fn pop(cpu: &PerCpu, mut queue: MutexGuard<'_, RunQueue<VcpuRef>>) -> Picked {
    let was_free = queue.inside().is_empty();
    let next = queue.pop(cpu.id);
    publish_less(cpu, &queue);
    publish_occupant(cpu, &queue);
    Picked { changes_core: was_free && next.is_some() && by_core(), next }
}

/// Wakes idle threads of this core which can run something now.
fn kick_mates(cpu: &PerCpu) {
    if mutants::is(Mutant::CoreNotPassedOn) {
        return;
    }
    for mate in mates(cpu.id).without(cpu.id).iter() {
        if can_run(by_id(mate)) {
            kick_one(mate, CpuSet::NONE.with(mate));
        }
    }
}

/// Takes a vCPU from the longest queue, for this pCPU, whose own queue has none for it.
///
/// It goes through the pCPU's queue, where others could take it. So it leaves that in the same breath: otherwise two
/// pCPUs that look for work may take one vCPU from each other for ever, and none runs it.
fn steal(cpu: &PerCpu) -> Picked {
    let nothing = Picked { next: None, changes_core: false };
    let waiting = |other: &PerCpu| other.scheduler.waiting.load(Ordering::SeqCst);
    let Some(taker) = taker(cpu) else { return nothing };
    let with_some = || others_with_some_for(cpu).fold(CpuSet::NONE, |set, other| set.with(other.id));
    let mut others = with_some();
    while let Some(busiest) = others.iter().map(by_id).max_by_key(|other| waiting(other)) {
        let mut queue = queue_of(busiest);
        let taken = queue.take_last(taker);
        publish(busiest, &queue);
        drop(queue);
        if let Some((time, vcpu)) = taken {
            let mut queue = queue_of(cpu);
            queue.push_moved(time, vcpu);
            publish(cpu, &queue);
            if mutants::is(Mutant::StolenLeft) {
                drop(queue);
                let picked = pop(cpu, queue_of(cpu));
                if picked.next.is_some() {
                    return picked;
                }
                others = with_some();
                continue;
            }
            // With `smt=core` another VM may have been faster: then it waits here.
            return pop(cpu, queue);
        }
        if !by_core() {
            break;
        }
        // Only vCPUs of one VM may come, and these are of others.
        others = others.without(busiest.id);
    }
    nothing
}

/// What this pCPU may bring from another queue, and run at once.
fn taker(cpu: &PerCpu) -> Option<Taker> {
    if by_core() { queue_of(cpu).taker(cpu.id) } else { Some(Taker::any(cpu.id)) }
}

/// The pCPUs with another queue, in which a vCPU seems to wait that may run here.
fn others_with_some_for(cpu: &PerCpu) -> impl Iterator<Item = &'static PerCpu> {
    let (id, own) = (cpu.id, leader(cpu).id);
    leaders().filter(move |other| other.id != own && other.scheduler.has_for(id))
}

/// Whether a vCPU waits that this idle pCPU can run now.
fn can_run(cpu: &PerCpu) -> bool {
    if !by_core() {
        return runners().any(|other| other.scheduler.has_for(cpu.id));
    }
    let queue = queue_of(cpu);
    if queue.has_for(cpu.id) {
        return true;
    }
    let taker = queue.taker(cpu.id);
    drop(queue);
    let has = |taker| others_with_some_for(cpu).any(|other| queue_of(other).first_for(taker).is_some());
    taker.is_some_and(has)
}

/// Moves a vCPU to the queue of this pCPU if it waits elsewhere and its VM has used much less than the one that runs
/// here.
pub(super) fn pull(cpu: &PerCpu, running: VirtualTime) {
    let first = |other: &PerCpu| other.scheduler.first.load(Ordering::Relaxed);
    let Some(other) = others_with_some_for(cpu).min_by_key(|other| first(other)) else { return };
    if first(other).saturating_add(PULL_MARGIN) >= running {
        return;
    }
    let taker = Taker::any(cpu.id);
    let mut queue = queue_of(other);
    let is_behind = |claim: &Claim| claim.times().whole.saturating_add(PULL_MARGIN) < running;
    let taken =
        if queue.first_for(taker).is_some_and(|claim| is_behind(&claim)) { queue.take_first(taker) } else { None };
    publish(other, &queue);
    drop(queue);
    if let Some((time, vcpu)) = taken {
        let mut queue = queue_of(cpu);
        queue.push_moved(time, vcpu);
        publish(cpu, &queue);
    }
}

/// Sleeps until an interrupt, unless there is work after all.
pub(super) fn idle(cpu: &PerCpu) {
    cpu.scheduler.switched_since.set(Proof::by_place(), 0);
    IDLE.announce(cpu.id);
    if !can_run(cpu) || mutants::is(Mutant::IdleWithoutLook) {
        if by_core() {
            pass_on(cpu);
        }
        Machine::arm_timer(cpu.timers.next().min(cpu.scheduler.release_at.get()).min(next_tick(cpu)));
        longest::wait();
    }
    IDLE.withdraw(cpu.id);
}

/// This pCPU can run nothing of what waits. Its mates may, now that it has left the core; and where a VM waits that may
/// not come here, a pCPU of a core that runs nothing may take it: this one may have been kicked in its place.
fn pass_on(cpu: &PerCpu) {
    kick_mates(cpu);
    for other in leaders().filter(|other| others_wait(other)) {
        let takers = queue_of(other).outlook().1;
        kick_any_idle(other, takers.without(cpu.id));
    }
}

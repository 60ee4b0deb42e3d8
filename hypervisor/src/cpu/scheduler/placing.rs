//! Where a vCPU waits, and which of those that wait a pCPU takes.
//!
//! A woken vCPU goes to its last pCPU, or to an idle one. A pCPU without work steals some from the busiest queue before
//! it idles. One whose vCPU belongs to a VM that has used much more than one that waits elsewhere pulls from there.

use crossbeam_utils::CachePadded;
use sched::{Claim, CpuId, CpuSet, IdleSet, Member, Turn, VirtualTime};
use vcpu_layout::Proof;

use super::caps::{has_used_up_cap, park};
use super::threads::runners;
use super::{HANDOVER_NANOS, PULL_MARGIN, next_tick, others_wait};
use crate::arch::{Arch, Machine};
use crate::cpu::{PerCpu, by_id, this};
use crate::mutants::{self, Mutant};
use crate::sync::{Ordering, per_host};
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

/// Puts a vCPU that was blocked into a run queue.
pub(crate) fn wake(vcpu: VcpuRef) {
    let home = by_id(vcpu.vcpu().home());
    let cpus = vcpu.share().cpus();
    // A home that is this very pCPU and runs nothing takes it next; to wake another would only move it.
    let picks_next = home.id == this().id && home.scheduler.is_running.get() == 0 && !others_wait(home);
    let target = if picks_next { home } else { idle_one(home, cpus).unwrap_or(home) };
    let time = vcpu.vcpu().virtual_time();
    let now = Machine::now();
    vcpu.vcpu().set_queued_at(now);

    let mut queue = target.scheduler.queue.lock();
    let claim = queue.push_woken(time, Turn::Fair, vcpu);
    let running = queue.running(target.scheduler.times(now));
    target.scheduler.publish_more(&queue, claim.times().whole, cpus);
    drop(queue);

    if picks_next {
        return;
    }
    // What its VM used since it was last charged is not counted here. The pCPU that is kicked decides.
    let may_go_first = || running.is_some_and(|running| claim.is_before(&running, 0));
    if !kick_idle(target, cpus) && may_go_first() {
        // This pCPU, too, may be in the middle of a vCPU: the kick ends that vCPU's next entry at once.
        Machine::kick(target.id);
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
    vcpu.vcpu().set_queued_at(now);
    let mut queue = cpu.scheduler.queue.lock();
    let cpus = vcpu.share().cpus();
    let claim = queue.push_woken(time, Turn::Next, vcpu);
    cpu.scheduler.publish_more(&queue, claim.times().whole, cpus);
    drop(queue);
    // Whoever runs here is the caller.
    cpu.scheduler.handed_over_until.set(Proof::by_place(), now + Machine::nanos_to_ticks(HANDOVER_NANOS));
}

/// A vCPU that may run on `cpus` was pushed into the queue of `target`: kicks an idle one of them, if there is one,
/// which finds it there.
pub(super) fn kick_idle(target: &PerCpu, cpus: CpuSet) -> bool {
    if mutants::is(Mutant::WakeWithoutKick) {
        return true;
    }
    let idle = IDLE.claim(target.id, cpus);
    if let Some(idle) = idle {
        Machine::kick(idle);
    }
    idle.is_some()
}

/// Puts a vCPU that ran on `cpu` back, there or where fewer wait.
pub(super) fn put_back(cpu: &'static PerCpu, time: VirtualTime, vcpu: VcpuRef) {
    let (now, cpus, whole) = (Machine::now(), vcpu.share().cpus(), vcpu.share().whole().time());
    vcpu.vcpu().set_queued_at(now);
    if cpu.scheduler.handed_over_until.get() > now {
        let mut queue = cpu.scheduler.queue.lock();
        if !queue.is_empty() {
            queue.push(time, Turn::AfterOthers, vcpu);
            return cpu.scheduler.publish_more(&queue, whole, cpus);
        }
    }
    let waiting = |cpu: &PerCpu| cpu.scheduler.waiting.load(Ordering::Relaxed);
    let shortest = runners().filter(|other| cpus.contains(other.id)).min_by_key(|other| waiting(other)).unwrap_or(cpu);
    let target = idle_one(cpu, cpus).unwrap_or(if waiting(shortest) + 1 < waiting(cpu) { shortest } else { cpu });

    let mut queue = target.scheduler.queue.lock();
    if target.id == cpu.id {
        let turn = if cpu.scheduler.yields.get() == 0 { Turn::Fair } else { Turn::AfterOthers };
        queue.push(time, turn, vcpu);
    } else {
        queue.push_moved(time, vcpu);
    }
    target.scheduler.publish_more(&queue, whole, cpus);
    // This pCPU takes one from its queue next.
    let waits = target.id != cpu.id || queue.len() > 1;
    drop(queue);
    if waits {
        kick_idle(target, cpus);
    }
}

/// An idle pCPU of those in `cpus`, `preferred` if it is one.
fn idle_one(preferred: &'static PerCpu, cpus: CpuSet) -> Option<&'static PerCpu> {
    IDLE.find(preferred.id, cpus).map(by_id)
}

/// The vCPU to run next: the first of this pCPU's queue, else one from the longest queue.
pub(super) fn pick(cpu: &PerCpu) -> Option<(VirtualTime, VcpuRef)> {
    loop {
        let mut queue = cpu.scheduler.queue.lock();
        let next = queue.pop();
        cpu.scheduler.publish_less(&queue);
        drop(queue);
        let takers = CpuSet(cpu.scheduler.takers.load(Ordering::Relaxed));
        let (time, vcpu) = match next {
            Some(next) => next,
            None if steal(cpu) => continue,
            None => return None,
        };
        // The pCPU that was kicked for one of these may have found another vCPU, which not every pCPU may take.
        if takers.0 != 0 && takers != CpuSet::ALL && cpu.scheduler.handed_over_until.get() == 0 {
            kick_idle(cpu, takers);
        }
        if !has_used_up_cap(&vcpu) {
            return Some((time, vcpu));
        }
        park(cpu, time, vcpu);
    }
}

/// Moves a vCPU from the longest queue to the empty one of this pCPU. Returns whether there was one.
fn steal(cpu: &PerCpu) -> bool {
    let waiting = |other: &PerCpu| other.scheduler.waiting.load(Ordering::SeqCst);
    let Some(busiest) = runners().filter(|other| other.scheduler.has_for(cpu.id)).max_by_key(|other| waiting(other))
    else {
        return false;
    };
    let mut queue = busiest.scheduler.queue.lock();
    let taken = queue.take_last(cpu.id);
    busiest.scheduler.publish(&queue);
    drop(queue);
    let Some((time, vcpu)) = taken else { return false };
    let mut queue = cpu.scheduler.queue.lock();
    queue.push_moved(time, vcpu);
    cpu.scheduler.publish(&queue);
    true
}

/// Moves a vCPU to the queue of this pCPU if it waits elsewhere and its VM has used much less than the one that runs
/// here.
pub(super) fn pull(cpu: &PerCpu, running: VirtualTime) {
    let first = |other: &PerCpu| other.scheduler.first.load(Ordering::Relaxed);
    let others = runners().filter(|other| other.id != cpu.id && other.scheduler.has_for(cpu.id));
    let Some(other) = others.min_by_key(|other| first(other)) else { return };
    if first(other).saturating_add(PULL_MARGIN) >= running {
        return;
    }
    let mut queue = other.scheduler.queue.lock();
    let is_behind = |claim: &Claim| claim.times().whole.saturating_add(PULL_MARGIN) < running;
    let taken =
        if queue.first_for(cpu.id).is_some_and(|claim| is_behind(&claim)) { queue.take_first(cpu.id) } else { None };
    other.scheduler.publish(&queue);
    drop(queue);
    if let Some((time, vcpu)) = taken {
        let mut queue = cpu.scheduler.queue.lock();
        queue.push_moved(time, vcpu);
        cpu.scheduler.publish(&queue);
    }
}

/// Sleeps until an interrupt, unless there is work after all.
pub(super) fn idle(cpu: &PerCpu) {
    cpu.scheduler.switched_since.set(Proof::by_place(), 0);
    IDLE.announce(cpu.id);
    let has_work = runners().any(|other| other.scheduler.has_for(cpu.id));
    if !has_work || mutants::is(Mutant::IdleWithoutLook) {
        Machine::arm_timer(cpu.timers.next().min(cpu.scheduler.release_at.get()).min(next_tick(cpu)));
        longest::wait();
    }
    IDLE.withdraw(cpu.id);
}

//! A vCPU whose VM has used up its cap is *parked* until the next period, outside of the queues: on the list of the
//! pCPU that came across it.

use sched::{Member, Pending, Turn, VirtualTime};
use vcpu_layout::Proof;

use super::placing::{Open, kick_idle};
use super::threads::by_core;
use super::{now, publish, queue_of, stop_running, to_host, to_virtual};
use crate::cpu::PerCpu;
use crate::cpu::step::Step;
use crate::vm::VcpuRef;

/// Whether a vCPU has to wait for its VM's next period. One that is to leave its guest for good does not.
pub(super) fn has_used_up_cap(vcpu: &VcpuRef) -> bool {
    vcpu.share().left(now()) == 0 && !vcpu.vcpu().mailbox().has(Pending::STOP)
}

/// Keeps a vCPU out of the queues until its VM's next period.
pub(super) fn park(cpu: &PerCpu, time: VirtualTime, vcpu: VcpuRef) {
    let release_at = vcpu.share().next_period(now());
    stop_running(cpu, vcpu.share());
    cpu.scheduler.parked.lock().push_back((release_at, time, vcpu));
    // The next whole host tick: at the one before, the period has not begun.
    let release_at = to_host(release_at) + 1;
    let first = cpu.scheduler.release_at.get().min(release_at);
    cpu.scheduler.release_at.set(Proof::by_place(), first);
}

/// Puts parked vCPUs whose VMs may run again into the queue of this pCPU.
#[inline]
pub(in crate::cpu) fn release(cpu: &PerCpu, now: u64) {
    if cpu.scheduler.release_at.get() <= now {
        release_parked(cpu, now);
    }
}

#[cold]
fn release_parked(cpu: &PerCpu, now: u64) {
    let mut first = u64::MAX;
    let count = cpu.scheduler.parked.lock().len();
    let step = Step::begin();
    for number in 0..count {
        if number != 0 && step.is_over() {
            // The next housekeeping goes on.
            first = now;
            break;
        }
        let Some((release_at, time, vcpu)) = cpu.scheduler.parked.lock().pop_front() else { break };
        if has_used_up_cap(&vcpu) {
            let later = release_at.max(vcpu.share().next_period(to_virtual(now)));
            first = first.min(to_host(later) + 1);
            cpu.scheduler.parked.lock().push_back((later, time, vcpu));
            continue;
        }
        let open = Open::to(vcpu.share());
        let mut queue = queue_of(cpu);
        queue.push_woken(time, Turn::Fair, vcpu);
        publish(cpu, &queue);
        let waits = queue.len() > 1 || cpu.scheduler.is_running.get() != 0 || by_core();
        drop(queue);
        if waits {
            kick_idle(cpu, open);
        }
    }
    cpu.scheduler.release_at.set(Proof::by_place(), first);
}

//! Events that other pCPUs leave for a vCPU: interrupts, which are all alike, and a start.

use addr::Gpa;
use hyperv_defs::MessageType;
use sched::Pending;
use stage2::Access;

use super::platform::fault_of_child;
use super::vcpu::ArchVcpu;
use crate::device::interrupt::{Message, Target};
use crate::sync::{AtomicBool, Ordering};
use crate::vcpu::run::Running;
use crate::vcpu::{unannounced, unsent};
use crate::vm::Vm;
use crate::vm::child::{intercept, wait_between_instructions};
use crate::vm::fault::Resolved;

/// Events for a vCPU.
pub(crate) struct Posted {
    has_interrupt: AtomicBool,
    has_start: AtomicBool,
}

impl Posted {
    pub(crate) fn new() -> Self {
        Self { has_interrupt: AtomicBool::new(false), has_start: AtomicBool::new(false) }
    }

    /// Leaves an interrupt. The caller posts [`Pending::INTERRUPT`] next.
    pub(crate) fn interrupt(&self) {
        self.has_interrupt.store(true, Ordering::SeqCst);
    }

    /// Leaves a start. The caller posts [`Pending::STARTUP`] next.
    pub(crate) fn start(&self) {
        self.has_start.store(true, Ordering::SeqCst);
    }
}

/// Sends an interrupt to vCPUs by index.
pub(crate) fn send_fixed(vm: &Vm, _: u8, ids: impl IntoIterator<Item = u32>) {
    for id in ids {
        let Some(vcpu) = vm.vcpus().get(id as usize) else { continue };
        vcpu.posted().interrupt();
        vm.post(id, Pending::INTERRUPT);
    }
}

/// The vCPU that this pCPU runs sends an interrupt to vCPUs by index.
pub(crate) fn send_from(run: &Running<'_>, _: u8, ids: impl IntoIterator<Item = u32>) {
    unsent::send(run.vm, run.vcpu, 0, ids);
    unsent::has_sent(run.vcpu);
}

/// Sends an interrupt to one.
pub(crate) fn post_interrupt(vm: &Vm, id: u32, _: u64) {
    send_fixed(vm, 0, [id]);
}

/// Sends an interrupt for a vCPU that leaves this pCPU to the target.
pub(super) fn hand_over(vm: &Vm, target: u32) {
    if let Some(vcpu) = vm.vcpus().get(target as usize) {
        vcpu.posted().interrupt();
        vm.post_from_leaving(target, Pending::INTERRUPT);
    }
}

/// Sends `message`: any is an interrupt.
pub(crate) fn send(vm: &Vm, sender: Option<u32>, message: &Message) {
    let everybody = || (0..).take(vm.vcpus().len());
    match message.target {
        Target::SelfOnly => send_fixed(vm, message.vector, sender),
        Target::Physical(id) => send_fixed(vm, message.vector, [id]),
        Target::AllButSelf => send_fixed(vm, message.vector, everybody().filter(|&id| Some(id) != sender)),
        Target::AllIncludingSelf | Target::Logical(_) | Target::Cluster { .. } => {
            send_fixed(vm, message.vector, everybody())
        }
    }
}

/// The same for a call of a parent, which pauses now and then.
pub(crate) fn send_to_child(vm: &Vm, message: &Message, pause: impl Fn()) {
    send(vm, None, message);
    pause();
}

/// There is nothing to prepare.
pub(crate) fn prepare(_: &mut Running<'_>) {}

/// A device sends an interrupt to vCPUs by index.
pub(super) fn send_of_device(vm: &Vm, ids: impl IntoIterator<Item = u32>) {
    unannounced::send(vm, &vm.platform().unannounced, ids, |id| {
        vm.vcpus().get(id as usize)?.posted().interrupt();
        Some(Pending::INTERRUPT)
    });
}

/// One more step of that.
pub(crate) fn tell_more(vm: &Vm) -> bool {
    unannounced::announce_more(vm, &vm.platform().unannounced)
}

/// The owner takes over the events that `work` announces.
pub(crate) fn take_posted(vcpu: &mut ArchVcpu, posted: &Posted, work: Pending) {
    if work.contains(Pending::STARTUP) && posted.has_start.swap(false, Ordering::SeqCst) {
        vcpu.start();
    }
    if work.contains(Pending::INTERRUPT) && posted.has_interrupt.swap(false, Ordering::SeqCst) {
        vcpu.interrupt();
    }
}

/// Lets the vCPU's own timers expire that are due by `now`.
#[inline]
pub(crate) fn expire_timers(run: &mut Running<'_>, now: u64) {
    run.owner.arch.expire_timer(now);
}

/// Writes what the hypervisor owes the guest.
pub(crate) fn deliver_messages(run: &mut Running<'_>) {
    let Some((gpa, value)) = run.owner.arch.owed else { return };
    while !run.vm.memory.write(Gpa(gpa), &value.to_le_bytes()) {
        let kind = match fault_of_child(run, Gpa(gpa), Access::READ_WRITE) {
            Resolved::Again(_) => continue,
            Resolved::NoAccess => MessageType::GpaIntercept,
            _ => MessageType::UnmappedGpa,
        };
        return wait_between_instructions(run, |run| intercept(run, kind, &gpa.to_le_bytes()));
    }
    run.owner.arch.owed = None;
}

/// The same, if the guest had to wait for it.
pub(crate) fn held_no_more(run: &mut Running<'_>) {
    deliver_messages(run);
}

/// A child has a message for the parent's vCPU: an interrupt says so.
pub(crate) fn post_message(parent: &Vm, vcpu: u32, _: u32) {
    send_fixed(parent, 0, [vcpu]);
}

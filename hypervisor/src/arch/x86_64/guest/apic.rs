//! The guest's local APIC and its effects: accesses of the guest, and the messages that they send.

use super::{delivery, platform};
use crate::arch::x86_64::host::apic as host_apic;
use crate::device::interrupt::{Kind, Message, Target};
use crate::device::local_apic::{Effect, LocalApic};
use crate::vcpu::run::Running;
use crate::vcpu::{Vcpu, unsent};
use crate::vm::Vm;

/// The source of an access to a local APIC or another device.
#[derive(Clone, Copy)]
pub(in crate::arch::x86_64) struct Origin<'a> {
    pub(super) vm: &'a Vm,
    vcpu: &'a Vcpu,
    pub(super) index: u32,
}

impl<'a> Origin<'a> {
    #[inline]
    pub(in crate::arch::x86_64) fn of(run: &Running<'a>) -> Self {
        Self { vm: run.vm, vcpu: run.vcpu, index: run.index }
    }
}

/// Carries out the effect of an access to the local APIC.
#[inline(always)]
pub(in crate::arch::x86_64) fn apply(origin: Origin<'_>, apic: &mut LocalApic, effect: Effect) {
    let Origin { vm, vcpu, index } = origin;
    match effect {
        Effect::None => {}
        Effect::Send(message) => {
            if message.target == Target::SelfOnly && message.kind == Kind::Fixed {
                apic.accept(message.vector, message.level);
            } else if message.target == Target::SelfOnly {
                delivery::send(vm, Some(index), &Message { target: Target::Physical(index), ..message });
            } else {
                delivery::send(vm, Some(index), &message);
                unsent::has_sent(vcpu);
            }
        }
        Effect::TimerChanged => {
            if let Some(deadline) = apic.deadline() {
                host_apic::arm_timer(deadline);
            }
        }
        Effect::EndOfInterrupt { vector } => platform::end_of_interrupt(vm, vector),
        Effect::LogicalIdChanged | Effect::ModeChanged => {
            vcpu.posted().publish_logical_id(apic.logical_id());
        }
    }
}

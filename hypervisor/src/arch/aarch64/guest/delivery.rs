//! Start requests and interrupts that other pCPUs leave for a vCPU.

use core::sync::atomic::{AtomicU8, Ordering};

use sched::Pending;
use spin::Mutex;

use super::platform;
use crate::arch::aarch64::el2::vcpu::ArchVcpu;
use crate::device::gic::{self, Sgi};
use crate::device::psci::PowerState;
use crate::vcpu::run::Running;
use crate::vcpu::unsent;
use crate::vm::Vm;

/// Requests that others leave for a vCPU.
#[derive(Debug)]
pub(crate) struct Posted {
    /// [`ON`], [`OFF`] or, between the two, [`ON_PENDING`].
    power: AtomicU8,
    /// Its start request.
    start: Mutex<Option<Start>>,
    /// Interrupts for it.
    pub(super) interrupts: gic::Posted,
}

/// Start address of a vCPU, and its X0.
#[derive(Clone, Copy, Debug)]
pub(in crate::arch::aarch64) struct Start {
    pub(in crate::arch::aarch64) entry: u64,
    pub(in crate::arch::aarch64) context: u64,
}

const ON: u8 = 0;
const OFF: u8 = 1;
const ON_PENDING: u8 = 2;

impl Posted {
    pub(crate) fn new() -> Self {
        Self { power: AtomicU8::new(OFF), start: Mutex::new(None), interrupts: gic::Posted::new() }
    }

    /// Whether the vCPU is on.
    pub(super) fn power(&self) -> PowerState {
        match self.power.load(Ordering::Acquire) {
            ON => PowerState::On,
            OFF => PowerState::Off,
            _ => PowerState::OnPending,
        }
    }

    /// Requests a start; returns whether the vCPU was off and will start. The caller then posts [`Pending::STARTUP`].
    pub(super) fn request_start(&self, start: Start) -> Result<(), PowerState> {
        match self.power.compare_exchange(OFF, ON_PENDING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                *self.start.lock() = Some(start);
                Ok(())
            }
            Err(_) => Err(self.power()),
        }
    }

    /// Records that the owner is on, or off.
    pub(super) fn set_power(&self, on: bool) {
        self.power.store(if on { ON } else { OFF }, Ordering::Release);
    }
}

/// One more step of what the distributor has to tell.
pub(crate) fn tell_more(vm: &Vm) -> bool {
    platform::deliver_some_news(vm)
}

/// The owner takes what `work` announced.
pub(crate) fn take_posted(vcpu: &mut ArchVcpu, posted: &Posted, work: Pending) {
    if work.contains(Pending::STARTUP) {
        if let Some(start) = posted.start.lock().take() {
            vcpu.start(start);
        }
        posted.set_power(vcpu.is_on());
    }
    if work.contains(Pending::INTERRUPT) {
        vcpu.gic.accept(posted.interrupts.take());
    }
}

/// Called before an entry, and before the check whether something ends a wait: pending interrupts go into list
/// registers.
#[inline]
pub(crate) fn prepare(run: &mut Running<'_>) {
    if run.owner.arch.has_interrupt_news() {
        prepare_lists(run);
    }
}

fn prepare_lists(run: &mut Running<'_>) {
    let arch = &mut run.owner.arch;
    let is_gone = arch.take_timer();
    if arch.gic.needs_distributor() {
        arch.gic.prepare(Some(&mut run.vm.platform().distributor.lock()));
        platform::deliver_news_of(run);
    } else {
        arch.gic.prepare(None);
    }
    if is_gone {
        run.owner.arch.check_timer_link();
    }
}

/// The vCPU writes ICC_SGI1R_EL1.
pub(super) fn send_sgi(run: &mut Running<'_>, value: u64) {
    let sgi = Sgi::decode(value);
    let gic = &mut run.owner.arch.gic;
    let others = sgi.targets(run.index, run.vm.config.vcpus).filter(|&target| {
        let is_own = target == run.index;
        if is_own {
            gic.raise(sgi.intid);
        }
        !is_own
    });
    unsent::send(run.vm, run.vcpu, sgi.intid.into(), others);
    unsent::has_sent(run.vcpu);
}

/// Sends the SGI with this number.
pub(crate) fn post_interrupt(vm: &Vm, id: u32, intid: u64) {
    if let (Some(vcpu), Ok(intid)) = (vm.vcpus().get(id as usize), intid.try_into()) {
        vcpu.posted().interrupts.raise(intid);
        vm.post(id, Pending::INTERRUPT);
    }
}

/// Lets the vCPU's own timers expire that are due by `now`.
#[inline]
pub(crate) fn expire_timers(run: &mut Running<'_>, now: u64) {
    run.owner.arch.expire_timer(now);
}

/// No VM has children on this architecture.
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) fn post_message(_: &Vm, _: u32, _: u32) {}

/// There is none to deliver.
pub(crate) fn deliver_messages(_: &mut Running<'_>) {}

/// Nothing has waited for that.
pub(crate) fn held_no_more(_: &mut Running<'_>) {}

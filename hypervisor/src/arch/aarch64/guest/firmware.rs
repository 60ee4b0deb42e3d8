//! The guest's calls to its firmware, by HVC or SMC: executes what `device::psci` has decoded.

use abi::control::StopReason;
use addr::Gpa;
use sched::Pending;

use super::delivery::Start;
use super::platform;
use crate::arch::aarch64::speculation;
use crate::device::psci::{Answer, Call, PowerState, decode};
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};

/// Carries out the call.
pub(in crate::arch::aarch64) fn call(run: &mut Running<'_>) -> Next {
    let arch = &mut run.owner.arch;
    let [low, high, ..] = arch.registers.esr.to_le_bytes();
    let [x0, x1, x2, x3, ..] = arch.registers.x;
    let answer = match decode(
        u16::from_le_bytes([low, high]),
        &[x0, x1, x2, x3],
        run.vm.config.vcpus,
        speculation::for_guests(),
    ) {
        Call::Answer(answer) => answer,
        Call::CpuOn { vcpu, entry, context } => cpu_on(run, vcpu, Start { entry, context }),
        Call::CpuOff => return cpu_off(run),
        Call::AffinityInfo { vcpu } => match run.vm.vcpus().get(vcpu as usize) {
            Some(vcpu) => Answer::affinity_info(vcpu.posted().power()),
            None => Answer::INVALID_PARAMETERS,
        },
        Call::Suspend => {
            arch.registers.x[0] = Answer::SUCCESS.0;
            arch.activity = Activity::Halted;
            return Next::Idle;
        }
        Call::SystemOff => {
            run.vm.stop_by(
                run.index,
                StopReason::PowerOff,
                format_args!("vCPU {} turned the machine off, by PSCI", run.index),
            );
            return Next::Resume;
        }
        Call::SystemReset => {
            run.vm.stop_by(run.index, StopReason::Reset, format_args!("vCPU {} reset the machine, by PSCI", run.index));
            return Next::Resume;
        }
        Call::Mitigate(function) => {
            speculation::mitigate(function);
            Answer::SUCCESS
        }
        Call::Unknown => Answer::NOT_SUPPORTED,
    };
    run.owner.arch.registers.x[0] = answer.0;
    Next::Resume
}

// Not inlined, so that other calls save no registers for it.
#[cold]
#[inline(never)]
fn cpu_off(run: &mut Running<'_>) -> Next {
    let arch = &mut run.owner.arch;
    arch.activity = Activity::Off;
    arch.gic.power_off(&mut run.vm.platform().distributor.lock());
    platform::deliver_news_of(run);
    run.vcpu.posted().set_power(false);
    Next::Idle
}

fn cpu_on(run: &Running<'_>, index: u32, start: Start) -> Answer {
    let Some(vcpu) = run.vm.vcpus().get(index as usize) else { return Answer::INVALID_PARAMETERS };
    if !run.vm.memory.has(Gpa(start.entry)) {
        return Answer::INVALID_ADDRESS;
    }
    match vcpu.posted().request_start(start) {
        Ok(()) => {
            run.vm.post(index, Pending::STARTUP);
            Answer::SUCCESS
        }
        Err(PowerState::OnPending) => Answer::ON_PENDING,
        Err(_) => Answer::ALREADY_ON,
    }
}

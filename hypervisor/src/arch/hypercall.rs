//! Executes hypercalls of the Hyper-V interface.
//!
//! The architecture passes the control word and the place of the input ([`Input`]), and writes the answer into the
//! guest's registers. Input in memory is copied first, because another vCPU may change it at any time.

use addr::Gpa;
use hyperv_defs::GvaRanges;
use hyperv_defs::call::FAST_XMM_BYTES;
use hyperv_defs::{Answer, Call, Checked, Control, FlushCall, IpiCall, Offered, Refusal, Scope, Status, check};
use shootdown::{CutOff, Pages, Plan};

use super::machine::{cpuid, delivery};
use super::{Arch, Machine};
use crate::vcpu::run::Running;
use crate::vm::Vm;

/// Where the input of a call is.
pub(crate) enum Input {
    /// In registers, as many bytes as there are of them.
    Registers([u8; FAST_XMM_BYTES]),
    /// In guest memory.
    Memory(Gpa),
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With this result for the guest.
    With(Answer),
    /// With this result, and the guest only spins.
    Spinning(Answer),
    /// With #UD.
    InvalidOpcode,
    /// Not finished: the guest calls again with this control word. It may take interrupts in between.
    NotYet(Control),
}

/// Time limit for a list, after which the guest must call again for the rest: 50 µs (TLFS, "Hypercall Continuation").
const BUDGET_NANOS: u64 = 50_000;
/// Number of list elements between two reads of the clock.
const BETWEEN_LOOKS: u16 = 32;

/// Executes a call. It calls `input` for the place of its input only if it needs one.
pub(crate) fn call(
    run: &mut Running<'_>,
    control: Control,
    offered: Offered,
    input: impl FnOnce(&Checked) -> Input,
) -> Ended {
    let checked = match check(control, offered) {
        Ok(checked) => checked,
        Err(Refusal::InvalidOpcode) => return Ended::InvalidOpcode,
        Err(Refusal::Status(status)) => return Ended::With(status.into()),
    };
    let result = match input(&checked) {
        Input::Registers(bytes) => perform(run, &checked, &bytes),
        // Most inputs are short, and zeroing a page would be most of the cost.
        Input::Memory(at) if checked.input_bytes() <= SHORT => from_memory::<SHORT>(run, &checked, at),
        Input::Memory(at) => from_memory::<LONGEST>(run, &checked, at),
    };
    result.unwrap_or_else(|status| Ended::With(checked.failure(status)))
}

/// Bytes that flush calls for up to a few hundred vCPUs have.
const SHORT: usize = 96;
/// An input is within one page.
const LONGEST: usize = 4096;

fn from_memory<const ROOM: usize>(run: &mut Running<'_>, checked: &Checked, at: Gpa) -> Result<Ended, Status> {
    checked.check_placement(at, cpuid::physical_addresses_end())?;
    let mut bytes = [0; ROOM];
    let bytes = &mut bytes[..checked.input_bytes()];
    if !run.vm.memory.read(at, bytes) {
        return Err(Status::InvalidHypercallInput);
    }
    perform(run, checked, bytes)
}

fn perform(run: &mut Running<'_>, checked: &Checked, input: &[u8]) -> Result<Ended, Status> {
    match checked.parse(input)? {
        Call::Flush(call) => Ok(flush(run, checked, &call)),
        Call::Ipi(call) => {
            send(run.vm, &call);
            run.tally.add(|count| &count.ipi_calls, 1);
            Ok(Ended::With(checked.success()))
        }
        Call::SpinWait(_) => Ok(Ended::Spinning(checked.success())),
        // No VM is offered these.
        Call::Partition(_) => Err(Status::AccessDenied),
    }
}

fn flush(run: &mut Running<'_>, checked: &Checked, call: &FlushCall<'_>) -> Ended {
    let control = checked.control();
    let (plan, done) = match &call.scope {
        Scope::Everything => (Plan::whole(), control.rep_count()),
        Scope::List(ranges) => plan_for(ranges.clone(), control),
    };

    run.tally.add(|count| &count.flush_calls, 1);
    if !plan.is_empty() {
        let vm = run.vm;
        vm.memory.flush(&plan, vm.vcpus(), call.targets, Some(run));
    }
    if done < control.rep_count() {
        Ended::NotYet(control.with_rep_start(done))
    } else {
        Ended::With(checked.success())
    }
}

/// The flush for a list: the part that was read within the time limit, and the number of elements read.
fn plan_for(ranges: GvaRanges<'_>, control: Control) -> (Plan, u16) {
    let mut plan = Plan::new(CutOff::default());
    let started = Machine::now();
    for (done, pages) in (control.rep_start() + 1..).zip(ranges) {
        plan.add(Pages::new(pages.first().0, pages.small_pages()));
        if plan.is_whole() {
            // More would change nothing.
            break;
        }
        let is_over_budget = || Machine::now().saturating_sub(started) > Machine::nanos_to_ticks(BUDGET_NANOS);
        if done % BETWEEN_LOOKS == 0 && is_over_budget() {
            return (plan, done);
        }
    }
    (plan, control.rep_count())
}

/// Each target gets the interrupt once; those that do not exist get nothing.
fn send(vm: &Vm, call: &IpiCall<'_>) {
    delivery::send_fixed(vm, call.vector, call.targets.indices(vm.config.vcpus));
}

//! Executes hypercalls of the Hyper-V interface.
//!
//! The architecture passes the control word and the place of the input ([`Input`]), and writes the answer into the
//! guest's registers. Input in memory is copied first, because another vCPU may change it at any time.

mod budget;
mod flush;
mod held;
mod interrupt;
mod ipi;
mod mail;
mod memory;
mod parent;
mod partition;
mod register_page;
mod registers;
mod stats;
mod synic_page;
mod time;
mod tracking;
mod vmbus;
mod vp;

use addr::Gpa;
use hyperv_defs::call::FAST_XMM_BYTES;
use hyperv_defs::{Answer, Call, Checked, Control, Offered, Refusal, Status, check};

pub(in crate::arch) use held::Held;
pub(in crate::arch) use memory::fault;
pub(in crate::arch) use parent::Children;
#[cfg(test)]
pub(in crate::arch) use parent::perform as perform_of_parent;
pub(in crate::arch) use synic_page::SynicPage;

use super::machine::cpuid;
use crate::trace::longest;
use crate::vcpu::run::Running;

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
    /// With this result, and the guest spins, or waits for another vCPU that can run now.
    Yielding(Answer),
    /// With #UD.
    InvalidOpcode,
    /// Not finished: the guest calls again with this control word. It may take interrupts in between.
    NotYet(Control),
    /// Not begun: a child's input, which is at this address, is not there now. If it never will be, the call ends with
    /// [`Status::InvalidHypercallInput`].
    Absent(Gpa),
}

/// What the caller may do.
#[derive(Clone, Copy)]
pub(crate) struct Rights<'a> {
    /// The calls that it is offered.
    pub(crate) offered: Offered,
    /// Its children, if it is a parent.
    pub(in crate::arch) children: Option<&'a Children>,
}

/// Executes a call, whose output goes to `output`. It calls `input` for the place of its input only if it needs one.
#[inline(always)]
pub(crate) fn call(
    run: &mut Running<'_>,
    control: Control,
    rights: Rights<'_>,
    output: Gpa,
    input: impl FnOnce(&Checked) -> Input,
) -> Ended {
    let checked = match check(control, rights.offered) {
        Ok(checked) => checked,
        Err(Refusal::InvalidOpcode) => return Ended::InvalidOpcode,
        Err(Refusal::Status(status)) => return Ended::With(status.into()),
    };
    let result = match input(&checked) {
        Input::Registers(bytes) => perform(run, &checked, &bytes, rights, output),
        // Most inputs are short, and zeroing a page would be most of the cost.
        Input::Memory(at) if checked.input_bytes() <= SHORT => from_memory::<SHORT>(run, &checked, at, rights, output),
        Input::Memory(at) => from_memory::<LONGEST>(run, &checked, at, rights, output),
    };
    result.unwrap_or_else(|status| Ended::With(checked.failure(status)))
}

/// Bytes that flush calls for up to a few hundred vCPUs have.
const SHORT: usize = 96;
/// An input is within one page.
const LONGEST: usize = 4096;

fn from_memory<const ROOM: usize>(
    run: &mut Running<'_>,
    checked: &Checked,
    at: Gpa,
    rights: Rights<'_>,
    output: Gpa,
) -> Result<Ended, Status> {
    checked.check_placement(at, cpuid::physical_addresses_end())?;
    let mut bytes = [0; ROOM];
    let bytes = &mut bytes[..checked.input_bytes()];
    if !run.vm.memory.read(at, bytes) {
        let is_child = run.vm.as_child().is_some();
        return if is_child { Ok(Ended::Absent(at)) } else { Err(Status::InvalidHypercallInput) };
    }
    perform(run, checked, bytes, rights, output)
}

fn perform(
    run: &mut Running<'_>,
    checked: &Checked,
    input: &[u8],
    rights: Rights<'_>,
    output: Gpa,
) -> Result<Ended, Status> {
    match checked.parse(input)? {
        Call::Flush(call) => Ok(flush::flush(run, checked, &call)),
        Call::Ipi(call) => Ok(ipi::send(run, checked, &call)),
        Call::SpinWait(_) => Ok(Ended::Yielding(checked.success())),
        Call::Partition(request) => {
            if longest::is_on() {
                longest::left(run, || request.name());
            }
            parent::perform(run.vm, run.index, checked, &request, rights.children, output)
        }
    }
}

#[cfg(test)]
mod tests;

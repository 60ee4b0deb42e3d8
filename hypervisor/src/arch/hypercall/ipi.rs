//! Interrupts to many vCPUs at once: HvCallSendSyntheticClusterIpi and its Ex form.

use hyperv_defs::{Checked, IpiCall};

use super::Ended;
use crate::arch::machine::delivery;
use crate::vcpu::run::Running;

/// Each target gets the interrupt once; those that do not exist get nothing.
pub(super) fn send(run: &mut Running<'_>, checked: &Checked, call: &IpiCall<'_>) -> Ended {
    delivery::send_from(run, call.vector, call.targets.indices(run.vm.config.vcpus));
    run.tally.add(|count| &count.ipi_calls, 1);
    Ended::With(checked.success())
}

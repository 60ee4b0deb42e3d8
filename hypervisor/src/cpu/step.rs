//! Work on behalf of many vCPUs, in steps. A pCPU takes no interrupts in a step, so a step is over after some time, not
//! after some number: what it takes to wake one vCPU depends on how many wait already.

use crate::arch::{Arch, Machine};

/// How long a step takes. One piece of the work may go beyond it.
const NANOS: u64 = 5_000;

/// A step.
pub(crate) struct Step {
    until: u64,
}

impl Step {
    /// Begins now.
    pub(crate) fn begin() -> Self {
        Self { until: Machine::now() + Machine::nanos_to_ticks(NANOS) }
    }

    /// Whether the rest is for the next step. In tests a step has one piece of work: VMs of the fake machine are small.
    pub(crate) fn is_over(&self) -> bool {
        cfg!(test) || Machine::now() >= self.until
    }
}

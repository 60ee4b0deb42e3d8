//! Time limit of a call: work on a list stops there, and the guest calls again for the rest.

use crate::arch::{Arch, Machine};

/// 50 µs (TLFS, "Hypercall Continuation").
const NANOS: u64 = 50_000;

/// The time that a call has.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    started: u64,
}

impl Budget {
    /// A whole one, from now on.
    pub(super) fn start() -> Self {
        Self { started: Machine::now() }
    }

    /// Whether the guest must call again for the rest.
    pub(super) fn is_spent(self) -> bool {
        Machine::now().saturating_sub(self.started) > Machine::nanos_to_ticks(NANOS)
    }
}

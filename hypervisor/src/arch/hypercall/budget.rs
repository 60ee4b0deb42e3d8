//! Time limit of a call: work on a list stops there, and the guest calls again for the rest.

use crate::arch::{Arch, Machine};

/// Half of the 50 µs that the TLFS allows ("Hypercall Continuation"): the rest of the exit takes time, too.
const NANOS: u64 = 25_000;

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
        self.is_older_than(NANOS)
    }

    /// Whether more than a third is spent, for work with a second part of about the same length, and a flush.
    pub(super) fn is_third_spent(self) -> bool {
        self.is_older_than(NANOS / 3)
    }

    fn is_older_than(self, nanos: u64) -> bool {
        Machine::now().saturating_sub(self.started) > Machine::nanos_to_ticks(nanos)
    }
}

//! Flushes of other CPUs' TLBs without interrupts: by instructions that all CPUs obey. They cause no exit and need no
//! hypervisor.

use guest_model::command_line::Approach;
use guest_model::cpu_set::CpuSet;

use super::tlb;
use crate::shootdown::{CEILING, Operation};

/// This implementation's name.
pub(crate) const APPROACH: Approach = Approach::Broadcast;

/// Prepares nothing: it is there.
pub(crate) fn bring_up() -> bool {
    true
}

/// As [`bring_up`].
pub(crate) fn prepare_cpu(_: usize) {}

/// Whether there is this way.
pub(crate) fn is_offered() -> bool {
    true
}

/// Flushes `operation` on all CPUs, which include those of the set.
#[expect(clippy::unnecessary_wraps, reason = "elsewhere it can fail")]
pub(crate) fn flush(_: &CpuSet, operation: Operation, _everybody: bool) -> Option<()> {
    match operation {
        Operation::Range { start, pages } if pages <= CEILING => {
            tlb::flush_pages_of_all((0..pages).map(|page| start + page * 4096));
        }
        Operation::Page { at } => tlb::flush_pages_of_all(core::iter::once(at)),
        Operation::Whole | Operation::Range { .. } => tlb::flush_all_of_all(),
    }
    Some(())
}

/// The time for which this CPU has run, in units of 100 ns: not available.
pub(crate) fn runtime() -> Option<u64> {
    None
}

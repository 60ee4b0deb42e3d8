//! Flushing the TLBs of other CPUs without interrupting them: by instructions that all CPUs hear. No exit is needed,
//! and the hypervisor is not asked.

use guest_model::command_line::Approach;
use guest_model::cpu_set::CpuSet;

use super::tlb;
use crate::shootdown::{CEILING, Operation};

/// What this way is called.
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

/// Flushes what `operation` names, on the CPUs of the set and all others.
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

/// For how long this CPU has run, in units of 100 ns: nobody says.
pub(crate) fn runtime() -> Option<u64> {
    None
}

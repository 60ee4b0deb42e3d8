//! The flushes that changes of stage 2 need (APM vol. 2, 15.25).
//!
//! No instruction of this architecture invalidates entries of nested paging by guest physical address. So for any
//! flush, all vCPUs of the VM flush all of their entries, the running ones at once. A fault never comes from a cached
//! entry that denies more than the tables: the processor walks again before it reports one.

use stage2::Stale;

use super::tags::VmTags;
use crate::arch::block::Block;
use crate::arch::trace::{self, TraceEvent};
use crate::vcpu::Vcpu;
use crate::vm::memory::Memory;

/// Makes entries visible to all walkers. Stores are, in order.
pub(crate) fn publish() {}

/// Flushes `stale` on all pCPUs. On return none of the `vcpus` runs its guest with a stale translation.
pub(crate) fn flush(memory: &Memory, _: &VmTags, vcpus: &[Block<Vcpu>], stale: Stale) {
    let root = memory.stage2_root();
    trace::note(|| TraceEvent::Flush { root });
    memory.flush_everybody(vcpus);
    trace::paid(root, stale);
}

/// The rules of this processor, as the trace has them.
#[cfg(debug_assertions)]
pub(crate) fn rules() -> alloc::string::String {
    use stage2::Format;
    alloc::format!("rules=nested levels={}", super::format::stage2_format().levels())
}

//! What changes of stage 2 owe to the TLBs (APM vol. 2, 15.25).
//!
//! Nothing on this architecture invalidates entries of nested paging by guest physical address, so whoever owes anything
//! has all vCPUs of the VM flush all of theirs, those that run at once. A fault never finds an entry that denies more than
//! the tables do: the processor looks again before it reports one.

use addr::Gpa;
use stage2::Stale;

use crate::arch::block::Block;
use crate::arch::trace::{self, Event};
use crate::vcpu::Vcpu;
use crate::vm::memory::Memory;

/// Makes entries visible to all walkers. Stores are, in order.
pub(crate) fn publish() {}

/// Pays what is owed to everybody. On return none of the `vcpus` runs its guest with what was `stale`.
pub(crate) fn flush(memory: &Memory, vcpus: &[Block<Vcpu>], stale: Stale) {
    let root = memory.stage2_root();
    trace::note(|| Event::Flush { root });
    memory.flush_everybody(vcpus);
    trace::paid(root, stale);
}

/// This pCPU forgets that the page at `gpa` denies an access. It looks again by itself.
pub(crate) fn forget(gpa: Gpa) {
    debug_assert!(false, "denials are not cached: {gpa}");
}

/// The rules of this processor, as the trace has them.
#[cfg(debug_assertions)]
pub(crate) fn rules() -> alloc::string::String {
    use stage2::Format;
    alloc::format!("rules=nested levels={}", super::format::stage2_format().levels())
}

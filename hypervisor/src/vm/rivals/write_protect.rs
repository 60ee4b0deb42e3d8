//! The cache of decoded instructions that the vCPUs of a VM share: the pages that it depends on are read-only for the
//! guest. `decode_cache` has the algorithm; this is its access to memory and to stage 2.

use addr::Gpa;
use decode_cache::{DropCause, Lost, Protect, Protection, Size, Unprotection, Vouching, WriteProtect};
use stage2::{Access, Attempt, Denial, Stale};

use crate::arch::block::Block;
use crate::cpu;
use crate::vcpu::Vcpu;
use crate::vcpu::run::Running;
use crate::vm::address_space::AllTlbs;
use crate::vm::fault::{Needs, Problem, Resolved};
use crate::vm::memory::{Decoded, Memory};

/// The guest may write to all of its memory, except to pages that decoded instructions depend on. Those instructions
/// are dropped, and the page becomes writable again.
#[cold]
#[inline(never)]
pub(in crate::vm) fn denied(run: &Running<'_>, gpa: Gpa, needs: Needs) -> Resolved {
    let (memory, tally) = (&run.vm.memory, run.tally);
    let cause = if needs.is_table_walk { DropCause::Walk } else { DropCause::Write };
    if memory.decoded().is_none() {
        return Resolved::End(Problem::NotMapped);
    }
    tally.add(|count| &count.decode_write_faults, 1);
    let lost = memory.write_fault(gpa, cause);
    if cause == DropCause::Walk {
        tally.add(|count| &count.decode_evicted_by_walks, lost.entries().into());
    } else {
        tally.add(|count| &count.decode_evicted_by_code_writes, lost.code.into());
        tally.add(|count| &count.decode_evicted_by_table_writes, lost.tables.into());
    }
    Resolved::Again(Denial::NONE)
}

impl Memory {
    /// Caches decoded instructions for the whole VM from now on, and write-protects the pages that they depend on.
    pub(crate) fn remember_decoded(&mut self, vouching: Vouching) {
        self.decoded = Some(WriteProtect::new(Size::default(), vouching));
    }

    /// The decoded instructions that are cached for the whole VM.
    #[inline]
    pub(crate) fn decoded(&self) -> Option<&WriteProtect<Decoded>> {
        self.decoded.as_ref()
    }

    /// The guest faulted on a write to its memory at `gpa`, or on a walk of a page table there. Returns which cached
    /// instructions are dropped. The guest may retry in any case.
    fn write_fault(&self, gpa: Gpa, cause: DropCause) -> Lost {
        let protected = Protected { memory: self, vcpus: &[] };
        self.decoded.as_ref().and_then(|decoded| decoded.written(gpa, cause, &protected)).unwrap_or_default()
    }

    /// Does a write of the hypervisor to the page of `gpa`, and drops the cached instructions that depend on it.
    #[inline]
    pub(in crate::vm) fn write_beside_decoded<R>(&self, gpa: Gpa, write: impl FnOnce() -> R) -> R {
        match &self.decoded {
            None => write(),
            Some(decoded) => decoded.write_as_host(gpa, &Protected { memory: self, vcpus: &[] }, write).0,
        }
    }
}

/// A VM's memory, for the write-protecting cache of decoded instructions. `vcpus` must not write with old rights. A
/// write by the hypervisor needs none of them.
pub(crate) struct Protected<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) vcpus: &'a [Block<Vcpu>],
}

impl Protect for Protected<'_> {
    fn protect(&self, page: Gpa) -> Protection {
        if !self.memory.has(page) {
            return Protection::Refused;
        }
        let (tlbs, walking) = (self.tlbs(), self.memory.announce(cpu::this().id));
        // Nested pages need no flush for a leaf that was split before the page was found busy.
        match self.memory.walk(&tlbs, &walking).try_protect_page(page, Access::READ_EXECUTE) {
            Ok(Attempt::Done(stale)) if stale.is_empty() => Protection::Already,
            Ok(Attempt::Done(_)) => Protection::Owed,
            Ok(Attempt::Busy(_)) => Protection::Busy,
            Err(_) => Protection::Refused,
        }
    }

    fn flush(&self) {
        self.memory.flush_everybody(self.vcpus);
    }

    fn unprotect(&self, page: Gpa) -> Unprotection {
        let (tlbs, walking) = (self.tlbs(), self.memory.announce(cpu::this().id));
        // The page has a leaf of its own since it was protected, so nothing must be split; and added rights need no
        // flush.
        let grown = self.memory.walk(&tlbs, &walking).try_protect_page(page, Access::ALL);
        debug_assert!(matches!(grown, Ok(Attempt::Done(Stale::EMPTY) | Attempt::Busy(Stale::EMPTY))), "{grown:?}");
        if let Ok(Attempt::Busy(_)) = grown { Unprotection::Busy } else { Unprotection::Done }
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        self.memory.read(gpa, bytes)
    }
}

impl Protected<'_> {
    fn tlbs(&self) -> AllTlbs<'_> {
        AllTlbs::new(self.memory, self.vcpus)
    }
}

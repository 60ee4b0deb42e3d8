//! The dirty log of a child's memory, which its parent harvests.
//!
//! A child has no slots and no session: its parent asks for the states of pages
//! ([`tracking`](crate::arch::hypercall)). Faults, and the hypervisor's own writes, mark the leaves of stage 2.

use addr::{Gpa, GpaRange, Hpa};
use stage2::{Access, Fault, Format as _, Granularity, MapError, Source, Spare, Tlb, Walk, WalkMut, Walking};

use crate::arch::tables::TablePool;
use crate::vm::address_space::{NoTlb, Stage2Format};
use crate::vm::memory::Memory;

impl Memory {
    /// From now on, writes to a child's memory are recorded. On return the hypervisor's own are as well.
    pub(crate) fn begin_tracking(&self) {
        // No pages are being joined then, and none will be.
        let shape = self.shape();
        self.dirty.on_fault.set(Granularity::Recorded);
        drop(shape);
        self.set_recording(true);
    }

    /// Writes to a child's memory are not recorded any more. A page that is write-protected becomes writable at its
    /// next write. Large pages that were split come back, little by little.
    pub(crate) fn end_tracking(&self) {
        self.dirty.on_fault.set(Granularity::Whole);
        self.set_recording(false);
        if let Some(comeback) = self.comeback() {
            comeback.lock().begin(Gpa(0));
        }
    }

    /// Small pages were mapped into a child, from this one on. They may be a large one, now or with those that follow.
    pub(crate) fn join_from(&self, first: Gpa) {
        // The end of tracking looks at all of them. And large pages that a fetch would split would come and go as often
        // as pages are mapped.
        if self.is_tracked() || !self.tree.format().large_code() {
            return;
        }
        if let Some(comeback) = self.comeback() {
            comeback.lock().begin(first);
        }
    }

    /// Whether writes to a child's memory are recorded.
    pub(crate) fn is_tracked(&self) -> bool {
        self.granularity() != Granularity::Whole
    }

    /// What a fault on a write-protected page does.
    pub(crate) fn granularity(&self) -> Granularity {
        self.dirty.on_fault.get()
    }

    /// Maps pages into a child. While writes are recorded they are clean: what was written at these addresses before is
    /// known elsewhere.
    pub(crate) fn map_lent<T: Tlb>(
        &self,
        walk: &mut WalkMut<'_, Stage2Format, TablePool, T>,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
    ) -> Result<(), MapError> {
        if self.is_tracked() {
            walk.map_clean(range, hpa, access, Source::Hardware)
        } else {
            walk.map(range, hpa, access)
        }
    }

    /// Splits a large page at its first write, or fetch. Without a table, all of it counts as written.
    pub(crate) fn split_lent<T: Tlb>(&self, walk: Walk<'_, Stage2Format, TablePool, T>, gpa: Gpa, needs: Access) {
        let mut spare = Spare::new();
        let is_split = spare.fill(&self.tables, 1).is_ok()
            && walk.split_at_fault(gpa, Granularity::Recorded, 0, &mut spare).is_ok_and(|(stale, _)| {
                // The parts grant what the whole has granted.
                debug_assert!(stale.is_empty(), "nested pages are split without a flush");
                true
            });
        spare.give_back(&self.tables);
        let granularity = if is_split { Granularity::Recorded } else { Granularity::Whole };
        if let Fault::Large = walk.fault(gpa, needs, granularity) {
            // Larger than that: the guest tries again.
        }
    }

    /// The hypervisor is about to write to a child's page, on a visit that lasts until it has. Records the write.
    /// Returns whether the page is there.
    #[cold]
    pub(in crate::vm) fn record_write(&self, walking: &Walking<'_>, gpa: Gpa) -> bool {
        let walk = self.tree.walk(&self.tables, &NoTlb, walking);
        if let Fault::Large = walk.fault(gpa, Access::READ_WRITE, Granularity::Recorded) {
            self.split_lent(walk, gpa, Access::READ_WRITE);
        }
        walk.mark_written(gpa)
    }
}

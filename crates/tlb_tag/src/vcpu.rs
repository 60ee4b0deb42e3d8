//! A vCPU's part of a pool, and one entry into its guest. Only the pCPU that runs the vCPU writes it.

use crate::cpu::CpuTags;
use crate::pool::Scheme;
use crate::rivals::FIRST_GENERATION;
use crate::seen::Seen;
use crate::tag::Tag;

/// What an entry must flush before the guest's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Flush {
    /// Nothing.
    Nothing,
    /// The entries of the entry's own tag (SVM: TLB_CONTROL 3).
    Tag,
    /// The entries of all tags of the pCPU (SVM: TLB_CONTROL 1).
    Everything,
}

/// The tag of a vCPU, and its debts.
#[derive(Debug)]
pub struct VcpuTags {
    scheme: Scheme,
    name: u64,
    /// Index of its home tag, on all pCPUs.
    home: Option<u32>,
    /// Index of its tag on the pCPU where it arrived last.
    index: u32,
    pub(crate) tag: Tag,
    /// The generation of `tag`; [`VOID`] if it has none.
    pub(crate) generation: u64,
    /// The VM's epoch that its entries are from; none if they must all be flushed.
    pub(crate) seen: Seen,
    /// Since its last entry the vCPU got another tag.
    moved: bool,
}

/// No generation is zero.
pub(crate) const VOID: u64 = 0;

impl VcpuTags {
    pub(crate) fn new(scheme: Scheme, name: u64, home: Option<u32>, tag: Tag) -> Self {
        let generation = if scheme == Scheme::Generation { VOID } else { FIRST_GENERATION };
        Self { scheme, name, home, index: home.unwrap_or(u32::MAX), tag, generation, seen: Seen::VOID, moved: false }
    }

    pub(crate) fn home(&self) -> Option<u32> {
        self.home
    }

    /// The vCPU arrives at a pCPU for some entries. `came_back`: it was here last, and nowhere else since.
    pub fn arrive(&mut self, cpu: &mut CpuTags, came_back: bool) {
        match self.scheme {
            Scheme::FlushAlways => {}
            Scheme::Generation if came_back => {}
            // Two pCPUs may count the same generation by accident; a tag means nothing on another pCPU.
            Scheme::Generation => self.generation = VOID,
            Scheme::Epoch if came_back && cpu.cache.holds(self.index, self.name) => {}
            Scheme::Epoch => {
                let held = cpu.cache.holds(self.index, self.name);
                self.index = cpu.cache.take(self.name, self.home, self.index);
                self.tag = cpu.range.at(self.index);
                self.seen = Seen::VOID;
                self.moved = !held;
                cpu.counts.assignments += u64::from(!held);
            }
        }
    }

    /// Whether an entry has nothing to do about tags: the tag is unchanged since the last entry, and no flush is due.
    /// This is the cost of each entry.
    #[must_use]
    #[inline]
    pub fn is_current(&self, cpu: &CpuTags, epoch: u64) -> bool {
        // Compares both without asking for the scheme. What a scheme does not use never differs; for the scheme that
        // flushes always, the epoch always differs.
        self.seen.difference(Seen::epoch(epoch)) | (self.generation ^ cpu.generations.valid) == 0
    }

    /// Whether the vCPU's last entry was in this epoch of its VM and its entries are still good. Never true for a
    /// scheme that keeps no entries between two entries into the guest.
    #[must_use]
    #[inline]
    pub fn has_seen(&self, epoch: u64) -> bool {
        self.seen == Seen::epoch(epoch)
    }

    /// Prepares an entry on the pCPU where the vCPU arrived. `epoch` is the VM's epoch; it is below 2^63.
    #[inline]
    pub fn enter<'a>(&'a mut self, cpu: &'a mut CpuTags, epoch: u64) -> GuestEntry<'a> {
        let seen = Seen::epoch(epoch);
        if self.is_current(cpu, epoch) {
            return GuestEntry { vcpu: self, cpu, seen, flush: Flush::Nothing, assigned: false, new_generation: false };
        }
        match self.scheme {
            Scheme::Generation => self.enter_generation(cpu, seen),
            Scheme::Epoch if cpu.can_flush_one_tag => self.enter_flushing(cpu, seen, Flush::Tag),
            Scheme::Epoch | Scheme::FlushAlways => self.enter_flushing(cpu, seen, Flush::Everything),
        }
    }

    fn enter_flushing<'a>(&'a mut self, cpu: &'a mut CpuTags, seen: Seen, flush: Flush) -> GuestEntry<'a> {
        let assigned = core::mem::take(&mut self.moved);
        GuestEntry { vcpu: self, cpu, seen, flush, assigned, new_generation: false }
    }

    /// All TLB entries of the vCPU must be flushed before its guest's next instruction.
    #[inline]
    pub fn void(&mut self) {
        match self.scheme {
            Scheme::FlushAlways => {}
            Scheme::Generation => self.generation = VOID,
            Scheme::Epoch => self.seen = Seen::VOID,
        }
    }

    /// Whether the next entry flushes all entries of the vCPU anyway, so that no single page needs a flush.
    #[must_use]
    #[inline]
    pub fn is_void(&self) -> bool {
        match self.scheme {
            Scheme::FlushAlways => true,
            Scheme::Generation => self.generation == VOID,
            Scheme::Epoch => self.seen == Seen::VOID,
        }
    }

    /// The tag of its entries on the pCPU where it arrived. Meaningless while it [is void](Self::is_void).
    #[must_use]
    #[inline]
    pub fn tag(&self) -> Tag {
        self.tag
    }
}

/// An entry that is about to happen. If it is dropped, it has not happened, and its flush is still required.
#[derive(Debug)]
#[must_use]
pub struct GuestEntry<'a> {
    pub(crate) vcpu: &'a mut VcpuTags,
    pub(crate) cpu: &'a mut CpuTags,
    pub(crate) seen: Seen,
    pub(crate) flush: Flush,
    pub(crate) assigned: bool,
    pub(crate) new_generation: bool,
}

impl GuestEntry<'_> {
    /// The tag to enter with.
    #[inline]
    pub fn tag(&self) -> Tag {
        self.vcpu.tag
    }

    /// What the entry must flush.
    #[inline]
    pub fn flush(&self) -> Flush {
        self.flush
    }

    /// Whether the vCPU got another tag for this entry.
    #[must_use]
    #[inline]
    pub fn assigned(&self) -> bool {
        self.assigned
    }

    /// Whether a new generation begins with it.
    #[must_use]
    #[inline]
    pub fn new_generation(&self) -> bool {
        self.new_generation
    }

    /// The entry has happened, and its flush is done.
    #[inline]
    pub fn completed(self) {
        if self.flush != Flush::Nothing {
            self.pay();
        }
    }

    fn pay(self) {
        match self.flush {
            Flush::Nothing => {}
            Flush::Tag => self.cpu.counts.tag_flushes += 1,
            Flush::Everything => {
                self.cpu.counts.full_flushes += 1;
                self.cpu.generations.flushed();
            }
        }
        if self.vcpu.scheme != Scheme::FlushAlways {
            self.vcpu.seen = self.seen;
        }
    }
}

//! A vCPU's part of its VM's tag, and one entry into its guest. Only the pCPU that runs the vCPU writes it.

use super::cpu::{CpuTags, Found, Name};
use super::pool::{Id, VmTags};
use crate::pool::Scheme;
use crate::seen::Seen;
use crate::tag::Tag;

/// What an entry must flush on its pCPU before the guest's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Flush {
    /// Nothing.
    Nothing,
    /// Under the entry's own tag, translations made with the guest's own tables; entries of stage 2 alone may stay
    /// (Arm: TLBI VMALLE1).
    OwnTables,
    /// All entries of the entry's own tag (Arm: TLBI VMALLS12E1).
    Tag,
    /// The entries of all tags (Arm: TLBI ALLE1).
    Everything,
}

/// The tag of a vCPU, and its debts.
#[derive(Debug)]
pub struct VcpuTags {
    vm: VmTags,
    name: Name,
    /// The tag since the last arrival.
    id: Id,
    /// The VM's epoch that its entries are from; none if an entry must check.
    seen: Seen,
    /// All entries must be flushed, whichever vCPU ran last.
    is_void: bool,
    /// Since its last entry the vCPU got another tag, or began a generation.
    assigned: bool,
    began: bool,
}

impl VcpuTags {
    pub(super) fn new(vm: VmTags, name: Name) -> Self {
        Self { vm, name, id: Id::NONE, seen: Seen::VOID, is_void: false, assigned: false, began: false }
    }

    /// The vCPU arrives at a pCPU for some entries. `came_back`: it was here last, and nowhere else since. From here on
    /// it keeps its tag, until it departs.
    pub fn arrive(&mut self, cpu: &mut CpuTags, came_back: bool) {
        let (id, began) = self.vm.claim(cpu.number);
        let epoch = self.seen.number();
        // On another pCPU the guest may have flushed entries that it has here: by an instruction for one pCPU only.
        let is_here = came_back && id == self.id && cpu.find(id, self.name, epoch) == Found::Mine;
        if !is_here {
            self.seen = Seen::VOID;
        }
        self.assigned |= self.id == Id::NONE || id.index() != self.id.index();
        self.began |= began;
        self.id = id;
    }

    /// The vCPU departs from the pCPU.
    pub fn depart(&mut self, cpu: &mut CpuTags) {
        self.vm.release(cpu.number);
    }

    /// Whether an entry has nothing to do about tags. This is the cost of each entry.
    #[must_use]
    #[inline]
    pub fn is_current(&self, epoch: u64) -> bool {
        self.seen == Seen::epoch(epoch)
    }

    /// Prepares an entry on the pCPU where the vCPU arrived. `epoch` is the VM's epoch; it is below 2^63.
    #[inline]
    pub fn enter<'a>(&'a mut self, cpu: &'a mut CpuTags, epoch: u64) -> GuestEntry<'a> {
        let is_current = self.is_current(epoch);
        let flush = if is_current { Flush::Nothing } else { self.owed(cpu, epoch) };
        GuestEntry { vcpu: self, cpu, epoch, flush, is_current }
    }

    #[cold]
    fn owed(&self, cpu: &CpuTags, epoch: u64) -> Flush {
        match cpu.find(self.id, self.name, epoch) {
            _ if self.vm.shared().scheme == Scheme::FlushAlways => Flush::Tag,
            Found::Unknown => Flush::Everything,
            Found::Nothing => Flush::Nothing,
            Found::Mine | Found::Sibling if !self.is_void => Flush::OwnTables,
            Found::Mine | Found::Sibling | Found::Other => Flush::Tag,
        }
    }

    /// All TLB entries of the vCPU must be flushed before its guest's next instruction.
    #[inline]
    pub fn void(&mut self) {
        self.seen = Seen::VOID;
        self.is_void = true;
    }

    /// Its tag since the last arrival.
    #[must_use]
    #[inline]
    pub fn tag(&self) -> Tag {
        self.vm.shared().range.at(self.id.index())
    }
}

/// An entry that is about to happen. If it is dropped, it has not happened, and its flush is still required.
#[derive(Debug)]
#[must_use]
pub struct GuestEntry<'a> {
    vcpu: &'a mut VcpuTags,
    cpu: &'a mut CpuTags,
    epoch: u64,
    flush: Flush,
    is_current: bool,
}

impl GuestEntry<'_> {
    /// The tag to enter with.
    #[inline]
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.vcpu.tag()
    }

    /// What the entry must flush.
    #[inline]
    pub fn flush(&self) -> Flush {
        self.flush
    }

    /// Whether the vCPU got another tag since its last entry.
    #[must_use]
    #[inline]
    pub fn assigned(&self) -> bool {
        self.vcpu.assigned
    }

    /// Whether a new generation began with its arrival.
    #[must_use]
    #[inline]
    pub fn new_generation(&self) -> bool {
        self.vcpu.began
    }

    /// The entry has happened, and its flush is done.
    #[inline]
    pub fn completed(self) {
        if !self.is_current {
            self.pay();
        }
    }

    fn pay(self) {
        let Self { vcpu, cpu, epoch, flush, .. } = self;
        match flush {
            Flush::Nothing => {}
            Flush::OwnTables => cpu.counts.own_flushes += 1,
            Flush::Tag => cpu.counts.tag_flushes += 1,
            Flush::Everything => {
                cpu.counts.full_flushes += 1;
                cpu.flushed(vcpu.id);
            }
        }
        cpu.counts.assignments += u64::from(core::mem::take(&mut vcpu.assigned));
        cpu.counts.generations += u64::from(core::mem::take(&mut vcpu.began));
        cpu.entered(vcpu.id, vcpu.name, epoch);
        vcpu.is_void = false;
        if vcpu.vm.shared().scheme != Scheme::FlushAlways {
            vcpu.seen = Seen::epoch(epoch);
        }
    }
}

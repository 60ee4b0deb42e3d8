//! Tags: each vCPU has one of its own, as with SVM, or all vCPUs of a VM have one, as at EL2. The scenario chooses.

use sched::CpuId;
use tlb_tag::{Flush, Scheme, Tag, TagRange, by_vm};

use super::machine::machine;
use crate::cpu;

pub(crate) enum Pool {
    OfVcpus(tlb_tag::Pool),
    OfVms(by_vm::Pool),
}

pub(crate) fn pool(scheme: Scheme, range: TagRange, can_flush_one: bool, inherits: bool) -> Pool {
    if !machine().hardware().tags_of_vms {
        return Pool::OfVcpus(tlb_tag::Pool::new(scheme, range, can_flush_one));
    }
    let pool = by_vm::Pool::new(scheme, range, cpu::count());
    Pool::OfVms(if inherits { pool.inheriting() } else { pool })
}

impl Pool {
    pub(crate) fn scheme(&self) -> Scheme {
        match self {
            Self::OfVcpus(pool) => pool.scheme(),
            Self::OfVms(pool) => pool.scheme(),
        }
    }

    pub(crate) fn homes(&self) -> u32 {
        match self {
            Self::OfVcpus(pool) => pool.homes(),
            Self::OfVms(pool) => pool.homes(),
        }
    }
}

pub(crate) enum CpuTags {
    OfVcpus(tlb_tag::CpuTags),
    OfVms(by_vm::CpuTags),
}

pub(crate) fn cpu(pool: &Pool, id: CpuId) -> CpuTags {
    match pool {
        Pool::OfVcpus(pool) => CpuTags::OfVcpus(pool.cpu()),
        Pool::OfVms(pool) => CpuTags::OfVms(pool.cpu(id.index())),
    }
}

/// A VM's part: its tag, if that is not a matter of its vCPUs.
pub(crate) struct VmTags(Option<by_vm::VmTags>);

impl VmTags {
    pub(crate) fn new(pool: &Pool) -> Self {
        match pool {
            Pool::OfVcpus(_) => Self(None),
            Pool::OfVms(pool) => Self(Some(pool.vm())),
        }
    }

    pub(crate) fn vcpu(&self, pool: &Pool) -> VcpuTags {
        match (&self.0, pool) {
            (None, Pool::OfVcpus(pool)) => VcpuTags::OfVcpus(pool.vcpu()),
            (Some(own), Pool::OfVms(_)) => VcpuTags::OfVms(own.vcpu()),
            _ => unreachable!("a VM's tags are of its pool"),
        }
    }

    pub(crate) fn release(&self, pool: &Pool, vcpu: VcpuTags) {
        if let (Pool::OfVcpus(pool), VcpuTags::OfVcpus(vcpu)) = (pool, vcpu) {
            pool.release(vcpu);
        }
    }
}

pub(crate) enum VcpuTags {
    OfVcpus(tlb_tag::VcpuTags),
    OfVms(by_vm::VcpuTags),
}

/// What must be flushed before an entry.
pub(super) enum Needed {
    Nothing,
    /// Entries of the guest's own tables.
    OwnTables,
    Tag,
    Everything,
}

impl VcpuTags {
    pub(super) fn arrive(&mut self, cpu: &mut CpuTags, came_back: bool) {
        match (self, cpu) {
            (Self::OfVcpus(own), CpuTags::OfVcpus(cpu)) => own.arrive(cpu, came_back),
            (Self::OfVms(own), CpuTags::OfVms(cpu)) => own.arrive(cpu, came_back),
            _ => unreachable!("a VM's tags are of its pool"),
        }
    }

    pub(super) fn depart(&mut self, cpu: &mut CpuTags) {
        if let (Self::OfVms(own), CpuTags::OfVms(cpu)) = (self, cpu) {
            own.depart(cpu);
        }
    }

    /// An entry is about to happen, before which `flush` does what is needed.
    pub(super) fn enter(&mut self, cpu: &mut CpuTags, epoch: u64, flush: impl FnOnce(Tag, Needed)) {
        match (self, cpu) {
            (Self::OfVcpus(own), CpuTags::OfVcpus(cpu)) if !own.is_current(cpu, epoch) => {
                let entry = own.enter(cpu, epoch);
                let needed = match entry.flush() {
                    Flush::Nothing => Needed::Nothing,
                    Flush::Tag => Needed::Tag,
                    Flush::Everything => Needed::Everything,
                };
                flush(entry.tag(), needed);
                entry.completed();
            }
            (Self::OfVms(own), CpuTags::OfVms(cpu)) if !own.is_current(epoch) => {
                let entry = own.enter(cpu, epoch);
                let needed = match entry.flush() {
                    by_vm::Flush::Nothing => Needed::Nothing,
                    by_vm::Flush::OwnTables => Needed::OwnTables,
                    by_vm::Flush::Tag => Needed::Tag,
                    by_vm::Flush::Everything => Needed::Everything,
                };
                flush(entry.tag(), needed);
                entry.completed();
            }
            _ => {}
        }
    }

    pub(super) fn void(&mut self) {
        match self {
            Self::OfVcpus(own) => own.void(),
            Self::OfVms(own) => own.void(),
        }
    }

    /// Whether the next entry flushes anyway.
    pub(super) fn is_void(&self) -> bool {
        match self {
            Self::OfVcpus(own) => own.is_void(),
            Self::OfVms(_) => false,
        }
    }

    pub(super) fn tag(&self) -> Tag {
        match self {
            Self::OfVcpus(own) => own.tag(),
            Self::OfVms(own) => own.tag(),
        }
    }
}

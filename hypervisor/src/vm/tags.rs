//! The pools of TLB tags for VMs.
//!
//! A machine has one space of tags. VMs may manage theirs in different ways (`tags`, `tag_limit`). So the space is
//! divided into pools, one for each way that a VM of the payload uses; VMs with the same way share a pool. It is
//! divided once, before the first VM is made, so a tag never moves between two ways of counting.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use abi::payload::{TagScheme, VmConfig};
use crossbeam_utils::CachePadded;
use spin::Once;
use tlb_tag::{Scheme, TagRange};

use crate::arch::tags::{self, CpuTags, Pool, VcpuTags};
use crate::cpu::CpuId;
use crate::sync::per_host;

/// The common settings of VMs that share a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    scheme: TagScheme,
    limit: Option<u32>,
}

impl Kind {
    fn of(config: &VmConfig) -> Self {
        // One tag is all that this scheme ever uses.
        let limit = if config.tags == TagScheme::FlushAlways { Some(1) } else { config.tag_limit };
        Self { scheme: config.tags, limit }
    }
}

per_host! {
    static POOLS: Once<Vec<(Kind, Pool)>> = Once::new();
}

/// Maximum number of tags in one pool. More vCPUs than that are of no use on [`crate::cpu::MAX_CPUS`] pCPUs.
const LARGEST_POOL: u32 = 4095;

/// Cuts the machine's `tags` (numbers from 1 on) into pools for these VMs. `can_flush_one`: the machine can flush the
/// entries of one tag.
///
/// # Errors
/// When there are more pools than tags.
pub(crate) fn init(vms: &[VmConfig], tags: u32, can_flush_one: bool) -> Result<(), String> {
    let mut kinds: Vec<Kind> = Vec::new();
    for kind in vms.iter().map(Kind::of) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }

    let wanted: u32 = kinds.iter().filter_map(|kind| kind.limit).sum();
    let unlimited = u32::try_from(kinds.iter().filter(|kind| kind.limit.is_none()).count()).unwrap_or(u32::MAX);
    if wanted.saturating_add(unlimited) > tags {
        return Err(format!("the VMs ask for {wanted} TLB tags and more, the machine has {tags}; lower `tag_limit`"));
    }
    let share = (tags - wanted).checked_div(unlimited).unwrap_or(0).min(LARGEST_POOL);

    let mut first = 1;
    let pools = kinds.into_iter().map(|kind| {
        let count = kind.limit.unwrap_or(share);
        let scheme = match kind.scheme {
            TagScheme::FlushAlways => Scheme::FlushAlways,
            TagScheme::Generation => Scheme::Generation,
            TagScheme::Epoch => Scheme::Epoch,
        };
        let pool = tags::pool(scheme, TagRange::new(first, count), can_flush_one);
        first += count;
        (kind, pool)
    });
    POOLS.call_once(|| pools.collect());
    Ok(())
}

/// A VM's pool, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolId(usize);

/// The pool for a VM of the payload.
fn pool_for(config: &VmConfig) -> PoolId {
    let kind = Kind::of(config);
    PoolId(pools().iter().position(|(other, _)| *other == kind).unwrap_or(0))
}

impl PoolId {
    /// The pool.
    pub(crate) fn pool(self) -> &'static Pool {
        &pools()[self.0].1
    }
}

/// A VM's part of its pool.
pub(crate) struct VmTags {
    pool: PoolId,
    own: tags::VmTags,
}

impl VmTags {
    pub(crate) fn new(config: &VmConfig) -> Self {
        let pool = pool_for(config);
        Self { pool, own: tags::VmTags::new(pool.pool()) }
    }

    /// The pool.
    #[inline]
    pub(crate) fn pool(&self) -> PoolId {
        self.pool
    }

    /// The architecture's part.
    #[cfg_attr(machine = "pc", allow(dead_code, reason = "nothing there is flushed by the tag of a VM"))]
    pub(crate) fn own(&self) -> &tags::VmTags {
        &self.own
    }

    /// A new vCPU's part.
    pub(crate) fn vcpu(&self) -> VcpuTags {
        self.own.vcpu(self.pool.pool())
    }

    /// A vCPU is gone for good.
    pub(crate) fn release(&self, vcpu: VcpuTags) {
        self.own.release(self.pool.pool(), vcpu);
    }
}

/// One pCPU's state of all pools.
pub(crate) struct CpuPools(Vec<CachePadded<CpuTags>>);

impl CpuPools {
    pub(crate) fn new(cpu: CpuId) -> Self {
        Self(pools().iter().map(|(_, pool)| CachePadded::new(tags::cpu(pool, cpu))).collect())
    }

    /// The pCPU's part of one pool.
    pub(crate) fn of(&mut self, id: PoolId) -> &mut CpuTags {
        &mut self.0[id.0]
    }
}

fn pools() -> &'static [(Kind, Pool)] {
    POOLS.get().map_or(&[], Vec::as_slice)
}

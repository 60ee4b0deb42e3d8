//! Pools of TLB tags. Each VM takes its tags from one pool.
//!
//! A machine has one range of tags. VMs may manage their tags in different ways (`tags`, `tag_limit`). VMs with the
//! same settings share a pool, which is a part of that range. The first VM with such settings creates the pool, and the
//! last one removes it. Its tags are then free for another pool. TLBs may still hold entries under them, so each pCPU
//! flushes these entries before its first entry with a tag of the new pool.

use alloc::format;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use abi::payload::{TagScheme, VmConfig};
use crossbeam_utils::CachePadded;
use tlb_tag::{Scheme, TagRange};
use vcpu_layout::{Owned, OwnerGuard};

use crate::arch::{Arch, Machine};
use crate::cpu::{self, CpuId};
use crate::exhaustion;
use crate::mutants::{self, Mutant};
use crate::sync::{Mutex, per_host};

type Pool = <Machine as Arch>::TagPool;
type CpuTags = <Machine as Arch>::CpuTags;
type VcpuTags = <Machine as Arch>::VcpuTags;

/// The settings that all VMs of a pool have in common.
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

/// Maximum number of tags in one pool. A host of [`crate::cpu::MAX_CPUS`] pCPUs has no use for more vCPUs than that.
const LARGEST_POOL: u32 = 4095;
/// Of the tags that no payload VM reserves with `tag_limit`, one in this many stays free for later VMs.
const KEPT_PART: u32 = 8;

/// Number of pools that fit without another heap allocation.
const KINDS: usize = 16;

/// The machine's tags: numbers from 1 on.
struct Space {
    tags: u32,
    can_flush_one: bool,
    /// Number of tags for a pool without a limit.
    share: u32,
    /// Tags from here on were never in a pool.
    untouched: u32,
    /// The pools that live, and perhaps some that have ended.
    pools: Vec<Weak<TagPool>>,
}

per_host! {
    static SPACE: Mutex<Space> =
        Mutex::new(Space { tags: 0, can_flush_one: false, share: 0, untouched: 1, pools: Vec::new() });
}

/// A pool, with each pCPU's part of it.
pub(crate) struct TagPool {
    kind: Kind,
    range: TagRange,
    pool: Pool,
    /// By pCPU. Taken once for each time slice of a vCPU, by that pCPU alone.
    cpus: Vec<CachePadded<Owned<CpuTags>>>,
}

/// Sets up the pools. `tags` is the machine's number of tags; `can_flush_one` says whether it can flush the entries of
/// a single tag. `vms` are the payload's VMs, whose pools are created here.
///
/// # Errors
/// The VMs ask for more tags than there are.
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
    let rest = tags - wanted;
    let share = (rest - rest / KEPT_PART) / unlimited.max(1);
    *SPACE.lock() = Space {
        tags,
        can_flush_one,
        share: share.clamp(1, LARGEST_POOL),
        untouched: 1,
        pools: Vec::with_capacity(KINDS),
    };
    Ok(())
}

/// Tags that pools have, those among them that are some vCPU's or VM's own, and all of the machine's.
pub(crate) fn usage() -> [u32; 3] {
    let mut space = SPACE.lock();
    space.forget_ended();
    let (pools, homes) = space
        .pools
        .iter()
        .filter_map(Weak::upgrade)
        .fold((0, 0), |(pools, homes), pool| (pools + pool.range.count(), homes + pool.pool.homes()));
    [pools, homes, space.tags]
}

impl Space {
    fn forget_ended(&mut self) {
        self.pools.retain(|pool| pool.strong_count() != 0);
    }

    /// The pool for VMs of this kind.
    fn pool(&mut self, kind: Kind) -> Result<Arc<TagPool>, String> {
        self.forget_ended();
        if let Some(pool) = self.pools.iter().filter_map(Weak::upgrade).find(|pool| pool.kind == kind) {
            return Ok(pool);
        }

        let range = self.find(kind)?;
        let scheme = match kind.scheme {
            TagScheme::FlushAlways => Scheme::FlushAlways,
            TagScheme::Generation => Scheme::Generation,
            TagScheme::Epoch => Scheme::Epoch,
        };
        let inherits = range.first().get() < self.untouched && !mutants::is(Mutant::TagsInheritedUnsaid);
        let pool = Machine::tag_pool(scheme, range, self.can_flush_one, inherits);
        let cpus =
            (0..).take(cpu::count()).map(|cpu| CachePadded::new(Owned::new(Machine::cpu_tags(&pool, CpuId(cpu)))));
        let pool = Arc::new(TagPool { kind, range, cpus: cpus.collect(), pool });
        self.untouched = self.untouched.max(range.first().get() + range.count());
        self.pools.push(Arc::downgrade(&pool));
        Ok(pool)
    }

    /// Finds tags for a new pool: the first free range that is long enough. Without a limit it takes the longest free
    /// range, up to the share.
    fn find(&self, kind: Kind) -> Result<TagRange, String> {
        let mut taken: Vec<_> = self.pools.iter().filter_map(Weak::upgrade).map(|pool| pool.range).collect();
        taken.sort_unstable_by_key(|range| range.first());
        let ends = taken.iter().map(|range| range.first().get()).chain([self.tags + 1]);
        let starts = [1].into_iter().chain(taken.iter().map(|range| range.first().get() + range.count()));
        let mut free = starts.zip(ends).map(|(start, end)| (start, end - start)).filter(|&(_, count)| count != 0);
        let found = match kind.limit {
            Some(limit) => free.find(|&(_, count)| count >= limit).map(|(start, _)| (start, limit)),
            None => free.max_by_key(|&(_, count)| count).map(|(start, count)| (start, count.min(self.share))),
        };
        found.map(|(start, count)| TagRange::new(start, count)).ok_or_else(|| {
            let wanted = kind.limit.map_or(String::from("any"), |limit| format!("{limit} in a row"));
            format!("the machine has {} TLB tags, and VMs with other `tags` or `tag_limit` left {wanted}", self.tags)
        })
    }
}

impl TagPool {
    /// The pool's scheme of tags.
    #[inline]
    pub(crate) fn scheme(&self) -> Scheme {
        self.pool.scheme()
    }

    /// This pCPU's part of the pool. `cpu` must be the calling pCPU.
    ///
    /// # Panics
    /// The machine has no such pCPU.
    #[inline]
    pub(crate) fn on(&self, cpu: CpuId) -> OwnerGuard<'_, CpuTags> {
        self.cpus[cpu.index()].run()
    }
}

/// A VM's part of its pool.
pub(crate) struct VmTags {
    pool: Arc<TagPool>,
    own: <Machine as Arch>::VmTags,
}

impl VmTags {
    /// For a VM of this description.
    ///
    /// # Errors
    /// When there are no tags left for VMs of its kind.
    pub(crate) fn new(config: &VmConfig) -> Result<Self, String> {
        if exhaustion::strikes() {
            return Err(String::from("the host has no TLB tags left"));
        }
        let pool = SPACE.lock().pool(Kind::of(config))?;
        Ok(Self { own: <Machine as Arch>::VmTags::new(&pool.pool), pool })
    }

    /// The pool.
    #[inline]
    pub(crate) fn pool(&self) -> &TagPool {
        &self.pool
    }

    /// The architecture's part.
    pub(crate) fn own(&self) -> &<Machine as Arch>::VmTags {
        &self.own
    }

    /// A new vCPU's part.
    pub(crate) fn vcpu(&self) -> VcpuTags {
        self.own.vcpu(&self.pool.pool)
    }

    /// A vCPU was removed.
    pub(crate) fn release(&self, vcpu: VcpuTags) {
        self.own.release(&self.pool.pool, vcpu);
    }
}

//! A VM's memory: the frames it owns, the stage-2 tree through which the guest reaches them, the tags under which TLBs
//! remember it, and how what they remember is flushed.
//!
//! All memory is taken, zeroed and mapped when the VM is created, with the largest leaves that its frames allow; a
//! guest meets no stage-2 fault in its own memory. It goes back to the pool when the VM is dropped, after its last vCPU
//! has left the guest for good.
//!
//! A flush is asked for by one vCPU and concerns some or all of the VM ([`Memory::flush`]). It is left where each target meets it
//! before it next runs the guest: single pages beside the target's mailbox, everything of everybody as a new *epoch* of
//! the VM, which each entry compares with the one it has seen. Only then is it looked who is in the guest at this moment;
//! those are kicked out, all at once, and waited for. Nobody waits for a vCPU that does not run.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, GpaRange, Hpa, PageSize};
use sched::{CpuId, Pending};
use shootdown::{Flush, Plan};
use stage2::{Access, MapError, Tree};
use tlb_tag::Scheme;

use super::tags::PoolId;
use crate::arch::loader::stage2_format;
use crate::arch::tables::TablePool;
use crate::arch::vcpu::ArchVcpu;
use crate::arch::{interrupts, tsc};
use crate::frames::{Exhausted, Frames};
use crate::vcpu::{Owner, Vcpu};

/// A VM's memory.
pub(crate) struct Memory {
    /// In ascending order, without overlaps.
    regions: Vec<Region>,
    tables: TablePool,
    root: Hpa,
    /// Counts the times that all TLB entries of the VM became void.
    epoch: AtomicU64,
    pool: PoolId,
}

/// A wait for kicked vCPUs, in host TSC ticks.
struct Wait {
    since: u64,
    /// When whoever is waited for then is kicked again, and how long after that once more.
    kick_at: u64,
    patience: u64,
}

/// How long kicked vCPUs have to leave their guests before one is kicked again: 100 µs, where an exit takes one or two;
/// then twice as long. QEMU (7.2) may forget to tell a CPU of an interrupt that comes while it enters a guest, until the
/// next one comes.
const PATIENCE_NANOS: u64 = 100_000;

/// Whose TLBs are flushed.
#[derive(Clone, Copy)]
pub(crate) struct Targets<'a> {
    /// The vCPUs.
    pub(crate) set: hyperv_defs::Targets<'a>,
    /// The one that asks; it may be in the set, or not.
    pub(crate) me: u32,
}

/// A contiguous run of the guest's memory.
struct Region {
    start: Gpa,
    frames: Frames,
}

/// Why a VM's memory could not be set up.
#[derive(Debug)]
pub(crate) enum MemoryError {
    /// The host has not enough free memory.
    Exhausted,
    /// Stage 2 could not map it.
    Map(MapError),
}

impl From<Exhausted> for MemoryError {
    fn from(_: Exhausted) -> Self {
        Self::Exhausted
    }
}

impl Memory {
    /// Takes, zeroes and maps memory for `ranges`, whose lengths are multiples of 2 MiB.
    ///
    /// # Errors
    /// When the host has too little; everything that was taken is given back.
    pub(crate) fn new(ranges: impl Iterator<Item = GpaRange>, pool: PoolId) -> Result<Self, MemoryError> {
        let tables = TablePool::new();
        let mut tree = Tree::new(stage2_format(), &tables).map_err(MemoryError::Map)?;
        let mut regions = Vec::new();

        for range in ranges {
            let mut at = range.start;
            while at < range.end() {
                let frames = Frames::allocate_at_most(range.end().0 - at.0, PageSize::Size2M.bytes())?;
                frames.zero();
                let piece = GpaRange::new(at, frames.bytes()).ok_or(MemoryError::Exhausted)?;
                // Nothing was mapped there before, so nothing can be stale.
                let stale = tree.map(&tables, piece, frames.hpa(), Access::ALL).map_err(MemoryError::Map)?;
                debug_assert!(stale.is_empty());
                regions.push(Region { start: at, frames });
                at = piece.end();
            }
        }

        Ok(Self { regions, root: tree.root(), tables, epoch: AtomicU64::new(0), pool })
    }

    /// The VM's epoch: an entry that has seen another must not use TLB entries from before.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Read after `Presence::enter`, whose barrier orders it against `Memory::flush`.
        self.epoch.load(Ordering::Relaxed)
    }

    /// The pool that its vCPUs' tags come from.
    #[inline]
    pub(crate) fn tag_pool(&self) -> PoolId {
        self.pool
    }

    /// Flushes what `plan` says from the TLBs of the `targets` among `vcpus`. On return none of them runs its guest with
    /// what was flushed. `arch` is the caller's own vCPU.
    pub(crate) fn flush(&self, plan: &Plan, vcpus: &[Vcpu], targets: Targets<'_>, arch: &mut ArchVcpu) {
        let count = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
        let Targets { set, me } = targets;
        let mine = &vcpus[me as usize];
        let others = set.indices(count).filter(|&target| target != me).map(|target| &vcpus[target as usize]);

        // Everything of everybody is one store. (A scheme that counts per pCPU would make others pay for it.)
        let by_epoch = plan.is_whole() && self.pool.pool().scheme() == Scheme::Epoch && is_everybody(set, count);
        if by_epoch {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }
        let publish = |target: &Vcpu| {
            if !by_epoch {
                plan.flushes().for_each(|flush| target.requests().ask(flush));
                target.mailbox().leave(Pending::FLUSH);
            }
        };
        let meanwhile = || {
            if !by_epoch && set.contains(me) {
                plan.flushes().for_each(|flush| flush_own(arch, mine, flush));
            }
        };
        let mut wait: Option<Wait> = None;
        let relax = |cpu| {
            let now = tsc::now();
            let patience = tsc::nanos_to_ticks(PATIENCE_NANOS);
            let wait = wait.get_or_insert(Wait { since: now, kick_at: now + patience, patience });
            if now > wait.kick_at {
                wait.patience *= 2;
                wait.kick_at = now + wait.patience;
                interrupts::kick(CpuId(cpu));
            }
            core::hint::spin_loop();
        };
        let outcome = shootdown::run(others, Vcpu::presence, publish, interrupts::kick_all, meanwhile, relax);

        let counters = mine.counters();
        counters.flush_targets.add(outcome.targets.into());
        counters.flush_kicks.add(outcome.kicked.into());
        if let Some(wait) = wait {
            counters.flush_wait_ticks.add(tsc::now().saturating_sub(wait.since));
        }
    }

    /// The vCPU, about to enter, does what others have asked it to flush.
    pub(crate) fn settle_flush(&self, vcpu: &Vcpu, owner: &mut Owner) {
        let taken = vcpu.requests().take();
        if taken.whole() {
            flush_own(&mut owner.arch, vcpu, Flush::Whole);
        } else {
            taken.for_each(|pages| flush_own(&mut owner.arch, vcpu, Flush::Pages(pages)));
        }
    }

    /// HPA of the stage-2 tree's root table.
    pub(crate) fn stage2_root(&self) -> Hpa {
        self.root
    }

    /// Bytes of host memory that the stage-2 tables take.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.tables.bytes()
    }

    /// Copies guest memory from `gpa` on. False, and `into` is not to be used, when a part of it does not exist.
    #[must_use]
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.pieces(gpa, into.len(), |frames, offset, piece| frames.read(offset, &mut into[piece]))
    }

    /// Copies `from` to guest memory at `gpa`. False when a part of it does not exist; what lies before it was written.
    #[must_use]
    pub(crate) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        self.pieces(gpa, from.len(), |frames, offset, piece| frames.write(offset, &from[piece]))
    }

    /// The 64-bit word at `gpa`, a multiple of 8, for the guest's own page tables.
    pub(crate) fn word(&self, gpa: Gpa) -> Option<&AtomicU64> {
        let (region, offset) = self.find(gpa)?;
        gpa.0.is_multiple_of(8).then(|| region.frames.atomic_u64((offset / 8) as usize))?
    }

    /// Cuts a run of guest memory at the borders of regions.
    fn pieces(
        &self,
        gpa: Gpa,
        bytes: usize,
        mut copy: impl FnMut(&Frames, u64, core::ops::Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        while done < bytes {
            let Some((region, offset)) = gpa.checked_add(done as u64).and_then(|at| self.find(at)) else {
                return false;
            };
            let left = usize::try_from(region.frames.bytes() - offset).unwrap_or(usize::MAX);
            let piece = left.min(bytes - done);
            if !copy(&region.frames, offset, done..done + piece) {
                return false;
            }
            done += piece;
        }
        true
    }

    fn find(&self, gpa: Gpa) -> Option<(&Region, u64)> {
        let after = self.regions.partition_point(|region| region.start <= gpa);
        let region = &self.regions[after.checked_sub(1)?];
        let offset = gpa.0 - region.start.0;
        (offset < region.frames.bytes()).then_some((region, offset))
    }
}

/// Whether `set` has all of `count` vCPUs in it.
fn is_everybody(set: hyperv_defs::Targets<'_>, count: u32) -> bool {
    set.banks(count).map(|(_, members)| members.count_ones()).sum::<u32>() == count
}

/// The running vCPU flushes its own entries: pages at once, everything by the next entry.
fn flush_own(arch: &mut ArchVcpu, vcpu: &Vcpu, flush: Flush) {
    match flush {
        Flush::Whole => {
            arch.flush_whole();
            vcpu.counters().flush_whole.add(1);
        }
        Flush::Pages(pages) => vcpu.counters().flush_pages.add(arch.flush_pages(pages)),
    }
}

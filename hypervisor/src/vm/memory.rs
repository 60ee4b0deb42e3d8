//! A VM's memory: its frames, its stage-2 tree, its TLB tags, and the flush of TLBs.
//!
//! The frames are allocated and zeroed when the VM is created, and mapped with the largest possible leaves. `populate`
//! may delay the mapping to the first touch. The frames return to the pool when the VM is dropped, after its last vCPU
//! has left the guest for ever.
//!
//! One vCPU requests a flush for some or all vCPUs of the VM ([`Memory::flush`]). First it publishes the request, where
//! each target finds it before its next entry. Single pages go into words next to the target's mailbox. A flush of
//! everything on all vCPUs is a new *epoch* of the VM, which each entry compares with the epoch that the vCPU has seen.
//! Then the sender reads which targets are in their guests, kicks those, all at once, and waits for them. It never
//! waits for a vCPU that does not run.

#![cfg_attr(
    machine = "virt",
    allow(
        dead_code,
        reason = "guests of that machine flush TLBs by themselves, and none of their instructions is decoded"
    )
)]

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};
use decode_cache::{Cause, Lost, Protect, Protection, Size, Unprotection, Vouching, WriteProtect};
use sched::{CpuId, Pending};
use shootdown::{Flush, Plan};
use stage2::{Access, Attempt, MapError, Shape, Stale, Tlb, Tree, Walk, WalkMut, Walking};
use tlb_tag::Scheme;
use vcpu_layout::lay_out;

use super::dirty::log::{AllTlbs, Logging};
use super::tags::{PoolId, VmTags};
use crate::arch::bank::{Bank, Word};
use crate::arch::block::Block;
use crate::arch::emulate::Decoded;
use crate::arch::format::{Stage2Format, stage2_format};
use crate::arch::tables::TablePool;
use crate::arch::vcpu::ArchVcpu;
use crate::arch::{interrupts, tlb, tsc};
use crate::cpu;
use crate::frames::{Exhausted, Frames};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, relax};
use crate::trace;
use crate::vcpu::{Owner, Tally, Vcpu};

/// A VM's memory.
#[lay_out]
pub(crate) struct Memory {
    /// In ascending order, without overlaps. Each is a run of the bank, in the same order.
    #[layout(frozen)]
    regions: Vec<GpaRange>,
    #[layout(frozen)]
    bank: Bank,
    #[layout(cold)]
    tables: TablePool,
    #[layout(frozen)]
    tree: Tree<Stage2Format>,
    #[layout(cold)]
    shape: Mutex<Shape>,
    /// Level of the pages that are mapped at their first touch; `None` if all memory is mapped at creation.
    #[layout(frozen)]
    level_on_touch: Option<u32>,
    /// State of its dirty log.
    #[layout(mailbox)]
    logging: Logging,
    /// Each increment makes all TLB entries of the VM stale.
    #[layout(mailbox)]
    epoch: AtomicU64,
    #[layout(frozen)]
    tags: VmTags,
    /// Decoded instructions, if they are cached for the whole VM: the pages that they depend on are read-only.
    #[layout(frozen)]
    decoded: Option<WriteProtect<Decoded>>,
}

/// A wait for kicked vCPUs, in ticks of the host's clock.
struct Wait {
    since: u64,
    /// When to kick the vCPU again that is waited for, and the delay until the kick after that.
    kick_at: u64,
    patience: u64,
}

/// Time limit for kicked vCPUs to leave their guests, before one is kicked again: 100 µs, then twice as long each time.
/// An exit takes one or two. QEMU (7.2) may fail to report an interrupt that arrives during an entry, until the next
/// one arrives.
const PATIENCE_NANOS: u64 = 100_000;

/// The targets of a flush.
#[derive(Clone, Copy)]
pub(crate) struct Targets<'a> {
    /// The vCPUs.
    pub(crate) set: hyperv_defs::Targets<'a>,
    /// The sender, which may be in the set or not.
    pub(crate) me: u32,
}

/// The vCPU that requests a flush, which this pCPU runs.
pub(crate) struct Mine<'a> {
    pub(crate) arch: &'a mut ArchVcpu,
    pub(crate) tally: Tally<'a>,
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
    /// Allocates, zeroes and maps memory for `ranges`, whose lengths are multiples of 2 MiB, for a VM with this many
    /// vCPUs. With a level, it maps pages of that level at their first touch instead.
    ///
    /// # Errors
    /// The host has too little memory; everything is freed again.
    pub(crate) fn new(
        ranges: &[GpaRange],
        vcpus: u32,
        tags: VmTags,
        level_on_touch: Option<u32>,
    ) -> Result<Self, MemoryError> {
        let tables = TablePool::new(ranges, vcpus)?;
        let (tree, mut shape) = Tree::new(stage2_format(), &tables).map_err(MemoryError::Map)?;
        let (mut regions, mut runs) = (Vec::new(), Vec::new());

        for range in ranges {
            let mut at = range.start;
            while at < range.end() {
                let frames = Frames::allocate_at_most(range.end().0 - at.0, PageSize::Size2M.bytes())?;
                frames.zero();
                let piece = GpaRange::new(at, frames.bytes()).ok_or(MemoryError::Exhausted)?;
                if level_on_touch.is_none() {
                    let mut walk = tree.walk_mut(&tables, &NoTlb, &mut shape);
                    walk.map(piece, frames.hpa(), Access::ALL).map_err(MemoryError::Map)?;
                }
                regions.push(piece);
                runs.push(frames);
                at = piece.end();
            }
        }

        // Otherwise a walker on another pCPU may read the old content of the root's page.
        tlb::publish();

        let logging = Logging::new(&regions, level_on_touch.is_some());
        Ok(Self::lay_out(MemoryFields {
            regions,
            bank: Bank::new(runs),
            tables,
            tree,
            shape: Mutex::new(shape),
            level_on_touch,
            logging,
            epoch: AtomicU64::new(0),
            tags,
            decoded: None,
        }))
    }

    /// The VM's epoch. An entry that has seen another epoch must not use older TLB entries.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Read after `Presence::enter`, whose barrier orders it against `Memory::flush`.
        self.epoch.load(Ordering::Relaxed)
    }

    /// The pool of its vCPUs' tags.
    #[inline]
    pub(crate) fn tag_pool(&self) -> PoolId {
        self.tags.pool()
    }

    /// Its part of that pool.
    pub(crate) fn tags(&self) -> &VmTags {
        &self.tags
    }

    /// Flushes what `plan` says from the TLBs of the `targets` among `vcpus`. On return none of them runs its guest
    /// with a flushed translation. `mine` is the caller's own vCPU.
    pub(crate) fn flush(&self, plan: &Plan, vcpus: &[Block<Vcpu>], targets: Targets<'_>, mine: Mine<'_>) {
        let count = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
        let Targets { set, me } = targets;
        let Mine { arch, tally } = mine;
        let others = set.indices(count).filter(|&target| target != me).map(|target| &*vcpus[target as usize]);

        // A flush of everything on all vCPUs is one store. (With a scheme that counts per pCPU, other VMs would pay for
        // it.)
        let by_epoch = plan.is_whole() && self.tag_pool().pool().scheme() == Scheme::Epoch && is_everybody(set, count);
        if by_epoch && !mutants::is(Mutant::EpochNotBumped) && !mutants::is(Mutant::EpochAfterLook) {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }
        let publish = |target: &Vcpu| {
            if !by_epoch {
                plan.flushes().for_each(|flush| target.requests().ask(flush));
                if !mutants::is(Mutant::FlushNotAnnounced) {
                    target.mailbox().leave(Pending::FLUSH);
                }
            }
        };
        let meanwhile = || {
            if !by_epoch && set.contains(me) {
                plan.flushes().for_each(|flush| flush_own(arch, tally, flush));
            }
        };
        let began = tsc::now();
        let mut wait = None;
        let relax = |cpu| kick_again(&mut wait, cpu);
        let outcome = shootdown::run(others, Vcpu::presence, publish, interrupts::kick_all, meanwhile, relax);
        if by_epoch && mutants::is(Mutant::EpochAfterLook) {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }

        tally.add(|count| &count.flush_targets, outcome.targets.into());
        tally.add(|count| &count.flush_kicks, outcome.kicked.into());
        trace::flushed(began, outcome.targets, outcome.kicked);
        if let Some(wait) = wait {
            tally.add(|count| &count.flush_wait_ticks, tsc::now().saturating_sub(wait.since));
        }
    }

    /// Flushes everything on all `vcpus`. On return none of them runs its guest with a flushed translation. The
    /// caller's own vCPU flushes before its next entry.
    pub(crate) fn flush_everybody(&self, vcpus: &[Block<Vcpu>]) {
        let by_epoch = self.tag_pool().pool().scheme() == Scheme::Epoch;
        if by_epoch {
            self.epoch.fetch_add(1, Ordering::SeqCst);
        }
        let publish = |target: &Vcpu| {
            if !by_epoch {
                target.requests().ask(Flush::Whole);
                target.mailbox().leave(Pending::FLUSH);
            }
        };
        let mut wait = None;
        let relax = |cpu| kick_again(&mut wait, cpu);
        let _ = shootdown::run(
            vcpus.iter().map(|vcpu| &**vcpu),
            Vcpu::presence,
            publish,
            interrupts::kick_all,
            || {},
            relax,
        );
    }

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
    pub(crate) fn write_fault(&self, gpa: Gpa, cause: Cause) -> Lost {
        let protected = Protected { memory: self, vcpus: &[] };
        self.decoded.as_ref().and_then(|decoded| decoded.written(gpa, cause, &protected)).unwrap_or_default()
    }

    /// The vCPU, which is about to enter, does the flushes that others have requested.
    pub(crate) fn flush_owed(&self, vcpu: &Vcpu, owner: &mut Owner, tally: Tally<'_>) {
        let taken = vcpu.requests().take();
        if mutants::is(Mutant::FlushNotCarriedOut) {
            return;
        }
        if taken.whole() {
            flush_own(&mut owner.arch, tally, Flush::Whole);
        } else {
            taken.for_each(|pages| flush_own(&mut owner.arch, tally, Flush::Pages(pages)));
        }
    }

    /// The stage-2 tree.
    #[inline]
    pub(crate) fn tree(&self) -> &Tree<Stage2Format> {
        &self.tree
    }

    /// Walks stage 2, on a pCPU that has [announced](Logging::walk) itself.
    #[inline(always)]
    pub(crate) fn walk<'a>(
        &'a self,
        tlbs: &'a AllTlbs<'_>,
        walking: &'a Walking<'_>,
    ) -> Walk<'a, Stage2Format, TablePool, AllTlbs<'a>> {
        self.tree.walk(&self.tables, tlbs, walking)
    }

    /// Walks stage 2, with the right to change its shape.
    pub(crate) fn walk_mut<'a>(
        &'a self,
        tlbs: &'a AllTlbs<'_>,
        shape: &'a mut Shape,
    ) -> WalkMut<'a, Stage2Format, TablePool, AllTlbs<'a>> {
        self.tree.walk_mut(&self.tables, tlbs, shape)
    }

    /// Pool of its tables.
    #[inline]
    pub(crate) fn tables(&self) -> &TablePool {
        &self.tables
    }

    /// The right to change its shape.
    pub(crate) fn shape(&self) -> MutexGuard<'_, Shape> {
        self.shape.lock()
    }

    /// State of its dirty log.
    #[inline]
    pub(crate) fn logging(&self) -> &Logging {
        &self.logging
    }

    /// Level of the pages that are mapped at their first touch; `None` if all memory is mapped at creation.
    pub(crate) fn level_on_touch(&self) -> Option<u32> {
        self.level_on_touch
    }

    /// Host address of the page at `level`, in this region, that holds `gpa`.
    #[inline]
    pub(crate) fn host_page(&self, region: u32, gpa: Gpa, level: u32) -> Option<Hpa> {
        let (region, run) = (self.regions.get(region as usize)?, self.bank.run(region as usize)?);
        let bytes = PAGE_BYTES << (9 * level);
        Some(Hpa(run.hpa().0 + ((gpa.0 - region.start.0) & !(bytes - 1))))
    }

    /// HPA of the stage-2 tree's root table.
    pub(crate) fn stage2_root(&self) -> Hpa {
        self.tree.root()
    }

    /// Bytes of host memory that the stage-2 tables use now.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.tables.bytes()
    }

    /// Copies guest memory from `gpa` on. False if a part of it does not exist; then `into` must not be used.
    #[must_use]
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.pieces(gpa, into.len(), |frames, offset, piece| frames.read(offset, &mut into[piece]))
    }

    /// Copies `from` to guest memory at `gpa`. False if a part of it does not exist; everything before that part was
    /// written.
    #[must_use]
    pub(crate) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        let mut at = gpa;
        let mut left = from;
        while !left.is_empty() {
            // Page by page, because cached instructions are dropped by page.
            let bytes = usize::try_from(PAGE_BYTES - at.offset_in(PageSize::Size4K)).unwrap_or(usize::MAX);
            let (piece, rest) = left.split_at(bytes.min(left.len()));
            let copy = || self.pieces(at, piece.len(), |frames, offset, part| frames.write(offset, &piece[part]));
            if !self.as_host(at, piece.len(), copy) {
                return false;
            }
            let Some(next) = at.checked_add(piece.len() as u64) else { return rest.is_empty() };
            (at, left) = (next, rest);
        }
        true
    }

    /// Atomically replaces a word if it is still `current`; returns whether it was.
    pub(crate) fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        let Some((run, offset)) = self.bank.place_of(word) else { return false };
        let Some(region) = self.regions.get(run) else { return false };
        let gpa = Gpa(region.start.0 + offset);
        self.as_host(gpa, size_of::<u64>(), || self.bank.compare_exchange(word, current, new))
    }

    /// Does a write of the hypervisor to the page of `gpa`. All such writes use this function. They cause no stage-2
    /// fault, which would drop cached instructions and inform a dirty log.
    #[inline]
    fn as_host<R>(&self, gpa: Gpa, bytes: usize, write: impl FnOnce() -> R) -> R {
        let result = match &self.decoded {
            None => write(),
            Some(decoded) => decoded.write_as_host(gpa, &Protected { memory: self, vcpus: &[] }, write).0,
        };
        self.logging.wrote(gpa, bytes as u64);
        result
    }

    /// The aligned 64-bit word that holds `gpa`, for repeated accesses.
    pub(crate) fn find_word(&self, gpa: Gpa) -> Option<Word> {
        let region = self.find_index(gpa)?;
        let offset = gpa.0 - self.regions.get(region)?.start.0;
        self.bank.find(region, usize::try_from(offset / 8).ok()?)
    }

    /// Reads the word that is `ahead` words after one that was found, on the same page.
    #[inline]
    pub(crate) fn load(&self, word: Word, ahead: usize) -> u64 {
        self.bank.load(word, ahead)
    }

    /// Index of the region where the guest faulted at `gpa` in stage 2; `None` if it has no memory there. `is_present`:
    /// stage 2 maps a page there, but does not allow the access. For most devices this takes one comparison.
    #[inline]
    pub(crate) fn faulting_region(&self, gpa: Gpa, is_present: bool) -> Option<u32> {
        if !is_present && !self.logging.has_gaps() {
            return None;
        }
        Some((0..).zip(&self.regions).find(|(_, region)| region.contains(gpa))?.0)
    }

    /// Whether the guest has memory at `gpa`.
    #[inline]
    pub(crate) fn has(&self, gpa: Gpa) -> bool {
        // Most VMs have one or two regions, and each device access asks.
        self.regions.iter().any(|region| region.contains(gpa))
    }

    /// Splits a run of guest memory at the borders of regions.
    fn pieces(
        &self,
        gpa: Gpa,
        bytes: usize,
        mut copy: impl FnMut(&Frames, u64, core::ops::Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        while done < bytes {
            let found = gpa.checked_add(done as u64).and_then(|at| Some((at, self.find_index(at)?)));
            let Some((at, index)) = found else { return false };
            let (Some(region), Some(frames)) = (self.regions.get(index), self.bank.run(index)) else { return false };
            let left = usize::try_from(region.end().0 - at.0).unwrap_or(usize::MAX);
            let piece = left.min(bytes - done);
            if !copy(frames, at.0 - region.start.0, done..done + piece) {
                return false;
            }
            done += piece;
        }
        true
    }

    /// Index of the region that holds `gpa`.
    fn find_index(&self, gpa: Gpa) -> Option<usize> {
        let index = self.regions.partition_point(|region| region.start <= gpa).checked_sub(1)?;
        self.regions.get(index)?.contains(gpa).then_some(index)
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
        let (tlbs, walking) = (self.tlbs(), self.memory.logging.walk(cpu::this().id));
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
        let (tlbs, walking) = (self.tlbs(), self.memory.logging.walk(cpu::this().id));
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

/// The TLBs of a VM that has no vCPUs yet.
struct NoTlb;

impl Tlb for NoTlb {
    fn publish(&self) {}
    fn flush(&self, _: Stale) {}
    fn relax(&self) {}
}

/// The sender waits for a kicked vCPU on `cpu`: kicks it again, less and less often.
fn kick_again(wait: &mut Option<Wait>, cpu: u32) {
    let now = tsc::now();
    let patience = tsc::nanos_to_ticks(PATIENCE_NANOS);
    let wait = wait.get_or_insert(Wait { since: now, kick_at: now + patience, patience });
    if now > wait.kick_at {
        wait.patience *= 2;
        wait.kick_at = now + wait.patience;
        interrupts::kick(CpuId(cpu));
    }
    relax();
}

/// Whether `set` contains all of `count` vCPUs.
fn is_everybody(set: hyperv_defs::Targets<'_>, count: u32) -> bool {
    set.banks(count).map(|(_, members)| members.count_ones()).sum::<u32>() == count
}

/// The running vCPU flushes its own entries: pages at once, everything at the next entry.
fn flush_own(arch: &mut ArchVcpu, tally: Tally<'_>, flush: Flush) {
    match flush {
        Flush::Whole => {
            arch.flush_whole();
            tally.add(|count| &count.flush_whole, 1);
        }
        Flush::Pages(pages) => tally.add(|count| &count.flush_pages, arch.flush_pages(pages)),
    }
}

//! A VM's memory: its frames, the hypervisor's own accesses to them, and the protection of cached instructions there.
//! The guest reaches them through its [address space](super::address_space).
//!
//! The frames are allocated and zeroed when the VM is created ([`Assembly`]), and mapped with the largest possible
//! leaves. `populate` may delay the mapping to the first touch. The frames return to the pool when the VM is dropped,
//! after its last vCPU has left the guest for good.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};
use decode_cache::{DropCause, Lost, Protect, Protection, Size, Unprotection, Vouching, WriteProtect};
use stage2::{Access, Attempt, MapError, Shape, Stale, Tree};
use vcpu_layout::lay_out;

use super::address_space::{AllTlbs, NoTlb, Stage2Format};
use super::backing::Backing;
use super::dirty::log::DirtyState;
use super::tags::VmTags;
use crate::arch::block::Block;
use crate::arch::tables::TablePool;
use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::frames::{Exhausted, Frames, reserve};
use crate::sync::{AtomicU64, Mutex};
use crate::vcpu::Vcpu;

type Decoded = <Machine as Arch>::Decoded;

/// A VM's memory.
#[lay_out]
pub(crate) struct Memory {
    #[layout(frozen)]
    pub(crate) backing: Backing,
    #[layout(cold)]
    pub(super) tables: TablePool,
    #[layout(frozen)]
    pub(super) tree: Tree<Stage2Format>,
    #[layout(cold)]
    pub(super) shape: Mutex<Shape>,
    /// Level of the pages that are mapped at their first touch; `None` if all memory is mapped at creation.
    #[layout(frozen)]
    level_on_touch: Option<u32>,
    /// State of its dirty log.
    #[layout(mailbox)]
    pub(super) dirty: DirtyState,
    /// Each increment makes all TLB entries of the VM stale.
    #[layout(mailbox)]
    pub(super) epoch: AtomicU64,
    #[layout(frozen)]
    pub(super) tags: VmTags,
    /// Decoded instructions, if they are cached for the whole VM: the pages that they depend on are read-only.
    #[layout(frozen)]
    decoded: Option<WriteProtect<Decoded>>,
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

/// An unfinished VM's memory: allocated, zeroed and mapped piece by piece. Dropping it frees the pieces.
pub(crate) struct Assembly {
    ranges: Vec<GpaRange>,
    tags: VmTags,
    level_on_touch: Option<u32>,
    tables: TablePool,
    tree: Tree<Stage2Format>,
    shape: Shape,
    regions: Vec<GpaRange>,
    runs: Vec<Frames>,
    /// The last allocated piece, and the number of its zeroed bytes.
    last: Option<(Frames, u64)>,
}

/// Memory that is zeroed in one step.
const ZEROED_AT_ONCE: u64 = 4 << 20;
/// Runs of frames that there is room for; memory in smaller pieces needs more of the heap.
const USUAL_RUNS: usize = 8;

impl Assembly {
    /// Begins with memory for `ranges`, in ascending order, with lengths that are multiples of 2 MiB, of a VM with this
    /// number of vCPUs. With `level_on_touch` it is mapped at its first touch, in pages of that level.
    ///
    /// # Errors
    /// The host has too little memory for the tables.
    pub(crate) fn begin(
        ranges: Vec<GpaRange>,
        vcpus: u32,
        tags: VmTags,
        level_on_touch: Option<u32>,
    ) -> Result<Self, MemoryError> {
        let tables = TablePool::new(&ranges, vcpus)?;
        let (tree, shape) = Tree::new(Machine::stage2_format(), &tables).map_err(MemoryError::Map)?;
        let (mut regions, mut runs) = (Vec::new(), Vec::new());
        reserve(&mut regions, USUAL_RUNS)?;
        reserve(&mut runs, USUAL_RUNS)?;
        Ok(Self { ranges, tags, level_on_touch, tables, tree, shape, regions, runs, last: None })
    }

    /// Allocates, zeroes or maps the next piece. Returns whether all memory is ready.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn step(&mut self) -> Result<bool, MemoryError> {
        let Some(at) = self.missing() else { return Ok(true) };
        let Some((frames, zeroed)) = &mut self.last else {
            let end = self.ranges.iter().find(|range| range.contains(at)).map_or(at, GpaRange::end);
            reserve(&mut self.regions, 1)?;
            reserve(&mut self.runs, 1)?;
            self.last = Some((Frames::allocate_at_most(end.0 - at.0, PageSize::Size2M.bytes())?, 0));
            return Ok(false);
        };
        frames.zero_part(*zeroed, ZEROED_AT_ONCE);
        *zeroed += ZEROED_AT_ONCE;
        if *zeroed < frames.bytes() {
            return Ok(false);
        }

        let Some((frames, _)) = self.last.take() else { return Ok(false) };
        let piece = GpaRange::new(at, frames.bytes()).ok_or(MemoryError::Exhausted)?;
        if self.level_on_touch.is_none() {
            let mut walk = self.tree.walk_mut(&self.tables, &NoTlb, &mut self.shape);
            walk.map(piece, frames.hpa(), Access::ALL).map_err(MemoryError::Map)?;
        }
        self.regions.push(piece);
        self.runs.push(frames);
        Ok(self.missing().is_none())
    }

    /// Where the next piece begins, if one is missing.
    fn missing(&self) -> Option<Gpa> {
        let done = self.regions.last().map_or(Gpa(0), GpaRange::end);
        let next = self.ranges.iter().find(|range| range.end() > done)?;
        Some(next.start.max(done))
    }

    /// The memory, once all is there.
    ///
    /// # Errors
    /// When the host has too little for what logs need.
    pub(crate) fn finish(self) -> Result<Memory, MemoryError> {
        // Otherwise a walker on another pCPU may read the old content of the root's page.
        Machine::publish();

        let dirty = DirtyState::new(&self.regions, self.level_on_touch.is_some())?;
        Ok(Memory::lay_out(MemoryFields {
            backing: Backing::new(self.regions, self.runs),
            tables: self.tables,
            tree: self.tree,
            shape: Mutex::new(self.shape),
            level_on_touch: self.level_on_touch,
            dirty,
            epoch: AtomicU64::new(0),
            tags: self.tags,
            decoded: None,
        }))
    }
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
    pub(crate) fn write_fault(&self, gpa: Gpa, cause: DropCause) -> Lost {
        let protected = Protected { memory: self, vcpus: &[] };
        self.decoded.as_ref().and_then(|decoded| decoded.written(gpa, cause, &protected)).unwrap_or_default()
    }

    /// State of its dirty log.
    #[inline]
    pub(crate) fn dirty_state(&self) -> &DirtyState {
        &self.dirty
    }

    /// Level of the pages that are mapped at their first touch; `None` if all memory is mapped at creation.
    pub(crate) fn level_on_touch(&self) -> Option<u32> {
        self.level_on_touch
    }

    /// Host address of the page at `level`, in this region, that holds `gpa`.
    #[inline]
    pub(crate) fn host_page(&self, region: u32, gpa: Gpa, level: u32) -> Option<Hpa> {
        self.backing.host_page(region, gpa, level)
    }

    /// Copies guest memory from `gpa` on. False if a part of it does not exist; then `into` must not be used.
    #[must_use]
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.backing.read(gpa, into)
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
            if !self.as_host(at, piece.len(), || self.backing.write(at, piece)) {
                return false;
            }
            let Some(next) = at.checked_add(piece.len() as u64) else { return rest.is_empty() };
            (at, left) = (next, rest);
        }
        true
    }

    /// Does a write of the hypervisor to the page of `gpa`. All such writes use this function. They cause no stage-2
    /// fault, which would drop cached instructions and inform a dirty log.
    #[inline]
    pub(crate) fn as_host<R>(&self, gpa: Gpa, bytes: usize, write: impl FnOnce() -> R) -> R {
        let result = match &self.decoded {
            None => write(),
            Some(decoded) => decoded.write_as_host(gpa, &Protected { memory: self, vcpus: &[] }, write).0,
        };
        self.dirty.wrote(gpa, bytes as u64);
        result
    }

    /// Whether the guest has memory at `gpa`.
    #[inline]
    pub(crate) fn has(&self, gpa: Gpa) -> bool {
        // Most VMs have one or two regions, and this runs at each device access.
        self.backing.regions.iter().any(|region| region.contains(gpa))
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

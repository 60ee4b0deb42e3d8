//! A VM's memory: its frames, and the hypervisor's own accesses to them. The guest reaches them through its
//! [address space](super::address_space).
//!
//! The frames are allocated and zeroed when the VM is created ([`Assembly`]), and mapped with the largest possible
//! leaves. `populate` may delay the mapping to the first touch. A VM with the machine's devices has its memory at the
//! frames' own addresses, because devices know no others without an IOMMU. The frames return to the pool when the VM is
//! dropped, after its last vCPU has left the guest for good.

use alloc::boxed::Box;
use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};
use decode_cache::WriteProtect;
use spin::Once;
use stage2::{Access, MapError, Shape, Tree};
use vcpu_layout::lay_out;

use super::address_space::{NoTlb, Stage2Format};
use super::backing::Backing;
use super::dirty::log::DirtyState;
use super::tags::VmTags;
use super::visits::Visits;
use crate::arch::tables::TablePool;
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::frames::{Exhausted, Frames, reserve};
use crate::io::iommu::{Devices, Functions, NotOwned};
use crate::sync::{AtomicU64, Mutex};

pub(super) type Decoded = <Machine as Arch>::Decoded;

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
    /// Decoded instructions, if they are cached for the whole VM: see [`rivals`](super::rivals).
    #[layout(frozen)]
    pub(super) decoded: Option<WriteProtect<Decoded>>,
    /// For the hypervisor's own accesses, if the memory may go away.
    #[layout(frozen)]
    pub(super) visits: Option<Box<Visits>>,
    /// PCI functions that reach it.
    #[layout(cold)]
    devices: Once<Devices>,
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
    wanted: Wanted,
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

/// Guest addresses of the memory of an unfinished VM.
enum Wanted {
    /// These, in ascending order.
    At(Vec<GpaRange>),
    /// Those of the frames, whatever they are: this many bytes are missing. Those below 4 GiB come first, because boot
    /// loaders and old devices can use no others. In the end there may be none left.
    InPlace { bytes: u64, may_be_low: bool },
}

/// The next piece of memory.
struct Missing {
    /// Where it begins; `None`: where its frames begin.
    at: Option<Gpa>,
    /// Its maximum length.
    bytes: u64,
}

/// The root of a tree that was taken ([`Tree::take`]).
const NO_ROOT: Hpa = Hpa(0);

/// End of the memory that boot loaders and old devices can use, and the shortest piece of it that is worth an entry of
/// the guest's memory map.
const LOW: Hpa = Hpa(1 << 32);
const LEAST_LOW: u64 = 16 << 20;
/// Maximum number of such pieces, and of the tables for their ends, for the machine's other addresses, and for the
/// registers of its devices. These are mapped with the largest pages that hold nothing else.
const PIECES_IN_PLACE: usize = 64;
const TABLES_IN_PLACE: u64 = 1024;
/// Tables for the registers of a PCI function, at most: for both ends of six BARs, and of the closed pages in them.
const TABLES_OF_A_FUNCTION: u64 = 32;

/// Memory that is zeroed in one step.
pub(crate) const ZEROED_AT_ONCE: u64 = 128 << 10;
/// The same of a file that is written.
const WRITTEN_AT_ONCE: usize = 8 << 10;
/// Runs of frames that there is room for; memory in smaller pieces needs more of the heap.
const USUAL_RUNS: usize = 8;

impl Assembly {
    /// Begins with memory for `ranges`, in ascending order, with lengths that are multiples of 2 MiB, of a VM with this
    /// number of vCPUs. With `level_on_touch` it is mapped at its first touch, in pages of that level.
    ///
    /// `functions` of PCI will have their registers there, too.
    ///
    /// # Errors
    /// The host has too little memory for the tables.
    pub(crate) fn begin(
        ranges: Vec<GpaRange>,
        vcpus: u32,
        tags: VmTags,
        level_on_touch: Option<u32>,
        functions: usize,
    ) -> Result<Self, MemoryError> {
        let tables = TablePool::new(&ranges, vcpus, functions as u64 * TABLES_OF_A_FUNCTION)?;
        Self::with(Wanted::At(ranges), tables, tags, level_on_touch)
    }

    /// Begins with `bytes` of memory at its own addresses, a multiple of 2 MiB, and with `low`, which keeps its
    /// content.
    ///
    /// # Errors
    /// The host has too little memory for the tables.
    pub(crate) fn in_place(low: Vec<Frames>, bytes: u64, vcpus: u32, tags: VmTags) -> Result<Self, MemoryError> {
        let size = GpaRange::new(Gpa(0), bytes).ok_or(MemoryError::Exhausted)?;
        let tables = TablePool::new(&[size], vcpus, TABLES_IN_PLACE)?;
        let mut assembly = Self::with(Wanted::InPlace { bytes, may_be_low: true }, tables, tags, None)?;
        for frames in low {
            assembly.add(None, frames)?;
        }
        Ok(assembly)
    }

    fn with(wanted: Wanted, tables: TablePool, tags: VmTags, level_on_touch: Option<u32>) -> Result<Self, MemoryError> {
        let (tree, shape) = Tree::new(Machine::stage2_format(), &tables).map_err(MemoryError::Map)?;
        let (mut regions, mut runs) = (Vec::new(), Vec::new());
        reserve(&mut regions, USUAL_RUNS)?;
        reserve(&mut runs, USUAL_RUNS)?;
        Ok(Self { wanted, tags, level_on_touch, tables, tree, shape, regions, runs, last: None })
    }

    /// Allocates, zeroes or maps the next piece. Returns whether all memory is ready.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn step(&mut self) -> Result<bool, MemoryError> {
        let Some(missing) = self.missing() else { return Ok(true) };
        let Some((frames, zeroed)) = &mut self.last else {
            if missing.at.is_none() && self.regions.len() >= PIECES_IN_PLACE {
                return Err(MemoryError::Exhausted);
            }
            self.last = self.allocate(missing.bytes)?.map(|frames| (frames, 0));
            return Ok(false);
        };
        frames.zero_part(*zeroed, ZEROED_AT_ONCE);
        *zeroed += ZEROED_AT_ONCE;
        if *zeroed < frames.bytes() {
            return Ok(false);
        }

        preemption_point();
        let Some((frames, _)) = self.last.take() else { return Ok(false) };
        if let Wanted::InPlace { bytes, .. } = &mut self.wanted {
            *bytes = bytes.saturating_sub(frames.bytes());
        }
        self.add(missing.at, frames)?;
        Ok(self.missing().is_none())
    }

    /// Allocates a piece of at most `bytes`. `None`: there is none of the kind that was looked for first.
    fn allocate(&mut self, bytes: u64) -> Result<Option<Frames>, MemoryError> {
        let align = PageSize::Size2M.bytes();
        if let Wanted::InPlace { may_be_low, .. } = &mut self.wanted
            && *may_be_low
        {
            let found = Frames::allocate_below(LOW, bytes, LEAST_LOW.min(bytes)).ok();
            *may_be_low = found.is_some();
            return Ok(found);
        }
        Ok(Some(Frames::allocate_at_most(bytes, align)?))
    }

    /// Adds a piece of memory, at `at` or in place.
    fn add(&mut self, at: Option<Gpa>, frames: Frames) -> Result<(), MemoryError> {
        reserve(&mut self.regions, 1)?;
        reserve(&mut self.runs, 1)?;
        let at = at.unwrap_or(Gpa(frames.hpa().0));
        let piece = GpaRange::new(at, frames.bytes()).ok_or(MemoryError::Exhausted)?;
        if self.level_on_touch.is_none() {
            let mut walk = self.tree.walk_mut(&self.tables, &NoTlb, &mut self.shape);
            walk.map(piece, frames.hpa(), Access::ALL).map_err(MemoryError::Map)?;
        }
        // In ascending order.
        let index = self.regions.partition_point(|region| region.start < piece.start);
        self.regions.insert(index, piece);
        self.runs.insert(index, frames);
        Ok(())
    }

    /// The next piece, if one is missing.
    fn missing(&self) -> Option<Missing> {
        match &self.wanted {
            Wanted::InPlace { bytes: 0, .. } => None,
            Wanted::InPlace { bytes, .. } => Some(Missing { at: None, bytes: *bytes }),
            Wanted::At(ranges) => {
                let done = self.regions.last().map_or(Gpa(0), GpaRange::end);
                let next = ranges.iter().find(|range| range.end() > done)?;
                let at = next.start.max(done);
                Some(Missing { at: Some(at), bytes: next.end().0 - at.0 })
            }
        }
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
            visits: None,
            devices: Once::new(),
        }))
    }
}

impl Memory {
    /// Memory of a child, which has no frames of its own: what its parent maps into it are the parent's. Its tables are
    /// pages that `tables` was given, at least one.
    ///
    /// # Errors
    /// Returns the tables if they are too few, or the host has too little memory for what logs need.
    #[allow(dead_code, reason = "not every architecture has children")]
    #[expect(clippy::result_large_err, reason = "once for each child")]
    pub(crate) fn of_child(tags: VmTags, tables: TablePool) -> Result<Self, TablePool> {
        let Ok(dirty) = DirtyState::new(&[], true) else { return Err(tables) };
        let Ok((tree, shape)) = Tree::new(Machine::stage2_format(), &tables) else { return Err(tables) };
        // Otherwise a walker on another pCPU may read the old content of the root's page.
        Machine::publish();

        Ok(Self::lay_out(MemoryFields {
            backing: Backing::new(Vec::new(), Vec::new()),
            tables,
            tree,
            shape: Mutex::new(shape),
            level_on_touch: None,
            dirty,
            epoch: AtomicU64::new(0),
            tags,
            decoded: None,
            visits: Some(Box::new(Visits::new(true))),
            devices: Once::new(),
        }))
    }

    /// Takes a child's tree apart, as long as there is time for `more`. Its last vCPU has left for good. Returns
    /// whether nothing is left of it: its tables can be [taken](Self::take_table) then.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn take_tree_apart(&mut self, more: impl FnMut() -> bool) -> bool {
        if let Some(comeback) = self.comeback() {
            comeback.lock().end(self);
        }
        if self.tree.root() != NO_ROOT {
            if !self.tree.empty(&self.tables, more) {
                return false;
            }
            self.tree.take().destroy(&self.tables);
        }
        true
    }

    /// Takes one of the pages that the tables of a tree that was taken apart were given. After the last one there is an
    /// empty table wherever anybody looks.
    #[allow(dead_code, reason = "not every architecture has children")]
    pub(crate) fn take_table(&mut self) -> Option<Hpa> {
        let table = self.tables.take_back();
        if table.is_none() {
            debug_assert!(self.tables.has_all(), "some pages are still tables");
            self.tables = TablePool::of_nothing();
        }
        table
    }

    /// These functions reach the VM's memory from now on, until its end. Called once. All of it is mapped already, and
    /// stays writable: the VM has no dirty log, and caches no decoded instructions that need write protection.
    ///
    /// # Errors
    /// Too many VMs own functions.
    pub(crate) fn own(&self, functions: Functions, given: Option<<Machine as Arch>::Given>) -> Result<(), NotOwned> {
        debug_assert!(self.level_on_touch.is_none() && self.decoded.is_none(), "devices do not fault");
        self.devices.try_call_once(|| Devices::own(functions, given, self.stage2_root()))?;
        Ok(())
    }

    /// Maps registers of PCI functions that the VM was given. No vCPU runs yet.
    ///
    /// # Errors
    /// There are too few tables, or something else is mapped there.
    pub(crate) fn map_registers(&self, registers: impl Iterator<Item = (GpaRange, Hpa)>) -> Result<(), MapError> {
        for (gpa, hpa) in registers {
            self.tree.walk_mut(&self.tables, &NoTlb, &mut self.shape.lock()).map_device(
                gpa,
                hpa,
                Access::READ_WRITE,
            )?;
        }
        Machine::publish();
        Ok(())
    }

    /// Maps a page of the machine at its own address. No vCPU runs yet.
    ///
    /// # Errors
    /// There are too few tables, or something else is mapped there.
    #[allow(dead_code, reason = "not on every architecture has a VM all devices")]
    pub(crate) fn map_at_its_address(&self, page: GpaRange) -> Result<(), MapError> {
        let mapped =
            self.tree.walk_mut(&self.tables, &NoTlb, &mut self.shape.lock()).map(page, Hpa(page.start.0), Access::ALL);
        Machine::publish();
        mapped
    }

    /// The functions that reach it.
    #[inline]
    pub(crate) fn devices(&self) -> Option<&Devices> {
        self.devices.get()
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

    /// Copies guest memory from `gpa` on. False if a part of it does not exist or is not there now; then `into` must
    /// not be used.
    #[must_use]
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        match self.visit() {
            None => self.backing.read(gpa, into),
            Some(visit) => visit.read(gpa, into),
        }
    }

    /// Copies `from` to guest memory at `gpa`. False if a part of it does not exist or is not there now; everything
    /// before that part was written.
    #[must_use]
    pub(crate) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        let mut at = gpa;
        let mut left = from;
        while !left.is_empty() {
            // Page by page, because cached instructions are dropped by page.
            let bytes = usize::try_from(PAGE_BYTES - at.offset_in(PageSize::Size4K)).unwrap_or(usize::MAX);
            let (piece, rest) = left.split_at(bytes.min(left.len()));
            let write = || match self.visit() {
                None => self.backing.write(at, piece),
                Some(visit) => visit.write(at, piece),
            };
            if !self.as_host(at, piece.len(), write) {
                return false;
            }
            let Some(next) = at.checked_add(piece.len() as u64) else { return rest.is_empty() };
            (at, left) = (next, rest);
        }
        true
    }

    /// The same for a file: lets interrupts in now and then.
    pub(crate) fn write_file(&self, gpa: Gpa, from: &[u8]) -> bool {
        from.chunks(WRITTEN_AT_ONCE).enumerate().all(|(number, piece)| {
            preemption_point();
            gpa.checked_add((number * WRITTEN_AT_ONCE) as u64).is_some_and(|at| self.write(at, piece))
        })
    }

    /// Does a write of the hypervisor to the page of `gpa`. All such writes use this function. They cause no stage-2
    /// fault, which would drop cached instructions and inform a dirty log.
    #[inline]
    pub(crate) fn as_host<R>(&self, gpa: Gpa, bytes: usize, write: impl FnOnce() -> R) -> R {
        let result = self.write_beside_decoded(gpa, write);
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

impl Drop for Memory {
    fn drop(&mut self) {
        // Frames and tables return to the pool next.
        self.devices = Once::new();
    }
}
